"""AWQ, version "gemm": 4-bit columns packed eight to a word in a permuted order.

Stored: qweight I32 [K, N/8], qzeros I32 [G, N/8], scales [G, N]; W[n, k] = (q[k, n] − zero[g, n]) · scale[g, n].
Source: Lin et al. 2023, arXiv:2306.00978; the layout is AutoAWQ's (https://github.com/casper-hansen/AutoAWQ).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from colibri_offload.checkpoint.base import Raw, Tensor
from colibri_offload.checkpoint.hub_quant.affine import affine, consecutive, unpack
from colibri_offload.checkpoint.hub_quant.parts import (
    FLOATS,
    Folded,
    choice,
    expect,
    groups,
    matrix,
    modules,
    partner,
    whole_number,
)
from colibri_offload.checkpoint.hub_types import Stored, as_float32, float32_rows

PER_WORD = 8
# Nibble n of a word holds column COLUMN_OF_NIBBLE[n] of its eight columns.
COLUMN_OF_NIBBLE = (0, 2, 4, 6, 1, 3, 5, 7)


def fold(stored: Mapping[str, Stored], settings: Mapping[str, Any]) -> Folded:
    """`X.qweight`, `X.qzeros`, `X.scales` → `X.weight`, F32 [N, K]."""
    choice(settings, "bits", (4,))
    choice(settings, "version", ("gemm", "GEMM"), "gemm")
    group_size = whole_number(settings, "group_size", 128)
    out = Folded()
    for prefix, qweight in modules(stored, ".qweight"):
        qzeros = partner(stored, f"{prefix}.qzeros", qweight)
        scales = partner(stored, f"{prefix}.scales", qweight)
        out.add(_tensor(f"{prefix}.weight", qweight, qzeros, scales, group_size), qweight, qzeros, scales)
    return out


def _tensor(name: str, qweight: Stored, qzeros: Stored, scales: Stored, group_size: int) -> Tensor:
    k, words = matrix(qweight, ("I32",))
    n, g = words * PER_WORD, groups(k, group_size)
    expect(qzeros, ("I32",), (g, words))
    expect(scales, FLOATS, (g, n))

    def decode(raws: Raw) -> np.ndarray:
        q, zero = _columns(raws[0], (k, words)), _columns(raws[1], (g, words))
        scale = as_float32(raws[2], scales.dtype).reshape(g, n)
        return float32_rows(affine(q.T, zero.T.astype(np.float32), scale.T, consecutive(k, group_size)))

    slices = (qweight.slice, qzeros.slice, scales.slice)
    return Tensor(name, (n, k), "F32", slices, decode, contiguous=False)


def _columns(raw: memoryview, words: tuple[int, int]) -> np.ndarray:
    """uint8 [rows, 8·words]: the columns in their own order."""
    return unpack(raw, words, 4)[..., np.argsort(COLUMN_OF_NIBBLE)].reshape(words[0], -1)
