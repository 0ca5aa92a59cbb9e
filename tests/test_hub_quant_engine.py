"""Engines on quantised hub checkpoints of every block format, against the reference on the same files.

The golden fixtures are too narrow for blocks of 128 columns, and leave latent attention unquantised.
"""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from checkpoint_writers import hub_typed
from reference import reference_forward
from safetensors.numpy import load_file

from colibri_offload import Engine
from colibri_offload.checkpoint.open import open_checkpoint
from colibri_offload.families.resolve import load_model_spec

GOLDEN = Path(__file__).parent / "golden"
KEPT = ("embed_tokens.weight", "lm_head.weight", "mlp.gate.weight", "norm.weight", "layernorm.weight")
IDS = np.random.default_rng(1).integers(0, 256, 21)


def small_qwen3_moe() -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    """Random weights; every matrix that is quantised has 128 columns or twice as many."""
    config = json.loads((GOLDEN / "qwen3_moe" / "config.json").read_text()) | {
        "hidden_size": 128, "moe_intermediate_size": 128, "num_experts": 4, "num_experts_per_tok": 2,
        "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 64, "vocab_size": 256,
        "bos_token_id": 1, "eos_token_id": 2,
    }  # fmt: skip
    shapes = {"model.embed_tokens": (256, 128), "lm_head": (256, 128), "model.norm": (128,)}
    for layer in range(2):
        at = f"model.layers.{layer}."
        shapes |= {at + "input_layernorm": (128,), at + "post_attention_layernorm": (128,)}
        shapes |= {at + "self_attn.q_proj": (256, 128), at + "self_attn.o_proj": (128, 256)}
        shapes |= {at + "self_attn.k_proj": (128, 128), at + "self_attn.v_proj": (128, 128)}
        shapes |= {at + "self_attn.q_norm": (64,), at + "self_attn.k_norm": (64,), at + "mlp.gate": (4, 128)}
        shapes |= {at + f"mlp.experts.{e}.{n}_proj": (128, 128) for e in range(4) for n in ("gate", "up", "down")}
    rng = np.random.default_rng(0)
    weights = {
        f"{name}.weight": (rng.standard_normal(shape) * shape[-1] ** -0.5 + (len(shape) == 1)).astype(np.float32)
        for name, shape in shapes.items()
    }
    return config, weights


def small_deepseek_v3() -> tuple[dict[str, Any], dict[str, np.ndarray]]:
    config = json.loads((GOLDEN / "deepseek_v3" / "config.json").read_text())
    return config, load_file(GOLDEN / "deepseek_v3" / "model.safetensors")


def packed(q: np.ndarray) -> np.ndarray:
    """int32 [N, K/8] of unsigned nibbles [N, K], lowest bits first."""
    shifts = np.arange(8, dtype=np.uint64) * 4
    words = (q.reshape(len(q), -1, 8).astype(np.uint64) << shifts).sum(-1)
    return words.astype(np.uint32).view(np.int32)


def int8(name: str, w: np.ndarray) -> dict[str, tuple[str, Any]]:
    scale = np.abs(w).max(1, keepdims=True) / np.float32(127)
    return {name: ("I8", np.rint(w / scale).astype(np.int8)), f"{name}_scale": ("F32", scale)}


def int4(name: str, w: np.ndarray) -> dict[str, tuple[str, Any]]:
    groups = w.reshape(len(w), -1, 32)
    scale = (np.abs(groups).max(-1) / 7).astype(np.float16)
    scale[scale == 0] = 1
    q = np.rint(groups / scale[..., None].astype(np.float32)).clip(-8, 7).astype(int) + 8
    return {
        f"{name}_packed": ("I32", packed(q.reshape(w.shape))),
        f"{name}_scale": ("F16", scale),
        f"{name}_shape": ("I64", np.array(w.shape)),
    }


def fp8(name: str, w: np.ndarray) -> dict[str, tuple[str, Any]]:
    """Cut to 4 bits of exponent and 3 of mantissa, under random scales."""
    codes = ((np.abs(w) * 2.0**-120 * 64).astype(np.float32).view(np.uint32) >> 20).astype(np.uint8)
    codes = np.minimum(codes, 0x7E) | np.where(w < 0, 0x80, 0).astype(np.uint8)
    cells = -(-w.shape[0] // 128), -(-w.shape[1] // 128)
    scale = np.random.default_rng(2).uniform(1 / 80, 1 / 50, cells).astype(np.float32)
    return {name: ("F8_E4M3", codes), f"{name}_scale_inv": ("F32", scale)}


def ct(file_format: str, **weights: Any) -> dict[str, Any]:
    groups = {"group_0": {"targets": ["Linear"], "weights": {"type": "int", "symmetric": True, **weights}}}
    return {"quant_method": "compressed-tensors", "format": file_format, "config_groups": groups}


CT_INT4 = ct("pack-quantized", num_bits=4, strategy="group", group_size=32)
CASES: dict[str, tuple[Any, ...]] = {
    "int8": (small_qwen3_moe, int8, ct("int-quantized", num_bits=8, strategy="channel"), "INT8", 32),
    "fp8": (small_qwen3_moe, fp8, {"quant_method": "fp8", "weight_block_size": [128, 128]}, "F8_E4M3", 32),
    "int4": (small_qwen3_moe, int4, CT_INT4, "Q4_Z", 32),
    "int4 in latent attention": (small_deepseek_v3, int4, CT_INT4, "Q4_Z", None),
}


@pytest.mark.parametrize("case", CASES)
def test_engine_agrees_with_the_reference(tmp_path: Path, case: str) -> None:
    model, quantise, settings, fmt, count = CASES[case]
    config, weights = model()
    stored: dict[str, tuple[str, Any]] = {}
    for name, w in weights.items():
        plain = w.ndim < 2 or name.endswith(KEPT)
        stored |= {name: ("F32", np.asarray(w, np.float32))} if plain else quantise(name, np.asarray(w, np.float32))
    path = hub_typed(tmp_path / "model", stored, config | {"quantization_config": settings})
    checkpoint = open_checkpoint(path)
    formats = Counter(t.fmt for t in checkpoint.tensors.values())
    assert set(formats) == {"F32", fmt} and formats[fmt] == (count or formats[fmt])
    expected, routing = reference_forward(*load_model_spec(checkpoint), IDS)
    errors = {}
    for activations in ("float32", "int8"):
        with Engine.load(path, activations=activations, threads=2, memory_budget="2GiB", expert_cache=2) as engine:
            with engine.record_routing() as got:
                logits = engine.logits(IDS)
        errors[activations] = np.abs(logits - expected).max(axis=1) / np.abs(expected).max()
        if activations == "float32":
            for layer, (ids, _) in routing.items():
                np.testing.assert_array_equal(np.sort(got.topk_ids[layer]), np.sort(ids))
    assert errors["float32"].max() <= 2e-5
    assert np.median(errors["int8"]) <= 0.05
