"""Recognise a file whose end was never written: an interrupted download or copy into preallocated space leaves zeros.

A tensor of zeros can be legitimate, so zeros alone prove nothing. Two signs do: a quantised tensor that is zero
throughout (its scales would all be 0), or a run of zeros that begins inside one tensor and swallows the next whole.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from colibri_offload.checkpoint.files import shown
from colibri_offload.errors import CheckpointError

MIN_TAIL_BYTES = 64 << 10
MIN_OVERLAP_BYTES = 4 << 10  # zeros at the end of the tensor in which the run begins; fewer may be its own padding
MAX_TAIL_BYTES = 64 << 20  # enough to be sure, and quick to read
CHUNK_BYTES = 64 << 10


@dataclass(frozen=True)
class Span:
    """A tensor's bytes [begin, end) of its file."""

    name: str
    begin: int
    end: int
    quantised: bool = False


def refuse_zero_tail(f: BinaryIO, size: int, spans: Sequence[Span], path: Path) -> None:
    """CheckpointError when the file's end was never written. `spans` are sorted and disjoint; reads at most 64 MiB."""
    if not spans:
        return
    end = spans[-1].end
    start = _zeros_from(f, size, max(spans[0].begin, end - MAX_TAIL_BYTES))
    if end - start < MIN_TAIL_BYTES:
        return
    whole = [s for s in spans if s.begin >= start and s.end > s.begin]
    cut = next((s for s in spans if s.begin < start < s.end), None)
    if cut is not None and cut.quantised and end - start >= MAX_TAIL_BYTES:
        whole.insert(0, cut)
    swallowed = bool(whole) and cut is not None and cut.end - start >= MIN_OVERLAP_BYTES
    if swallowed or any(s.quantised for s in whole):
        raise CheckpointError(
            f"{path}: tensor {shown(whole[0].name)} and all after it are zeros (the last {size - start} bytes): "
            "the file was not written to its end; download it again"
        )


def _zeros_from(f: BinaryIO, size: int, floor: int) -> int:
    """The offset from which the file holds only zeros, not searched below `floor`."""
    end = size
    while end > floor:
        begin = max(floor, end - CHUNK_BYTES)
        f.seek(begin)
        kept = f.read(end - begin).rstrip(b"\0")
        if kept:
            return begin + len(kept)
        end = begin
    return end
