"""One declaration, two views: a NumPy dtype for Python, field loads for kernels."""

from __future__ import annotations

from typing import Any

import llvmlite.ir as ir
import numpy as np

from colibri_offload.jit.emit.types import f32, i32, i64, ptr
from colibri_offload.jit.emit.values import Val

_NUMPY = {str(ptr): np.uint64, str(i64): np.int64, str(i32): np.int32, str(f32): np.float32}


class Struct:
    """Struct("Mat", w=ptr, n=i64): `.dtype` is the aligned NumPy dtype, `.at(p).n` loads a field in a kernel."""

    def __init__(self, name: str, **fields: ir.Type):
        self.name, self.fields = name, fields
        self.dtype = np.dtype([(n, _NUMPY[str(t)]) for n, t in fields.items()], align=True)

    @property
    def nbytes(self) -> int:
        return self.dtype.itemsize

    def at(self, p: Val) -> StructView:
        return StructView(self, p)

    def new(self, count: int = 1) -> np.ndarray:
        """A zeroed array of `count` descriptors."""
        return np.zeros(count, self.dtype)


class StructView:
    """Loads fields of the struct at a pointer."""

    def __init__(self, struct: Struct, p: Val):
        self._struct, self._p = struct, p

    def __getattr__(self, name: str) -> Any:
        assert self._struct.dtype.fields is not None
        if name not in self._struct.fields:
            raise AttributeError(f"{self._struct.name} has no field {name}")
        return self._p.load(self._struct.fields[name], int(self._struct.dtype.fields[name][1]))
