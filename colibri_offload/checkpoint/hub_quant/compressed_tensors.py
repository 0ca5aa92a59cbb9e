"""compressed-tensors: integers packed along the input axis, plain int8, or 8-bit floats, by config group.

pack-quantized: weight_packed I32 [N, ceil(K·bits/32)], weight_scale [N, G], weight_shape I32/I64 [2] = N, K, perhaps
weight_zero_point I32 [ceil(N·bits/32), G] (asymmetric) and weight_g_idx [K] (activation order). Integers are stored
with 2^(bits−1) added, so W = (q − 2^(bits−1)) · scale, or (q − zero) · scale with the zero as stored.
int-quantized: weight I8 [N, K] · weight_scale. float-quantized: see fp8.py, with weight_scale.
Source: https://github.com/vllm-project/compressed-tensors (compressors/quantized_compressors).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from colibri_offload.checkpoint.base import Raw, Tensor, read_slice
from colibri_offload.checkpoint.files import shown
from colibri_offload.checkpoint.hub_quant.affine import affine, consecutive, unpack
from colibri_offload.checkpoint.hub_quant.fp8 import ACTIVATION_SUFFIXES, WEIGHTS, block_size, scaled_tensor
from colibri_offload.checkpoint.hub_quant.parts import (
    FLOATS,
    Folded,
    choice,
    expect,
    groups,
    matrix,
    modules,
    partner,
)
from colibri_offload.checkpoint.hub_types import Stored, as_float32, float32_rows
from colibri_offload.errors import CheckpointError, UnsupportedError

FORMATS = ("pack-quantized", "int-quantized", "float-quantized", "naive-quantized", "mixed-precision", "dense")
PACKED_BITS = (4, 8)


@dataclass(frozen=True)
class Group:
    """How a config group quantises weights. `group_size` None: one scale per row; `block` only for 8-bit floats."""

    bits: int
    group_size: int | None
    symmetric: bool
    block: tuple[int, int] | None

    def scales(self, rows: int, columns: int) -> tuple[int, int]:
        """The shape of weight_scale for integers."""
        return rows, 1 if self.group_size is None else groups(columns, self.group_size)


def fold(stored: Mapping[str, Stored], settings: Mapping[str, Any]) -> Folded:
    """The parts of `X` → `X.weight`, F32 [N, K]. Modules of the ignore list have a float `X.weight` and stay."""
    choice(settings, "format", FORMATS)
    config = _groups(settings)
    out = Folded()
    for prefix, packed in modules(stored, ".weight_packed"):
        _fold_packed(out, prefix, packed, stored, config)
    for prefix, weight in modules(stored, ".weight"):
        if weight.dtype in WEIGHTS:
            scale = partner(stored, f"{prefix}.weight_scale", weight)
            block = next((g.block for g in config if g.block is not None and len(scale.shape) == 2), None)
            out.add(scaled_tensor(weight, scale, block), weight, scale)
        elif weight.dtype == "I8":
            scale = partner(stored, f"{prefix}.weight_scale", weight)
            out.add(_int8_tensor(weight, scale, stored, config), weight, scale)
    out.used.update(name for name in stored if name.endswith(ACTIVATION_SUFFIXES))
    return out


def _groups(settings: Mapping[str, Any]) -> list[Group]:
    found = settings.get("config_groups")
    if not isinstance(found, dict):
        raise CheckpointError(
            f"config.json: quantization_config.config_groups is {shown(found)}, not a table; download it again"
        )
    out = []
    for name, group in found.items():
        weights = group.get("weights") if isinstance(group, dict) else None
        if isinstance(weights, dict):  # null: the group quantises activations only
            choice({"format": group.get("format") or "dense"}, "format", FORMATS)
            out.append(_group(name, weights))
    return out


def _group(name: str, weights: Mapping[str, Any]) -> Group:
    strategy = choice(weights, "strategy", ("group", "channel", "tensor", "block"))
    bits, size = weights.get("num_bits"), weights.get("group_size")
    if type(bits) is not int or (strategy == "group" and (type(size) is not int or size < 1)):
        raise CheckpointError(
            f"config.json: config group {shown(name)} has num_bits {shown(bits)} and group_size {shown(size)}; "
            "download it again"
        )
    block = block_size(weights.get("block_structure")) if strategy == "block" else None
    return Group(bits, size if strategy == "group" else None, weights.get("symmetric", True) is True, block)


def _fold_packed(out: Folded, prefix: str, packed: Stored, stored: Mapping[str, Stored], config: list[Group]) -> None:
    scale = partner(stored, f"{prefix}.weight_scale", packed)
    shape = partner(stored, f"{prefix}.weight_shape", packed)
    zero = stored.get(f"{prefix}.weight_zero_point")
    g_idx = stored.get(f"{prefix}.weight_g_idx")
    expect(scale, FLOATS)
    n, words = matrix(packed, ("I32",))
    group, k = _matching(packed, scale, shape, config, n, words)
    g = scale.shape[1]
    if not group.symmetric:
        zero = partner(stored, f"{prefix}.weight_zero_point", packed)
        expect(zero, ("I32",), (-(-n * group.bits // 32), g))
    if g_idx is not None:
        expect(g_idx, ("I32", "I64"), (k,))
    tensor = _packed_tensor(f"{prefix}.weight", (n, k), group, packed, scale, None if group.symmetric else zero, g_idx)
    out.add(tensor, packed, scale, shape, zero, g_idx)


def _matching(
    packed: Stored, scale: Stored, shape: Stored, config: list[Group], n: int, words: int
) -> tuple[Group, int]:
    """The config group whose bits and group size agree with the stored shapes, and the number K of columns.

    K needs weight_shape only when the last word or group may be partial: a model with 60,000 experts would otherwise
    cost that many small reads before it starts.
    """
    expect(shape, ("I32", "I64"), (2,))
    candidates = [g for g in config if g.bits in PACKED_BITS]
    for group in candidates:
        full = words * 32 // group.bits
        if group.group_size is not None and full % group.group_size == 0 and scale.shape == group.scales(n, full):
            return group, full
    if candidates:
        rows, k = _read_shape(shape)
        for group in candidates:
            if rows == n and k > 0 and words == -(-k * group.bits // 32) and scale.shape == group.scales(n, k):
                return group, k
    raise UnsupportedError(
        f"{packed.slice.path}: tensor {shown(packed.name)} {list(packed.shape)} with scales {list(scale.shape)} fits "
        "no integer group of 4 or 8 bits in config.json's config_groups; use a checkpoint in one of these"
    )


def _read_shape(shape: Stored) -> tuple[int, int]:
    rows, columns = np.frombuffer(read_slice(shape.slice), "<i4" if shape.dtype == "I32" else "<i8").tolist()
    return rows, columns


def _packed_tensor(
    name: str,
    shape: tuple[int, int],
    group: Group,
    packed: Stored,
    scale: Stored,
    zero: Stored | None,
    g_idx: Stored | None,
) -> Tensor:
    (n, k), g, bits = shape, scale.shape[1], group.bits
    extra = [p for p in (zero, g_idx) if p is not None]

    def decode(raws: Raw) -> np.ndarray:
        q = unpack(raws[0], packed.shape, bits).reshape(n, -1)[:, :k]
        scales = as_float32(raws[1], scale.dtype).reshape(n, g)
        zeros = np.full((1, g), 1 << bits - 1, np.float32)
        if zero is not None:  # packed along the rows
            stored = unpack(raws[2], zero.shape, bits).transpose(0, 2, 1)
            zeros = stored.reshape(-1, g)[:n].astype(np.float32)
        group_of = consecutive(k, -1 if group.group_size is None else group.group_size)
        if g_idx is not None:
            group_of = _group_indices(raws[-1], g_idx, g, group_of)
        return float32_rows(affine(q, zeros, scales, group_of))

    slices = tuple(p.slice for p in (packed, scale, *extra))
    return Tensor(name, shape, "F32", slices, decode, contiguous=False)


def _group_indices(raw: memoryview, g_idx: Stored, g: int, consecutive_groups: np.ndarray) -> np.ndarray:
    """The group of every column; −1 throughout means that activation order was not used."""
    found = np.frombuffer(raw, "<i4" if g_idx.dtype == "I32" else "<i8")
    if (found == -1).all():
        return consecutive_groups
    if found.min() < 0 or found.max() >= g:
        raise CheckpointError(
            f"{g_idx.slice.path}: tensor {shown(g_idx.name)} names a group outside 0–{g - 1}; download the model again"
        )
    return found


def _int8_tensor(weight: Stored, scale: Stored, stored: Mapping[str, Stored], config: list[Group]) -> Tensor:
    n, k = matrix(weight, ("I8",))
    if f"{weight.name}_zero_point" in stored:
        raise UnsupportedError(
            f"{weight.slice.path}: tensor {shown(weight.name)} is asymmetric int8; use a symmetric checkpoint"
        )
    size = next((g.group_size for g in config if g.bits == 8 and scale.shape == g.scales(n, k)), None)
    expect(scale, FLOATS, (n, groups(k, -1 if size is None else size)), (1,), ())
    group_of = consecutive(k, -1 if size is None else size)

    def decode(raws: Raw) -> np.ndarray:
        q = np.frombuffer(raws[0], np.int8).reshape(n, k)
        scales = as_float32(raws[1], scale.dtype).reshape(-1, scale.shape[1] if len(scale.shape) == 2 else 1)
        return float32_rows(affine(q, np.zeros((1, scales.shape[1]), np.float32), scales, group_of))

    return Tensor(weight.name, weight.shape, "F32", (weight.slice, scale.slice), decode, contiguous=False)
