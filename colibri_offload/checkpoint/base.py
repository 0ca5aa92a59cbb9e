"""What every checkpoint reader delivers: names, shapes, formats and bytes. Nothing here knows a model family."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np

from colibri_offload.errors import CheckpointError


@dataclass(frozen=True)
class FileSlice:
    """`nbytes` bytes at `offset` of a file."""

    path: Path
    offset: int
    nbytes: int

    def part(self, i: int, count: int) -> FileSlice:
        """The i-th of `count` equal parts."""
        size = self.nbytes // count
        return FileSlice(self.path, self.offset + i * size, size)


Raw = Sequence[memoryview]
Decode = Callable[[Raw], np.ndarray]


@dataclass(frozen=True)
class Tensor:
    """A logical tensor: where its bytes lie and how they become rows of a format.

    `fmt` is a format name of the jit package ("F32", "F16", "BF16", "Q4_0", "MXFP4" …). `decode(raws)` takes the bytes
    of `slices`, in order, and returns uint8 [*shape[:-1], row_nbytes]: row-major rows of the format's blocks as ggml
    lays them out. A quantised hub tensor that is stored as several tensors is one logical tensor with several slices.
    `narrow(i)`, where given, makes the i-th entry along the first axis out of that entry's own bytes; `view` drops it.
    `to_float32()`, where a block format offers it, is the same tensor in F32, whose elements can be moved one by one.
    """

    name: str
    shape: tuple[int, ...]
    fmt: str
    slices: tuple[FileSlice, ...]
    decode: Decode
    contiguous: bool = True  # decode is a plain reshape of one slice: leading-axis views narrow the slice
    narrow: Callable[[int], Tensor] | None = None
    to_float32: Callable[[], Tensor] | None = None

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""
        return sum(s.nbytes for s in self.slices)

    def index(self, i: int) -> Tensor:
        """The i-th entry along the first axis, or IndexError; reads only its own bytes where the layout allows."""
        if not self.shape or not 0 <= i < self.shape[0]:
            raise IndexError(f"{self.name}: index {i} is outside the first axis of shape {list(self.shape)}")
        rest = self.shape[1:]
        if self.narrow is not None:
            return self.narrow(i)
        if self.contiguous:
            (whole,) = self.slices
            part = whole.part(i, self.shape[0])
            row_nbytes = part.nbytes // max(1, int(np.prod(rest[:-1], dtype=np.int64)))
            return Tensor(f"{self.name}[{i}]", rest, self.fmt, (part,), reshaper(rest, row_nbytes))
        return self.view(rest, lambda rows: rows[i], f"{self.name}[{i}]")

    def view(self, shape: tuple[int, ...], pick: Callable[[np.ndarray], np.ndarray], name: str | None = None) -> Tensor:
        """A tensor made from this one's decoded rows (uint8 [..., row_nbytes]) by `pick`."""
        decode = self.decode
        return replace(
            self,
            name=name or self.name,
            shape=shape,
            decode=lambda raws: pick(decode(raws)),
            contiguous=False,
            narrow=None,
            to_float32=None,
        )

    def read(self) -> np.ndarray:
        """uint8 [*shape[:-1], row_nbytes], read from the files now. CheckpointError when a file has gone or shrunk."""
        return self.decode([memoryview(read_slice(s)) for s in self.slices])


def read_slice(part: FileSlice) -> bytearray:
    """The slice's bytes, or CheckpointError naming the file."""
    try:
        with open(part.path, "rb", buffering=0) as f:
            f.seek(part.offset)
            return read_exactly(f, part.nbytes, part.path)
    except OSError as error:
        raise CheckpointError(f"{part.path}: cannot be read ({error.strerror}); check the file and the disk") from error


def read_exactly(f: BinaryIO, nbytes: int, path: Path) -> bytearray:
    """`nbytes` bytes from f, or CheckpointError naming the file."""
    out = bytearray(nbytes)
    view, done = memoryview(out), 0
    while done < nbytes:
        n = f.readinto(view[done:])  # type: ignore[attr-defined]
        if not n:
            raise CheckpointError(f"{path}: ends {nbytes - done} bytes too early: it is truncated; download it again")
        done += n
    return out


def reshaper(shape: tuple[int, ...], row_nbytes: int) -> Decode:
    """decode for a tensor stored as is in one slice."""
    return lambda raws: np.frombuffer(raws[0], np.uint8).reshape(*shape[:-1], row_nbytes)


def stacked(
    name: str, shape: tuple[int, ...], fmt: str, slices: tuple[FileSlice, ...], decode_for: Callable[..., Decode]
) -> Tensor:
    """A tensor whose every slice is split evenly by the first axis, so that one entry needs only its share of each.

    `decode_for(shape)` gives the decode of a tensor of that shape (the whole one, or one entry along the first axis).
    """

    def entry(i: int) -> Tensor:
        parts = tuple(s.part(i, shape[0]) for s in slices)
        return Tensor(f"{name}[{i}]", shape[1:], fmt, parts, decode_for(shape[1:]), contiguous=False)

    return Tensor(name, shape, fmt, slices, decode_for(shape), contiguous=False, narrow=entry)


class Checkpoint(ABC):
    """A model's files, opened and checked. `tensors` is complete and every slice lies inside its file."""

    path: Path
    files: tuple[Path, ...]
    tensors: Mapping[str, Tensor]

    @property
    @abstractmethod
    def kind(self) -> str:
        """The reader: "gguf" or "safetensors"."""

    @property
    @abstractmethod
    def metadata(self) -> Mapping[str, Any]:
        """GGUF: the key-value section. Hub directory: config.json (plus "generation_config" when there is one)."""
