"""Every family through GGUF: a hub fixture rewritten with the `gguf` package must still give its recorded logits."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from golden_util import GOLDEN, Fixture, check_logits, check_routing, load_golden
from reference import reference_forward
from to_gguf import to_gguf

from colibri_offload.checkpoint.open import open_checkpoint
from colibri_offload.errors import CheckpointError, UnsupportedError
from colibri_offload.families.resolve import load_model_spec


def check(fixture: Fixture, gguf_path: Path) -> None:
    spec, weights = load_model_spec(open_checkpoint(gguf_path))
    golden = load_golden(fixture)
    logits, routing = reference_forward(spec, weights, golden["input_ids_1"])
    check_logits(logits, golden, 1, 1e-5)
    check_routing(routing, golden, 1, 1e-5)
    assert weights.unused() == []


@pytest.mark.parametrize(
    "name", ["llama", "mixtral_swa", "qwen3", "qwen2_moe", "qwen3_moe", "olmoe", "deepseek_v2", "deepseek_v2_lite"]
)
def test_gguf_gives_the_logits_of_its_hub_model(name: str, tmp_path: Path) -> None:
    fixture = Fixture(GOLDEN / name, 0)
    check(fixture, to_gguf(fixture.path, tmp_path / "model.gguf"))


@pytest.mark.parametrize(
    ("name", "layout"),
    [
        ("mixtral", {"merge": False}),
        ("qwen2_moe", {"widths": False}),
        ("deepseek_v2", {"split": False}),
        ("deepseek_v2_lite", {"split": False}),
    ],
)
def test_layouts_of_old_files(name: str, layout: dict[str, Any], tmp_path: Path) -> None:
    fixture = Fixture(GOLDEN / name, 0)
    check(fixture, to_gguf(fixture.path, tmp_path / "model.gguf", **layout))


def test_a_quantised_kv_b_in_one_piece_is_refused(tmp_path: Path) -> None:
    """Turning k_b needs single elements; what cannot be turned exactly must not be read as garbage."""
    path = tmp_path / "model.gguf"
    to_gguf(GOLDEN / "deepseek_v2", path, split=False, quantise="attn_kv_b")
    with pytest.raises(UnsupportedError, match=r"attn_kv_b\.weight: format Q8_0"):
        load_model_spec(open_checkpoint(path))


def write(path: Path, arch: str, tensors: dict[str, np.ndarray], **keys: int) -> Path:
    writer = gguf.GGUFWriter(path, arch)
    for key, value in keys.items():
        writer.add_uint32(f"{arch}.{key.replace('__', '.')}", value)
    for name, tensor in tensors.items():
        writer.add_tensor(name, tensor)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


SMALL = {"block_count": 1, "embedding_length": 32, "feed_forward_length": 32, "context_length": 64}
EMBED = {"token_embd.weight": np.ones((8, 32), np.float32)}


def test_unknown_architecture_lists_the_known_ones(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", "mamba", EMBED, **SMALL)
    with pytest.raises(UnsupportedError, match=r"'mamba'.*deepseek2, gpt-oss, llama.*qwen3moe"):
        load_model_spec(open_checkpoint(path))


@pytest.mark.parametrize("factors", [[1.0, 0.0], [1.0, np.nan], [1.0]])
def test_broken_rope_factors_are_named(factors: list[float], tmp_path: Path) -> None:
    tensors = EMBED | {"rope_freqs.weight": np.array(factors, np.float32)}
    path = write(tmp_path / "m.gguf", "llama", tensors, attention__head_count=8, **SMALL)
    with pytest.raises(CheckpointError, match=r"rope_freqs\.weight"):
        load_model_spec(open_checkpoint(path))


def test_missing_key_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", "llama", EMBED, **SMALL)
    with pytest.raises(CheckpointError, match=r"m\.gguf.*num_attention_heads.*missing"):
        load_model_spec(open_checkpoint(path))


def test_missing_embedding_is_named(tmp_path: Path) -> None:
    path = write(tmp_path / "m.gguf", "llama", {"x": np.ones(4, np.float32)}, attention__head_count=8, **SMALL)
    with pytest.raises(CheckpointError, match=r"token_embd\.weight is missing"):
        load_model_spec(open_checkpoint(path))
