"""Activation layouts: what a dot product reads on its other side.

Tokens are packed in tiles of T ∈ {8, 4, 2, 1}; a tile is its blocks of 32 columns one after another, each block
holding the T tokens' values side by side. The matrix–vector product is the matrix product with T = 1.

Sums of a block are kept negated, because a format's offset is subtracted: acc += offset · (−Σx).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import ClassVar

from colibri_offload.jit.emit import Fn, Val, Var, f32, i8, i32, vec
from colibri_offload.jit.formats import Format
from colibri_offload.jit.formats.base import QuantFormat
from colibri_offload.jit.formats.floats import FloatFormat

TILES = (8, 4, 2, 1)


def tile_counts(tokens: int) -> tuple[int, int]:
    """(full tiles of 8, size of the tail tile ∈ {0, 1, 2, 4}) that hold `tokens` tokens; the tail may be padded."""
    full, rest = divmod(tokens, 8)
    if rest > 4:
        return full + 1, 0
    return full, 4 if rest == 3 else rest


def padded_tokens(tokens: int) -> int:
    full, tail = tile_counts(tokens)
    return 8 * full + tail


class Activations(ABC):
    """One layout. `acc` are T variables of f32 [lanes], one per token: 16 rows' (or fewer lanes') running dot
    products."""

    name: ClassVar[str]
    token_nbytes: ClassVar[int]  # of one token in one block

    def block_nbytes(self, tokens: int) -> int:
        return tokens * self.token_nbytes

    def nbytes(self, tokens: int, blocks: int) -> int:
        """Size of `tokens` packed tokens of 32·blocks columns."""
        return padded_tokens(tokens) * self.token_nbytes * blocks

    @abstractmethod
    def pack(self, k: Fn, x: list[Val], block: Val, tokens: int, t: Val | int) -> None:
        """Write token t's 32 columns, given as vectors of `lanes` floats, into its place in the block."""

    @abstractmethod
    def dot(self, k: Fn, fmt: Format, tile: Val, x: Val, tokens: int, sub: int, acc: list[Var]) -> None:
        """acc[t] += one step of the weight tile · token t, for rows sub·lanes … of the tile."""

    def _at(self, k: Fn, block: Val, t: Val | int, scale: int, offset: int) -> Val:
        return block + (offset + scale * t if isinstance(t, int) else t * scale + offset)


def rounded(k: Fn, x: Val, inverse: Val) -> Val:
    """round-to-nearest-even(x · inverse) as i32, for |x · inverse| < 2^22."""
    return (x * inverse + 12582912.0).bits(vec(i32, x.lanes)) - 0x4B400000


def quantized(k: Fn, x: list[Val]) -> tuple[list[Val], Val]:
    """32 floats (as vectors) → signed bytes as i32 vectors, and their scale: x ≈ q·d, d = max|x| / 127.

    NaN and Inf reach the scale.
    """
    # compared as integers, where NaN is the largest: it must reach the scale, not be rounded to some number
    largest = x[0].abs().bits(vec(i32, x[0].lanes))
    for v in x[1:]:
        largest = largest.max(v.abs().bits(largest.t))
    amax = largest.hmax().bits(f32)
    tiny = amax < 1e-30  # 127/amax would overflow; such a block is zero for every purpose
    inverse = tiny.select(k.zero(f32), k.const(f32, 127.0) / amax)
    d = tiny.select(k.zero(f32), amax * (1.0 / 127.0))
    return [rounded(k, v, inverse) for v in x], d


