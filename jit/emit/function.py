"""A function under construction: loops, branches, scratch memory, intrinsics."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import llvmlite.ir as ir

from colibri_offload.jit.emit.types import const, i8, i32, i64, is_float, mangle, ptr, void
from colibri_offload.jit.emit.values import Operand, Val, Var

if TYPE_CHECKING:
    from colibri_offload.jit.targets.base import Target


class Fn:
    """Builds one LLVM function. Arguments are attributes: Fn(module, target, "f", {"x": ptr}).x is a Val.

    Pointer arguments are `noalias`: a kernel's buffers never overlap unless it says so by loading them from a
    descriptor.
    """

    def __init__(
        self,
        module: ir.Module,
        target: Target,
        name: str,
        args: dict[str, ir.Type],
        ret: ir.Type = void,
        inline: bool | None = None,
    ):
        self.module, self.target = module, target
        self.fn = ir.Function(module, ir.FunctionType(ret, list(args.values())), name)
        self.fn.attributes.add("nounwind")
        if inline is not None:
            self.fn.linkage = "internal"
            self.fn.attributes.add("alwaysinline" if inline else "noinline")
        self.b = ir.IRBuilder(self.fn.append_basic_block("entry"))
        self._args = {}
        for value, (arg, t) in zip(self.fn.args, args.items(), strict=True):
            value.name = arg
            if isinstance(t, ir.PointerType):
                value.add_attribute("noalias")
            self._args[arg] = Val(self, value)

    def __getattr__(self, name: str) -> Val:
        try:
            return self.__dict__["_args"][name]
        except KeyError:
            raise AttributeError(name) from None

    def __enter__(self) -> Fn:
        return self

    def __exit__(self, kind: Any, *_: Any) -> None:
        if kind is None and not self.b.block.is_terminated:
            self.b.ret_void()

    # ---- values
    def const(self, t: ir.Type, x: Any) -> Val:
        return Val(self, const(t, x))

    def zero(self, t: ir.Type) -> Val:
        return self.const(t, 0.0 if is_float(t) else 0)

    def val(self, x: Operand, t: ir.Type) -> Val:
        """x itself, or the constant x of type t."""
        return x if isinstance(x, Val) else self.const(t, x)

    def var(self, init: Val) -> Var:
        return Var(self, init)

    def iota(self, t: ir.VectorType) -> Val:
        """0, 1, 2 … as a vector."""
        return self.const(t, list(range(t.count)))

    # ---- control flow
    @contextmanager
    def range(self, start: Operand, stop: Operand, step: Operand = 1) -> Iterator[Val]:
        """for i in range(start, stop, step), i of type i64."""
        i = Var(self, self.val(start, i64))
        stop = self.val(stop, i64)
        head, body, end = (self.b.append_basic_block(n) for n in ("head", "body", "end"))
        self.b.branch(head)
        self.b.position_at_end(head)
        self.b.cbranch((i() < stop).v, body, end)
        self.b.position_at_end(body)
        yield i()
        i.set(i() + step)
        self.b.branch(head)
        self.b.position_at_end(end)

    @contextmanager
    def loop(self) -> Iterator[Loop]:
        """An endless loop, left by loop.leave_if(condition)."""
        body, end = self.b.append_basic_block("loop"), self.b.append_basic_block("left")
        self.b.branch(body)
        self.b.position_at_end(body)
        yield Loop(self, body, end)
        self.b.branch(body)
        self.b.position_at_end(end)

    @contextmanager
    def when(self, condition: Val) -> Iterator[None]:
        with self.b.if_then(condition.v):
            yield

    @contextmanager
    def either(self, condition: Val) -> Iterator[tuple[Any, Any]]:
        """with k.either(c) as (yes, no): with yes: …; with no: …"""
        with self.b.if_else(condition.v) as pair:
            yield pair

    def not_null(self, p: Val) -> Val:
        return Val(self, self.b.ptrtoint(p.v, i64)).ne(0)

    # ---- memory
    def scratch(self, nbytes: int) -> Val:
        """64-byte-aligned stack memory."""
        with self.b.goto_entry_block():
            a = self.b.alloca(i8, const(i32, nbytes))
            a.align = 64
            a.type = ptr  # llvmlite types an alloca by its element; everything here is an opaque pointer
        return Val(self, a)

    # ---- calls
    def _declare(self, name: str, ret: ir.Type, args: list[ir.Type], var_arg: bool = False) -> ir.Function:
        found = self.module.globals.get(name)
        return found or ir.Function(self.module, ir.FunctionType(ret, args, var_arg=var_arg), name)

    def intrinsic(self, name: str, *args: Val, ret: ir.Type | None = None) -> Val:
        """An overloaded LLVM intrinsic whose suffix and result are the first argument's type."""
        f = self._declare(f"{name}.{mangle(args[0].t)}", ret or args[0].t, [a.t for a in args])
        return Val(self, self.b.call(f, [a.v for a in args]))

    def target_intrinsic(self, name: str, ret: ir.Type, *args: Val) -> Val:
        """An intrinsic with a fixed name (llvm.x86.…)."""
        return Val(self, self.b.call(self._declare(name, ret, [a.t for a in args]), [a.v for a in args]))

    def call(self, f: Fn, *args: Val) -> Val:
        return Val(self, self.b.call(f.fn, [a.v for a in args]))

    def call_pointer(self, f: Val, ret: ir.Type, *args: Val) -> Val:
        """Call through a pointer value. llvmlite wants a typed pointer, so the address goes through an integer."""
        t = ir.FunctionType(ret, [a.t for a in args]).as_pointer()
        return Val(self, self.b.call(self.b.inttoptr(self.b.ptrtoint(f.v, i64), t), [a.v for a in args]))

    def ret(self, x: Val | None = None) -> None:
        if x is None:
            self.b.ret_void()
        else:
            self.b.ret(x.v)


class Loop:
    """The exit of Fn.loop."""

    def __init__(self, k: Fn, body: ir.Block, end: ir.Block):
        self.k, self.body, self.end = k, body, end

    def leave_if(self, condition: Val) -> None:
        go_on = self.k.b.append_basic_block("go_on")
        self.k.b.cbranch(condition.v, self.end, go_on)
        self.k.b.position_at_end(go_on)

    def again_if(self, condition: Val) -> None:
        go_on = self.k.b.append_basic_block("go_on")
        self.k.b.cbranch(condition.v, self.body, go_on)
        self.k.b.position_at_end(go_on)
