"""GPTQ: 4- or 8-bit integers packed along the input axis, optionally with columns grouped by activation order.

Stored: qweight I32 [K·bits/32, N], qzeros I32 [G, N·bits/32], scales [G, N], g_idx I32 [K] (the group of each input).
W[n, k] = (q[k, n] − zero[g, n]) · scale[g, n] with g = g_idx[k], or k // group_size without g_idx.
The stored zero is zero − 1, except in the checkpoint format "gptq_v2".
Source: Frantar et al. 2022, arXiv:2210.17323; the layout is AutoGPTQ's (https://github.com/AutoGPTQ/AutoGPTQ).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from colibri_offload.checkpoint.base import Raw, Tensor
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
from colibri_offload.checkpoint.hub_quant.candidates import Candidate, Proof, float16_proofs
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
from colibri_offload.errors import CheckpointError

ZERO_OFFSET = {"gptq": 1, "gptq_v2": 0}
MIDDLE = 128  # the zero of symmetric 8-bit integers


def fold(stored: Mapping[str, Stored], settings: Mapping[str, Any]) -> Folded:
    """`X.qweight`, `X.qzeros`, `X.scales` and perhaps `X.g_idx` → `X.weight`, Q4_Z, INT8 or F32 [N, K]."""
    bits = choice(settings, "bits", (4, 8))
    offset = ZERO_OFFSET[choice(settings, "checkpoint_format", tuple(ZERO_OFFSET), "gptq")]
    group_size = columns_per_group(settings, -1)
    in_order = settings.get("desc_act") is False
    out = Folded()
    for prefix, qweight in modules(stored, ".qweight"):
        qzeros = partner(stored, f"{prefix}.qzeros", qweight)
        scales = partner(stored, f"{prefix}.scales", qweight)
        g_idx = stored.get(f"{prefix}.g_idx")
        module = _Module(qweight, qzeros, scales, g_idx, bits, offset, group_size)
        module.check()
        out.add(module.candidate(f"{prefix}.weight", in_order), qweight, qzeros, scales, g_idx)
    return out


@dataclass(frozen=True, slots=True)
class _Module:
    """One module's parts, and its decoders of their bytes, in this order."""

    qweight: Stored
    qzeros: Stored
    scales: Stored
    g_idx: Stored | None
    bits: int
    offset: int
    group_size: int

    @property
    def shape(self) -> tuple[int, int]:
        """[N, K]"""
        words, n = self.qweight.shape
        return n, words * 32 // self.bits

    def check(self) -> None:
        """CheckpointError unless the parts agree."""
        matrix(self.qweight, ("I32",))
        n, k = self.shape
        g = groups(k, self.group_size)
        expect(self.scales, FLOATS, (g, n))
        expect(self.qzeros, ("I32",), (g, -(-n * self.bits // 32)))
        if self.g_idx is not None:
            expect(self.g_idx, ("I32",), (k,))

    def candidate(self, name: str, in_order: bool) -> Candidate:
        """`in_order`: the config says that columns were not sorted by activation."""
        parts = (self.qweight, self.qzeros, self.scales, self.g_idx)
        slices = tuple(p.slice for p in parts if p is not None)
        plain = Tensor(name, self.shape, "F32", slices, self.float32, contiguous=False)
        fmt = "Q4_Z" if self.bits == 4 else "INT8"
        consecutive_groups = in_order or self.g_idx is None or self.scales.shape[0] == 1
        if not consecutive_groups or not fits(fmt, self.shape[1], self.group_size):
            return Candidate(plain)
        if self.bits == 4:
            return Candidate(plain, replace(plain, fmt=fmt, decode=self.q4_z), float16_proofs(self.scales))
        stored = MIDDLE - self.offset
        proof = Proof(self.qzeros, lambda raw: bool((np.frombuffer(raw, np.uint8) == stored).all()))
        return Candidate(plain, replace(plain, fmt=fmt, decode=self.int8), (proof,))

    def float32(self, raws: Raw) -> np.ndarray:
        n, k = self.shape
        # [words, N, 32/bits] → [N, words, 32/bits]: a word's integers are consecutive inputs of one output.
        q = unpack(raws[0], self.qweight.shape, self.bits).transpose(1, 0, 2).reshape(n, k)
        scale = self._scale(raws)
        group_of = consecutive(k, self.group_size)
        if self.g_idx is not None:
            group_of = _checked(raws[3], scale.shape[1], self.g_idx)
        return float32_rows(affine(q, self._zero(raws).astype(np.float32), scale, group_of))

    def q4_z(self, raws: Raw) -> np.ndarray:
        group = self._groups_in_order(raws, "Q4_Z")
        return q4_z_rows(
            lambda rows: halves_of_words(self._words(raws, rows)),
            self._scale(raws)[:, group],
            self._zero(raws)[:, group],
        )

    def int8(self, raws: Raw) -> np.ndarray:
        group = self._groups_in_order(raws, "INT8")
        scale = self._scale(raws)[:, group]
        return byte_rows(lambda rows: signed(self._words(raws, rows).view(np.uint8)), len(scale), scale)

    def _words(self, raws: Raw, rows: slice) -> np.ndarray:
        """[n, K·bits/32]: some rows of the words, each holding consecutive inputs."""
        return np.ascontiguousarray(np.frombuffer(raws[0], "<u4").reshape(self.qweight.shape)[:, rows].T)

    def _scale(self, raws: Raw) -> np.ndarray:
        """float32 [N, G]"""
        return as_float32(raws[2], self.scales.dtype).reshape(self.scales.shape).T

    def _zero(self, raws: Raw) -> np.ndarray:
        """uint16 [N, G]"""
        g, n = self.scales.shape
        stored = unpack(raws[1], self.qzeros.shape, self.bits).reshape(g, -1)[:, :n]
        return (stored.astype(np.uint16) + self.offset).T

    def _groups_in_order(self, raws: Raw, fmt: str) -> np.ndarray:
        """The group of every block; CheckpointError when columns are not in the order that the config states."""
        k = self.shape[1]
        if self.g_idx is not None:
            found = _checked(raws[3], self.scales.shape[0], self.g_idx)
            if not np.array_equal(found, consecutive(k, self.group_size)):
                raise CheckpointError(
                    f"{self.g_idx.slice.path}: tensor {shown(self.g_idx.name)} sorts columns by activation, but "
                    "config.json says desc_act false; set quantization_config.desc_act to true there"
                )
        return groups_of_blocks(fmt, k, self.group_size)


def _checked(raw: memoryview, g: int, g_idx: Stored) -> np.ndarray:
    group_of = np.frombuffer(raw, "<i4")
    if group_of.min() < 0 or group_of.max() >= g:
        bad = int(group_of.min() if group_of.min() < 0 else group_of.max())
        raise CheckpointError(
            f"{g_idx.slice.path}: tensor {shown(g_idx.name)} names group {bad} of {g}; download the model again"
        )
    return group_of
