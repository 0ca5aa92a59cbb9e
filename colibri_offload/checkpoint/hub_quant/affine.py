"""Integers packed in 32-bit words, and the affine rule that most schemes share: weight = (q − zero) · scale."""

from __future__ import annotations

import numpy as np

ROWS_AT_ONCE = 256  # bounds the temporaries: the scales of a row block are expanded to all its columns


def unpack(raw: memoryview, words: tuple[int, ...], bits: int) -> np.ndarray:
    """uint8 [*words, 32 // bits]: the integers in each 32-bit word, lowest bits first. `bits` is 4 or 8."""
    octets = np.frombuffer(raw, np.uint8).reshape(*words, 4)  # words are little-endian
    if bits == 8:
        return octets
    out = np.empty((*words, 8), np.uint8)
    np.bitwise_and(octets, 15, out=out[..., 0::2])
    np.right_shift(octets, 4, out=out[..., 1::2])
    return out


def affine(q: np.ndarray, zero: np.ndarray, scale: np.ndarray, group_of: np.ndarray) -> np.ndarray:
    """float32 [N, K]: (q − zero[:, group]) · scale[:, group], each product rounded once.

    Shapes: q integers [N, K]; zero, scale float32 [N or 1, G]; group_of [K], the group of every column.
    """
    n = len(q)
    zero, scale = (np.broadcast_to(a, (n, a.shape[1])) for a in (zero, scale))
    out = np.empty(q.shape, np.float32)
    for start in range(0, n, ROWS_AT_ONCE):
        rows = slice(start, start + ROWS_AT_ONCE)
        block = out[rows]
        np.subtract(q[rows], zero[rows][:, group_of], out=block)
        np.multiply(block, scale[rows][:, group_of], out=block)
    return out


def consecutive(columns: int, group_size: int) -> np.ndarray:
    """[columns]: the group of every column when groups of `group_size` (−1: one for all) follow one another."""
    return np.zeros(columns, np.int64) if group_size == -1 else np.arange(columns) // group_size
