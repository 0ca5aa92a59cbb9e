"""compressed-tensors: integers packed along the input axis, plain int8, or 8-bit floats, by config group.

pack-quantized: weight_packed I32 [N, ceil(K·bits/32)], weight_scale [N, G], weight_shape I32/I64 [2] = N, K, perhaps
weight_zero_point I32 [ceil(N·bits/32), G] (asymmetric) and weight_g_idx [K] (activation order). Integers are stored
with 2^(bits−1) added, so W = (q − 2^(bits−1)) · scale, or (q − zero) · scale with the zero as stored.
int-quantized: weight I8 [N, K] · weight_scale. float-quantized: see fp8.py, with weight_scale.
Source: https://github.com/vllm-project/compressed-tensors (compressors/quantized_compressors).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from colibri_offload.checkpoint.base import Raw, Tensor, read_slice
from colibri_offload.checkpoint.files import shown
from colibri_offload.checkpoint.hub_quant.affine import affine, consecutive, unpack
from colibri_offload.checkpoint.hub_quant.blocks import (
    byte_rows,
    fits,
    groups_of_blocks,
    halves_of_words,
    q4_z_rows,
    signed,
)
from colibri_offload.checkpoint.hub_quant.candidates import Candidate, float16_proofs
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

    @property
    def columns(self) -> int:
        """Columns under one scale, −1: all."""
        return -1 if self.group_size is None else self.group_size

    def scales(self, rows: int, columns: int) -> tuple[int, int]:
        """The shape of weight_scale for integers."""
        return rows, groups(columns, self.columns)


def fold(stored: Mapping[str, Stored], settings: Mapping[str, Any]) -> Folded:
    """The parts of `X` → `X.weight`, Q4_Z, INT8, F8_E4M3 or F32 [N, K].

    Modules of the ignore list have a float `X.weight` and stay.
    """
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
            out.add(_int8(weight, scale, stored, config), weight, scale)
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
    module = _Packed((n, k), group, packed, scale, None if group.symmetric else zero, g_idx)
    out.add(module.candidate(f"{prefix}.weight"), packed, scale, shape, zero, g_idx)


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


@dataclass(frozen=True, slots=True)
class _Packed:
    """One module's parts, and its decoders of their bytes, in this order."""

    shape: tuple[int, int]
    group: Group
    packed: Stored
    scale: Stored
    zero: Stored | None
    g_idx: Stored | None

    def candidate(self, name: str) -> Candidate:
        parts = (self.packed, self.scale, self.zero, self.g_idx)
        slices = tuple(p.slice for p in parts if p is not None)
        plain = Tensor(name, self.shape, "F32", slices, self.float32, contiguous=False)
        fmt = "Q4_Z" if self.group.bits == 4 else "INT8"
        if self.g_idx is not None or not fits(fmt, self.shape[1], self.group.columns):
            return Candidate(plain)
        if fmt == "Q4_Z":
            return Candidate(plain, replace(plain, fmt=fmt, decode=self.q4_z), float16_proofs(self.scale))
        return Candidate(plain, replace(plain, fmt=fmt, decode=self.int8) if self.zero is None else None)

    def float32(self, raws: Raw) -> np.ndarray:
        n, k = self.shape
        q = unpack(raws[0], self.packed.shape, self.group.bits).reshape(n, -1)[:, :k]
        group_of = consecutive(k, self.group.columns)
        if self.g_idx is not None:
            group_of = _group_indices(raws[-1], self.g_idx, self.scale.shape[1], group_of)
        return float32_rows(affine(q, self._zero(raws).astype(np.float32), self._scale(raws), group_of))

    def q4_z(self, raws: Raw) -> np.ndarray:
        words = np.frombuffer(raws[0], "<u4").reshape(self.packed.shape)
        group = groups_of_blocks("Q4_Z", self.shape[1], self.group.columns)
        return q4_z_rows(
            lambda rows: halves_of_words(words[rows]), self._scale(raws)[:, group], self._zero(raws)[:, group]
        )

    def int8(self, raws: Raw) -> np.ndarray:
        codes = np.frombuffer(raws[0], np.uint8).reshape(self.shape)
        group = groups_of_blocks("INT8", self.shape[1], self.group.columns)
        return byte_rows(lambda rows: signed(codes[rows]), len(codes), self._scale(raws)[:, group])

    def _scale(self, raws: Raw) -> np.ndarray:
        """float32 [N, G]"""
        return as_float32(raws[1], self.scale.dtype).reshape(self.scale.shape)

    def _zero(self, raws: Raw) -> np.ndarray:
        """uint8 [N, G], or [1, G] where all rows have the same."""
        n, g = self.scale.shape
        if self.zero is None:
            return np.full((1, g), 1 << self.group.bits - 1, np.uint8)
        stored = unpack(raws[2], self.zero.shape, self.group.bits)  # packed along the rows
        return stored.transpose(0, 2, 1).reshape(-1, g)[:n]


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


def _int8(weight: Stored, scale: Stored, stored: Mapping[str, Stored], config: list[Group]) -> Candidate:
    n, k = matrix(weight, ("I8",))
    if f"{weight.name}_zero_point" in stored:
        raise UnsupportedError(
            f"{weight.slice.path}: tensor {shown(weight.name)} is asymmetric int8; use a symmetric checkpoint"
        )
    size = next((g.columns for g in config if g.bits == 8 and scale.shape == g.scales(n, k)), -1)
    expect(scale, FLOATS, (n, groups(k, size)), (1,), ())

    def scales(raws: Raw) -> np.ndarray:
        """float32 [N or 1, G]"""
        return as_float32(raws[1], scale.dtype).reshape(-1, scale.shape[1] if len(scale.shape) == 2 else 1)

    def float32(raws: Raw) -> np.ndarray:
        q, s = np.frombuffer(raws[0], np.int8).reshape(n, k), scales(raws)
        return float32_rows(affine(q, np.zeros((1, s.shape[1]), np.float32), s, consecutive(k, size)))

    def blocks(raws: Raw) -> np.ndarray:
        codes = np.frombuffer(raws[0], np.uint8).reshape(n, k)
        return byte_rows(lambda rows: codes[rows], n, scales(raws)[:, groups_of_blocks("INT8", k, size)])

    plain = Tensor(weight.name, weight.shape, "F32", (weight.slice, scale.slice), float32, contiguous=False)
    return Candidate(plain, replace(plain, fmt="INT8", decode=blocks) if fits("INT8", k, size) else None)