class Int8(Activations):
    """Per token and 32 columns: 32 signed bytes, f32 scale d, then −d·Σq over all, over the first and over the
    last 16."""

    name, token_nbytes = "int8", 48

    def pack(self, k: Fn, x: list[Val], block: Val, tokens: int, t: Val | int) -> None:
        q, d = quantized(k, x)
        at = self._at(k, block, t, 32, 0)
        for j, v in enumerate(q):
            at.store(v.trunc(i8), v.lanes * j, 1)
        halves = []
        for run in (q[: len(q) // 2], q[len(q) // 2 :]):
            total = run[0]
            for v in run[1:]:
                total = total + v
            halves.append(total.sum())
        sums = [halves[0] + halves[1], *halves]
        at = self._at(k, block, t, 4, 32 * tokens)
        at.store(d)
        for i, s in enumerate(sums, 1):
            at.store(-(d * s.f32()), 4 * tokens * i)

    def dot(self, k: Fn, fmt: Format, tile: Val, x: Val, tokens: int, sub: int, acc: list[Var]) -> None:
        assert isinstance(fmt, QuantFormat)
        n = k.target.lanes
        for block in fmt.blocks(k, tile, sub):
            xb = x + block.index * self.block_nbytes(tokens)
            offsets = [p.offset if p.offset is not None else p.scale * float(p.zero) for p in block.parts]
            for t in range(tokens):
                total = acc[t]()
                for i, part in enumerate(block.parts):
                    c = k.zero(vec(i32, n))
                    for j in range(part.first, part.first + part.count):
                        quad = xb.load(i32, 32 * t + 4 * j).splat(n).bits(vec(i8, 4 * n))
                        c = k.target.dot4(c, block.quads[j], quad, fmt.wide)
                    d = xb.load(f32, 32 * tokens + 4 * t).splat(n)
                    which = 1 if part.count == 8 else 2 + i
                    minus_sum = xb.load(f32, 32 * tokens + 4 * t + 4 * tokens * which).splat(n)
                    total = offsets[i].fma(minus_sum, c.f32().fma(part.scale * d, total))
                acc[t].set(total)


class Float32(Activations):
    """Per token and 32 columns: 32 floats, then −Σx over all, over the first and over the last 16."""

    name, token_nbytes = "float32", 140

    def pack(self, k: Fn, x: list[Val], block: Val, tokens: int, t: Val | int) -> None:
        at = self._at(k, block, t, 128, 0)
        for j, v in enumerate(x):
            at.store(v, 4 * v.lanes * j, 4)
        halves = []
        for run in (x[: len(x) // 2], x[len(x) // 2 :]):
            total = run[0]
            for v in run[1:]:
                total = total + v
            halves.append(total.sum())
        at = self._at(k, block, t, 4, 128 * tokens)
        for i, s in enumerate([halves[0] + halves[1], *halves]):
            at.store(-s, 4 * tokens * i)

    def dot(self, k: Fn, fmt: Format, tile: Val, x: Val, tokens: int, sub: int, acc: list[Var]) -> None:
        n = k.target.lanes
        if isinstance(fmt, FloatFormat):
            totals = [a() for a in acc]
            for c in range(32):
                w = fmt.column(k, tile, c, sub)
                totals = [w.fma(x.load(f32, 128 * t + 4 * c).splat(n), totals[t]) for t in range(tokens)]
            for a, total in zip(acc, totals, strict=True):
                a.set(total)
            return
        assert isinstance(fmt, QuantFormat)
        for block in fmt.blocks(k, tile, sub):
            xb = x + block.index * self.block_nbytes(tokens)
            totals = [a() for a in acc]
            for i, part in enumerate(block.parts):
                partial = [k.zero(vec(f32, n))] * tokens
                for j in range(part.first, part.first + part.count):
                    for byte, q in enumerate(fmt.quad_floats(block.quads[j], part.zero)):
                        at = 4 * (4 * j + byte)
                        partial = [q.fma(xb.load(f32, 128 * t + at).splat(n), partial[t]) for t in range(tokens)]
                totals = [partial[t].fma(part.scale, totals[t]) for t in range(tokens)]
                if part.offset is not None:
                    which = 0 if part.count == 8 else 1 + i
                    for t in range(tokens):
                        minus_sum = xb.load(f32, 128 * tokens + 4 * t + 4 * tokens * which).splat(n)
                        totals[t] = part.offset.fma(minus_sum, totals[t])
            for a, total in zip(acc, totals, strict=True):
                a.set(total)


INT8, FLOAT32 = Int8(), Float32()
ACTIVATIONS: dict[str, Activations] = {a.name: a for a in (INT8, FLOAT32)}


def activations_for(fmt: Format, mode: str) -> Activations:
    """Integer formats meet what `mode` ("int8" or "float32") says, all others float32 activations."""
    return ACTIVATIONS[mode] if fmt.integer else FLOAT32
