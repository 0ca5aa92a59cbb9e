"""Reads in flight: started, promoted, cancelled and waited for. What their results mean is the cache's business."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import CancelledError, Future

from colibri_offload.errors import ColibriError, StoreError
from colibri_offload.scheduler.blocks import Block
from colibri_offload.scheduler.reader import Reader
from colibri_offload.storage.base import ExpertKey


class Loads:
    """Reads blocks into their slots. All methods but wait are called with the cache's lock held.

    Reader threads only append to a list of arrivals, under a lock that nobody holds while calling the reader:
    whatever the reader locks, there is no cycle.
    """

    def __init__(self, reader: Reader, slots: Sequence[memoryview]) -> None:
        self._reader, self._slots = reader, slots
        self._wake = threading.Condition(threading.Lock())
        self._arrivals: deque[Block] = deque()
        self._version = 0
        self.in_flight: dict[Block, None] = {}  # a dict as an ordered set

    def start(self, block: Block, demand: bool) -> None:
        """Begin to read a block. An error of the call counts as one of the read: whoever waits for it gets it."""
        try:
            future = self._reader.submit(block.key, self._slots[block.slot], demand)
        except Exception as error:
            future = Future()
            future.set_exception(error)
        block.future = future
        self.in_flight[block] = None
        future.add_done_callback(lambda _: self._arrive(block))

    def promote(self, block: Block) -> None:
        """Make the read of a block, if it is still in flight, a demand read."""
        if block.future is not None:
            self._reader.promote(block.future)

    def cancel(self, block: Block) -> bool:
        """Whether the read had not begun: its slot is then not written, and whoever waits for it gets an error."""
        if block.future is None or not self._reader.cancel(block.future):
            return False
        block.future, block.error = None, read_error(block.key, CancelledError())
        del self.in_flight[block]
        return True

    @property
    def arrived(self) -> bool:
        """Whether results() has something to tell."""
        return bool(self._arrivals)

    def results(self) -> Iterator[tuple[Block, int]]:
        """The reads that have ended, in order of arrival: block, bytes read. A failure is in block.error."""
        while self._arrivals:
            block = self._arrivals.popleft()
            if block.future is None:  # cancelled here
                continue
            future, block.future = block.future, None
            del self.in_flight[block]
            error = CancelledError() if future.cancelled() else future.exception()
            if error is not None:
                block.error = read_error(block.key, error)
            yield block, 0 if error is not None else future.result()

    @property
    def version(self) -> int:
        """Counts calls of notify."""
        return self._version

    def notify(self) -> None:
        """Let those who wait look again."""
        with self._wake:
            self._version += 1
            self._wake.notify_all()

    def wait(self, version: int, timeout_sec: float) -> None:
        """Return when a read has ended, when notify was called after `version`, or after the timeout."""
        with self._wake:
            self._wake.wait_for(lambda: self._arrivals or self._version != version, timeout_sec)

    def _arrive(self, block: Block) -> None:
        """In a reader's thread."""
        with self._wake:
            self._arrivals.append(block)
            self._wake.notify_all()


def read_error(key: ExpertKey, error: BaseException) -> ColibriError:
    """One line that names the key; an error that is ours already names it."""
    if isinstance(error, ColibriError):
        return error
    reason = "its read was cancelled" if isinstance(error, CancelledError) else f"cannot be read: {error}"
    wrapped = StoreError(f"layer {key.layer} expert {key.expert}: {reason}; check the disk, then run `colibri verify`")
    wrapped.__cause__ = error
    return wrapped
