"""How keys and values are kept in a page: one class per type.

A page holds 64 positions of one kv head: first the keys, as four tiles of 16 positions (so 16 scores are one vector),
then the values, 16 columns of all positions at a time: both in the order in which attention reads them.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from typing import Any, ClassVar

from colibri_offload.jit.emit import Fn, Val, f16, f32, i8, i32, vec
from colibri_offload.jit.kernels.activations import quantized
from colibri_offload.jit.targets import Target

PAGE = 64
TILE = 16


def lanes_for(target: Target, count: int) -> int:
    """The widest power of two ≤ lanes that divides count."""
    n = target.lanes
    while count % n:
        n //= 2
    return n


def chunk_for(dim: int) -> int:
    """Columns of values that lie together: the widest power of two ≤ 16 that divides dim, on every target."""
    return min(16, dim & -dim)


class KvType(ABC):
    """One type. `dim` is the width of a head's key or value; `at` a position within the page."""

    name: ClassVar[str]
    multiple: ClassVar[int] = 1  # of which dim must be

    @abstractmethod
    def page_nbytes(self, dim: int) -> int:
        """Bytes of a page's keys, or of its values."""

    @abstractmethod
    def store_key(self, k: Fn, keys: Val, at: Val, x: Val, dim: int) -> None:
        """f32 [dim] at x → position `at` of the page's keys."""

    @abstractmethod
    def store_value(self, k: Fn, values: Val, at: Val, x: Val, dim: int) -> None: ...

    @abstractmethod
    def prepare(self, k: Fn, q: Val, queries: int, dim: int) -> Val:
        """Queries, f32 [queries, dim], in the form that scores() wants."""

    @abstractmethod
    def scores(self, k: Fn, keys: Val, tile: Val, sub: int, prepared: Val, queries: int, dim: int) -> list[Val]:
        """Per query, f32 [lanes]: products with positions tile·16 + sub·lanes … of the page."""

    @staticmethod
    def _value_at(at: Val, column: Val, dim: int) -> Val:
        """Number of the element that holds a position's column."""
        chunk = chunk_for(dim)
        return (column // chunk * PAGE + at) * chunk + column % chunk

    @abstractmethod
    def value(self, k: Fn, values: Val, column: Val, dim: int) -> Callable[[Val], Val]:
        """position → f32 [lanes_for(dim)]: its value from `column` on."""


class FloatKv(KvType):
    """Keys as [dim][16 positions] per tile, values as [dim/16][64 positions][16]."""

    size: ClassVar[int]
    llvm_type: ClassVar[Any]

    def page_nbytes(self, dim: int) -> int:
        return PAGE * dim * self.size

    @abstractmethod
    def narrow(self, x: Val) -> Val:
        """f32 → what is stored."""

    def store_key(self, k: Fn, keys: Val, at: Val, x: Val, dim: int) -> None:
        tile = keys + (at // TILE * (dim * TILE * self.size) + at % TILE * self.size)
        n = lanes_for(k.target, dim)
        with k.range(0, dim, n) as d:
            v = self.narrow((x + d * 4).load(vec(f32, n), 0, 4))
            for i in range(n):
                (tile + d * (TILE * self.size)).store(v.lane(i), i * TILE * self.size)

    def store_value(self, k: Fn, values: Val, at: Val, x: Val, dim: int) -> None:
        n = lanes_for(k.target, dim)
        with k.range(0, dim, n) as d:
            place = values + self._value_at(at, d, dim) * self.size
            place.store(self.narrow((x + d * 4).load(vec(f32, n), 0, 4)), 0, self.size)

    def prepare(self, k: Fn, q: Val, queries: int, dim: int) -> Val:
        return q

    def scores(self, k: Fn, keys: Val, tile: Val, sub: int, prepared: Val, queries: int, dim: int) -> list[Val]:
        lanes, size = k.target.lanes, self.size
        acc = [k.var(k.zero(vec(f32, lanes))) for _ in range(queries)]
        column = keys + tile * (dim * TILE * size) + sub * lanes * size
        with k.range(0, dim) as d:
            key = (column + d * (TILE * size)).load(vec(self.llvm_type, lanes), 0, size * lanes).f32()
            for r, a in enumerate(acc):
                a.set(key.fma((prepared + d * 4).load(f32, 4 * dim * r).splat(lanes), a()))
        return [a() for a in acc]

    def value(self, k: Fn, values: Val, column: Val, dim: int) -> Callable[[Val], Val]:
        t = vec(self.llvm_type, lanes_for(k.target, dim))
        return lambda at: (values + self._value_at(at, column, dim) * self.size).load(t, 0, self.size).f32()


class F32Kv(FloatKv):
    name, size, llvm_type = "f32", 4, f32

    def narrow(self, x: Val) -> Val:
        return x


class F16Kv(FloatKv):
    name, size, llvm_type = "f16", 2, f16

    def narrow(self, x: Val) -> Val:
        return x.k.target.f32_to_half_bits(x)


class Q8Kv(KvType):
    """Signed bytes under a float32 scale per 32 elements: 9 bits per element.

    Keys, per tile: for each 32 elements 8 quads [16 positions][4], stored + 128; then scales [dim/32][16 positions];
    the query is rounded in the same way and meets them in the integer dot. Values: bytes [dim/16][64 positions][16],
    then scales [dim/32][64].
    """

    name, multiple = "q8_0", 32
    _query_nbytes = 64  # per 32 elements: 32 bytes, f32 scale, i32 −128·Σq

    def page_nbytes(self, dim: int) -> int:
        return PAGE * (dim + dim // 32 * 4)

    def _block(self, k: Fn, x: Val, b: Val) -> tuple[list[Val], Val]:
        lanes = k.target.lanes
        at = x + b * 128
        return quantized(k, [at.load(vec(f32, lanes), 4 * lanes * j, 4) for j in range(32 // lanes)])

    def store_key(self, k: Fn, keys: Val, at: Val, x: Val, dim: int) -> None:
        tile, position = keys + at // TILE * (18 * dim), at % TILE
        bytes_ = k.scratch(32)
        with k.range(0, dim // 32) as b:
            q, d = self._block(k, x, b)
            for j, v in enumerate(q):
                bytes_.store((v + 128).trunc(i8), v.lanes * j, 1)
            for j in range(8):
                (tile + (b * 512 + position * 4)).store(bytes_.load(i32, 4 * j), 64 * j, 4)
            (tile + (b * 64 + position * 4)).store(d, 16 * dim)

    def store_value(self, k: Fn, values: Val, at: Val, x: Val, dim: int) -> None:
        with k.range(0, dim // 32) as b:
            q, d = self._block(k, x, b)
            for j, v in enumerate(q):
                (values + self._value_at(at, b * 32 + v.lanes * j, dim)).store(v.trunc(i8), 0, 1)
            (values + (b * PAGE + at) * 4).store(d, PAGE * dim)

    def prepare(self, k: Fn, q: Val, queries: int, dim: int) -> Val:
        blocks = queries * dim // 32
        out = k.scratch(blocks * self._query_nbytes)
        with k.range(0, blocks) as b:
            rounded, d = self._block(k, q, b)
            at, total = out + b * self._query_nbytes, rounded[0]
            for v in rounded[1:]:
                total = total + v
            for j, v in enumerate(rounded):
                at.store(v.trunc(i8), v.lanes * j, 1)
            at.store(d, 32)
            at.store(total.sum() * -128, 36)
        return out

    def scores(self, k: Fn, keys: Val, tile: Val, sub: int, prepared: Val, queries: int, dim: int) -> list[Val]:
        lanes = k.target.lanes
        acc = [k.var(k.zero(vec(f32, lanes))) for _ in range(queries)]
        base = keys + tile * (18 * dim) + sub * lanes * 4
        with k.range(0, dim // 32) as b:
            quads = [(base + b * 512).load(vec(i8, 4 * lanes), 64 * j, 4 * lanes) for j in range(8)]
            scale = (base + b * 64).load(vec(f32, lanes), 16 * dim, 4)
            for r, a in enumerate(acc):
                query = prepared + (b + r * (dim // 32)) * self._query_nbytes
                c = query.load(i32, 36).splat(lanes)
                for j in range(8):
                    word = query.load(i32, 4 * j).splat(lanes).bits(vec(i8, 4 * lanes))
                    c = k.target.dot4(c, quads[j], word, True)
                a.set(c.f32().fma(scale * query.load(f32, 32).splat(lanes), a()))
        return [a() for a in acc]

    def value(self, k: Fn, values: Val, column: Val, dim: int) -> Callable[[Val], Val]:
        n = lanes_for(k.target, dim)

        def at(position: Val) -> Val:
            q = (values + self._value_at(position, column, dim)).load(vec(i8, n), 0, 1).sext(i32).f32()
            d = (values + (column // 32 * PAGE + position) * 4).load(f32, PAGE * dim)
            return q * d.splat(n)

        return at


KV_TYPES: dict[str, KvType] = {t.name: t for t in (F32Kv(), F16Kv(), Q8Kv())}
