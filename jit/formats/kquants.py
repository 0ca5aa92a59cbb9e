"""ggml's super-blocks of 256 columns. Source: ggml-common.h and the k-quants description in llama.cpp PR 1684.

The groups of a super-block are a rolled loop on purpose: fully unrolled, LLVM reorders the loads and the hardware
prefetcher loses the stream.
"""

from __future__ import annotations

from collections.abc import Iterator

from colibri_offload.jit.emit import Fn, Val, f16, f32, i8, i16, i32, vec
from colibri_offload.jit.formats.base import Block, Move, Part, QuantFormat, high_nibbles, low_nibbles, words
from colibri_offload.jit.formats.legacy import IQ4_NL


class Q4_K(QuantFormat):
    """144 bytes per 256: f16 d, f16 dmin, 8 + 8 six-bit scales and minima in 12 bytes, nibbles. w = d·sc·q − dmin·m."""

    name, block_elements, block_nbytes, step, tile_nbytes = "Q4_K", 256, 144, 256, 2304
    quants_at, tile_quants_at = 16, 256

    def moves(self, block: int) -> list[Move]:
        scales = [Move(4 + j, 64 + 16 * j, 1) for j in range(12)]
        quants = [Move(self.quants_at + 4 * j, self.tile_quants_at + 64 * j, 4) for j in range(32)]
        return [Move(0, 0, 2), Move(2, 32, 2), *scales, *quants]

    def scales_and_offsets(self, k: Fn, tile: Val, sub: int) -> tuple[Val, int]:
        """Scratch with f32 [8][lanes] scales then f32 [8][lanes] offsets; the stride of a row of lanes in bytes."""
        stride = 4 * k.target.lanes
        d, dmin = (self.per_row(k, tile, f16, 2, o, sub).f32() for o in (0, 32))
        a, b, c = ([self.per_row(k, tile, i8, 1, 64 + 64 * g + 16 * j, sub) for j in range(4)] for g in range(3))
        scale = [x & 63 for x in a] + [(y & 15) | (x >> 2 & 48) for x, y in zip(a, c, strict=True)]
        minimum = [x & 63 for x in b] + [(y >> 4) | (x >> 2 & 48) for x, y in zip(b, c, strict=True)]
        out = k.scratch(16 * stride)
        for j in range(8):
            out.store(d * scale[j].zext(i32).f32(), stride * j, stride)
            out.store(dmin * minimum[j].zext(i32).f32(), stride * (8 + j), stride)
        return out, stride

    def group_quads(self, k: Fn, tile: Val, group: Val, sub: int) -> tuple[list[Val], list[Val]]:
        """Quads of the two sub-blocks (columns 64g … and 64g + 32 …) of a group."""
        packed = [self.quad(k, tile + group * 512, self.tile_quants_at + 64 * j, sub) for j in range(8)]
        return [low_nibbles(x) for x in packed], [high_nibbles(x) for x in packed]

    def blocks(self, k: Fn, tile: Val, sub: int) -> Iterator[Block]:
        factors, stride = self.scales_and_offsets(k, tile, sub)
        t = vec(f32, k.target.lanes)
        with k.range(0, 4) as group:
            for half, quads in enumerate(self.group_quads(k, tile, group, sub)):
                index = group * 2 + half
                at = factors + index * stride
                scale, offset = at.load(t, 0, stride), at.load(t, 8 * stride, stride)
                yield Block(index, quads, [Part(0, 8, scale, offset=offset)])


class Q5_K(Q4_K):
    """176 bytes per 256: Q4_K plus a fifth bit: bit s of byte l belongs to column l of sub-block s."""

    name, block_nbytes, tile_nbytes, quants_at, tile_quants_at = "Q5_K", 176, 2816, 48, 768

    def moves(self, block: int) -> list[Move]:
        return super().moves(block) + [Move(16 + 4 * j, 256 + 64 * j, 4) for j in range(8)]

    def group_quads(self, k: Fn, tile: Val, group: Val, sub: int) -> tuple[list[Val], list[Val]]:
        low, high = super().group_quads(k, tile, group, sub)
        bits = [words(self.quad(k, tile, 256 + 64 * j, sub)) for j in range(8)]
        n = k.target.lanes

        def fifth(x: Val, word: Val, half: int) -> Val:
            shift = (group * 2 + half).trunc(i32).splat(n)
            return x | ((word >> shift & 0x01010101) << 4).bits(x.t)

        return (
            [fifth(x, w, 0) for x, w in zip(low, bits, strict=True)],
            [fifth(x, w, 1) for x, w in zip(high, bits, strict=True)],
        )


