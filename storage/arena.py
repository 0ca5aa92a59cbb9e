"""Page-aligned anonymous memory: one arena of equal slots, and single buffers."""

from __future__ import annotations

import mmap
from contextlib import suppress
from typing import Any

import numpy as np

from colibri_offload.errors import BudgetError, UsageError

ALIGNMENT = 4096  # bytes: a multiple of every logical block size that direct I/O asks for


def round_up(n: int, multiple: int = ALIGNMENT) -> int:
    """The smallest multiple of `multiple` that is >= n."""
    return -(-n // multiple) * multiple


def address_of(buffer: memoryview) -> int:
    """Address of the first byte of a non-empty buffer."""
    return np.frombuffer(buffer, np.uint8).__array_interface__["data"][0]


def anonymous(nbytes: int) -> mmap.mmap:
    """Zeroed, page-aligned private memory, which costs nothing until it is written. BudgetError when refused."""
    # Python's default is MAP_SHARED, which is shmem: no transparent huge pages, and counted as shared memory.
    kind: dict[str, Any] = {"flags": mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS} if hasattr(mmap, "MAP_PRIVATE") else {}
    try:
        return mmap.mmap(-1, round_up(max(nbytes, 1)), **kind)
    except (OSError, OverflowError) as error:
        raise BudgetError(f"cannot reserve {nbytes} bytes of memory ({error}): lower --memory-budget") from error


class Arena:
    """`slots` buffers of at least `nbytes_per_slot` bytes in one map. Each is 4096-aligned and a multiple of 4096 long.

    Untouched slots cost no memory. Slots stay valid until close(); after it, a slot that somebody still holds keeps
    the memory alive, so a late writer cannot crash the process.
    """

    def __init__(self, nbytes_per_slot: int, slots: int) -> None:
        if nbytes_per_slot < 1 or slots < 1:
            raise UsageError(f"an arena of {slots} slots of {nbytes_per_slot} bytes: both numbers must be at least 1")
        self.slot_nbytes = round_up(nbytes_per_slot)
        self.slots = slots
        self._map = anonymous(self.nbytes)
        if hasattr(mmap, "MADV_HUGEPAGE"):
            with suppress(OSError):  # kernels built without huge pages refuse; small pages work as well
                self._map.madvise(mmap.MADV_HUGEPAGE)
        self._view = memoryview(self._map)
        self._address = address_of(self._view)

    @property
    def nbytes(self) -> int:
        """Bytes reserved."""
        return self.slot_nbytes * self.slots

    def slot(self, i: int) -> memoryview:
        """Slot i: writable, format 'B', `slot_nbytes` long."""
        start = self._offset(i)
        return self._view[start : start + self.slot_nbytes]

    def address(self, i: int) -> int:
        """Address of slot i's first byte."""
        return self._address + self._offset(i)

    def _offset(self, i: int) -> int:
        if not 0 <= i < self.slots:
            raise IndexError(f"slot {i} of an arena with {self.slots} slots")
        return i * self.slot_nbytes

    def close(self) -> None:
        """Give the memory back. Idempotent."""
        self._view.release()
        with suppress(BufferError):  # a slot is still held: its last holder frees the map
            self._map.close()

    def __enter__(self) -> Arena:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
