"""The LLVM types that kernels use, and constants of them. llvmlite has no bfloat, so it is added here."""

from __future__ import annotations

from typing import Any

import llvmlite.ir as ir


class BFloatType(ir.types._BaseFloatType):
    """LLVM's `bfloat`: the upper half of a float32."""

    null = "0.0"
    intrinsic_name = "bf16"

    def __str__(self) -> str:
        return "bfloat"

    def format_constant(self, value: float) -> str:
        return ir.types._format_double(value)


BFloatType._create_instance()

i1, i8, i16, i32, i64 = (ir.IntType(n) for n in (1, 8, 16, 32, 64))
f16, bf16, f32 = ir.HalfType(), BFloatType(), ir.FloatType()
ptr, void = ir.PointerType(), ir.VoidType()

_BITS = {ir.HalfType: 16, BFloatType: 16, ir.FloatType: 32, ir.PointerType: 64}
_NAMES = {ir.HalfType: "f16", BFloatType: "bf16", ir.FloatType: "f32", ir.PointerType: "p0"}


def vec(element: ir.Type, lanes: int) -> ir.VectorType:
    """<lanes x element>."""
    return ir.VectorType(element, lanes)


def element(t: ir.Type) -> ir.Type:
    """A vector's element type, or the scalar type itself."""
    return t.element if isinstance(t, ir.VectorType) else t


def like(t: ir.Type, scalar: ir.Type) -> ir.Type:
    """`scalar` in the shape of `t`: <n x scalar> when t is a vector of n lanes."""
    return vec(scalar, t.count) if isinstance(t, ir.VectorType) else scalar


def is_float(t: ir.Type) -> bool:
    return isinstance(element(t), (ir.HalfType, BFloatType, ir.FloatType))


def bits_of(t: ir.Type) -> int:
    """Width of the (element) type in bits."""
    e = element(t)
    return e.width if isinstance(e, ir.IntType) else _BITS[type(e)]


def nbytes_of(t: ir.Type) -> int:
    """Size in memory."""
    return bits_of(t) // 8 * (t.count if isinstance(t, ir.VectorType) else 1)


def mangle(t: ir.Type) -> str:
    """The suffix of an overloaded intrinsic: f32, v16f32, i64 …"""
    if isinstance(t, ir.VectorType):
        return f"v{t.count}{mangle(t.element)}"
    return f"i{t.width}" if isinstance(t, ir.IntType) else _NAMES[type(t)]


def const(t: ir.Type, x: Any) -> ir.Constant:
    """A constant; a scalar value fills a vector, a sequence gives its lanes."""
    if isinstance(t, ir.VectorType):
        x = list(x) if isinstance(x, (list, tuple)) else [x] * t.count
    return ir.Constant(t, x)
