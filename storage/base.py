"""The contract of every expert store. Stores know keys, bytes and files; they know neither models nor kernels."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Collection
from typing import NamedTuple


class ExpertKey(NamedTuple):
    """One expert block: the expert's index within its layer."""

    layer: int
    expert: int


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

    def __enter__(self) -> ExpertStore:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
