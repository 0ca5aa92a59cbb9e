"""8-bit floats with a scale per block, per output channel or per tensor: weight = value · scale.

Stored: `X` F8 [..., R, C] with `X_scale_inv` or `X_scale`, which despite its name is multiplied. Blocks of
weight_block_size start at 0, the last ones may be partial: scales [..., ceil(R/rows), ceil(C/columns)].
Source: DeepSeek-V3, arXiv:2412.19437, section 3.3; Micikevicius et al. 2022, arXiv:2209.05433.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import prod
from typing import Any

import numpy as np

from colibri_offload.checkpoint.base import Decode, Raw, Tensor, stacked
from colibri_offload.checkpoint.files import shown
from colibri_offload.checkpoint.hub_quant.parts import FLOATS, Folded, expect, partner
from colibri_offload.checkpoint.hub_types import F8_TABLES, Stored, as_float32, float32_rows
from colibri_offload.errors import CheckpointError

WEIGHTS = ("F8_E4M3", "F8_E5M2")
SCALES = (*FLOATS, "F8_E8M0")
SCALE_SUFFIXES = ("_scale_inv", "_scale")
ACTIVATION_SUFFIXES = (".input_scale", ".activation_scale")  # activations are not quantised to FP8 here
ROWS_AT_ONCE = 256


def fold(stored: Mapping[str, Stored], settings: Mapping[str, Any]) -> Folded:
    """Every F8 tensor `X` with its scales → `X`, F32. Unscaled modules are stored in wider types and stay."""
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


def scaled_tensor(weight: Stored, scale: Stored, block: tuple[int, int] | None) -> Tensor:
    """The logical tensor of an F8 weight [R, C], or of experts [E, R, C] that are stored as one, and its scales."""
    expect(weight, WEIGHTS)
    expect(scale, SCALES)
    if len(weight.shape) not in (2, 3) or 0 in weight.shape:
        raise CheckpointError(
            f"{weight.slice.path}: tensor {shown(weight.name)} has the shape {list(weight.shape)}, not that of a "
            "matrix or of stacked ones; download the model again"
        )
    rows, columns = _cell(weight, scale, block)
    slices = (weight.slice, scale.slice)
    decode_for = _decoder(weight.dtype, scale.dtype, rows, columns)
    if len(weight.shape) == 3 and scale.shape[:1] == weight.shape[:1]:
        return stacked(weight.name, weight.shape, "F32", slices, decode_for)
    return Tensor(weight.name, weight.shape, "F32", slices, decode_for(weight.shape), contiguous=False)


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


def _decoder(dtype: str, scale_dtype: str, rows: int, columns: int) -> Callable[[tuple[int, ...]], Decode]:
    def decode_for(shape: tuple[int, ...]) -> Decode:
        r, c = shape[-2:]
        grid = (-1, -(-r // rows), -(-c // columns))

        def decode(raws: Raw) -> np.ndarray:
            values = np.frombuffer(raws[0], np.uint8).reshape(-1, r, c)
            scales = as_float32(raws[1], scale_dtype).reshape(grid)
            scales = np.broadcast_to(scales, (len(values), *grid[1:]))
            out = np.empty(values.shape, np.float32)
            for matrix, codes, cells in zip(out, values, scales, strict=True):
                _scale_rows(matrix, codes, cells[:, np.arange(c) // columns], F8_TABLES[dtype], rows)
            return float32_rows(out.reshape(shape))

        return decode

    return decode_for


def _scale_rows(out: np.ndarray, codes: np.ndarray, cells: np.ndarray, table: np.ndarray, rows: int) -> None:
    """out [R, C] = table[codes] · cells[row // rows], a few rows at a time to bound the temporaries."""
    for start in range(0, len(out), ROWS_AT_ONCE):
        block = slice(start, start + ROWS_AT_ONCE)
        row = np.arange(start, min(start + ROWS_AT_ONCE, len(out)))
        np.multiply(table[codes[block]], cells[row // rows], out=out[block])
