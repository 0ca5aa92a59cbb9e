"""What every checkpoint reader delivers: names, shapes, formats and bytes. Nothing here knows a model family."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np


@dataclass(frozen=True)
class FileSlice:
    """`nbytes` bytes at `offset` of a file."""

    path: Path
    offset: int
    nbytes: int


Raw = Sequence[memoryview]


@dataclass(frozen=True)
class Tensor:
    """A logical tensor: where its bytes lie and how they become rows of a format.

    `fmt` is a format name of the jit package ("F32", "F16", "BF16", "Q4_0", "MXFP4" …). `decode(raws)` takes the bytes of
    `slices`, in order, and returns uint8 [*shape[:-1], row_nbytes]: row-major rows of the format's blocks as ggml
    lays them out. A quantised hub tensor that is stored as several tensors is one logical tensor with several slices.
    """

    name: str
    shape: tuple[int, ...]
    fmt: str
    slices: tuple[FileSlice, ...]
    decode: Callable[[Raw], np.ndarray]
    contiguous: bool = True  # decode is a plain reshape of one slice: leading-axis views narrow the slice

    @property
    def nbytes(self) -> int:
        """Bytes on disk."""
        return sum(s.nbytes for s in self.slices)

    def index(self, i: int) -> Tensor:
        """The i-th entry along the first axis; reads only its own bytes where the layout allows."""
        rest = self.shape[1:]
        if self.contiguous:
            (whole,) = self.slices
            size = whole.nbytes // self.shape[0]
            part = FileSlice(whole.path, whole.offset + i * size, size)
            row_nbytes = size // int(np.prod(rest[:-1], dtype=np.int64))
            return replace(self, name=f"{self.name}[{i}]", shape=rest, slices=(part,), decode=reshaper(rest, row_nbytes))
        return self.view(rest, lambda rows: rows[i], f"{self.name}[{i}]")

    def view(self, shape: tuple[int, ...], pick: Callable[[np.ndarray], np.ndarray], name: str | None = None) -> Tensor:
        """A tensor made from this one's decoded rows (uint8 [..., row_nbytes]) by `pick`."""
        decode = self.decode
        return replace(self, name=name or self.name, shape=shape, decode=lambda raws: pick(decode(raws)), contiguous=False)

    def read(self) -> np.ndarray:
        """uint8 [*shape[:-1], row_nbytes], read from the files now."""
        raws = []
        for s in self.slices:
            with open(s.path, "rb", buffering=0) as f:
                f.seek(s.offset)
                raws.append(memoryview(read_exactly(f, s.nbytes, s.path)))
        return self.decode(raws)


def read_exactly(f: Any, nbytes: int, path: Path) -> bytearray:
    """`nbytes` bytes from f, or CheckpointError naming the file."""
    from colibri_offload.errors import CheckpointError

    out = bytearray(nbytes)
    view, done = memoryview(out), 0
    while done < nbytes:
        n = f.readinto(view[done:])
        if not n:
            raise CheckpointError(f"{path}: ends {nbytes - done} bytes too early: the file is truncated; download it again")
        done += n
    return out


def reshaper(shape: tuple[int, ...], row_nbytes: int) -> Callable[[Raw], np.ndarray]:
    """decode for a tensor stored as is in one slice."""
    return lambda raws: np.frombuffer(raws[0], np.uint8).reshape(*shape[:-1], row_nbytes)


class Checkpoint(ABC):
    """A model's files, opened and checked. `tensors` is complete and every slice lies inside its file."""

    path: Path
    files: tuple[Path, ...]
    tensors: Mapping[str, Tensor]

    @property
    @abstractmethod
    def kind(self) -> str:
        """"gguf" or "safetensors"."""

    @property
    @abstractmethod
    def metadata(self) -> Mapping[str, Any]:
        """GGUF: the key-value section. Hub directory: config.json (plus "generation_config" when there is one)."""
