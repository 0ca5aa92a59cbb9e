"""x86-64 targets. The feature string is always masked to what the host has: no illegal instruction."""

from __future__ import annotations

from typing import TYPE_CHECKING

import llvmlite.binding as llvm

from colibri_offload.jit.emit.types import f16, f32, i8, i16, i32, like, vec, void
from colibri_offload.jit.emit.values import Val
from colibri_offload.jit.targets.base import Target

if TYPE_CHECKING:
    from colibri_offload.jit.emit.function import Fn


class X86(Target):
    """Baseline x86-64: SSE2."""

    name = "sse2"
    needs: tuple[str, ...] = ()

    def __init__(self, cpu: str = "x86-64", features: str = ""):
        super().__init__(cpu, features)

    def pause(self, k: Fn) -> None:
        k.target_intrinsic("llvm.x86.sse2.pause", void)

    def dot4(self, acc: Val, u: Val, s: Val, wide: bool) -> Val:
        """pmaddwd on 16-bit halves: exact on every x86-64."""

        def four(a: Val, x: Val, y: Val) -> Val:
            x, y = x.zext(i16), y.sext(i16)
            p = [
                a.k.target_intrinsic("llvm.x86.sse2.pmadd.wd", vec(i32, 4), x.part(i, 8), y.part(i, 8)) for i in (0, 1)
            ]
            return a + (p[0].shuffle([0, 2, 4, 6], p[1]) + p[0].shuffle([1, 3, 5, 7], p[1]))

        return self.split(4, acc, u, s, four)


class Avx2(X86):
    """AVX2 + FMA + F16C."""

    name, lanes = "avx2", 8
    needs = ("avx2", "fma", "f16c")

    def __init__(self, cpu: str = "haswell", features: str = ""):
        super().__init__(cpu, features)

    def half_to_f32(self, h: Val) -> Val:
        return Val(h.k, h.k.b.fpext(h.v, like(h.t, f32)))

    def f32_to_half_bits(self, x: Val) -> Val:
        return Val(x.k, x.k.b.fptrunc(x.v, like(x.t, f16))).bits(like(x.t, i16))

    def dot4(self, acc: Val, u: Val, s: Val, wide: bool) -> Val:
        """pmaddubsw saturates when u > 127, so bit 7 is then multiplied on its own."""

        def pairs(x: Val, y: Val) -> Val:
            k = x.k
            words = k.target_intrinsic("llvm.x86.avx2.pmadd.ub.sw", vec(i16, 16), x, y)
            return k.target_intrinsic("llvm.x86.avx2.pmadd.wd", vec(i32, 8), words, k.const(vec(i16, 16), 1))

        def eight(a: Val, x: Val, y: Val) -> Val:
            return a + (pairs(x & 0x7F, y) + pairs(x & 0x80, y)) if wide else a + pairs(x, y)

        return self.split(8, acc, u, s, eight)

    def lookup16(self, table: tuple[int, ...], index: Val) -> Val:
        """pshufb, 32 bytes at a time."""
        k = index.k
        t = k.const(vec(i8, 32), [*table, *table])
        parts = [
            k.target_intrinsic(
                "llvm.x86.avx2.pshuf.b", vec(i8, 32), t, index.part(i, 32) if index.lanes > 32 else index
            )
            for i in range(max(1, index.lanes // 32))
        ]
        return parts[0].concat(*parts[1:])


class Avx512Vnni(Avx2):
    """AVX-512 F/BW/DQ/VL + VNNI, compiled for the host CPU itself."""

    name, lanes, registers = "avx512vnni", 16, 32
    needs = ("avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512vnni")

    def __init__(self, cpu: str | None = None, features: str | None = None):
        super().__init__(
            cpu or llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten() if features is None else features
        )

    def dot4(self, acc: Val, u: Val, s: Val, wide: bool) -> Val:
        """vpdpbusd: no saturation. The dword form is accepted by old and new LLVM."""

        def sixteen(a: Val, x: Val, y: Val) -> Val:
            t = vec(i32, 16)
            return a.k.target_intrinsic("llvm.x86.avx512.vpdpbusd.512", t, a, x.bits(t), y.bits(t))

        return self.split(16, acc, u, s, sixteen)

    def lookup16(self, table: tuple[int, ...], index: Val) -> Val:
        k = index.k
        return k.target_intrinsic("llvm.x86.avx512.pshuf.b.512", vec(i8, 64), k.const(vec(i8, 64), [*table] * 4), index)
