"""Conversion: the same numbers as the source, formats by rule, nothing lost by a kill, nothing silently wrong."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import gguf
import numpy as np
import pytest
from golden_util import FIXTURES as ALL_FIXTURES
from golden_util import GOLDEN, load_golden
from safetensors.numpy import load_file, save_file

import colibri_offload.convert.conversion as convert_module
from colibri_offload import Engine
from colibri_offload.convert import convert
from colibri_offload.convert.quants import QUANTS, get_quant
from colibri_offload.errors import CheckpointError, StoreError, UsageError
from colibri_offload.jit.formats import get_format
from colibri_offload.storage.base import ExpertKey
from colibri_offload.storage.open import open_store, verify_store
from colibri_offload.text import hub

FIXTURES = {f.name: f for f in ALL_FIXTURES}
QWEN, LLAMA = GOLDEN / "qwen3_moe", GOLDEN / "llama"
BUDGET = "4GiB"


def logits(path: Path, ids: list[int]) -> np.ndarray:
    with Engine.load(path, activations="float32", kv_cache="f32", memory_budget=BUDGET) as engine:
        return engine.logits(ids)


def formats(path: Path) -> dict[str, str]:
    """Resident matrix → format."""
    with open_store(path) as store:
        metas = {name: store.resident_meta(name) for name in store.resident_names()}
    return {name: meta["fmt"] for name, meta in metas.items() if "fmt" in meta}


def contents(path: Path) -> dict[str, bytes]:
    """All bytes of a store; of an LMDB environment, whose pages depend on its history, the records."""
    files = {p.name: p.read_bytes() for p in path.iterdir() if p.is_file()}
    with open_store(path) as store:
        keys = store.keys()
        buffer = memoryview(bytearray(max(store.nbytes(key) for key in keys)))
        for key in keys:
            store.read_into(key, buffer)
            files[f"expert {key}"] = bytes(buffer[: store.nbytes(key)])
    return files


@pytest.mark.parametrize(
    "name", ["qwen3_moe", "mixtral_bf16", "llama", "gpt_oss_mxfp4", "qwen3_moe_awq", "qwen3_moe_fp8", "qwen2_moe",
             "deepseek_v2_lite", "deepseek_v3-Q8_0.gguf", "mixtral-Q4_0.gguf", "gpt_oss-MXFP4.gguf"]
)  # fmt: skip
def test_keep_gives_the_same_bits_as_the_source(name, tmp_path):
    fixture = FIXTURES[name]
    golden = load_golden(fixture)
    ids = golden["input_ids_0"].tolist()
    convert(fixture.path, tmp_path / "s", "keep")
    got = logits(tmp_path / "s", ids)
    np.testing.assert_array_equal(got, logits(fixture.path, ids))
    reference = golden["logits_0"]
    assert np.abs(got - reference).max() <= fixture.tolerance * np.abs(reference).max()


@pytest.mark.parametrize("quant, most", [("f32", 1e-5), ("f16", 0.01), ("bf16", 0.05), ("q8_0", 0.1)])
def test_logits_stay_near_the_reference(quant, most, tmp_path):
    golden = load_golden(FIXTURES["deepseek_v3"])
    convert(GOLDEN / "deepseek_v3", tmp_path / "s", quant)
    reference = golden["logits_0"]
    error = np.abs(logits(tmp_path / "s", golden["input_ids_0"].tolist()) - reference).max(1)
    assert np.median(error) <= most * np.abs(reference).max()


@pytest.mark.parametrize("quant, fmt", [("q8_0", "Q8_0"), ("q4_0", "Q4_0")])
def test_weights_are_those_of_the_gguf_package(quant, fmt, tmp_path):
    """Quantised by gguf-py, packed by the NumPy twin of the pack kernel."""
    convert(QWEN, tmp_path / "s", quant)
    weights = load_file(QWEN / "model.safetensors")
    with open_store(tmp_path / "s") as store:
        for slot, name, expected_fmt in [
            ("layers.1.q", "model.layers.1.self_attn.q_proj.weight", fmt),
            ("embed", "model.embed_tokens.weight", "Q8_0"),
        ]:
            x = weights[name].astype(np.float32)
            rows = gguf.quantize(x, gguf.GGMLQuantizationType[expected_fmt])
            expected = get_format(expected_fmt).pack(rows, x.shape[1])
            assert bytes(store.resident(slot)) == expected.tobytes()


def test_a_tensor_that_has_its_format_is_copied_bit_for_bit(tmp_path):
    source = GOLDEN / "gguf" / "qwen3_moe-Q4_0.gguf"
    convert(source, tmp_path / "s", "q4_0")
    tensor = next(t for t in gguf.GGUFReader(source).tensors if t.name == "blk.0.attn_q.weight")
    assert tensor.tensor_type.name == "Q4_0"
    expected = get_format("Q4_0").pack(np.array(tensor.data), int(tensor.shape[0]))
    with open_store(tmp_path / "s") as store:
        assert bytes(store.resident("layers.0.q")) == expected.tobytes()


def test_q4_0_spares_what_is_sensitive(tmp_path):
    convert(GOLDEN / "deepseek_v3", tmp_path / "s", "q4_0")
    found = formats(tmp_path / "s")
    last = max(int(name.split(".")[1]) for name in found if name.startswith("layers."))
    assert found["embed"] == found["head"] == "Q8_0"
    assert found[f"layers.{last}.router"] == "F32"
    assert found[f"layers.{last}.o"] == "Q4_0"
    assert {found[f"layers.{last}.{slot}"] for slot in ("k_b", "v_b")} <= {"Q8_0", "F16"}
    assert json.loads((tmp_path / "s" / "manifest.json").read_text())["model"]["experts"][str(last)]["gate"] == "Q4_0"


@pytest.mark.parametrize(
    "quant, slot, columns, found, expected",
    [
        ("q8_0", "q", 64, "BF16", "Q8_0"),
        ("q8_0", "q", 48, "BF16", "F16"),
        ("q8_0", "router", 64, "BF16", "F32"),
        ("q8_0", "shared_gate", 64, "F16", "F32"),
        ("q4_0", "q", 64, "F32", "Q4_0"),
        ("q4_0", "embed", 64, "F32", "Q8_0"),
        ("q4_0", "head", 64, "F32", "Q8_0"),
        ("q4_0", "k_b", 64, "F32", "Q8_0"),
        ("q4_0", "v_b", 16, "F32", "F16"),
        ("keep", "q", 48, "Q6_K", "Q6_K"),
        ("keep", "router", 64, "F16", "F32"),
        ("bf16", "experts.down", 48, "F32", "BF16"),
    ],
)
def test_rules(quant, slot, columns, found, expected):
    assert get_quant(quant).format(slot, columns, found) == expected


def changed_llama(tmp_path: Path, name: str, value: float) -> Path:
    """The llama fixture with one weight replaced."""
    folder = tmp_path / "changed"
    shutil.copytree(LLAMA, folder)
    weights = load_file(folder / "model.safetensors")
    weights[name] = weights[name].copy()
    weights[name][3, 5] = value
    save_file(weights, folder / "model.safetensors")
    return folder


def test_values_beyond_f16_stay_f32(tmp_path):
    source = changed_llama(tmp_path, "model.layers.1.self_attn.o_proj.weight", 70000.0)
    convert(source, tmp_path / "s", "f16")
    found = formats(tmp_path / "s")
    assert found["layers.1.o"] == "F32"
    assert found["layers.0.o"] == found["layers.1.q"] == "F16"


@pytest.mark.parametrize("value, words", [(float("nan"), "NaN or Inf"), (float("-inf"), "NaN or Inf"), (1e9, "1e+09")])
@pytest.mark.parametrize("name", ["model.layers.1.self_attn.o_proj.weight", "model.layers.0.mlp.down_proj.weight"])
def test_unusable_numbers_are_refused_by_name(name, value, words, tmp_path):
    source = changed_llama(tmp_path, name, value)
    with pytest.raises(CheckpointError, match=r"beyond the range|damaged") as error:
        convert(source, tmp_path / "s", "q8_0")
    assert name in str(error.value)
    assert words in str(error.value)
    assert not (tmp_path / "s").exists()


@pytest.mark.parametrize("name", ["qwen3_moe", "deepseek_v3", "gpt_oss_mxfp4", "llama"])
def test_small_pieces_give_the_same_store(name, tmp_path, monkeypatch):
    convert(GOLDEN / name, tmp_path / "a", "q8_0")
    monkeypatch.setattr(convert_module, "LOW_MEMORY_PIECE_NBYTES", 4096)
    convert(GOLDEN / name, tmp_path / "b", "q8_0", low_memory=True)
    assert contents(tmp_path / "a") == contents(tmp_path / "b")


def test_low_memory_bounds_what_is_read_and_widened(tmp_path, monkeypatch):
    pieces = []
    original = convert_module.Packer.float32

    def spy(self, fmt, rows, cols):
        pieces.append(4 * rows.size // rows.shape[-1] * cols)
        return original(self, fmt, rows, cols)

    monkeypatch.setattr(convert_module.Packer, "float32", spy)
    monkeypatch.setattr(convert_module, "LOW_MEMORY_PIECE_NBYTES", 8192)
    convert(GOLDEN / "mixtral_bf16", tmp_path / "s", "q8_0", low_memory=True)
    assert pieces
    assert max(pieces) <= 8192


def test_file_and_lmdb_hold_the_same_records(tmp_path):
    for kind in ("file", "lmdb"):
        convert(QWEN, tmp_path / kind, "q8_0", store=kind)
    with open_store(tmp_path / "file") as a, open_store(tmp_path / "lmdb") as b:
        assert list(a.keys()) == list(b.keys())
        assert a.model == b.model
    experts = [
        {k: v for k, v in contents(tmp_path / kind).items() if k.startswith("expert ")} for kind in ("file", "lmdb")
    ]
    assert experts[0] == experts[1]
    assert verify_store(tmp_path / "file") == verify_store(tmp_path / "lmdb") == []


def test_tokenizer_and_configuration_come_along(tmp_path):
    done = convert(QWEN, tmp_path / "s")
    assert done.warning == ""
    a, b = hub.from_directory(QWEN), hub.from_directory(tmp_path / "s")
    text = "Hello wörld, 12345!\n<|im_start|>"
    assert b.encode(text) == a.encode(text)
    assert (b.eos_ids, b.chat_template) == (a.eos_ids, a.chat_template)
    for name in ("config.json", "generation_config.json"):
        assert (tmp_path / "s" / name).read_bytes() == (QWEN / name).read_bytes()


def test_a_gguf_brings_its_tokenizer(tmp_path):
    source = GOLDEN / "gguf" / "qwen3_moe-Q8_0.gguf"
    assert convert(source, tmp_path / "s", "keep").warning == ""
    with Engine.load(source, memory_budget=BUDGET) as a, Engine.load(tmp_path / "s", memory_budget=BUDGET) as b:
        assert b.tokenizer.encode("And so on.") == a.tokenizer.encode("And so on.")
        assert b.eos_ids == a.eos_ids


def test_a_model_without_tokenizer_is_converted_with_a_warning(tmp_path):
    assert "tokenizer" in convert(LLAMA, tmp_path / "s").warning
    assert logits(tmp_path / "s", [1, 2, 3]).shape[0] == 3


def test_provenance_names_files_but_no_folder(tmp_path, monkeypatch):
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "86400")
    convert(QWEN, tmp_path / "s", "q4_0")
    text = (tmp_path / "s" / "manifest.json").read_text()
    assert json.loads(text)["model"]["provenance"] == {
        "source": "qwen3_moe",
        "files": {"model.safetensors": (QWEN / "model.safetensors").stat().st_size},
        "quant": "q4_0",
        "tool": "colibri-offload 0.1.0",
        "date": "1970-01-02",
    }
    assert str(tmp_path) not in text
    assert str(GOLDEN.parent) not in text


_KILLED = """
import os, signal, sys
from colibri_offload.convert import convert
left = int(sys.argv[4])
def progress(what, done, total):
    global left
    left -= 1
    if not left:
        os.kill(os.getpid(), signal.SIGKILL)
