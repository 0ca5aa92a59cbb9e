"""What the expert cache needs from a reader. `colibri_offload.storage` provides the real one."""

from __future__ import annotations

from concurrent.futures import Future
from typing import Protocol

from colibri_offload.storage.base import ExpertKey


class Reader(Protocol):
    """Reads expert blocks in the background. Every method returns at once and may be called from any thread."""

    def submit(self, key: ExpertKey, buffer: memoryview, demand: bool) -> Future[int]:
        """Read `key` into `buffer`; the result is the number of bytes read from the medium.

        The reader may write into `buffer` until the future is done. Demand reads overtake the others.
        """

    def promote(self, future: Future[int]) -> object:
        """Make a read that waits in the queue a demand read. Without effect when it has started or is done."""

    def cancel(self, future: Future[int]) -> bool:
        """True: the read had not started, its future is cancelled and its buffer will not be written."""
