"""MXFP4 experts as gpt-oss stores them, turned into ggml's blocks bit by bit: nothing is rounded.

Stored: `X_blocks` U8 [..., rows, K/32, 16], low nibble = even element; `X_scales` U8 [..., rows, K/32], exponent + 127.
ggml: 17 bytes per 32 elements, the exponent, then 16 bytes whose low nibbles are elements 0–15 and high ones 16–31.
Source: OCP Microscaling specification 1.0; block_mxfp4 in ggml-common.h.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from colibri_offload.checkpoint.base import Decode, Raw, stacked
from colibri_offload.checkpoint.hub_quant.parts import Folded, expect, modules, partner
from colibri_offload.checkpoint.hub_types import Stored

ELEMENTS, CODE_NBYTES, BLOCK_NBYTES = 32, 16, 17


def fold(stored: Mapping[str, Stored], settings: Mapping[str, Any]) -> Folded:
    """`X_blocks` and `X_scales` → `X`, MXFP4 [E, rows, K]: rows are outputs, unlike in the float checkpoint."""
    out = Folded()
    for name, blocks in modules(stored, "_blocks"):
        scales = partner(stored, f"{name}_scales", blocks)
        *lead, count, _ = blocks.shape if len(blocks.shape) > 2 else (0, 0, 0)
        expect(blocks, ("U8",), (*lead, count, CODE_NBYTES))
        expect(scales, ("U8",), (*lead, count))
        shape = (*lead, count * ELEMENTS)
        out.add(stacked(name, shape, "MXFP4", (blocks.slice, scales.slice), _decoder), blocks, scales)
    return out


def _decoder(shape: tuple[int, ...]) -> Decode:
    def decode(raws: Raw) -> np.ndarray:
        pairs = np.frombuffer(raws[0], np.uint8).reshape(-1, CODE_NBYTES)
        first, second = pairs[:, :8], pairs[:, 8:]  # elements 0–15 and 16–31, two to a byte
        out = np.empty((len(pairs), BLOCK_NBYTES), np.uint8)
        out[:, 0] = np.frombuffer(raws[1], np.uint8)
        out[:, 1::2] = first & 15 | second << 4
        out[:, 2::2] = first >> 4 | second & 240
        return out.reshape(*shape[:-1], shape[-1] // ELEMENTS * BLOCK_NBYTES)

    return decode
