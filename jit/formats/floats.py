"""F32, F16, BF16: 16 rows side by side for each column. They compute with float32 activations."""

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np

from colibri_offload.jit.emit import Fn, Val, bf16, f16, f32, vec
from colibri_offload.jit.formats.base import ROWS, Format, Move


class FloatFormat(Format):
    """One element per block; a step is 32 columns."""

    is_float, integer = True, False
    block_elements, step = 1, 32
    llvm_type: ClassVar[Any]

    def moves(self, block: int) -> list[Move]:
        n = self.block_nbytes
        return [Move(0, block * ROWS * n, n)]

    def column(self, k: Fn, tile: Val, column: int, sub: int) -> Val:
        """f32 [lanes]: column `column` of the step."""
        n = self.block_nbytes * k.target.lanes
        offset = column * ROWS * self.block_nbytes + n * sub
        return tile.load(vec(self.llvm_type, k.target.lanes), offset, n).f32()


class F32(FloatFormat):
    name, block_nbytes, tile_nbytes, llvm_type = "F32", 4, 32 * ROWS * 4, f32

    def quantize(self, x: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(x, np.float32).view(np.uint8)


class F16(FloatFormat):
    name, block_nbytes, tile_nbytes, llvm_type = "F16", 2, 32 * ROWS * 2, f16

    def quantize(self, x: np.ndarray) -> np.ndarray:
        return np.ascontiguousarray(x.astype(np.float16)).view(np.uint8)


class BF16(FloatFormat):
    name, block_nbytes, tile_nbytes, llvm_type = "BF16", 2, 32 * ROWS * 2, bf16

    def quantize(self, x: np.ndarray) -> np.ndarray:
        """Round to nearest even; NaN stays NaN."""
        u = np.ascontiguousarray(x, np.float32).view(np.uint32)
        rounded = (u + (0x7FFF + ((u >> 16) & 1))) >> 16
        return np.where(np.isnan(x), (u >> 16) | 0x40, rounded).astype(np.uint16).view(np.uint8)
