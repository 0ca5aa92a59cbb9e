"""What kernels must know of a CPU. The base class is portable IR that any LLVM back end can compile."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar

import llvmlite.binding as llvm

from colibri_offload.jit.emit.types import f32, i16, i32, like
from colibri_offload.jit.emit.values import Val

if TYPE_CHECKING:
    from colibri_offload.jit.emit.function import Fn


class Target:
    """A CPU as a value: several can live in one process (tests run AVX2 and generic kernels on an AVX-512 machine).

    `lanes`: float32 lanes of a vector register. `registers`: vector registers, which bounds the token tile.
    """

    name: ClassVar[str] = "generic"
    lanes: ClassVar[int] = 4
    registers: ClassVar[int] = 16
    triple: ClassVar[str | None] = None

    def __init__(self, cpu: str = "", features: str = ""):
        self.cpu, self.features = cpu, features

    def __repr__(self) -> str:
        return f"Target({self.name}, cpu={self.cpu!r})"

    def machine(self) -> llvm.TargetMachine:
        t = llvm.Target.from_triple(self.triple) if self.triple else llvm.Target.from_default_triple()
        return t.create_target_machine(
            cpu=self.cpu, features=self.features, opt=3, jit=self.triple is None, codemodel="jitdefault", reloc="pic"
        )

    @property
    def key(self) -> str:
        """Everything of the target that generated code depends on."""
        return "|".join([self.name, self.triple or llvm.get_default_triple(), self.cpu, self.features])

    def half_to_f32(self, h: Val) -> Val:
        """f16 → f32 with integer operations: exact for zeros, subnormals and normals; Inf and NaN keep their meaning.

        Without F16C, LLVM would call into a runtime library that a JIT does not have.
        """
        k = h.k
        x = h.bits(like(h.t, i16)).zext(i32)
        f32_t = like(h.t, f32)
        scaled = ((x & 0x7FFF) << 13).bits(f32_t) * 5.192296858534828e33  # 2^112 moves the exponent's bias
        bits = scaled.bits(like(h.t, i32))
        special = ((x & 0x7C00).eq(0x7C00)).select(k.const(bits.t, 0x7F800000), k.zero(bits.t))
        return (bits | special | ((x & 0x8000) << 16)).bits(f32_t)

    def f32_to_half_bits(self, x: Val) -> Val:
        """f32 → the bits of f16 as i16, rounded to nearest even (hardware conversion where there is one).

        Integer form: values beyond half range become Inf, subnormal results are rounded correctly.
        """
        k = x.k
        it, ft = like(x.t, i32), x.t
        u = x.bits(it)
        sign, mag = (u >> 16) & 0x8000, u & 0x7FFFFFFF
        # normal result: add the rounding bias and re-bias the exponent; subnormal: let a float addition round
        odd = (mag >> 13) & 1
        normal = (mag + 0xC8000FFF + odd) >> 13
        sub = (mag.bits(ft) + 0.5).bits(it) - 0x3F000000
        big = k.const(it, 0x7C00)
        nan = k.const(it, 0x7E00)
        h = (mag < 0x38800000).select(sub, (mag < 0x47800000).select(normal, big))
        h = (mag > 0x7F800000).select(nan, h)
        return (h | sign).trunc(i16)

    def dot4(self, acc: Val, u: Val, s: Val, wide: bool) -> Val:
        """acc[i] + Σ_j u[4i+j]·s[4i+j], exact in int32; u unsigned bytes, s signed bytes.

        `wide`: u may exceed 127 (targets whose instruction saturates then split u).
        """
        n = acc.lanes
        p = u.zext(i32) * s.sext(i32)
        q = [p.shuffle([4 * i + j for i in range(n)]) for j in range(4)]
        return acc + ((q[0] + q[1]) + (q[2] + q[3]))

    def lookup16(self, table: tuple[int, ...], index: Val) -> Val:
        """table[index] for unsigned bytes below 16, each lane."""
        k = index.k
        out = k.const(index.t, table[0])
        for i, value in enumerate(table[1:], 1):
            out = index.eq(i).select(k.const(index.t, value), out)
        return out

    def pause(self, k: Fn) -> None:
        """A hint inside a spin loop."""

    def split(self, lanes: int, acc: Val, u: Val, s: Val, f: Callable[[Val, Val, Val], Val]) -> Val:
        """f on pieces of `lanes` accumulators, joined again."""
        n = acc.lanes // lanes
        if n <= 1:
            return f(acc, u, s)
        parts = [f(acc.part(i, lanes), u.part(i, 4 * lanes), s.part(i, 4 * lanes)) for i in range(n)]
        return parts[0].concat(*parts[1:])
