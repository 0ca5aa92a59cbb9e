"""Formats of quantised hub checkpoints, kept exactly: bytes under a float32 scale per 128 columns; 4 bits with a zero.

These are our own blocks (no file stores them); the readers build them from the checkpoint's separate tensors.
"""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from colibri_offload.jit.emit import Fn, Val, f16, f32, i16, i32, vec
from colibri_offload.jit.formats.base import Block, Move, Part, QuantFormat, words
from colibri_offload.jit.formats.legacy import NibbleFormat


class ScaledBytes(QuantFormat):
    """132 bytes per 128: f32 scale, 128 bytes. Tile: 16 scales, then 32 quads of 64 bytes."""

    block_elements, block_nbytes, step, tile_nbytes = 128, 132, 128, 2112

    def blocks(self, k: Fn, tile: Val, sub: int) -> Iterator[Block]:
        scale = self.per_row(k, tile, f32, 4, 0, sub)
        for b in range(4):
            quads = [self.quad(k, tile, 64 + 512 * b + 64 * j, sub) for j in range(8)]
            yield Block(b, quads, [Part(0, 8, scale, zero=self.zero)])

    zero = 0


class INT8(ScaledBytes):
    """Signed bytes, w = s·q: int8 per channel (or per group of at least 128 columns). Stored + 128 in a tile."""

    name, wide, zero = "INT8", True, 128

    def moves(self, block: int) -> list[Move]:
        return [Move(0, 0, 4), *(Move(4 + 4 * j, 64 + 64 * j, 4, lambda w: w ^ 0x80808080) for j in range(32))]

    def quantize(self, x: np.ndarray) -> np.ndarray:
        """One scale per row, repeated in its blocks."""
        scale = np.abs(x).max(1, keepdims=True).astype(np.float32) / np.float32(127)
        inverse = np.divide(np.float32(1), scale, out=np.zeros_like(scale), where=scale > 0)
        q = np.rint(x * inverse).astype(np.int8)
        padded = np.zeros((len(x), self.row_nbytes(x.shape[1]) // 132, 128), np.int8)
        padded.reshape(len(x), -1)[:, : x.shape[1]] = q
        scales = np.broadcast_to(scale[:, None], (*padded.shape[:2], 1)).astype(np.float32)
        return np.concatenate([scales.view(np.uint8), padded.view(np.uint8)], 2).reshape(len(x), -1)


class F8_E4M3(ScaledBytes):
    """8-bit floats e4m3fn under a scale (FP8-block). Computes with float32 activations.

    Source: Micikevicius et al. 2022, arXiv:2209.05433; the block scales of DeepSeek-V3, arXiv:2412.19437, section 3.3.
    """

    name, integer = "F8_E4M3", False

    def moves(self, block: int) -> list[Move]:
        return [Move(0, 0, 4), *(Move(4 + 4 * j, 64 + 64 * j, 4) for j in range(32))]

    def quad_floats(self, quad: Val, zero: int) -> list[Val]:
        """Exponent and mantissa moved into a float32's, whose bias differs by 120; subnormals come out right."""
        w, t = words(quad), vec(f32, quad.lanes // 4)
        out = []
        for b in range(4):
            byte = w >> 8 * b
            magnitude = ((byte & 0x7F) << 20).bits(t) * 2.0**120
            out.append((magnitude.bits(w.t) | ((byte & 0x80) << 24)).bits(t))
        return out


class Q4_Z(NibbleFormat):
    """20 bytes per 32: f16 scale d, 16-bit zero point z, nibbles; w = d·(q − z). AWQ and GPTQ map onto it."""

    name, block_nbytes, tile_nbytes, nibbles_at, tile_nibbles_at = "Q4_Z", 20, 640, 4, 128

    def moves(self, block: int) -> list[Move]:
        return [Move(0, 32 * block, 2), Move(2, 64 + 32 * block, 2), *self.nibble_moves(block)]

    def blocks(self, k: Fn, tile: Val, sub: int) -> Iterator[Block]:
        for b in range(2):
            d = self.per_row(k, tile, f16, 2, 32 * b, sub).f32()
            zero = self.per_row(k, tile, i16, 2, 64 + 32 * b, sub).zext(i32).f32()
            yield Block(b, self.nibble_quads(k, tile, b, sub), [Part(0, 8, d, offset=d * zero)])
