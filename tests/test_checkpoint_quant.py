"""Quantised hub schemes against slow, independent loops written from each format's definition."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf
import numpy as np
import pytest
from checkpoint_writers import hub_typed

from colibri_offload.checkpoint.safetensors import HubCheckpoint
from colibri_offload.errors import CheckpointError, ColibriError, UnsupportedError

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


def read(folder: Path, name: str) -> np.ndarray:
    tensor = HubCheckpoint(folder).tensors[name]
    rows = tensor.read()
    assert tensor.fmt == "F32" and rows.shape == (*tensor.shape[:-1], tensor.shape[-1] * 4)
    return rows.view(np.float32)


def loop(n: int, k: int, weight: Callable[[int, int], Any]) -> np.ndarray:
    out = np.empty((n, k), np.float32)
    for i in range(n):
        for j in range(k):
            out[i, j] = np.float32(weight(i, j))
    return out


@pytest.mark.parametrize("group_size", [16, -1])
def test_awq(tmp_path: Path, group_size: int) -> None:
    rng = np.random.default_rng(2)
    k, n = 48, 16
    size = k if group_size == -1 else group_size
    q, zero = rng.integers(0, 16, (k, n)), rng.integers(0, 16, (k // size, n))
    scale = rng.standard_normal((k // size, n)).astype(np.float16)
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
    np.testing.assert_array_equal(read(folder, "m.weight"), wanted)
    tensors = HubCheckpoint(folder).tensors
    assert set(tensors) == {"m.weight", "m.bias", "gate.weight"} and tensors["gate.weight"].fmt == "F16"


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("order", ["sequential", "act-order", "no g_idx"])
@pytest.mark.parametrize("file_format", ["gptq", "gptq_v2"])
def test_gptq(tmp_path: Path, bits: int, order: str, file_format: str) -> None:
    rng = np.random.default_rng(3)
    k, n, size = 64, 8, 16
    g = k // size
    g_idx = rng.permutation(np.arange(k) // size) if order == "act-order" else np.arange(k) // size
    q, zero = rng.integers(0, 1 << bits, (k, n)), rng.integers(1, 1 << bits, (g, n))
    scale = rng.standard_normal((g, n)).astype(np.float16)
    stored: dict[str, tuple[str, Any]] = {
        "m.qweight": ("I32", np.ascontiguousarray(pack_words(q.T, bits).T)),  # packed along the input
        "m.qzeros": ("I32", pack_words(zero - (file_format == "gptq"), bits)),
        "m.scales": ("F16", scale),
    }
    if order != "no g_idx":
        stored["m.g_idx"] = ("I32", g_idx.astype(np.int32))
    settings = {"quant_method": "gptq", "bits": bits, "group_size": size, "checkpoint_format": file_format}
    folder = hub_typed(tmp_path, stored, {"quantization_config": settings})
    wanted = loop(n, k, lambda i, j: (int(q[j, i]) - int(zero[g_idx[j], i])) * np.float32(scale[g_idx[j], i]))
    np.testing.assert_array_equal(read(folder, "m.weight"), wanted)
    assert set(HubCheckpoint(folder).tensors) == {"m.weight"}


@pytest.mark.parametrize("bad", [-1, 4])
def test_gptq_group_outside(tmp_path: Path, bad: int) -> None:
    g_idx = np.arange(64, dtype=np.int32) // 16
    g_idx[5] = bad
    stored: dict[str, tuple[str, Any]] = {
        "m.qweight": ("I32", np.zeros((8, 8), np.int32)),
        "m.qzeros": ("I32", np.zeros((4, 1), np.int32)),
        "m.scales": ("F16", np.zeros((4, 8), np.float16)),
        "m.g_idx": ("I32", g_idx),
    }
    folder = hub_typed(tmp_path, stored, {"quantization_config": {"quant_method": "gptq", "bits": 4, "group_size": 16}})
    with pytest.raises(CheckpointError, match=f"'m.g_idx' names group {bad} of 4"):
        read(folder, "m.weight")


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


def test_fp8_stacked_experts_are_read_one_at_a_time(tmp_path: Path) -> None:
    rng = np.random.default_rng(6)
    codes, scale = fp8_codes(rng, (3, 6, 8)), rng.standard_normal((3, 2, 2)).astype(np.float32)
    stored: dict[str, tuple[str, Any]] = {"experts.up": ("F8_E4M3", codes), "experts.up_scale_inv": ("F32", scale)}
    folder = hub_typed(tmp_path, stored, {"quantization_config": {"quant_method": "fp8", "weight_block_size": [4, 4]}})
    tensor = HubCheckpoint(folder).tensors["experts.up"]
    for e in range(3):
        wanted = fp8_loop(codes[e], scale[e], 4, 4)
        one = tensor.index(e)
        assert one.nbytes * 3 == tensor.nbytes
        np.testing.assert_array_equal(one.read().view(np.float32), wanted)
        np.testing.assert_array_equal(tensor.read().view(np.float32)[e], wanted)


def ct_config(file_format: str, **weights: Any) -> dict[str, Any]:
    group = {"targets": ["Linear"], "weights": {"type": "int", "symmetric": True, **weights}}
    settings = {"quant_method": "compressed-tensors", "format": file_format, "config_groups": {"group_0": group}}
    return {"quantization_config": settings}


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize(("strategy", "k"), [("group", 64), ("channel", 64), ("channel", 61)])
@pytest.mark.parametrize("symmetric", [True, False])
def test_compressed_tensors_packed(tmp_path: Path, bits: int, strategy: str, k: int, symmetric: bool) -> None:
    rng = np.random.default_rng(7)
    n, size = 10, 16 if strategy == "group" else k
    g = -(-k // size)
    q, zero = rng.integers(0, 1 << bits, (n, k)), rng.integers(0, 1 << bits, (n, g))
    if symmetric:
        zero[:] = 1 << bits - 1
    scale = bf16(rng.standard_normal((n, g)))
    stored: dict[str, tuple[str, Any]] = {
        "m.weight_packed": ("I32", pack_words(q, bits)),
        "m.weight_scale": scale,
        "m.weight_shape": ("I64", np.array([n, k])),
        "skipped.weight": bf16(np.ones((2, 2))),
    }
    if not symmetric:
        stored["m.weight_zero_point"] = ("I32", np.ascontiguousarray(pack_words(zero.T, bits).T))  # packed along rows
    group_size = 16 if strategy == "group" else None
    config = ct_config("pack-quantized", num_bits=bits, strategy=strategy, group_size=group_size, symmetric=symmetric)
    folder = hub_typed(tmp_path, stored, config)
    values = bf16_value(scale)
    wanted = loop(n, k, lambda i, j: (int(q[i, j]) - int(zero[i, j // size])) * values[i, j // size])
    np.testing.assert_array_equal(read(folder, "m.weight"), wanted)
    assert set(HubCheckpoint(folder).tensors) == {"m.weight", "skipped.weight"}


@pytest.mark.parametrize("used", [True, False])
def test_compressed_tensors_activation_order(tmp_path: Path, used: bool) -> None:
    rng = np.random.default_rng(8)
    n, k, size = 4, 32, 8
    g_idx = rng.permutation(np.arange(k) // size)
    q, scale = rng.integers(0, 16, (n, k)), rng.standard_normal((n, 4)).astype(np.float32)
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


@pytest.mark.parametrize("shape", [(6, 1), (1,), (6, 2)], ids=str)
def test_compressed_tensors_int8(tmp_path: Path, shape: tuple[int, ...]) -> None:
    rng = np.random.default_rng(9)
    n, k = 6, 8
    q, scale = rng.integers(-128, 128, (n, k)).astype(np.int8), rng.standard_normal(shape).astype(np.float32)
    grouped = shape == (6, 2)
    config = ct_config("int-quantized", num_bits=8, strategy="group" if grouped else "channel", group_size=4)
    folder = hub_typed(tmp_path, {"m.weight": ("I8", q), "m.weight_scale": ("F32", scale)}, config)
    cells = np.broadcast_to(scale.reshape(-1, shape[1] if len(shape) == 2 else 1), (n, 2 if grouped else 1))
    wanted = loop(n, k, lambda i, j: int(q[i, j]) * cells[i, j // 4 if grouped else 0])
    np.testing.assert_array_equal(read(folder, "m.weight"), wanted)


@pytest.mark.parametrize("strategy", ["channel", "tensor", "block"])
def test_compressed_tensors_float(tmp_path: Path, strategy: str) -> None:
    rng = np.random.default_rng(10)
    n, k = 6, 10
    rows, columns = {"channel": (1, k), "tensor": (n, k), "block": (4, 4)}[strategy]
    shape = {"channel": (n, 1), "tensor": (1,), "block": (2, 3)}[strategy]
    codes, scale = fp8_codes(rng, (n, k)), rng.standard_normal(shape).astype(np.float32)
    config = ct_config("float-quantized", num_bits=8, type="float", strategy=strategy, block_structure=[4, 4])
    folder = hub_typed(tmp_path, {"m.weight": ("F8_E4M3", codes), "m.weight_scale": ("F32", scale)}, config)
    cells = scale.reshape(1, 1) if strategy == "tensor" else scale
    wanted = fp8_loop(codes, cells, rows, columns)
    np.testing.assert_array_equal(read(folder, "m.weight"), wanted)


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
    "awq group size 0": (AWQ, settings("awq", bits=4, group_size=0), CheckpointError, "'m.qzeros' has the shape"),
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
