"""A tensor's rows in pieces: memory stays bounded however large the tensor is."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from colibri_offload.checkpoint.base import FileSlice, Tensor, read_slice

GROUP = 16  # pieces are whole groups of as many rows as the compute layout interleaves


def row_blocks(tensor: Tensor, limit_nbytes: int) -> Iterator[np.ndarray]:
    """uint8 [n, row_nbytes] pieces of all rows (leading axes flattened), in order, of about `limit_nbytes` or less.

    n is a multiple of 16 except in the last piece of a tensor, or of an entry where only entries can be read alone.
    A tensor whose layout allows neither is read whole. Raises CheckpointError when a file has gone or shrunk.
    """
    if not tensor.contiguous and tensor.narrow is not None:
        for i in range(tensor.shape[0]):
            yield from row_blocks(tensor.index(i), limit_nbytes)
        return
    rows = int(np.prod(tensor.shape[:-1], dtype=np.int64))
    if not rows or not tensor.nbytes:
        return
    if tensor.contiguous:
        (whole,) = tensor.slices
        row_nbytes = whole.nbytes // rows
        for start, n in _spans(rows, row_nbytes, limit_nbytes):
            part = FileSlice(whole.path, whole.offset + start * row_nbytes, n * row_nbytes)
            yield np.frombuffer(read_slice(part), np.uint8).reshape(n, row_nbytes)
        return
    decoded = tensor.read()
    decoded = decoded.reshape(rows, decoded.shape[-1])
    for start, n in _spans(rows, decoded.shape[1], limit_nbytes):
        yield decoded[start : start + n]


def _spans(rows: int, row_nbytes: int, limit_nbytes: int) -> Iterator[tuple[int, int]]:
    step = max(1, limit_nbytes // max(1, row_nbytes * GROUP)) * GROUP
    for start in range(0, rows, step):
        yield start, min(step, rows - start)
