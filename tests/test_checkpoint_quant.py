"""Quantised hub schemes against slow, independent loops written from each format's definition.

What a block format holds is read by the reference model's dequantisers: the values must be those of the loops, bit for
bit, whichever format was chosen.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from checkpoint_writers import hub_typed
from reference import dequantized

from colibri_offload.checkpoint.base import FileSlice, Tensor, read_slice
from colibri_offload.checkpoint.hub_quant import candidates
from colibri_offload.checkpoint.hub_quant.blocks import COLUMNS
from colibri_offload.checkpoint.safetensors import HubCheckpoint
from colibri_offload.errors import CheckpointError, ColibriError, UnsupportedError
from colibri_offload.families.compose import OF_PARTS, compose, is_blocked
from colibri_offload.families.spec import Source
from colibri_offload.jit.formats import get_format

F8_VALUES = {0x00: 0.0, 0x38: 1.0, 0x3C: 1.5, 0xB8: -1.0, 0x7E: 448.0, 0x01: 2.0**-9, 0x40: 2.0}
FP4_VALUES = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0]


def pack_words(rows: np.ndarray, bits: int, column_of_slot: list[int] | None = None) -> np.ndarray:
    """int32 [R, ceil(C·bits/32)]: slot i of a word holds its column `column_of_slot[i]` (default i)."""
    per = 32 // bits
    slots = column_of_slot or list(range(per))
    out = np.zeros((len(rows), -(-rows.shape[1] // per)), np.uint32)
    for r, row in enumerate(rows.tolist()):
        for w in range(out.shape[1]):
            word = 0
            for slot, column in enumerate(slots):
                c = w * per + column
                word |= (row[c] if c < len(row) else 0) << (bits * slot)
            out[r, w] = word
    return out.view(np.int32)


def bf16(values: np.ndarray) -> tuple[str, np.ndarray]:
    return "BF16", (values.astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)


def bf16_value(stored: tuple[str, np.ndarray]) -> np.ndarray:
    return (stored[1].astype(np.uint32) << 16).view(np.float32)


def values(tensor: Tensor) -> np.ndarray:
    """float32 [shape]: the weights, each rounded once."""
    rows = tensor.read()
    assert rows.dtype == np.uint8
    assert rows.shape == (*tensor.shape[:-1], get_format(tensor.fmt).row_nbytes(tensor.shape[-1]))
    return dequantized(tensor.fmt, rows).astype(np.float32)


def read(folder: Path, name: str, fmt: str = "F32") -> np.ndarray:
    """The weights of a tensor that must be in `fmt`; in F32, which a block format must offer, they are the same."""
    tensor = HubCheckpoint(folder).tensors[name]
    assert tensor.fmt == fmt
    out = values(tensor)
    if fmt == "F32":
        assert tensor.to_float32 is None
    else:
        assert tensor.to_float32 is not None
        plain = tensor.to_float32()
        assert (plain.fmt, plain.shape, plain.slices) == ("F32", tensor.shape, tensor.slices)
        np.testing.assert_array_equal(values(plain), out)
    return out


def loop(n: int, k: int, weight: Callable[[int, int], Any]) -> np.ndarray:
    out = np.empty((n, k), np.float32)
    for i in range(n):
        for j in range(k):
            out[i, j] = np.float32(weight(i, j))
    return out


# Group size, columns → what 4 bits become; the last group of (64, 96) is partial.
Q4_Z_SHAPES = [(32, 64, "Q4_Z"), (64, 96, "Q4_Z"), (-1, 64, "Q4_Z"), (256, 64, "Q4_Z"), (16, 64, "F32"),
               (48, 96, "F32"), (-1, 48, "F32"), (32, 48, "F32")]  # fmt: skip


def cell(group_size: int, columns: int) -> int:
    """Columns under one scale."""
    return columns if group_size == -1 else group_size


@pytest.mark.parametrize(("group_size", "k", "fmt"), Q4_Z_SHAPES)
def test_awq(tmp_path: Path, group_size: int, k: int, fmt: str) -> None:
    rng = np.random.default_rng(2)
    n, size = 264, cell(group_size, k)  # more rows than are decoded at once
    g = -(-k // size)
    q, zero = rng.integers(0, 16, (k, n)), rng.integers(0, 16, (g, n))
    scale = rng.standard_normal((g, n)).astype(np.float16)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    stored: dict[str, tuple[str, Any]] = {
        "m.qweight": ("I32", pack_words(q, 4, order)),
        "m.qzeros": ("I32", pack_words(zero, 4, order)),
        "m.scales": ("F16", scale),
        "m.bias": ("F16", np.ones(n, np.float16)),
        "gate.weight": ("F16", np.ones((2, 4), np.float16)),
    }
    config = {"quantization_config": {"quant_method": "awq", "bits": 4, "group_size": group_size, "version": "gemm"}}
    folder = hub_typed(tmp_path, stored, config)
    wanted = loop(n, k, lambda i, j: (int(q[j, i]) - int(zero[j // size, i])) * np.float32(scale[j // size, i]))
    np.testing.assert_array_equal(read(folder, "m.weight", fmt), wanted)
    tensors = HubCheckpoint(folder).tensors
    assert set(tensors) == {"m.weight", "m.bias", "gate.weight"} and tensors["gate.weight"].fmt == "F16"


def gptq(
    q: np.ndarray, zero: np.ndarray, scale: tuple[str, np.ndarray], bits: int, offset: int, g_idx: np.ndarray | None
) -> dict[str, tuple[str, Any]]:
    """The module m of q [K, N], zero and scale [G, N]."""
    stored: dict[str, tuple[str, Any]] = {
        "m.qweight": ("I32", np.ascontiguousarray(pack_words(q.T, bits).T)),  # packed along the input
        "m.qzeros": ("I32", pack_words(zero - offset, bits)),
        "m.scales": scale,
    }
    return stored if g_idx is None else {**stored, "m.g_idx": ("I32", g_idx.astype(np.int32))}


def gptq_config(bits: int, group_size: int, **more: Any) -> dict[str, Any]:
    return {"quantization_config": {"quant_method": "gptq", "bits": bits, "group_size": group_size, **more}}


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("order", ["sequential", "act-order", "no g_idx"])
@pytest.mark.parametrize("file_format", ["gptq", "gptq_v2"])
def test_gptq(tmp_path: Path, bits: int, order: str, file_format: str) -> None:
    rng = np.random.default_rng(3)
    k, n, size = 128, 8, 32
    g = k // size
    g_idx = rng.permutation(np.arange(k) // size) if order == "act-order" else np.arange(k) // size
    q, zero = rng.integers(0, 1 << bits, (k, n)), rng.integers(1, 1 << bits, (g, n))
    scale = rng.standard_normal((g, n)).astype(np.float16)
    offset = 1 if file_format == "gptq" else 0
    stored = gptq(q, zero, ("F16", scale), bits, offset, None if order == "no g_idx" else g_idx)
    config = gptq_config(bits, size, checkpoint_format=file_format, desc_act=order == "act-order")
    folder = hub_typed(tmp_path, stored, config)
    wanted = loop(n, k, lambda i, j: (int(q[j, i]) - int(zero[g_idx[j], i])) * np.float32(scale[g_idx[j], i]))
    fmt = "Q4_Z" if bits == 4 and order != "act-order" else "F32"
    np.testing.assert_array_equal(read(folder, "m.weight", fmt), wanted)
    assert set(HubCheckpoint(folder).tensors) == {"m.weight"}


@pytest.mark.parametrize(("group_size", "k", "fmt"), Q4_Z_SHAPES)
def test_gptq_group_sizes(tmp_path: Path, group_size: int, k: int, fmt: str) -> None:
    rng = np.random.default_rng(12)
    n, size = 264, cell(group_size, k)
    g = -(-k // size)
    q, zero = rng.integers(0, 16, (k, n)), rng.integers(1, 17, (g, n))
    scale = rng.standard_normal((g, n)).astype(np.float16)
    stored = gptq(q, zero, ("F16", scale), 4, 1, None)
    folder = hub_typed(tmp_path, stored, gptq_config(4, group_size, desc_act=True))
    wanted = loop(n, k, lambda i, j: (int(q[j, i]) - int(zero[j // size, i])) * np.float32(scale[j // size, i]))
    np.testing.assert_array_equal(read(folder, "m.weight", fmt), wanted)


@pytest.mark.parametrize(
    ("group_size", "k", "odd_zero", "fmt"),
    [(128, 256, None, "INT8"), (-1, 128, None, "INT8"), (256, 384, None, "INT8"), (128, 256, 127, "F32"),
     (-1, 128, 129, "F32"), (64, 256, None, "F32"), (-1, 96, None, "F32")],
)  # fmt: skip
@pytest.mark.parametrize("file_format", ["gptq", "gptq_v2"])
def test_gptq_8_bits_around_the_middle(
    tmp_path: Path, group_size: int, k: int, odd_zero: int | None, fmt: str, file_format: str
) -> None:
    rng = np.random.default_rng(13)
    n, size, offset = 12, cell(group_size, k), 1 if file_format == "gptq" else 0
    g = -(-k // size)
    q, zero = rng.integers(0, 256, (k, n)), np.full((g, n), 128)
    if odd_zero is not None:
        zero[-1, -1] = odd_zero
    scale = bf16(rng.standard_normal((g, n)))
    stored = gptq(q, zero, scale, 8, offset, np.arange(k) // size)
    folder = hub_typed(tmp_path, stored, gptq_config(8, group_size, desc_act=False, checkpoint_format=file_format))
    s = bf16_value(scale)
    wanted = loop(n, k, lambda i, j: (int(q[j, i]) - int(zero[j // size, i])) * s[j // size, i])
    np.testing.assert_array_equal(read(folder, "m.weight", fmt), wanted)


@pytest.mark.parametrize(("claim", "fmt"), [(True, "F32"), (None, "F32"), (False, "Q4_Z")])
def test_gptq_order_is_what_the_config_says(tmp_path: Path, claim: bool | None, fmt: str) -> None:
    rng = np.random.default_rng(14)
    g_idx = rng.permutation(np.arange(64) // 32)
    q, zero = rng.integers(0, 16, (64, 8)), rng.integers(1, 16, (2, 8))
    stored = gptq(q, zero, ("F16", np.ones((2, 8), np.float16)), 4, 1, g_idx)
    config = gptq_config(4, 32) if claim is None else gptq_config(4, 32, desc_act=claim)
    folder = hub_typed(tmp_path, stored, config)
    tensor = HubCheckpoint(folder).tensors["m.weight"]
    assert tensor.fmt == fmt
    if claim is not False:
        wanted = loop(8, 64, lambda i, j: int(q[j, i]) - int(zero[g_idx[j], i]))
        np.testing.assert_array_equal(values(tensor), wanted)
        return
    with pytest.raises(CheckpointError, match=r"'m\.g_idx' sorts columns .*; set .*desc_act to true"):
        tensor.read()


@pytest.mark.parametrize("bad", [-1, 4])
@pytest.mark.parametrize("in_order", [True, False])
def test_gptq_group_outside(tmp_path: Path, bad: int, in_order: bool) -> None:
    g_idx = np.arange(128) // 32
    g_idx[5] = bad
    stored = gptq(np.zeros((128, 8), int), np.ones((4, 8), int), ("F16", np.ones((4, 8), np.float16)), 4, 1, g_idx)
    folder = hub_typed(tmp_path, stored, gptq_config(4, 32, desc_act=not in_order))
    with pytest.raises(CheckpointError, match=f"'m.g_idx' names group {bad} of 4"):
        HubCheckpoint(folder).tensors["m.weight"].read()


def e4m3(code: int) -> float:
    """The value of a byte that is no NaN, from its definition."""
    exponent, mantissa = code >> 3 & 15, code & 7
    value = mantissa / 8 * 2.0**-6 if exponent == 0 else (1 + mantissa / 8) * 2.0 ** (exponent - 7)
    return -value if code & 0x80 else value


def fp8_codes(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    return rng.choice(np.array(list(F8_VALUES), np.uint8), shape)


def fp8_loop(codes: np.ndarray, cells: np.ndarray, rows: int, columns: int) -> np.ndarray:
    def weight(i: int, j: int) -> Any:
        return np.float32(F8_VALUES[int(codes[i, j])]) * cells[i // rows, j // columns]

    return loop(codes.shape[0], codes.shape[1], weight)


@pytest.mark.parametrize("block", [(4, 8), (128, 128), (5, 3)])
@pytest.mark.parametrize("scale_type", ["F32", "BF16"])
def test_fp8_blocks_with_partial_last_ones(tmp_path: Path, block: tuple[int, int], scale_type: str) -> None:
    rng = np.random.default_rng(4)
    n, k = 10, 20
    codes = fp8_codes(rng, (n, k))
    scale = rng.standard_normal((-(-n // block[0]), -(-k // block[1]))).astype(np.float32)
    stored_scale = bf16(scale) if scale_type == "BF16" else ("F32", scale)
    used = bf16_value(stored_scale) if scale_type == "BF16" else scale
    stored: dict[str, tuple[str, Any]] = {
        "m.weight": ("F8_E4M3", codes),
        "m.weight_scale_inv": stored_scale,
        "m.input_scale": ("F32", np.ones(1, np.float32)),
        "lm_head.weight": bf16(np.ones((3, 4))),
    }
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": list(block)}}
    folder = hub_typed(tmp_path, stored, config)
    wanted = fp8_loop(codes, used, *block)
    np.testing.assert_array_equal(read(folder, "m.weight"), wanted)
    tensors = HubCheckpoint(folder).tensors
    assert set(tensors) == {"m.weight", "lm_head.weight"} and tensors["lm_head.weight"].fmt == "BF16"


@pytest.mark.parametrize("shape", [(), (1,), (300, 1), (300,)], ids=str)
@pytest.mark.parametrize("suffix", ["_scale", "_scale_inv"])
def test_fp8_scale_per_tensor_or_channel(tmp_path: Path, shape: tuple[int, ...], suffix: str) -> None:
    rng = np.random.default_rng(5)
    codes = fp8_codes(rng, (300, 4))  # more rows than are scaled at once
    scale = rng.standard_normal(shape).astype(np.float32)
    stored: dict[str, tuple[str, Any]] = {
        "m.weight": ("F8_E4M3", codes),
        "m.weight" + suffix: ("F32", np.asarray(scale)),
    }
    folder = hub_typed(tmp_path, stored, {"quantization_config": {"quant_method": "fp8"}})
    flat = scale.reshape(-1)
    wanted = loop(300, 4, lambda i, j: np.float32(F8_VALUES[int(codes[i, j])]) * flat[i if len(flat) > 1 else 0])
    np.testing.assert_array_equal(read(folder, "m.weight"), wanted)


@pytest.mark.parametrize(
    ("block", "k", "fmt"),
    [((4, 128), 384, "F8_E4M3"), ((128, 256), 384, "F8_E4M3"), ((5, 512), 128, "F8_E4M3"), ((4, 64), 128, "F32"),
     ((4, 192), 384, "F32"), ((4, 128), 320, "F32")],
)  # fmt: skip
def test_fp8_blocks_of_whole_scales(tmp_path: Path, block: tuple[int, int], k: int, fmt: str) -> None:
    rng = np.random.default_rng(15)
    n = 10
    codes = fp8_codes(rng, (n, k))
    scale = rng.standard_normal((-(-n // block[0]), -(-k // block[1]))).astype(np.float32)
    stored: dict[str, tuple[str, Any]] = {"m.weight": ("F8_E4M3", codes), "m.weight_scale_inv": ("F32", scale)}
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": list(block)}}
    folder = hub_typed(tmp_path, stored, config)
    np.testing.assert_array_equal(read(folder, "m.weight", fmt), fp8_loop(codes, scale, *block))


@pytest.mark.parametrize("shape", [(), (1,), (260, 1), (260,)], ids=str)
def test_fp8_scale_per_tensor_or_channel_in_blocks(tmp_path: Path, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(16)
    codes, scale = fp8_codes(rng, (260, 128)), rng.standard_normal(shape).astype(np.float32)
    stored: dict[str, tuple[str, Any]] = {
        "m.weight": ("F8_E4M3", codes),
        "m.weight_scale": ("F32", np.asarray(scale)),
    }
    folder = hub_typed(tmp_path, stored, {"quantization_config": {"quant_method": "fp8"}})
    flat = scale.reshape(-1, 1)
    wanted = fp8_loop(codes, flat, 1 if len(flat) > 1 else 260, 128)
    np.testing.assert_array_equal(read(folder, "m.weight", "F8_E4M3"), wanted)


def test_fp8_every_code_but_nan(tmp_path: Path) -> None:
    codes = np.array([c for c in range(256) if c & 0x7F != 0x7F] + [0, 0], np.uint8).reshape(2, 128)
    stored: dict[str, tuple[str, Any]] = {
        "m.weight": ("F8_E4M3", codes),
        "m.weight_scale": ("F32", np.array([0.5], np.float32)),
    }
    folder = hub_typed(tmp_path, stored, {"quantization_config": {"quant_method": "fp8"}})
    wanted = loop(2, 128, lambda i, j: e4m3(int(codes[i, j])) / 2)
    np.testing.assert_array_equal(read(folder, "m.weight", "F8_E4M3"), wanted)


@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_fp8_nan_is_named(tmp_path: Path, code: int) -> None:
    codes = np.zeros((300, 128), np.uint8)
    codes[299, 127] = code
    stored: dict[str, tuple[str, Any]] = {
        "m.weight": ("F8_E4M3", codes),
        "m.weight_scale": ("F32", np.ones(1, np.float32)),
    }
    folder = hub_typed(tmp_path, stored, {"quantization_config": {"quant_method": "fp8"}})
    with pytest.raises(CheckpointError, match=r"model\.safetensors: tensor 'm\.weight' holds NaN: .*download it again"):
        HubCheckpoint(folder).tensors["m.weight"].read()


def test_fp8_with_another_exponent_stays_float32(tmp_path: Path) -> None:
    stored: dict[str, tuple[str, Any]] = {
        "m.weight": ("F8_E5M2", np.full((2, 128), 0x3C, np.uint8)),
        "m.weight_scale": ("F32", np.full(1, 3, np.float32)),
    }
    folder = hub_typed(tmp_path, stored, {"quantization_config": {"quant_method": "fp8"}})
    np.testing.assert_array_equal(read(folder, "m.weight"), np.full((2, 128), 3, np.float32))


@pytest.mark.parametrize(("columns", "fmt"), [(8, "F32"), (256, "F8_E4M3")])
def test_fp8_stacked_experts_are_read_one_at_a_time(tmp_path: Path, columns: int, fmt: str) -> None:
    rng = np.random.default_rng(6)
    block = columns // 2
    codes, scale = fp8_codes(rng, (3, 6, columns)), rng.standard_normal((3, 2, 2)).astype(np.float32)
    stored: dict[str, tuple[str, Any]] = {"experts.up": ("F8_E4M3", codes), "experts.up_scale_inv": ("F32", scale)}
    config = {"quantization_config": {"quant_method": "fp8", "weight_block_size": [4, block]}}
    folder = hub_typed(tmp_path, stored, config)
    tensor = HubCheckpoint(folder).tensors["experts.up"]
    assert tensor.fmt == fmt
    for e in range(3):
        wanted = fp8_loop(codes[e], scale[e], 4, block)
        one = tensor.index(e)
        assert one.nbytes * 3 == tensor.nbytes
        np.testing.assert_array_equal(values(one), wanted)
        np.testing.assert_array_equal(values(tensor)[e], wanted)
        if fmt != "F32":
            assert one.to_float32 is not None
            plain = one.to_float32()
            assert (plain.fmt, plain.slices) == ("F32", one.slices)
            np.testing.assert_array_equal(values(plain), wanted)


def ct_config(file_format: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"type": "int", "symmetric": True, **weights}}
    settings = {"quant_method": "compressed-tensors", "format": file_format, "config_groups": {"group_0": group}}
    return {"quantization_config": settings}


CT_SHAPES = [("group", 32, 128), ("group", 128, 256), ("group", 16, 64), ("channel", None, 128), ("channel", None, 61)]


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("strategy", "group_size", "k"), CT_SHAPES)
@pytest.mark.parametrize("symmetric", [True, False])
def test_compressed_tensors_packed(
    tmp_path: Path, bits: int, strategy: str, group_size: int | None, k: int, symmetric: bool
) -> None:
    rng = np.random.default_rng(7)
    n, size = 10, group_size or k
    g = -(-k // size)
    q, zero = rng.integers(0, 1 << bits, (n, k)), rng.integers(0, 1 << bits, (n, g))
    if symmetric:
        zero[:] = 1 << bits - 1
    scale = bf16(rng.uniform(0.001, 2, (n, g)))
    stored: dict[str, tuple[str, Any]] = {
        "m.weight_packed": ("I32", pack_words(q, bits)),
        "m.weight_scale": scale,
        "m.weight_shape": ("I64", np.array([n, k])),
        "skipped.weight": bf16(np.ones((2, 2))),
    }
    if not symmetric:
        stored["m.weight_zero_point"] = ("I32", np.ascontiguousarray(pack_words(zero.T, bits).T))  # packed along rows
    config = ct_config("pack-quantized", num_bits=bits, strategy=strategy, group_size=group_size, symmetric=symmetric)
    folder = hub_typed(tmp_path, stored, config)
    s = bf16_value(scale)
    wanted = loop(n, k, lambda i, j: (int(q[i, j]) - int(zero[i, j // size])) * s[i, j // size])
    fmt = "F32"
    if bits == 4 and size % 32 == 0:
        fmt = "Q4_Z"
    if bits == 8 and size % 128 == 0 and symmetric:
        fmt = "INT8"
    np.testing.assert_array_equal(read(folder, "m.weight", fmt), wanted)
    assert set(HubCheckpoint(folder).tensors) == {"m.weight", "skipped.weight"}


# Scales that are float16 numbers, subnormal ones and zero included, and ones that are not.
HALF_SCALES = [1.0, -0.75, 65504.0, 2.0**-14, 2.0**-24, 3 * 2.0**-24, 0.0, 1 + 2.0**-10, np.inf]
OTHER_SCALES = [65536.0, 2.0**-25, 2.0**-15 + 2.0**-25, 1 + 2.0**-11, 0.1, np.nan]


def ct_int4(scales: dict[str, float], dtype: str = "F32") -> dict[str, tuple[str, Any]]:
    """Modules of 8 rows and 32 columns of ones, all but one of whose scales are 1."""
    stored: dict[str, tuple[str, Any]] = {}
    for name, value in scales.items():
        scale = np.ones((8, 1), np.float32)
        scale[3] = value
        stored |= {
            f"{name}.weight_packed": ("I32", pack_words(np.full((8, 32), 9), 4)),
            f"{name}.weight_scale": bf16(scale) if dtype == "BF16" else (dtype, scale),
            f"{name}.weight_shape": ("I64", np.array([8, 32])),
        }
    return stored


CT_INT4 = {"num_bits": 4, "strategy": "group", "group_size": 32}


@pytest.mark.parametrize("value", HALF_SCALES + OTHER_SCALES)
def test_scales_decide_whether_four_bits_stay(tmp_path: Path, value: float) -> None:
    folder = hub_typed(tmp_path, ct_int4({"m": value}), ct_config("pack-quantized", **CT_INT4))
    wanted = np.ones((8, 32), np.float32)
    wanted[3] = value
    fmt = "Q4_Z" if value in HALF_SCALES else "F32"
    np.testing.assert_array_equal(read(folder, "m.weight", fmt), wanted)


@pytest.mark.parametrize("value", [2.0**-17, 1.9921875 * 2.0**-17, 2.0**-24, 65280.0])
def test_bfloat16_scales_within_float16(tmp_path: Path, value: float) -> None:
    folder = hub_typed(tmp_path, ct_int4({"m": value}, "BF16"), ct_config("pack-quantized", **CT_INT4))
    assert read(folder, "m.weight", "Q4_Z")[3, 0] == np.float32(value)


def test_experts_of_a_layer_share_a_format(tmp_path: Path) -> None:
    """The engine packs all experts of a layer in the first one's format: one that cannot must hold back the others."""
    parts = ("mlp.experts.0.up", "mlp.experts.1.up", "mlp.experts.0.down", "mlp.experts.1.down", "x.0.w1", "x.1.w1")
    names = {f"layers.{layer}.{part}": 1.0 for layer in (0, 1) for part in parts}
    names |= {"layers.1.mlp.experts.1.up": 0.1, "layers.0.x.0.w1": 0.1}
    tensors = HubCheckpoint(hub_typed(tmp_path, ct_int4(names), ct_config("pack-quantized", **CT_INT4))).tensors
    held_back = {f"layers.1.mlp.experts.{e}.up.weight" for e in (0, 1)} | {f"layers.0.x.{e}.w1.weight" for e in (0, 1)}
    assert {name for name, t in tensors.items() if t.fmt == "F32"} == held_back
    assert {t.fmt for t in tensors.values()} == {"F32", "Q4_Z"}


