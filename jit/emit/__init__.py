"""The emitter layer: LLVM IR written as expressions. A kernel body imports from here and reads like its equation."""

from colibri_offload.jit.emit.function import Fn
from colibri_offload.jit.emit.struct import Struct
from colibri_offload.jit.emit.types import bf16, f16, f32, i8, i16, i32, i64, ptr, vec, void
from colibri_offload.jit.emit.values import Val, Var

__all__ = ["Fn", "Struct", "Val", "Var", "bf16", "f16", "f32", "i8", "i16", "i32", "i64", "ptr", "vec", "void"]
