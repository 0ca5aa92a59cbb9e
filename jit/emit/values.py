"""SSA values with operators. Python numbers mix in as constants, scalars splat against vectors.

No fast-math flag is ever set: a kernel's result must not depend on how the optimiser likes to contract it, because the
same product is computed by differently shaped kernels (decode and prefill) that have to agree to the bit. Where a fused
multiply-add is wanted it is written: a.fma(b, c).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Union

import llvmlite.ir as ir

from colibri_offload.jit.emit.types import bits_of, const, element, f32, i8, i16, i32, i64, is_float, like, vec

if TYPE_CHECKING:
    from colibri_offload.jit.emit.function import Fn

Operand = Union["Val", int, float]


class Val:
    """One SSA value of a function under construction."""

    __slots__ = ("k", "v")

    def __init__(self, k: Fn, v: ir.Value):
        self.k, self.v = k, v

    @property
    def t(self) -> ir.Type:
        return self.v.type

    @property
    def lanes(self) -> int:
        return self.t.count if isinstance(self.t, ir.VectorType) else 1

    # ---- arithmetic
    def _pair(self, other: Operand) -> tuple[ir.Value, ir.Value]:
        a, b = self, other if isinstance(other, Val) else Val(self.k, const(self.t, other))
        if a.lanes > 1 and b.lanes == 1:
            b = b.splat(a.lanes)
        elif b.lanes > 1 and a.lanes == 1:
            a = a.splat(b.lanes)
        return a.v, b.v

    def _op(self, other: Operand, integer: str, floating: str = "", swap: bool = False) -> Val:
        a, b = self._pair(other)
        if swap:
            a, b = b, a
        return Val(self.k, getattr(self.k.b, floating if is_float(a.type) else integer)(a, b))

    def __add__(self, o: Operand) -> Val:
        if isinstance(self.t, ir.PointerType):
            return Val(self.k, self.k.b.gep(self.v, [self.k.val(o, i64).v], source_etype=i8))
        return self._op(o, "add", "fadd")

    def __sub__(self, o: Operand) -> Val:
        return self._op(o, "sub", "fsub")

    def __mul__(self, o: Operand) -> Val:
        return self._op(o, "mul", "fmul")

    def __truediv__(self, o: Operand) -> Val:
        return self._op(o, "sdiv", "fdiv")

    def __floordiv__(self, o: Operand) -> Val:
        return self._op(o, "udiv")

    def __mod__(self, o: Operand) -> Val:
        return self._op(o, "urem")

    def __and__(self, o: Operand) -> Val:
        return self._op(o, "and_")

    def __or__(self, o: Operand) -> Val:
        return self._op(o, "or_")

    def __xor__(self, o: Operand) -> Val:
        return self._op(o, "xor")

    def __rshift__(self, o: Operand) -> Val:
        """Logical shift right."""
        return self._op(o, "lshr")

    def __lshift__(self, o: Operand) -> Val:
        return self._op(o, "shl")

    def __rsub__(self, o: Operand) -> Val:
        return self._op(o, "sub", "fsub", swap=True)

    def __rtruediv__(self, o: Operand) -> Val:
        return self._op(o, "sdiv", "fdiv", swap=True)

    __radd__, __rmul__, __ror__, __rand__ = __add__, __mul__, __or__, __and__

    def __neg__(self) -> Val:
        return Val(self.k, self.k.b.fneg(self.v)) if is_float(self.t) else self.k.const(self.t, 0) - self

    def fma(self, factor: Operand, addend: Operand) -> Val:
        """self · factor + addend, fused wherever the target has the instruction.

        `fmuladd`, not `fma`: on a CPU without FMA the latter becomes a call into libm.
        """
        x, y = self._pair(factor)
        a, z = Val(self.k, x)._pair(addend)
        return self.k.intrinsic("llvm.fmuladd", Val(self.k, a), Val(self.k, y), Val(self.k, z))

    # ---- comparison
    def _cmp(self, op: str, o: Operand, signed: bool = True) -> Val:
        a, b = self._pair(o)
        if is_float(a.type):
            return Val(self.k, self.k.b.fcmp_ordered(op, a, b))
        return Val(self.k, (self.k.b.icmp_signed if signed else self.k.b.icmp_unsigned)(op, a, b))

    def __lt__(self, o: Operand) -> Val:
        return self._cmp("<", o)

    def __le__(self, o: Operand) -> Val:
        return self._cmp("<=", o)

    def __gt__(self, o: Operand) -> Val:
        return self._cmp(">", o)

    def __ge__(self, o: Operand) -> Val:
        return self._cmp(">=", o)

    def eq(self, o: Operand) -> Val:
        return self._cmp("==", o)

    def ne(self, o: Operand) -> Val:
        return self._cmp("!=", o)

    def select(self, yes: Val, no: Val) -> Val:
        """Lane by lane: yes where self is true, no elsewhere."""
        return Val(self.k, self.k.b.select(self.v, yes.v, no.v))

    def min(self, o: Operand) -> Val:
        return self.k.intrinsic("llvm.minnum" if is_float(self.t) else "llvm.smin", self, Val(self.k, self._pair(o)[1]))

    def max(self, o: Operand) -> Val:
        return self.k.intrinsic("llvm.maxnum" if is_float(self.t) else "llvm.smax", self, Val(self.k, self._pair(o)[1]))

    def abs(self) -> Val:
        return self.k.intrinsic("llvm.fabs", self)

    def sqrt(self) -> Val:
        return self.k.intrinsic("llvm.sqrt", self)

    # ---- type and shape
    def zext(self, t: ir.Type) -> Val:
        return Val(self.k, self.k.b.zext(self.v, like(self.t, t)))

    def sext(self, t: ir.Type) -> Val:
        return Val(self.k, self.k.b.sext(self.v, like(self.t, t)))

    def trunc(self, t: ir.Type) -> Val:
        return Val(self.k, self.k.b.trunc(self.v, like(self.t, t)))

    def bits(self, t: ir.Type) -> Val:
        """The same bits as another type of the same size."""
        return Val(self.k, self.k.b.bitcast(self.v, t))

    def f32(self) -> Val:
        """Convert to float32: from f16 and bf16 exactly, from signed integers by rounding to nearest."""
        e = element(self.t)
        if isinstance(e, ir.FloatType):
            return self
        if isinstance(e, ir.HalfType):
            return self.k.target.half_to_f32(self)
        if is_float(self.t):
            words = self.bits(like(self.t, i16)).zext(i32) << 16
            return words.bits(like(self.t, f32))
        return Val(self.k, self.k.b.sitofp(self.v, like(self.t, f32)))

    def splat(self, lanes: int) -> Val:
        t = vec(self.t, lanes)
        undef = ir.Constant(t, ir.Undefined)
        one = self.k.b.insert_element(undef, self.v, const(i32, 0))
        return Val(self.k, self.k.b.shuffle_vector(one, undef, const(vec(i32, lanes), 0)))

    def shuffle(self, lanes: Sequence[int], other: Val | None = None) -> Val:
        second = other.v if other is not None else ir.Constant(self.t, ir.Undefined)
        return Val(self.k, self.k.b.shuffle_vector(self.v, second, const(vec(i32, len(lanes)), list(lanes))))

    def part(self, i: int, lanes: int) -> Val:
        """The i-th run of `lanes` lanes."""
        return self.shuffle(range(i * lanes, (i + 1) * lanes))

    def concat(self, *others: Val) -> Val:
        """Join a power-of-two number of equal vectors."""
        out = [self, *others]
        while len(out) > 1:
            out = [a.shuffle(range(2 * a.lanes), b) for a, b in zip(out[::2], out[1::2], strict=True)]
        return out[0]

    def lane(self, i: int) -> Val:
        return Val(self.k, self.k.b.extract_element(self.v, const(i32, i)))

    def sum(self) -> Val:
        """Horizontal sum in a fixed order (halving), so it never depends on the target's own reduction."""
        x = self
        while x.lanes > 2:
            x = x.part(0, x.lanes // 2) + x.part(1, x.lanes // 2)
        return x.lane(0) + x.lane(1) if x.lanes == 2 else x

    def hmax(self) -> Val:
        x = self
        while x.lanes > 2:
            x = x.part(0, x.lanes // 2).max(x.part(1, x.lanes // 2))
        return x.lane(0).max(x.lane(1)) if x.lanes == 2 else x

    # ---- memory: self is a pointer, offsets are in bytes
    def load(self, t: ir.Type, offset: Operand = 0, align: int | None = None) -> Val:
        p = self if isinstance(offset, int) and offset == 0 else self + offset
        return Val(self.k, self.k.b.load(p.v, typ=t, align=align or bits_of(t) // 8))

    def store(self, x: Val, offset: Operand = 0, align: int | None = None) -> None:
        p = self if isinstance(offset, int) and offset == 0 else self + offset
        self.k.b.store(x.v, p.v, align=align or bits_of(x.t) // 8)


class Var:
    """A mutable local: x.set(value), x(). An alloca that the optimiser turns into registers."""

    def __init__(self, k: Fn, init: Val):
        with k.b.goto_entry_block():
            self.slot = k.b.alloca(init.t)
        self.k, self.t = k, init.t
        self.set(init)

    def __call__(self) -> Val:
        return Val(self.k, self.k.b.load(self.slot, typ=self.t))

    def set(self, x: Val) -> None:
        self.k.b.store(x.v, self.slot)
