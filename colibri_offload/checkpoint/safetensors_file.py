"""One safetensors file: its header, checked against the file before anything is believed.

Layout: u64 header length, a JSON object name → {dtype, shape, data_offsets}, then the data without holes.
Source: https://github.com/huggingface/safetensors#format
"""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

from colibri_offload.checkpoint.base import FileSlice
from colibri_offload.checkpoint.files import open_checked, parse_object, refuse_lfs_pointer, shown
from colibri_offload.checkpoint.hub_types import ITEM_NBYTES, Stored
from colibri_offload.checkpoint.zero_tail import Span, refuse_zero_tail
from colibri_offload.errors import CheckpointError, UnsupportedError

MAX_HEADER_BYTES = 100_000_000  # the limit of the safetensors library
MAX_DIMS = 8
REMEDY = "the file is damaged or incomplete: download it again"


def read_safetensors_file(path: Path) -> dict[str, Stored]:
    """Name → tensor, in the header's order. CheckpointError when the file is damaged."""
    with open_checked(path) as (f, size):
        head = f.read(64)
        refuse_lfs_pointer(path, head)
        if size < 8:
            raise CheckpointError(f"{path}: has {size} bytes, fewer than the 8 of a header's length; {REMEDY}")
        length = int.from_bytes(head[:8], "little")
        data = 8 + length
        if data > size or length > MAX_HEADER_BYTES:
            raise CheckpointError(
                f"{path}: claims a header of {length} bytes in a file of {size}: not a safetensors file, or it is "
                "damaged or incomplete: download it again"
            )
        f.seek(8)
        header = parse_object(f.read(length), path)
        header.pop("__metadata__", None)
        tensors = {name: _stored(name, entry, path, data, size) for name, entry in header.items()}
        refuse_zero_tail(f, size, _spans(tensors, path, data, size), path)
    return tensors


def _stored(name: str, entry: Any, path: Path, data: int, size: int) -> Stored:
    where = f"{path}: tensor {shown(name)}"
    if not isinstance(entry, dict) or not {"dtype", "shape", "data_offsets"} <= entry.keys():
        raise CheckpointError(
            f"{where} is described by {shown(entry)} instead of dtype, shape and data_offsets; {REMEDY}"
        )
    dtype, shape, offsets = entry["dtype"], entry["shape"], entry["data_offsets"]
    if not isinstance(dtype, str) or dtype not in ITEM_NBYTES:
        known = ", ".join(ITEM_NBYTES)
        raise UnsupportedError(f"{where} has the type {shown(dtype)}; supported are {known}")
    if not _naturals(shape) or len(shape) > MAX_DIMS:
        raise CheckpointError(f"{where} has the impossible shape {shown(shape)}; {REMEDY}")
    if not _naturals(offsets) or len(offsets) != 2 or not offsets[0] <= offsets[1] <= size - data:
        raise CheckpointError(f"{where} has the offsets {shown(offsets)} in {size - data} bytes of data; {REMEDY}")
    begin, end = offsets
    expected = ITEM_NBYTES[dtype] * math.prod(shape)
    if end - begin != expected:
        raise CheckpointError(f"{where} has {end - begin} bytes, but {dtype} {shape} takes {shown(expected)}; {REMEDY}")
    return Stored(name, dtype, tuple(shape), FileSlice(path, data + begin, end - begin))


def _naturals(value: Any) -> bool:
    return isinstance(value, list) and all(type(v) is int and 0 <= v < 1 << 63 for v in value)


def _spans(tensors: dict[str, Stored], path: Path, data: int, size: int) -> list[Span]:
    """The tensors in file order. They must cover the data without overlap or hole, as the format demands."""
    spans = [Span(t.name, t.slice.offset, t.slice.offset + t.slice.nbytes) for t in tensors.values()]
    spans.sort(key=lambda s: (s.begin, s.end))
    expected, before = data, "the header"
    for span in spans:
        if span.begin != expected:
            fault = "overlaps" if span.begin < expected else f"leaves a hole of {span.begin - expected} bytes after"
            raise CheckpointError(f"{path}: tensor {shown(span.name)} {fault} {before}; {REMEDY}")
        expected, before = span.end, shown(span.name)
    if expected != size:
        raise CheckpointError(f"{path}: {size - expected} bytes at the end belong to no tensor; {REMEDY}")
    return spans
