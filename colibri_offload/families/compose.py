"""From a checkpoint's tensor to a slot's: the steps of a Source, applied lazily to decoded rows."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np

from colibri_offload.checkpoint.base import Tensor, reshaper
from colibri_offload.errors import CheckpointError, UnsupportedError
from colibri_offload.families.spec import Source

ELEMENT_NBYTES = {"F32": 4, "F16": 2, "BF16": 2}
# Made from a hub checkpoint's parts, and turned as its float tensors are.
OF_PARTS = ("Q4_Z", "INT8", "F8_E4M3")


def is_blocked(fmt: str) -> bool:
    """Whether a file stores `fmt` as blocks, which some checkpoints turn as they quantise."""
    return fmt not in ELEMENT_NBYTES and fmt not in OF_PARTS


def compose(tensor: Tensor, source: Source) -> Tensor:
    """`tensor` (of one layer and one expert) after the steps of `source`. Nothing is read.

    Raises: CheckpointError when the shape does not allow a step; UnsupportedError for a turned block format.
    """
    if (source.transpose or source.swap) and tensor.to_float32 is not None:
        tensor = tensor.to_float32()
    if source.transpose:
        tensor = _swap(tensor)
    if source.rows is not None:
        tensor = _rows(tensor, slice(*source.rows))
    if source.heads is not None:
        tensor = _heads(tensor, *source.heads)
    if source.swap:
        tensor = _swap(tensor)
    return tensor


def drop_unit_axes(tensor: Tensor, shape: tuple[int, ...]) -> Tensor:
    """`tensor` as `shape` when the two differ only in axes of size 1; else unchanged (some writers squeeze them)."""
    if tensor.shape == shape or _squeezed(tensor.shape) != _squeezed(shape) or tensor.shape[-1:] != shape[-1:]:
        return tensor
    pick = _reshape(shape[:-1])
    return tensor.view(shape, pick)


def _squeezed(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(n for n in shape if n != 1)


def _reshape(leading: tuple[int, ...]) -> Callable[[np.ndarray], np.ndarray]:
    return lambda rows: rows.reshape(*leading, rows.shape[-1])


def _rows(tensor: Tensor, rows: slice) -> Tensor:
    count = len(range(*rows.indices(tensor.shape[0])))
    if count == 0:
        raise CheckpointError(f"{tensor.name}: shape {list(tensor.shape)} has too few rows; download the file again")
    shape = (count, *tensor.shape[1:])
    if len(tensor.shape) == 1:
        size = _element_nbytes(tensor)
        return tensor.view(shape, lambda row: np.ascontiguousarray(row.reshape(-1, size)[rows]).reshape(-1))
    start, _, step = rows.indices(tensor.shape[0])
    if tensor.contiguous and step == 1:
        # A run of rows lies in one piece: read no more than it.
        (whole,) = tensor.slices
        row_nbytes = whole.nbytes // int(np.prod(tensor.shape[:-1], dtype=np.int64))
        stride = whole.nbytes // tensor.shape[0]
        part = replace(whole, offset=whole.offset + start * stride, nbytes=count * stride)
        return replace(tensor, shape=shape, slices=(part,), decode=reshaper(shape, row_nbytes), narrow=None)
    return tensor.view(shape, lambda decoded: decoded[rows])


def _heads(tensor: Tensor, n: int, start: int, stop: int | None) -> Tensor:
    rows, *rest = tensor.shape
    if rows % n or len(rest) != 1:
        raise CheckpointError(
            f"{tensor.name}: shape {list(tensor.shape)} does not divide into {n} heads; download the file again"
        )
    kept = slice(start, stop)
    count = len(range(*kept.indices(rows // n)))
    return tensor.view(
        (n, count, *rest), lambda decoded: decoded.reshape(n, rows // n, decoded.shape[-1])[:, kept]
    )


def _swap(tensor: Tensor) -> Tensor:
    if len(tensor.shape) < 2:
        raise CheckpointError(f"{tensor.name}: shape {list(tensor.shape)} has no two axes; download the file again")
    size = _element_nbytes(tensor)
    *outer, rows, cols = tensor.shape

    def swap(decoded: np.ndarray) -> np.ndarray:
        elements = decoded.reshape(*outer, rows, cols, size)
        return np.ascontiguousarray(np.swapaxes(elements, -3, -2)).reshape(*outer, cols, rows * size)

    return tensor.view((*outer, cols, rows), swap)


def _element_nbytes(tensor: Tensor) -> int:
    if tensor.fmt not in ELEMENT_NBYTES:
        raise UnsupportedError(
            f"{tensor.name}: format {tensor.fmt} cannot be turned element by element; "
            "use a file in which this tensor is F32, F16, BF16 or already split"
        )
    return ELEMENT_NBYTES[tensor.fmt]
