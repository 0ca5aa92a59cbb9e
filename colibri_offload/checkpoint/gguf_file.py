"""One GGUF file, checked from its first byte to its last. Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from colibri_offload.checkpoint.base import FileSlice, Tensor, reshaper
from colibri_offload.checkpoint.files import open_checked, refuse_lfs_pointer, shown
from colibri_offload.checkpoint.ggml_types import ggml_type
from colibri_offload.checkpoint.gguf_cursor import Cursor
from colibri_offload.checkpoint.zero_tail import Span, refuse_zero_tail
from colibri_offload.errors import CheckpointError, UnsupportedError

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_DIMS = 4
DEFAULT_ALIGNMENT = 32
MIN_KEY_VALUE_BYTES = 8 + 1 + 4 + 1
MIN_TENSOR_INFO_BYTES = 8 + 1 + 4 + 8 + 4 + 8


@dataclass(frozen=True)
class GgufFile:
    """What one file holds, shards of a split model included."""

    path: Path
    metadata: dict[str, Any]
    tensors: dict[str, Tensor]


@dataclass(frozen=True)
class _Info:
    """A tensor as the header describes it; `offset` counts from the start of the data section."""

    name: str
    shape: tuple[int, ...]
    fmt: str
    quantised: bool
    row_nbytes: int
    offset: int

    @property
    def nbytes(self) -> int:
        return self.row_nbytes * math.prod(self.shape[:-1])


def read_gguf_file(path: Path) -> GgufFile:
    """Parse and check one file. CheckpointError when it is damaged, UnsupportedError when it is of a foreign kind."""
    with open_checked(path) as (f, size):
        cursor = Cursor(f, size, path)
        _check_version(cursor)
        n_tensors = cursor.count("tensors", MIN_TENSOR_INFO_BYTES)
        n_values = cursor.count("metadata keys", MIN_KEY_VALUE_BYTES)
        metadata = _metadata(cursor, n_values)
        alignment = _alignment(metadata, cursor)
        infos = _infos(cursor, n_tensors, alignment)
        data = -(-cursor.offset // alignment) * alignment
        spans = _spans(infos, data, cursor)
        refuse_zero_tail(f, size, spans, path)
    tensors = {i.name: _tensor(i, path, data) for i in infos}
    return GgufFile(path, metadata, tensors)


def _check_version(cursor: Cursor) -> None:
    path = cursor.path
    head = cursor.peek(64)
    refuse_lfs_pointer(path, head)
    if head[:4] != MAGIC:
        raise CheckpointError(
            f"{path}: starts with {shown(head[:4])} instead of {shown(MAGIC)}: not a GGUF file; check the download"
        )
    cursor.take(4, "the magic")
    version = cursor.u32("the version")
    if version in VERSIONS:
        return
    swapped = int.from_bytes(version.to_bytes(4, "little"), "big")
    if swapped in (1, *VERSIONS):
        raise UnsupportedError(f"{path}: is a big-endian GGUF file (version {swapped}); use the little-endian one")
    raise UnsupportedError(f"{path}: has GGUF version {version}; 2 and 3 are supported: convert the model again")


def _metadata(cursor: Cursor, count: int) -> dict[str, Any]:
    out: dict[str, Any] = {}
    for _ in range(count):
        key = cursor.name("a metadata key")
        if key in out:
            cursor.fail(f"the metadata key {shown(key)} occurs twice")
        out[key] = cursor.value(key)
    return out


def _alignment(metadata: dict[str, Any], cursor: Cursor) -> int:
    value = metadata.get("general.alignment", DEFAULT_ALIGNMENT)
    if type(value) is not int or not 0 < value <= cursor.size or value & (value - 1):
        cursor.fail(f"general.alignment is {shown(value)}, not a power of two within the file")
    return value


def _infos(cursor: Cursor, count: int, alignment: int) -> list[_Info]:
    out: list[_Info] = []
    seen: set[str] = set()
    for _ in range(count):
        info = _info(cursor, alignment)
        if info.name in seen:
            cursor.fail(f"tensor {shown(info.name)} occurs twice")
        seen.add(info.name)
        out.append(info)
    return out


def _info(cursor: Cursor, alignment: int) -> _Info:
    name = cursor.name("a tensor name")
    tensor = f"tensor {shown(name)}"
    n_dims = cursor.u32(tensor)
    if not 0 < n_dims <= MAX_DIMS:
        cursor.fail(f"{tensor} claims {n_dims} dimensions, not 1 to {MAX_DIMS}")
    dims = [cursor.u64(tensor) for _ in range(n_dims)]
    kind = ggml_type(cursor.u32(tensor), cursor.path, name)
    offset = cursor.u64(tensor)
    if not all(0 < d < 1 << 63 for d in dims):
        cursor.fail(f"{tensor} has the impossible dimensions {dims}")
    if dims[0] % kind.block_elements:
        block = f"the {kind.block_elements} in a {kind.name} block"
        cursor.fail(f"{tensor} has rows of {dims[0]} elements, not a multiple of {block}")
    if offset % alignment:
        cursor.fail(f"{tensor} has the offset {offset}, not a multiple of the alignment {alignment}")
    row_nbytes = dims[0] // kind.block_elements * kind.block_nbytes
    return _Info(name, tuple(reversed(dims)), kind.name, kind.quantised, row_nbytes, offset)


def _spans(infos: list[_Info], data: int, cursor: Cursor) -> list[Span]:
    """The tensors in file order, each inside the file, none overlapping another."""
    spans = sorted(
        (Span(i.name, data + i.offset, data + i.offset + i.nbytes, i.quantised) for i in infos), key=lambda s: s.begin
    )
    before: Span | None = None
    for span in spans:
        if span.end > cursor.size:
            cursor.fail(f"tensor {shown(span.name)} ends at byte {span.end}, but the file at byte {cursor.size}")
        if before is not None and span.begin < before.end:
            cursor.fail(f"tensors {shown(before.name)} and {shown(span.name)} overlap at byte {span.begin}")
        before = span
    return spans


def _tensor(info: _Info, path: Path, data: int) -> Tensor:
    whole = FileSlice(path, data + info.offset, info.nbytes)
    return Tensor(info.name, info.shape, info.fmt, (whole,), reshaper(info.shape, info.row_nbytes))