def test_experts_of_different_bits_share_float32(tmp_path: Path) -> None:
    stored = ct_int4({"layers.0.experts.0.up": 1.0})
    stored |= {
        "layers.0.experts.1.up.weight_packed": ("I32", pack_words(np.full((8, 128), 129), 8)),
        "layers.0.experts.1.up.weight_scale": ("F32", np.ones((8, 1), np.float32)),
        "layers.0.experts.1.up.weight_shape": ("I64", np.array([8, 128])),
    }
    config = ct_config("pack-quantized", **CT_INT4)
    eight = {"targets": ["Linear"], "weights": {"num_bits": 8, "strategy": "channel"}}
    config["quantization_config"]["config_groups"]["group_1"] = eight
    tensors = HubCheckpoint(hub_typed(tmp_path, stored, config)).tensors
    assert {t.fmt for t in tensors.values()} == {"F32"}
    assert all((values(t) == 1).all() for t in tensors.values())


def test_many_scales_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    names = {f"layers.{i}.up": 1.0 for i in range(4)}
    folder = hub_typed(tmp_path, ct_int4(names), ct_config("pack-quantized", **CT_INT4))
    reads: list[int] = []

    def counted(part: FileSlice) -> bytearray:
        reads.append(part.nbytes)
        return read_slice(part)

    monkeypatch.setattr(candidates, "read_slice", counted)
    for limit, fmt, expected in ((4 * 32, "Q4_Z", [32] * 4), (4 * 32 - 1, "F32", [])):
        monkeypatch.setattr(candidates, "MAX_PROOF_BYTES", limit)
        reads.clear()
        assert {t.fmt for t in HubCheckpoint(folder).tensors.values()} == {fmt}
        assert reads == expected
    monkeypatch.setattr(candidates, "MAX_PROOF_BYTES", 1 << 30)
    monkeypatch.setattr(candidates, "PIECE_BYTES", 12)
    reads.clear()
    assert {t.fmt for t in HubCheckpoint(folder).tensors.values()} == {"Q4_Z"}
    assert reads == [12, 12, 8] * 4


