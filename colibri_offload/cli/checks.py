"""Reads a model from end to end and names what is broken in it."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from pathlib import Path

from colibri_offload.checkpoint.base import Checkpoint, Tensor
from colibri_offload.convert.rows import RowReader, make_packer, row_blocks
from colibri_offload.convert.side_files import broken_files
from colibri_offload.errors import CheckpointError
from colibri_offload.graph.source import CheckpointSource
from colibri_offload.jit.formats import FORMATS
from colibri_offload.models import model_path, open_model
from colibri_offload.storage.open import verify_store

Progress = Callable[[str, int, int], None]
_PIECE_NBYTES = 64 << 20


def check_model(model: str, progress: Progress) -> list[str]:
    """Names of what is broken, empty when all is well.

    Raises ColibriError for a model that cannot be opened at all: a wrong header, a missing tensor or file.
    """
    path, packer = model_path(model), make_packer()
    source, _ = open_model(path, packer)
    with closing(source):
        if isinstance(source, CheckpointSource):
            return _check_tensors(source.checkpoint, RowReader(packer, _PIECE_NBYTES), progress)
        described = source.model.get("files", {})  # type: ignore[attr-defined]
    # closed before it is opened again: a process may have an LMDB environment open only once
    return _check_store(path, described, progress)


def _check_store(path: Path, described: dict, progress: Progress) -> list[str]:
    records = verify_store(path, lambda done, total: progress("checking", done, total))
    return [*records, *(f"file {name}" for name in broken_files(path, described))]


def _check_tensors(checkpoint: Checkpoint, reader: RowReader, progress: Progress) -> list[str]:
    broken, done = [], 0
    total = sum(tensor.nbytes for tensor in checkpoint.tensors.values())
    for tensor in checkpoint.tensors.values():
        try:
            _check_tensor(tensor, reader)
        except CheckpointError as error:
            broken.append(str(error))
        done += tensor.nbytes
        progress("checking", done, total)
    return broken


def _check_tensor(tensor: Tensor, reader: RowReader) -> None:
    """Read all of it; NaN and Inf are errors where the numbers can be understood, scales of blocks included."""
    if tensor.fmt in FORMATS:
        reader.largest(tensor)
    else:
        for _ in row_blocks(tensor, _PIECE_NBYTES):
            pass
