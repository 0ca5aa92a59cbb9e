"""The contract of every expert store. Stores know keys, bytes and files; they know neither models nor kernels."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import NamedTuple, Self

from colibri_offload.errors import StoreError


class ExpertKey(NamedTuple):
    """One expert block: the expert's index within its layer."""

    layer: int
    expert: int


def key_name(key: ExpertKey) -> str:
    """How messages name a block."""
    return f"layer {key[0]} expert {key[1]}"


def check_room(what: str, nbytes: int, buffer: memoryview) -> None:
    """StoreError when the buffer cannot take `nbytes` bytes. `what` names the record."""
    if len(buffer) < nbytes or buffer.readonly or buffer.format != "B":
        raise StoreError(
            f"{what}: {nbytes} bytes do not fit a buffer of {len(buffer)} items of format {buffer.format!r}"
            f"{', which is read-only' if buffer.readonly else ''}: pass a writable buffer of enough bytes"
        )


class ExpertStore(ABC):
    """Immutable expert blocks by key. Every method may be called from several threads at once, until close()."""

    @abstractmethod
    def keys(self) -> Collection[ExpertKey]:
        """All keys, in the order in which the store would like to be read."""

    @abstractmethod
    def nbytes(self, key: ExpertKey) -> int:
        """Size of the block as read_into delivers it. KeyError for an unknown key."""

    @abstractmethod
    def medium_nbytes(self, key: ExpertKey) -> int:
        """Bytes that reading the block moves from the medium."""

    @abstractmethod
    def read_into(self, key: ExpertKey, buffer: memoryview) -> int:
        """Fill buffer[:nbytes(key)] and return the bytes read from the medium.

        `buffer` is writable, of format 'B', 4096-aligned and a multiple of 4096 long (its tail may be overwritten).
        Raises StoreError naming file and key; CorruptRecordError when a checksum or length is wrong.
        """

    @abstractmethod
    def close(self) -> None:
        """Release files and maps. Idempotent."""

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