def test_block_formats_are_the_kernels_own() -> None:
    for name, columns in COLUMNS.items():
        fmt = get_format(name)
        assert columns == fmt.block_elements
        assert fmt.block_nbytes == (20 if name == "Q4_Z" else 132)
    # these keep the orientation of the float tensor, unlike blocks that files store
    assert set(COLUMNS) == set(OF_PARTS) and not any(map(is_blocked, OF_PARTS)) and is_blocked("MXFP4")


@pytest.mark.parametrize("turn", [Source("m.weight", swap=True), Source("m.weight", transpose=True)])
def test_turned_blocks_become_float32(tmp_path: Path, turn: Source) -> None:
    """DeepSeek's kv_b is split into heads and one half turned: blocks cannot be, their float32 twin can."""
    rng = np.random.default_rng(17)
    q, scale = rng.integers(0, 16, (12, 64)), rng.standard_normal((12, 2)).astype(np.float16)
    stored: dict[str, tuple[str, Any]] = {
        "m.weight_packed": ("I32", pack_words(q, 4)),
        "m.weight_scale": ("F16", scale),
        "m.weight_shape": ("I64", np.array([12, 64])),
    }
    tensor = HubCheckpoint(hub_typed(tmp_path, stored, ct_config("pack-quantized", **CT_INT4))).tensors["m.weight"]
    whole = loop(12, 64, lambda i, j: (int(q[i, j]) - 8) * np.float32(scale[i, j // 32]))
    assert tensor.fmt == "Q4_Z"
    turned = compose(tensor, turn)
    assert turned.fmt == "F32" and turned.shape == (64, 12)
    np.testing.assert_array_equal(values(turned), whole.T)
    heads = (3, 1, None)
    half = compose(tensor, Source("m.weight", heads=heads))
    assert half.fmt == "Q4_Z" and half.shape == (3, 3, 64)
    np.testing.assert_array_equal(values(half), whole.reshape(3, 4, 64)[:, 1:])
    other = compose(tensor, Source("m.weight", heads=heads, swap=True))
    assert other.fmt == "F32" and other.shape == (3, 64, 3)
    np.testing.assert_array_equal(values(other), whole.reshape(3, 4, 64)[:, 1:].swapaxes(1, 2))
    odd = compose(tensor, Source("m.weight", rows=(1, None, 2)))
    assert odd.fmt == "Q4_Z"
    np.testing.assert_array_equal(values(odd), whole[1::2])


@pytest.mark.parametrize("used", [True, False])
def test_compressed_tensors_activation_order(tmp_path: Path, used: bool) -> None:
    rng = np.random.default_rng(8)
    n, k, size = 4, 128, 32
    g_idx = rng.permutation(np.arange(k) // size)
    q, scale = rng.integers(0, 16, (n, k)), rng.integers(1, 99, (n, 4)).astype(np.float32)
    stored: dict[str, tuple[str, Any]] = {
        "m.weight_packed": ("I32", pack_words(q, 4)),
        "m.weight_scale": ("F32", scale),
        "m.weight_shape": ("I32", np.array([n, k], np.int32)),
        "m.weight_g_idx": ("I32", g_idx.astype(np.int32) if used else np.full(k, -1, np.int32)),
    }
    folder = hub_typed(tmp_path, stored, ct_config("pack-quantized", num_bits=4, strategy="group", group_size=size))
    group = g_idx if used else np.arange(k) // size
    wanted = loop(n, k, lambda i, j: (int(q[i, j]) - 8) * scale[i, group[j]])
    np.testing.assert_array_equal(read(folder, "m.weight"), wanted)


@pytest.mark.parametrize("shape", [(6, 1), (1,), (), (6, 2)], ids=str)
@pytest.mark.parametrize(("k", "fmt"), [(8, "F32"), (256, "INT8")])
def test_compressed_tensors_int8(tmp_path: Path, shape: tuple[int, ...], k: int, fmt: str) -> None:
    rng = np.random.default_rng(9)
    n, half = 6, k // 2
    q, scale = rng.integers(-128, 128, (n, k)).astype(np.int8), np.asarray(rng.standard_normal(shape), np.float32)
    grouped = shape == (6, 2)
    config = ct_config("int-quantized", num_bits=8, strategy="group" if grouped else "channel", group_size=half)
    folder = hub_typed(tmp_path, {"m.weight": ("I8", q), "m.weight_scale": ("F32", scale)}, config)
    cells = np.broadcast_to(scale.reshape(-1, shape[1] if len(shape) == 2 else 1), (n, 2 if grouped else 1))
    wanted = loop(n, k, lambda i, j: int(q[i, j]) * cells[i, j // half if grouped else 0])
    np.testing.assert_array_equal(read(folder, "m.weight", fmt), wanted)


@pytest.mark.parametrize("strategy", ["channel", "tensor", "block"])
@pytest.mark.parametrize(("k", "block", "fmt"), [(10, 4, "F32"), (256, 128, "F8_E4M3")])
def test_compressed_tensors_float(tmp_path: Path, strategy: str, k: int, block: int, fmt: str) -> None:
    rng = np.random.default_rng(10)
    n = 6
    rows, columns = {"channel": (1, k), "tensor": (n, k), "block": (4, block)}[strategy]
    shape = {"channel": (n, 1), "tensor": (1,), "block": (2, -(-k // block))}[strategy]
    codes, scale = fp8_codes(rng, (n, k)), rng.standard_normal(shape).astype(np.float32)
    config = ct_config("float-quantized", num_bits=8, type="float", strategy=strategy, block_structure=[4, block])
    folder = hub_typed(tmp_path, {"m.weight": ("F8_E4M3", codes), "m.weight_scale": ("F32", scale)}, config)
    cells = scale.reshape(1, 1) if strategy == "tensor" else scale
    wanted = fp8_loop(codes, cells, rows, columns)
    np.testing.assert_array_equal(read(folder, "m.weight", fmt), wanted)


def test_mxfp4(tmp_path: Path) -> None:
    rng = np.random.default_rng(11)
    experts, rows, k = 3, 5, 64
    codes = rng.integers(0, 16, (experts, rows, k))
    exponent = rng.integers(100, 140, (experts, rows, k // 32)).astype(np.uint8)
    blocks = np.zeros((experts, rows, k // 32, 16), np.uint8)
    for e, r, j in np.ndindex(codes.shape):
        blocks[e, r, j // 32, j % 32 // 2] |= int(codes[e, r, j]) << (4 * (j % 2))  # the low nibble is the even element
    stored: dict[str, tuple[str, Any]] = {
        "x.gate_up_proj_blocks": ("U8", blocks),
        "x.gate_up_proj_scales": ("U8", exponent),
        "x.gate_up_proj_bias": bf16(np.ones((experts, rows))),
    }
    folder = hub_typed(tmp_path, stored, {"quantization_config": {"quant_method": "mxfp4"}})
    tensors = HubCheckpoint(folder).tensors
    assert set(tensors) == {"x.gate_up_proj", "x.gate_up_proj_bias"}
    tensor = tensors["x.gate_up_proj"]
    assert tensor.fmt == "MXFP4" and tensor.shape == (experts, rows, k)
    whole = tensor.read()
    assert whole.shape == (experts, rows, k // 32 * 17)
    got = gguf.quants.dequantize(whole.reshape(-1, k // 32 * 17), gguf.GGMLQuantizationType.MXFP4)
    wanted = np.empty(codes.shape, np.float32)
    for e, r, j in np.ndindex(codes.shape):
        wanted[e, r, j] = FP4_VALUES[codes[e, r, j]] * 2.0 ** (int(exponent[e, r, j // 32]) - 127)
    np.testing.assert_array_equal(got.reshape(codes.shape), wanted)
    one = tensor.index(1)
    assert one.nbytes * experts == tensor.nbytes and np.array_equal(one.read(), whole[1])


def settings(method: Any, **more: Any) -> dict[str, Any]:
    return {"quantization_config": {"quant_method": method, **more}}


WORDS = ("I32", np.zeros((8, 2), np.int32))
HALVES = ("F16", np.zeros((1, 16), np.float16))
FP8 = ("F8_E4M3", np.zeros((8, 8), np.uint8))
AWQ: dict[str, tuple[str, Any]] = {
    "m.qweight": WORDS,
    "m.qzeros": ("I32", np.zeros((1, 2), np.int32)),
    "m.scales": HALVES,
}
CT: dict[str, tuple[str, Any]] = {
    "m.weight_packed": WORDS,
    "m.weight_scale": ("F32", np.zeros((8, 5), np.float32)),
    "m.weight_shape": ("I64", np.array([8, 16])),
}
REFUSED: dict[str, tuple[Any, ...]] = {
    "unknown method": (AWQ, settings("hqq"), UnsupportedError, "'hqq' is not supported; use a checkpoint in awq, "),
    "no method": (AWQ, {"quantization_config": {"bits": 4}}, UnsupportedError, "quant_method None"),
    "method of wrong type": (AWQ, settings(["awq"]), UnsupportedError, "quant_method"),
    "no settings": (AWQ, {}, CheckpointError, "no quantization_config, but tensor 'm.qweight'"),
    "awq gemv": (AWQ, settings("awq", bits=4, group_size=8, version="gemv"), UnsupportedError, "version is 'gemv'"),
    "awq 3 bits": (AWQ, settings("awq", bits=3, group_size=8), UnsupportedError, "bits is 3"),
    "awq group size": (AWQ, settings("awq", bits=4, group_size="8"), CheckpointError, "group_size is '8'"),
    "awq groups disagree": (AWQ, settings("awq", bits=4, group_size=4), CheckpointError, "'m.qzeros' has the shape"),
    "awq group size 0": (AWQ, settings("awq", bits=4, group_size=0), CheckpointError, "group_size is 0, neither -1"),
    "gptq group size -2": (AWQ, settings("gptq", bits=4, group_size=-2), CheckpointError, "group_size is -2, neither"),
    "awq without scales": ({"m.qweight": WORDS, "m.qzeros": WORDS}, settings("awq", bits=4, group_size=8),
                           CheckpointError, "'m.scales' is missing"),
    "gptq 2 bits": (AWQ, settings("gptq", bits=2, group_size=8), UnsupportedError, "bits is 2"),
    "gptq marlin": (AWQ, settings("gptq", bits=4, checkpoint_format="marlin"), UnsupportedError, "'marlin'"),
    "gptq shapes": (AWQ, settings("gptq", bits=4, group_size=64), CheckpointError, "'m.scales' has the shape [1, 16]"),
    "fp8 without scale": ({"m.weight": FP8}, settings("fp8"), CheckpointError, "'m.weight_scale_inv' is missing"),
    "fp8 block size": ({"m.weight": FP8}, settings("fp8", weight_block_size=[0, 4]), CheckpointError, "[0, 4]"),
    "fp8 grid": ({"m.weight": FP8, "m.weight_scale_inv": HALVES}, settings("fp8", weight_block_size=[4, 4]),
                 CheckpointError, "has the shape [1, 16], its quantisation calls for [2, 2]"),
    "ct nvfp4": (CT, ct_config("nvfp4-pack-quantized", num_bits=4), UnsupportedError, "nvfp4"),
    "ct no groups": (CT, settings("compressed-tensors", format="pack-quantized"), CheckpointError, "config_groups"),
    "ct scales": (CT, ct_config("pack-quantized", num_bits=4, strategy="group", group_size=8), UnsupportedError, "fit"),
    "ct 3 bits": (CT, ct_config("pack-quantized", num_bits=3, strategy="channel"), UnsupportedError, "fits"),
    "ct strategy": (CT, ct_config("pack-quantized", num_bits=4, strategy="token"), UnsupportedError, "'token'"),
    "mxfp4 blocks": ({"a_proj_blocks": ("U8", np.zeros((2, 3, 4, 8), np.uint8)), "a_proj_scales": FP8},
                     settings("mxfp4"),
                     CheckpointError, "'a_proj_blocks' has the shape"),
    "mxfp4 scales": ({"a_proj_blocks": ("U8", np.zeros((2, 3, 4, 16), np.uint8))}, settings("mxfp4"),
                     CheckpointError, "'a_proj_scales' is missing"),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_the_reason(tmp_path: Path, case: str) -> None:
    stored, config, kind, message = REFUSED[case]
    folder = hub_typed(tmp_path, stored, config)
    with pytest.raises(ColibriError) as caught:
        HubCheckpoint(folder)
    assert type(caught.value) is kind and message in str(caught.value) and "\n" not in str(caught.value)


def test_settings_of_a_multimodal_model(tmp_path: Path) -> None:
    config = {"text_config": settings("awq", bits=4, group_size=8)}
    assert HubCheckpoint(hub_typed(tmp_path, AWQ, config)).tensors["m.weight"].shape == (16, 8)
