"""Rows of the jit package's formats for hub checkpoints, put together from a module's parts without rounding.

Q4_Z: 20 bytes per 32 columns, f16 scale, u16 zero, 16 bytes whose low nibbles are columns 0–15 and whose high ones are
columns 16–31; weight = scale · (q − zero). INT8 and F8_E4M3: 132 bytes per 128 columns, f32 scale and a byte each;
weight = scale · value. Definition: jit/formats/scaled.py.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

COLUMNS = {"Q4_Z": 32, "INT8": 128, "F8_E4M3": 128}  # of a block
_Q4_Z = np.dtype([("scale", "<f2"), ("zero", "<u2"), ("nibbles", "u1", 16)])
_BYTES = np.dtype([("scale", "<f4"), ("codes", "u1", 128)])
ROWS_AT_ONCE = 256  # bounds the temporaries and keeps them in the cache; a multiple of 8

Part = Callable[[slice], np.ndarray]  # some rows of a matrix, at most ROWS_AT_ONCE


def fits(fmt: str, columns: int, group_size: int) -> bool:
    """Whether rows of `columns` fill blocks of `fmt`, each under one scale. group_size −1: one scale per row."""
    size = COLUMNS[fmt]
    return columns % size == 0 and (group_size == -1 or group_size >= columns or group_size % size == 0)


def groups_of_blocks(fmt: str, columns: int, group_size: int) -> np.ndarray:
    """[blocks of a row]: the group of every block."""
    size = COLUMNS[fmt]
    starts = np.arange(columns // size) * size
    return np.zeros_like(starts) if group_size == -1 else starts // group_size


def q4_z_rows(nibbles: Part, scale: np.ndarray, zero: np.ndarray) -> np.ndarray:
    """uint8 [N, 20·K/32] from nibbles(rows) uint8 [n, K/32, 16], scale [N, K/32] (exact in float16) and zero
    [N or 1, K/32]."""
    out = np.empty(scale.shape, _Q4_Z)
    out["scale"], out["zero"] = scale, zero
    _fill(out["nibbles"], nibbles)
    return out.view(np.uint8)


def byte_rows(codes: Part, rows: int, scale: np.ndarray) -> np.ndarray:
    """uint8 [rows, 132·K/128] from codes(rows) uint8 [n, K] and scale float32 [rows or 1, K/128]."""
    out = np.empty((rows, scale.shape[1]), _BYTES)
    out["scale"] = scale
    _fill(out["codes"], codes)
    return out.view(np.uint8)


def _fill(out: np.ndarray, part: Part) -> None:
    for start in range(0, len(out), ROWS_AT_ONCE):
        rows = slice(start, min(start + ROWS_AT_ONCE, len(out)))
        out[rows] = part(rows).reshape(out[rows].shape)


def halves(first: np.ndarray, second: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Bytes of two nibbles, of columns 0–15 and of 16–31 → first | second << 4 of the low and of the high nibbles."""
    return first & 15 | second << 4, first >> 4 | second & 240


def halves_of_words(words: np.ndarray) -> np.ndarray:
    """uint8 [n, K/32, 16], Q4_Z's nibbles, from 32-bit words [n, K/8] whose lowest bits are the first of 8 columns."""
    pairs = words.view(np.uint8).reshape(len(words), -1, 2, 8)
    out = np.empty((len(words), pairs.shape[1], 16), np.uint8)
    out[..., 0::2], out[..., 1::2] = halves(pairs[:, :, 0], pairs[:, :, 1])
    return out


def signed(codes: np.ndarray) -> np.ndarray:
    """Bytes stored with 128 added, as the bytes of signed ones."""
    return codes ^ 0x80
