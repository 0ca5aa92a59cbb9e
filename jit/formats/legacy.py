"""ggml's 32-column formats: Q8_0, Q4_0, Q4_1, Q5_0, Q5_1, and the table formats IQ4_NL and MXFP4.

Source: ggml's block definitions (ggml-common.h) and the OCP Microscaling Formats specification 1.0 for MXFP4.
A step is 64 columns (two blocks), so that the f16 scales of 16 rows fill one cache line.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np

from colibri_offload.jit.emit import Fn, Val, f16, f32, i8, i32, vec
from colibri_offload.jit.formats.base import Block, Move, Part, QuantFormat, high_nibbles, low_nibbles, words


def transpose_high_bits(word: Any) -> Any:
    """Bit 4j+b of a 32-bit word → bit 8b+j: then bit j of byte b belongs to element b of quad j."""
    out = None
    for b in range(4):
        x = (word >> b) & 0x11111111  # bits 4j: gather them into 8 neighbouring bits
        x = (x | (x >> 3)) & 0x03030303
        x = (x | (x >> 6)) & 0x000F000F
        x = (x | (x >> 12)) & 0x000000FF
        out = x << (8 * b) if out is None else out | (x << (8 * b))
    return out


class Q8_0(QuantFormat):
    """34 bytes per 32: f16 scale, 32 signed bytes (stored + 128 in a tile, since the dot wants one unsigned side)."""

    name, block_elements, block_nbytes, step, tile_nbytes, wide = "Q8_0", 32, 34, 64, 1088, True

    def moves(self, block: int) -> list[Move]:
        quads = [Move(2 + 4 * j, 64 + 512 * block + 64 * j, 4, lambda w: w ^ 0x80808080) for j in range(8)]
        return [Move(0, 32 * block, 2), *quads]

    def blocks(self, k: Fn, tile: Val, sub: int) -> Iterator[Block]:
        for b in range(2):
            scale = self.per_row(k, tile, f16, 2, 32 * b, sub).f32()
            quads = [self.quad(k, tile, 64 + 512 * b + 64 * j, sub) for j in range(8)]
            yield Block(b, quads, [Part(0, 8, scale, zero=128)])

    def quantize(self, x: np.ndarray) -> np.ndarray:
        blocks = x.reshape(-1, 32).astype(np.float32)
        d = np.abs(blocks).max(1, keepdims=True) / np.float32(127)
        inverse = np.divide(np.float32(1), d, out=np.zeros_like(d), where=d > 0)
        v = blocks * inverse
        q = (np.sign(v) * np.floor(np.abs(v) + np.float32(0.5))).astype(np.int8)
        return np.concatenate([d.astype(np.float16).view(np.uint8), q.view(np.uint8)], 1).reshape(len(x), -1)


class NibbleFormat(QuantFormat):
    """16 bytes of nibbles per 32 columns: low nibbles are columns 0–15, high ones 16–31."""

    block_elements, step = 32, 64
    nibbles_at: int  # in the file's block
    tile_nibbles_at: int

    def nibble_moves(self, block: int) -> list[Move]:
        return [Move(self.nibbles_at + 4 * j, self.tile_nibbles_at + 256 * block + 64 * j, 4) for j in range(4)]

    def nibble_quads(self, k: Fn, tile: Val, block: int, sub: int) -> list[Val]:
        packed = [self.quad(k, tile, self.tile_nibbles_at + 256 * block + 64 * j, sub) for j in range(4)]
        return [low_nibbles(x) for x in packed] + [high_nibbles(x) for x in packed]


class Q4_0(NibbleFormat):
    """18 bytes per 32: f16 scale, nibbles; w = d·(q − 8)."""

    name, block_nbytes, tile_nbytes, nibbles_at, tile_nibbles_at = "Q4_0", 18, 576, 2, 64

    def moves(self, block: int) -> list[Move]:
        return [Move(0, 32 * block, 2), *self.nibble_moves(block)]

    def blocks(self, k: Fn, tile: Val, sub: int) -> Iterator[Block]:
        for b in range(2):
            scale = self.per_row(k, tile, f16, 2, 32 * b, sub).f32()
            yield Block(b, self.nibble_quads(k, tile, b, sub), [Part(0, 8, scale, zero=8)])

    def quantize(self, x: np.ndarray) -> np.ndarray:
        blocks = x.reshape(-1, 32).astype(np.float32)
        extreme = np.take_along_axis(blocks, np.abs(blocks).argmax(1)[:, None], 1)
        d = extreme / np.float32(-8)
        inverse = np.divide(np.float32(1), d, out=np.zeros_like(d), where=d != 0)
        q = np.trunc(blocks.astype(np.float64) * inverse + 8.5).clip(0, 15).astype(np.uint8)
        nibbles = q[:, :16] | q[:, 16:] << 4
        return np.concatenate([d.astype(np.float16).view(np.uint8), nibbles], 1).reshape(len(x), -1)


class Q4_1(NibbleFormat):
    """20 bytes per 32: f16 scale d, f16 minimum m, nibbles; w = d·q + m."""

    name, block_nbytes, tile_nbytes, nibbles_at, tile_nibbles_at = "Q4_1", 20, 640, 4, 128

    def moves(self, block: int) -> list[Move]:
        return [Move(0, 32 * block, 2), Move(2, 64 + 32 * block, 2), *self.nibble_moves(block)]

    def blocks(self, k: Fn, tile: Val, sub: int) -> Iterator[Block]:
        for b in range(2):
            d, m = (self.per_row(k, tile, f16, 2, o + 32 * b, sub).f32() for o in (0, 64))
            yield Block(b, self.nibble_quads(k, tile, b, sub), [Part(0, 8, d, offset=-m)])


class FiveBitFormat(NibbleFormat):
    """A fifth bit per column in a 32-bit word, transposed in the tile so that a shift and a mask bring it in place."""

    high_at: int
    tile_high_at: int

    def five_bit_moves(self, block: int) -> list[Move]:
        return [Move(self.high_at, self.tile_high_at + 64 * block, 4, transpose_high_bits), *self.nibble_moves(block)]

    def five_bit_quads(self, k: Fn, tile: Val, block: int, sub: int) -> list[Val]:
        high = words(self.quad(k, tile, self.tile_high_at + 64 * block, sub))
        nibbles = self.nibble_quads(k, tile, block, sub)
        return [x | ((high >> j & 0x01010101) << 4).bits(x.t) for j, x in enumerate(nibbles)]


class Q5_0(FiveBitFormat):
    """22 bytes per 32: f16 scale, 32 high bits, nibbles; w = d·(q − 16)."""

    name, block_nbytes, tile_nbytes = "Q5_0", 22, 704
    nibbles_at, tile_nibbles_at, high_at, tile_high_at = 6, 192, 2, 64

    def moves(self, block: int) -> list[Move]:
        return [Move(0, 32 * block, 2), *self.five_bit_moves(block)]

    def blocks(self, k: Fn, tile: Val, sub: int) -> Iterator[Block]:
        for b in range(2):
            scale = self.per_row(k, tile, f16, 2, 32 * b, sub).f32()
            yield Block(b, self.five_bit_quads(k, tile, b, sub), [Part(0, 8, scale, zero=16)])


class Q5_1(FiveBitFormat):
    """24 bytes per 32: f16 scale d, f16 minimum m, 32 high bits, nibbles; w = d·q + m."""

    name, block_nbytes, tile_nbytes = "Q5_1", 24, 768
    nibbles_at, tile_nibbles_at, high_at, tile_high_at = 8, 256, 4, 128

    def moves(self, block: int) -> list[Move]:
        return [Move(0, 32 * block, 2), Move(2, 64 + 32 * block, 2), *self.five_bit_moves(block)]

    def blocks(self, k: Fn, tile: Val, sub: int) -> Iterator[Block]:
        for b in range(2):
            d, m = (self.per_row(k, tile, f16, 2, o + 32 * b, sub).f32() for o in (0, 64))
            yield Block(b, self.five_bit_quads(k, tile, b, sub), [Part(0, 8, d, offset=-m)])


class IQ4_NL(NibbleFormat):
    """Q4_0's layout with a table of 16 signed values instead of q − 8."""

    name, block_nbytes, tile_nbytes, nibbles_at, tile_nibbles_at, wide = "IQ4_NL", 18, 576, 2, 64, True
    values = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)

    def moves(self, block: int) -> list[Move]:
        return [Move(0, 32 * block, 2), *self.nibble_moves(block)]

    def blocks(self, k: Fn, tile: Val, sub: int) -> Iterator[Block]:
        table = tuple(v + 128 for v in self.values)
        for b in range(2):
            scale = self.per_row(k, tile, f16, 2, 32 * b, sub).f32()
            quads = [k.target.lookup16(table, x) for x in self.nibble_quads(k, tile, b, sub)]
            yield Block(b, quads, [Part(0, 8, scale, zero=128)])


class MXFP4(NibbleFormat):
    """17 bytes per 32: e8m0 scale (a power of two), 4-bit floats e2m1. A step is 128 columns.

    The table holds twice the value plus 12; the scale is halved.
    """

    name, block_nbytes, step, tile_nbytes, nibbles_at, tile_nibbles_at = "MXFP4", 17, 128, 1088, 1, 64
    table = (12, 13, 14, 15, 16, 18, 20, 24, 12, 11, 10, 9, 8, 6, 4, 0)

    def moves(self, block: int) -> list[Move]:
        return [Move(0, 16 * block, 1), *self.nibble_moves(block)]

    def blocks(self, k: Fn, tile: Val, sub: int) -> Iterator[Block]:
        for b in range(4):
            exponent = self.per_row(k, tile, i8, 1, 16 * b, sub).zext(i32) << 23
            scale = exponent.bits(vec(f32, k.target.lanes)) * 0.5
            quads = [k.target.lookup16(self.table, x) for x in self.nibble_quads(k, tile, b, sub)]
            yield Block(b, quads, [Part(0, 8, scale, zero=12)])
