"""8-bit floats with a scale per block, per output channel or per tensor: weight = value · scale.

Stored: `X` F8 [..., R, C] with `X_scale_inv` or `X_scale`, which despite its name is multiplied. Blocks of
weight_block_size start at 0, the last ones may be partial: scales [..., ceil(R/rows), ceil(C/columns)].
Source: DeepSeek-V3, arXiv:2412.19437, section 3.3; Micikevicius et al. 2022, arXiv:2209.05433.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from math import prod
from typing import Any

import numpy as np

from colibri_offload.checkpoint.base import Decode, Raw, Tensor, stacked
from colibri_offload.checkpoint.files import shown
from colibri_offload.checkpoint.hub_quant.blocks import byte_rows, fits, groups_of_blocks
from colibri_offload.checkpoint.hub_quant.candidates import Candidate
from colibri_offload.checkpoint.hub_quant.parts import FLOATS, Folded, expect, partner
from colibri_offload.checkpoint.hub_types import F8_TABLES, Stored, as_float32, float32_rows
from colibri_offload.errors import CheckpointError

WEIGHTS = ("F8_E4M3", "F8_E5M2")
SCALES = (*FLOATS, "F8_E8M0")
SCALE_SUFFIXES = ("_scale_inv", "_scale")
ACTIVATION_SUFFIXES = (".input_scale", ".activation_scale")  # activations are not quantised to FP8 here
ROWS_AT_ONCE = 256


def fold(stored: Mapping[str, Stored], settings: Mapping[str, Any]) -> Folded:
    """Every F8 tensor `X` with its scales → `X`, F8_E4M3 or F32. Unscaled modules have wider types and stay."""
    block = block_size(settings.get("weight_block_size"))
    out = Folded()
    for weight in stored.values():
        if weight.dtype in WEIGHTS:
            found = [s for suffix in SCALE_SUFFIXES if (s := stored.get(weight.name + suffix))]
            scale = found[0] if found else partner(stored, weight.name + SCALE_SUFFIXES[0], weight)
            out.add(scaled_tensor(weight, scale, block), weight, scale)
    out.used.update(name for name in stored if name.endswith(ACTIVATION_SUFFIXES))
    return out


def block_size(value: Any) -> tuple[int, int] | None:
    """[rows, columns] of a block from a config, None when scales are not per block."""
    if value is None:
        return None
    if not isinstance(value, list) or len(value) != 2 or not all(type(v) is int and v > 0 for v in value):
        raise CheckpointError(
            f"config.json: the block size of its quantisation is {shown(value)}, not [rows, columns]; download it again"
        )
    return value[0], value[1]


def scaled_tensor(weight: Stored, scale: Stored, block: tuple[int, int] | None) -> Candidate:
    """The logical tensor of an F8 weight [R, C], or of experts [E, R, C] that are stored as one, and its scales."""
    expect(weight, WEIGHTS)
    expect(scale, SCALES)
    if len(weight.shape) not in (2, 3) or 0 in weight.shape:
        raise CheckpointError(
            f"{weight.slice.path}: tensor {shown(weight.name)} has the shape {list(weight.shape)}, not that of a "
            "matrix or of stacked ones; download the model again"
        )
    rows, columns = _cell(weight, scale, block)
    cells = _Cells(weight, scale, rows, columns)
    plain = cells.tensor("F32", cells.float32)
    fitting = weight.dtype == "F8_E4M3" and fits("F8_E4M3", weight.shape[-1], columns)
    return Candidate(plain, cells.tensor("F8_E4M3", cells.blocks) if fitting else None)


def _cell(weight: Stored, scale: Stored, block: tuple[int, int] | None) -> tuple[int, int]:
    """How many rows and columns share a scale, which the scales' shape must agree with."""
    *lead, r, c = weight.shape
    tensor_wide = [(), (1,)] if not lead else [(), (1,), (*lead, 1, 1)]
    if block is not None:
        grid = (*lead, -(-r // block[0]), -(-c // block[1]))
        expect(scale, SCALES, grid, *tensor_wide[:2])
        return block if scale.shape == grid else (r, c)
    channel_wide = [(*lead, r, 1)] if lead else [(r, 1), (r,)]
    expect(scale, SCALES, *tensor_wide, (1,) * len(weight.shape), *channel_wide)
    return (r, c) if scale.shape in tensor_wide or prod(scale.shape) == 1 else (1, c)


@dataclass(frozen=True, slots=True)
class _Cells:
    """A weight and its scales, each for `rows` × `columns` elements, and the decoders of their bytes."""

    weight: Stored
    scale: Stored
    rows: int
    columns: int

    def tensor(self, fmt: str, decode_for: Callable[[tuple[int, ...]], Decode]) -> Tensor:
        weight, slices = self.weight, (self.weight.slice, self.scale.slice)
        if len(weight.shape) == 3 and self.scale.shape[:1] == weight.shape[:1]:
            return stacked(weight.name, weight.shape, fmt, slices, decode_for)
        return Tensor(weight.name, weight.shape, fmt, slices, decode_for(weight.shape), contiguous=False)

    def float32(self, shape: tuple[int, ...]) -> Decode:
        """Decodes a matrix, or stacked ones, of this shape to F32."""

        def decode(raws: Raw) -> np.ndarray:
            values, scales = self._parts(raws, shape)
            group = np.arange(shape[-1]) // self.columns
            out = np.empty(values.shape, np.float32)
            for matrix, codes, cells in zip(out, values, scales, strict=True):
                _scale_rows(matrix, codes, cells[:, group], F8_TABLES[self.weight.dtype], self.rows)
            return float32_rows(out.reshape(shape))

        return decode

    def blocks(self, shape: tuple[int, ...]) -> Decode:
        """Decodes a matrix, or stacked ones, of this shape to F8_E4M3; CheckpointError for NaN, which it lacks."""

        def decode(raws: Raw) -> np.ndarray:
            values, scales = self._parts(raws, shape)
            group = groups_of_blocks("F8_E4M3", shape[-1], self.columns)
            of_rows = scales[:, np.arange(shape[-2]) // self.rows][..., group]
            codes = values.reshape(-1, shape[-1])
            out = byte_rows(lambda rows: self._finite(codes[rows]), len(codes), of_rows.reshape(len(codes), -1))
            return out.reshape(*shape[:-1], -1)

        return decode

    def _parts(self, raws: Raw, shape: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        """The codes uint8 [matrices, R, C] and the scales float32 [matrices, rows of cells, columns of cells]."""
        r, c = shape[-2:]
        values = np.frombuffer(raws[0], np.uint8).reshape(-1, r, c)
        scales = as_float32(raws[1], self.scale.dtype).reshape(-1, -(-r // self.rows), -(-c // self.columns))
        return values, np.broadcast_to(scales, (len(values), *scales.shape[1:]))

    def _finite(self, codes: np.ndarray) -> np.ndarray:
        if ((codes & 0x7F) == 0x7F).any():
            raise CheckpointError(
                f"{self.weight.slice.path}: tensor {shown(self.weight.name)} holds NaN: "
                "the file is damaged; download it again"
            )
        return codes


def _scale_rows(out: np.ndarray, codes: np.ndarray, cells: np.ndarray, table: np.ndarray, rows: int) -> None:
    """out [R, C] = table[codes] · cells[row // rows], a few rows at a time to bound the temporaries."""
    for start in range(0, len(out), ROWS_AT_ONCE):
        block = slice(start, start + ROWS_AT_ONCE)
        row = np.arange(start, min(start + ROWS_AT_ONCE, len(out)))
        np.multiply(table[codes[block]], cells[row // rows], out=out[block])