convert(sys.argv[1], sys.argv[2], "q8_0", store=sys.argv[3], progress=progress)
"""


@pytest.mark.parametrize("kind, calls", [("file", 1), ("file", 9), ("file", 40), ("lmdb", 40)])
def test_resume_after_a_kill_gives_the_same_store(kind, calls, tmp_path, monkeypatch):
    """The date passes midnight in between: the store has the second date, and is otherwise the same bit for bit."""
    environment = {**os.environ, "SOURCE_DATE_EPOCH": "0"}
    command = [sys.executable, "-c", _KILLED, str(QWEN), str(tmp_path / "s"), kind, str(calls)]
    assert subprocess.run(command, env=environment).returncode == -signal.SIGKILL
    assert not (tmp_path / "s").exists()
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "86400")
    seen = []
    with pytest.raises(StoreError, match="--resume"):
        convert(QWEN, tmp_path / "s", "q8_0", store=kind)
    convert(QWEN, tmp_path / "s", "q8_0", store=kind, resume=True, progress=lambda *args: seen.append(args))
    convert(QWEN, tmp_path / "whole", "q8_0", store=kind)
    assert contents(tmp_path / "s") == contents(tmp_path / "whole")
    with open_store(tmp_path / "s") as store:
        assert store.model["provenance"]["date"] == "1970-01-02"
    assert seen[-1][1] == seen[-1][2]


def test_resume_writes_only_what_is_missing(tmp_path, monkeypatch):
    def stop(what, done, total):
        if what == "experts":
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(QWEN, tmp_path / "s", progress=stop)
    written = []
    original = convert_module.StoreWriter.add_expert
    monkeypatch.setattr(
        convert_module.StoreWriter,
        "add_expert",
        lambda self, key, data: (written.append(key), original(self, key, data)),
    )
    monkeypatch.setattr(convert_module.StoreWriter, "add_resident", lambda *args: pytest.fail("written twice"))
    convert(QWEN, tmp_path / "s", resume=True)
    assert ExpertKey(0, 0) not in written
    assert ExpertKey(0, 1) in written


def test_resume_with_other_settings_is_refused(tmp_path):
    def stop(what, done, total):
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        convert(QWEN, tmp_path / "s", "q8_0", progress=stop)
    with pytest.raises(StoreError, match="other settings"):
        convert(QWEN, tmp_path / "s", "q4_0", resume=True)
    convert(QWEN, tmp_path / "s", "q4_0", overwrite=True)
    assert formats(tmp_path / "s")["layers.0.q"] == "Q4_0"


def test_a_store_is_replaced_only_on_request(tmp_path):
    convert(QWEN, tmp_path / "s", "q8_0")
    with pytest.raises(StoreError, match="already"):
        convert(QWEN, tmp_path / "s", "q4_0")
    assert formats(tmp_path / "s")["layers.0.q"] == "Q8_0"
    convert(QWEN, tmp_path / "s", "q4_0", overwrite=True)
    assert formats(tmp_path / "s")["layers.0.q"] == "Q4_0"


def test_unusable_arguments(tmp_path):
    with pytest.raises(UsageError, match=", ".join(QUANTS)):
        convert(QWEN, tmp_path / "s", "q9")
    with pytest.raises(UsageError, match="file or lmdb"):
        convert(QWEN, tmp_path / "s", store="tape")  # type: ignore[arg-type]
    convert(QWEN, tmp_path / "s")
    with pytest.raises(UsageError, match="already"):
        convert(tmp_path / "s", tmp_path / "t")
