"""Tensors read in pieces of rows, as stored or as float32: memory stays bounded however large a tensor is."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from colibri_offload.checkpoint.base import Tensor
from colibri_offload.checkpoint.files import shown
from colibri_offload.checkpoint.rows import row_blocks
from colibri_offload.convert.quants import LARGEST
from colibri_offload.errors import CheckpointError
from colibri_offload.graph.packer import Packer
from colibri_offload.jit.compiler import Compiler
from colibri_offload.jit.formats import get_format
from colibri_offload.jit.kernels import Kernels
from colibri_offload.jit.targets import get_target


def make_packer() -> Packer:
    """A packer of its own, for work without an engine."""
    return Packer(Kernels(Compiler(get_target())))


class RowReader:
    """Rows of tensors in any float or block format. `limit_nbytes` bounds a piece once it is float32."""

    def __init__(self, packer: Packer, limit_nbytes: int):
        self._packer, self._limit_nbytes = packer, limit_nbytes

    def stored(self, tensor: Tensor) -> Iterator[np.ndarray]:
        """uint8 pieces as row_blocks gives them, small enough that each is at most `limit_nbytes` as float32."""
        fmt = get_format(tensor.fmt)
        columns = tensor.shape[-1] if tensor.shape else 1
        share = self._limit_nbytes * fmt.row_nbytes(columns) // (4 * max(1, columns))
        return row_blocks(tensor, share)

    def values(self, tensor: Tensor) -> Iterator[np.ndarray]:
        """float32 [n, columns] pieces, exactly as the kernels understand the format."""
        columns = tensor.shape[-1] if tensor.shape else 1
        for rows in self.stored(tensor):
            yield self._packer.float32(tensor.fmt, rows, columns)

    def largest(self, tensor: Tensor) -> float:
        """The largest magnitude; CheckpointError for NaN and Inf."""
        return max((_magnitude(tensor, x) for x in self.values(tensor)), default=0.0)

    def converted(self, tensor: Tensor, fmt_name: str) -> Iterator[np.ndarray]:
        """uint8 [n, row_nbytes] pieces in another format; bit for bit when it is the tensor's own.

        Raises CheckpointError for NaN, Inf, and values that the format cannot express.
        """
        if fmt_name == tensor.fmt:
            yield from self.stored(tensor)
            return
        fmt, limit = get_format(fmt_name), LARGEST.get(fmt_name, float("inf"))
        for x in self.values(tensor):
            largest = _magnitude(tensor, x)
            if largest > limit:
                raise CheckpointError(
                    f"{tensor.slices[0].path}: tensor {shown(tensor.name)} holds {largest:g}, beyond the range of "
                    f"{fmt_name} ({limit:g}): choose --quant bf16 or f32"
                )
            yield fmt.quantize(x)


def _magnitude(tensor: Tensor, x: np.ndarray) -> float:
    # max and min propagate NaN, and need no copy of x
    largest = max(float(x.max()), -float(x.min())) if x.size else 0.0
    if not np.isfinite(largest):
        raise CheckpointError(
            f"{tensor.slices[0].path}: tensor {shown(tensor.name)} holds NaN or Inf: "
            "the file is damaged; download it again"
        )
    return largest
