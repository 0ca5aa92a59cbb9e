"""AArch64 with the dot-product extension."""

from __future__ import annotations

from typing import TYPE_CHECKING

import llvmlite.binding as llvm

from colibri_offload.jit.emit.types import f16, f32, i8, i16, i32, like, vec, void
from colibri_offload.jit.emit.values import Val
from colibri_offload.jit.targets.base import Target

if TYPE_CHECKING:
    from colibri_offload.jit.emit.function import Fn


class NeonDot(Target):
    """NEON + dotprod. `cross=True` compiles for AArch64 Linux on another machine (to look at the code, not to run
    it)."""

    name, lanes, registers = "neondot", 4, 32

    def __init__(self, cpu: str = "neoverse-n1", features: str = "+dotprod,+fullfp16", cross: bool = False):
        super().__init__(cpu, features)
        if cross:
            self.triple = "aarch64-unknown-linux-gnu"  # type: ignore[misc]

    @classmethod
    def host(cls) -> NeonDot:
        return cls(llvm.get_host_cpu_name(), llvm.get_host_cpu_features().flatten())

    def pause(self, k: Fn) -> None:
        k.target_intrinsic("llvm.aarch64.hint", void, k.const(i32, 1))

    def half_to_f32(self, h: Val) -> Val:
        return Val(h.k, h.k.b.fpext(h.v, like(h.t, f32)))

    def f32_to_half_bits(self, x: Val) -> Val:
        return Val(x.k, x.k.b.fptrunc(x.v, like(x.t, f16))).bits(like(x.t, i16))

    def dot4(self, acc: Val, u: Val, s: Val, wide: bool) -> Val:
        """sdot multiplies signed by signed: bytes above 127 are moved down by 128, and 128·Σs is added by a
        second sdot."""

        def sdot(a: Val, x: Val, y: Val) -> Val:
            return a.k.target_intrinsic("llvm.aarch64.neon.sdot.v4i32.v16i8", vec(i32, 4), a, x, y)

        def four(a: Val, x: Val, y: Val) -> Val:
            if not wide:
                return sdot(a, x, y)
            ones = a.k.const(vec(i8, 16), 1)
            return sdot(a, x ^ 0x80, y) + (sdot(a.k.zero(a.t), ones, y) << 7)

        return self.split(4, acc, u, s, four)

    def lookup16(self, table: tuple[int, ...], index: Val) -> Val:
        k = index.k
        t = k.const(vec(i8, 16), list(table))
        return k.target_intrinsic("llvm.aarch64.neon.tbl1.v16i8", vec(i8, 16), t, index)
