"""GPTQ: 4- or 8-bit integers packed along the input axis, optionally with columns grouped by activation order.

Stored: qweight I32 [K·bits/32, N], qzeros I32 [G, N·bits/32], scales [G, N], g_idx I32 [K] (the group of each input).
W[n, k] = (q[k, n] − zero[g, n]) · scale[g, n] with g = g_idx[k], or k // group_size without g_idx.
The stored zero is zero − 1, except in the checkpoint format "gptq_v2".
Source: Frantar et al. 2022, arXiv:2210.17323; the layout is AutoGPTQ's (https://github.com/AutoGPTQ/AutoGPTQ).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from colibri_offload.checkpoint.base import Raw, Tensor
from colibri_offload.checkpoint.files import shown
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
from colibri_offload.errors import CheckpointError

ZERO_OFFSET = {"gptq": 1, "gptq_v2": 0}


def fold(stored: Mapping[str, Stored], settings: Mapping[str, Any]) -> Folded:
    """`X.qweight`, `X.qzeros`, `X.scales` and perhaps `X.g_idx` → `X.weight`, F32 [N, K]."""
    bits = choice(settings, "bits", (4, 8))
    offset = ZERO_OFFSET[choice(settings, "checkpoint_format", tuple(ZERO_OFFSET), "gptq")]
    group_size = whole_number(settings, "group_size", -1)
    out = Folded()
    for prefix, qweight in modules(stored, ".qweight"):
        qzeros = partner(stored, f"{prefix}.qzeros", qweight)
        scales = partner(stored, f"{prefix}.scales", qweight)
        g_idx = stored.get(f"{prefix}.g_idx")
        tensor = _tensor(f"{prefix}.weight", qweight, qzeros, scales, g_idx, bits, offset, group_size)
        out.add(tensor, qweight, qzeros, scales, g_idx)
    return out


def _tensor(
    name: str,
    qweight: Stored,
    qzeros: Stored,
    scales: Stored,
    g_idx: Stored | None,
    bits: int,
    offset: int,
    group_size: int,
) -> Tensor:
    words, n = matrix(qweight, ("I32",))
    k, g = words * 32 // bits, groups(words * 32 // bits, group_size)
    expect(scales, FLOATS, (g, n))
    zero_words = -(-n * bits // 32)
    expect(qzeros, ("I32",), (g, zero_words))
    if g_idx is not None:
        expect(g_idx, ("I32",), (k,))

    def decode(raws: Raw) -> np.ndarray:
        # [words, N, 32/bits] → [N, words, 32/bits]: a word's integers are consecutive inputs of one output.
        q = unpack(raws[0], (words, n), bits).transpose(1, 0, 2).reshape(n, k)
        zero = unpack(raws[1], (g, zero_words), bits).reshape(g, -1)[:, :n].astype(np.float32) + offset
        scale = as_float32(raws[2], scales.dtype).reshape(g, n)
        group_of = consecutive(k, group_size) if g_idx is None else _checked(raws[3], g, g_idx)
        return float32_rows(affine(q, zero.T, scale.T, group_of))

    parts = (qweight, qzeros, scales) if g_idx is None else (qweight, qzeros, scales, g_idx)
    return Tensor(name, (n, k), "F32", tuple(p.slice for p in parts), decode, contiguous=False)


def _checked(raw: memoryview, g: int, g_idx: Stored) -> np.ndarray:
    group_of = np.frombuffer(raw, "<i4")
    if group_of.min() < 0 or group_of.max() >= g:
        bad = int(group_of.min() if group_of.min() < 0 else group_of.max())
        raise CheckpointError(
            f"{g_idx.slice.path}: tensor {shown(g_idx.name)} names group {bad} of {g}; download the model again"
        )
    return group_of
