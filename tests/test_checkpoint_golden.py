"""The golden models: GGUF against the gguf package, quantised directories against their unquantised siblings."""

from __future__ import annotations

from pathlib import Path

import gguf
import numpy as np
import pytest
from reference import load

from colibri_offload.checkpoint.open import open_checkpoint

GOLDEN = Path(__file__).parent / "golden"

# Directory → the unquantised model and the relative error that the scheme's bits leave in a weight.
QUANTISED = {
    "qwen3_moe_awq": ("qwen3_moe", 0.12),
    "qwen3_moe_gptq_actorder": ("qwen3_moe", 0.12),
    "mixtral_gptq": ("mixtral", 0.12),
    "qwen3_moe_fp8": ("qwen3_moe", 0.04),
    "deepseek_v3_fp8": ("deepseek_v3", 0.04),
    "deepseek_v3_ct_int4": ("deepseek_v3", 0.12),
    "gpt_oss_mxfp4": ("gpt_oss", 0.15),
}


@pytest.mark.parametrize("path", sorted((GOLDEN / "gguf").glob("*.gguf")), ids=lambda p: p.name)
def test_gguf_agrees_with_the_gguf_package(path: Path) -> None:
    model = open_checkpoint(path)
    reader = gguf.GGUFReader(path)
    assert set(model.tensors) == {t.name for t in reader.tensors}
    for theirs in reader.tensors:
        ours = model.tensors[theirs.name]
        assert (ours.fmt, ours.shape) == (theirs.tensor_type.name, tuple(reversed(theirs.shape.tolist())))
        assert ours.read().tobytes() == theirs.data.tobytes()
    own_keys = {key for key in reader.fields if not key.startswith("GGUF.")}
    assert set(model.metadata) == own_keys
    for key in own_keys:
        assert model.metadata[key] == reader.fields[key].contents()


@pytest.mark.parametrize("name", QUANTISED)
def test_quantised_directory_is_close_to_its_sibling(name: str) -> None:
    sibling, tolerance = QUANTISED[name]
    ours, plain = open_checkpoint(GOLDEN / name).tensors, open_checkpoint(GOLDEN / sibling).tensors
    assert set(ours) == set(plain)
    for key, tensor in ours.items():
        got, wanted = load(tensor), load(plain[key])
        if tensor.fmt == "MXFP4":
            wanted = wanted.swapaxes(1, 2)  # gpt-oss's float experts are [E, in, out], its MXFP4 ones [E, out, in]
        assert got.shape == wanted.shape
        assert np.linalg.norm(got - wanted) <= tolerance * np.linalg.norm(wanted), key