class Q6_K(QuantFormat):
    """210 bytes per 256: low nibbles, 2 high bits, 16 signed byte scales (per 16 columns), f16 d; w = d·sc·(q − 32).

    Tile: d (32 bytes, padded to 64) | scales 16 × 16 | per half of the columns: 8 × (high bits, low nibbles), 8 × low
    nibbles. That is the order of use: a decode must be one stream for the prefetchers. 3,392 bytes, 1 % padding.
    """

    name, block_elements, block_nbytes, step, tile_nbytes = "Q6_K", 256, 210, 256, 3392

    def moves(self, block: int) -> list[Move]:
        return [
            Move(208, 0, 2),
            Move(208, 32, 2, lambda w: w & 0),  # padding: equal weights must give equal bytes
            *(Move(192 + j, 64 + 16 * j, 1) for j in range(16)),
            *(Move(4 * j, 1536 * (j // 16) + self._low_at(j % 16), 4) for j in range(32)),
            *(Move(128 + 4 * j, 1536 * (j // 8) + self._high_at(j % 8), 4) for j in range(16)),
        ]

    @staticmethod
    def _high_at(j: int) -> int:
        return 320 + 128 * j

    @staticmethod
    def _low_at(j: int) -> int:
        return 384 + 128 * j if j < 8 else 1344 + 64 * (j - 8)

    def blocks(self, k: Fn, tile: Val, sub: int) -> Iterator[Block]:
        d = self.per_row(k, tile, f16, 2, 0, sub).f32()
        stride = 4 * k.target.lanes
        scales = k.scratch(16 * stride)
        for j in range(16):
            scales.store(d * self.per_row(k, tile, i8, 1, 64 + 16 * j, sub).sext(i32).f32(), stride * j, stride)
        t = vec(f32, k.target.lanes)
        with k.range(0, 2) as half:
            at_half = tile + half * 1536
            low, high = [], []
            for j in range(8):
                high.append(words(self.quad(k, at_half, self._high_at(j), sub)))
                low.append(self.quad(k, at_half, self._low_at(j), sub))
            for b in range(4):
                if b == 1:
                    low += [self.quad(k, at_half, self._low_at(j), sub) for j in range(8, 16)]
                nibbles = [(high_nibbles if b > 1 else low_nibbles)(x) for x in low[8 * (b & 1) : 8 * (b & 1) + 8]]
                quads = [x | ((h >> 2 * b & 0x03030303) << 4).bits(x.t) for x, h in zip(nibbles, high, strict=True)]
                at = scales + (half * 8 + 2 * b) * stride
                parts = [Part(4 * i, 4, at.load(t, i * stride, stride), zero=32) for i in range(2)]
                yield Block(half * 4 + b, quads, parts)


class Q2_K(QuantFormat):
    """84 bytes per 256: 16 scales and minima of 4 bits each (one per 16 columns), 2-bit quants, f16 d and dmin.

    w = d·(s & 15)·q − dmin·(s >> 4). Of byte l of a 32-byte run, bits 2j belong to column 32j + l of its 128 columns.
    """

    name, block_elements, block_nbytes, step, tile_nbytes = "Q2_K", 256, 84, 256, 1344

    def moves(self, block: int) -> list[Move]:
        scales = [Move(j, 64 + 16 * j, 1) for j in range(16)]
        return [Move(80, 0, 2), Move(82, 32, 2), *scales, *(Move(16 + 4 * j, 320 + 64 * j, 4) for j in range(16))]

    def blocks(self, k: Fn, tile: Val, sub: int) -> Iterator[Block]:
        d, dmin = (self.per_row(k, tile, f16, 2, o, sub).f32() for o in (0, 32))
        stride, t = 4 * k.target.lanes, vec(f32, k.target.lanes)
        factors = k.scratch(32 * stride)
        for j in range(16):
            s = self.per_row(k, tile, i8, 1, 64 + 16 * j, sub)
            factors.store(d * (s & 15).zext(i32).f32(), stride * j, stride)
            factors.store(dmin * (s >> 4).zext(i32).f32(), stride * (16 + j), stride)
        with k.range(0, 2) as half:
            packed = [words(self.quad(k, tile + half * 512, 320 + 64 * j, sub)) for j in range(8)]
            for b in range(4):
                quads = [(x >> 2 * b & 0x03030303).bits(vec(i8, 4 * k.target.lanes)) for x in packed]
                at = factors + (half * 8 + 2 * b) * stride
                parts = [
                    Part(4 * i, 4, at.load(t, i * stride, stride), offset=at.load(t, (16 + i) * stride, stride))
                    for i in range(2)
                ]
                yield Block(half * 4 + b, quads, parts)


class Q3_K(QuantFormat):
    """110 bytes per 256: a third bit per column, 2-bit quants, 16 six-bit scales in 12 bytes, f16 d; w = d·(s −
    32)·(q − 4).

    Tile: d (padded to 64) | scales 12 × 16 | third bits 8 × 64 | quants 16 × 64: 1,792 bytes, 2 % padding.
    """

    name, block_elements, block_nbytes, step, tile_nbytes = "Q3_K", 256, 110, 256, 1792

    def moves(self, block: int) -> list[Move]:
        return [
            Move(108, 0, 2),
            Move(108, 32, 2, lambda w: w & 0),  # padding: equal weights must give equal bytes
            *(Move(96 + j, 64 + 16 * j, 1) for j in range(12)),
            *(Move(4 * j, 256 + 64 * j, 4) for j in range(8)),
            *(Move(32 + 4 * j, 768 + 64 * j, 4) for j in range(16)),
        ]

    def blocks(self, k: Fn, tile: Val, sub: int) -> Iterator[Block]:
        d = self.per_row(k, tile, f16, 2, 0, sub).f32()
        packed_scales = [self.per_row(k, tile, i8, 1, 64 + 16 * j, sub) for j in range(12)]
        stride, t, n = 4 * k.target.lanes, vec(f32, k.target.lanes), k.target.lanes
        scales = k.scratch(16 * stride)
        for j in range(16):
            low = packed_scales[j % 8] >> 4 if j >= 8 else packed_scales[j % 8] & 15
            s = low | (packed_scales[8 + j % 4] >> 2 * (j // 4) & 3) << 4
            scales.store(d * (s.zext(i32) - 32).f32(), stride * j, stride)
        third = [words(self.quad(k, tile, 256 + 64 * j, sub)) for j in range(8)]
        with k.range(0, 2) as half:
            packed = [words(self.quad(k, tile + half * 512, 768 + 64 * j, sub)) for j in range(8)]
            for b in range(4):
                bit = (half * 4 + b).trunc(i32).splat(n)
                quads = [
                    ((x >> 2 * b & 0x03030303) | (h >> bit & 0x01010101) << 2).bits(vec(i8, 4 * n))
                    for x, h in zip(packed, third, strict=True)
                ]
                at = scales + (half * 8 + 2 * b) * stride
                yield Block(
                    half * 4 + b, quads, [Part(4 * i, 4, at.load(t, i * stride, stride), zero=4) for i in (0, 1)]
                )


class IQ4_XS(QuantFormat):
    """136 bytes per 256: f16 d, 8 six-bit scales (low nibbles and a word of high bits), nibbles into IQ4_NL's table."""

    name, block_elements, block_nbytes, step, tile_nbytes, wide = "IQ4_XS", 256, 136, 256, 2176, True

    def moves(self, block: int) -> list[Move]:
        return [
            Move(0, 0, 2),
            Move(2, 32, 2),
            *(Move(4 + j, 64 + 16 * j, 1) for j in range(4)),
            *(Move(8 + 4 * j, 128 + 64 * j, 4) for j in range(32)),
        ]

    def blocks(self, k: Fn, tile: Val, sub: int) -> Iterator[Block]:
        d = self.per_row(k, tile, f16, 2, 0, sub).f32()
        high = self.per_row(k, tile, i16, 2, 32, sub).zext(i32)
        low = [self.per_row(k, tile, i8, 1, 64 + 16 * j, sub).zext(i32) for j in range(4)]
        stride, table = 4 * k.target.lanes, tuple(v + 128 for v in IQ4_NL.values)
        scales = k.scratch(8 * stride)
        for j in range(8):
            s = (low[j // 2] >> 4 * (j % 2) & 15) | (high >> 2 * j & 3) << 4
            scales.store(d * (s - 32).f32(), stride * j, stride)
        with k.range(0, 8) as index:
            packed = [self.quad(k, tile + index * 256, 128 + 64 * j, sub) for j in range(4)]
            quads = [k.target.lookup16(table, f(x)) for f in (low_nibbles, high_nibbles) for x in packed]
            scale = (scales + index * stride).load(vec(f32, k.target.lanes), 0, stride)
            yield Block(index, quads, [Part(0, 8, scale, zero=128)])
