"""AWQ, version "gemm": 4-bit columns packed eight to a word in a permuted order.

Stored: qweight I32 [K, N/8], qzeros I32 [G, N/8], scales [G, N]; W[n, k] = (q[k, n] − zero[g, n]) · scale[g, n].
Source: Lin et al. 2023, arXiv:2306.00978; the layout is AutoAWQ's (https://github.com/casper-hansen/AutoAWQ).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from colibri_offload.checkpoint.base import Raw, Tensor
from colibri_offload.checkpoint.hub_quant.affine import affine, consecutive, unpack
from colibri_offload.checkpoint.hub_quant.blocks import fits, groups_of_blocks, halves, q4_z_rows
from colibri_offload.checkpoint.hub_quant.candidates import Candidate, float16_proofs
from colibri_offload.checkpoint.hub_quant.parts import (
    FLOATS,
    Folded,
    choice,
    columns_per_group,
    expect,
    groups,
    matrix,
    modules,
    partner,
)
from colibri_offload.checkpoint.hub_types import Stored, as_float32, float32_rows

PER_WORD = 8
# Nibble n of a word holds column COLUMN_OF_NIBBLE[n] of its eight columns.
COLUMN_OF_NIBBLE = (0, 2, 4, 6, 1, 3, 5, 7)


def fold(stored: Mapping[str, Stored], settings: Mapping[str, Any]) -> Folded:
    """`X.qweight`, `X.qzeros`, `X.scales` → `X.weight`, Q4_Z or F32 [N, K]."""
    choice(settings, "bits", (4,))
    choice(settings, "version", ("gemm", "GEMM"), "gemm")
    group_size = columns_per_group(settings, 128)
    out = Folded()
    for prefix, qweight in modules(stored, ".qweight"):
        qzeros = partner(stored, f"{prefix}.qzeros", qweight)
        scales = partner(stored, f"{prefix}.scales", qweight)
        module = _module(qweight, qzeros, scales, group_size)
        out.add(module.candidate(f"{prefix}.weight"), qweight, qzeros, scales)
    return out


def _module(qweight: Stored, qzeros: Stored, scales: Stored, group_size: int) -> _Module:
    k, words = matrix(qweight, ("I32",))
    g = groups(k, group_size)
    expect(qzeros, ("I32",), (g, words))
    expect(scales, FLOATS, (g, words * PER_WORD))
    return _Module(qweight, qzeros, scales, group_size)


@dataclass(frozen=True, slots=True)
class _Module:
    """One module's parts, and its decoders of their bytes, in this order."""

    qweight: Stored
    qzeros: Stored
    scales: Stored
    group_size: int

    def candidate(self, name: str) -> Candidate:
        k, words = self.qweight.shape
        slices = (self.qweight.slice, self.qzeros.slice, self.scales.slice)
        plain = Tensor(name, (words * PER_WORD, k), "F32", slices, self.float32, contiguous=False)
        if not fits("Q4_Z", k, self.group_size):
            return Candidate(plain)
        return Candidate(plain, replace(plain, fmt="Q4_Z", decode=self.q4_z), float16_proofs(self.scales))

    def float32(self, raws: Raw) -> np.ndarray:
        q, (zero, scale) = _columns(raws[0], self.qweight.shape), self._groups(raws)
        return float32_rows(affine(q.T, zero.astype(np.float32), scale, consecutive(len(q), self.group_size)))

    def q4_z(self, raws: Raw) -> np.ndarray:
        k, words = self.qweight.shape
        pairs = np.frombuffer(raws[0], np.uint8).reshape(k // 32, 2, 16, words, 4)

        def nibbles(rows: slice) -> np.ndarray:
            mine = pairs[:, :, :, rows.start // PER_WORD : rows.stop // PER_WORD]
            out = np.empty((mine.shape[3], PER_WORD, k // 32, 16), np.uint8)
            for high, octets in enumerate(halves(mine[:, 0], mine[:, 1])):
                for at in range(4):
                    out[:, COLUMN_OF_NIBBLE[2 * at + high]] = octets[..., at].transpose(2, 0, 1)
            return out

        zero, scale = self._groups(raws)
        group = groups_of_blocks("Q4_Z", k, self.group_size)
        return q4_z_rows(nibbles, scale[:, group], zero[:, group])

    def _groups(self, raws: Raw) -> tuple[np.ndarray, np.ndarray]:
        """zero uint8 [N, G], scale float32 [N, G]."""
        zero = _columns(raws[1], self.qzeros.shape)
        return zero.T, as_float32(raws[2], self.scales.dtype).reshape(zero.shape).T


def _columns(raw: memoryview, words: tuple[int, ...]) -> np.ndarray:
    """uint8 [rows, 8·words]: the columns in their own order."""
    return unpack(raw, words, 4)[..., np.argsort(COLUMN_OF_NIBBLE)].reshape(words[0], -1)
