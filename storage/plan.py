"""Stores whose blocks are byte ranges of files say so by a plan, so that an asynchronous reader can do the reading."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from threading import local
from typing import NamedTuple

from colibri_offload.storage.arena import ALIGNMENT, anonymous, round_up
from colibri_offload.storage.base import ExpertKey, ExpertStore, check_room, key_name
from colibri_offload.storage.files import FileSet


class Slice(NamedTuple):
    """`nbytes` bytes at `offset` of a file."""

    path: Path
    offset: int
    nbytes: int

    @property
    def stop(self) -> int:
        return self.offset + self.nbytes


class Cut(NamedTuple):
    """Where one raw lies: `nbytes` bytes at `start` of the bytes of reads[read]."""

    read: int
    start: int
    nbytes: int


@dataclass(frozen=True)
class ReadPlan:
    """`reads` are to be read; `cuts` cut them into the raws that finish() takes.

    `in_place`: one read, 4096-aligned in its file and followed there by padding up to the next multiple of 4096: its
    bytes are the block, and are best read straight into the destination.
    """

    reads: tuple[Slice, ...]
    cuts: tuple[Cut, ...]
    in_place: bool = False

    @property
    def nbytes(self) -> int:
        """Bytes to be read, without alignment padding."""
        return sum(part.nbytes for part in self.reads)

    @property
    def staging_nbytes(self) -> int:
        """Size of a staging buffer in which every read starts at its own multiple of 4096, padded for direct I/O."""
        return 0 if self.in_place else sum(span(part) for part in self.reads)


def span(part: Slice) -> int:
    """Bytes of the 4096-aligned range of the file that covers `part`."""
    return round_up(part.stop) - part.offset // ALIGNMENT * ALIGNMENT


def coalesce(slices: Iterable[Slice]) -> ReadPlan:
    """A plan in which slices that touch or overlap in their file are read together; raws keep the order of `slices`."""
    wanted = list(slices)
    reads: list[Slice] = []
    cuts = [Cut(0, 0, 0)] * len(wanted)
    for i in sorted(range(len(wanted)), key=lambda i: (str(wanted[i].path), wanted[i].offset)):
        part = wanted[i]
        last = reads[-1] if reads else None
        if last is not None and last.path == part.path and part.offset <= last.stop:
            reads[-1] = last._replace(nbytes=max(last.stop, part.stop) - last.offset)
        else:
            reads.append(part)
        cuts[i] = Cut(len(reads) - 1, part.offset - reads[-1].offset, part.nbytes)
    return ReadPlan(tuple(reads), tuple(cuts))


def cut_raws(plan: ReadPlan, parts: list[memoryview]) -> list[memoryview]:
    """The raws of a plan from the bytes of its reads."""
    return [parts[cut.read][cut.start : cut.start + cut.nbytes] for cut in plan.cuts]


class PlannedStore(ExpertStore):
    """A store that tells where its blocks lie. Blocking reads are built here on plan() and finish()."""

    def __init__(self, what: str) -> None:
        self._files = FileSet(what)
        self._thread = local()

    @abstractmethod
    def plan(self, key: ExpertKey) -> ReadPlan:
        """What to read for the block. KeyError for an unknown key."""

    @abstractmethod
    def finish(self, key: ExpertKey, raws: list[memoryview], out: memoryview) -> None:
        """Make out[:nbytes(key)] from the raws, which are valid during the call only, and check it.

        With an in_place plan the one raw already is out[:nbytes(key)].
        """

    def medium_nbytes(self, key: ExpertKey) -> int:
        return self.plan(key).nbytes

    def read_into(self, key: ExpertKey, buffer: memoryview) -> int:
        plan = self.plan(key)
        check_room(key_name(key), self.nbytes(key), buffer)
        staging = buffer if plan.in_place else self._staging(plan.nbytes)
        parts, start = [], 0
        for part in plan.reads:
            parts.append(staging[start : start + part.nbytes])
            start += part.nbytes
            self._files.read(key_name(key), part.path, part.offset, parts[-1])
        self.finish(key, cut_raws(plan, parts), buffer)
        return plan.nbytes

    def _staging(self, nbytes: int) -> memoryview:
        """This thread's staging buffer, grown to `nbytes`."""
        held: memoryview | None = getattr(self._thread, "staging", None)
        if held is None or len(held) < nbytes:
            held = self._thread.staging = memoryview(anonymous(nbytes))
        return held

    def close(self) -> None:
        self._files.close()
