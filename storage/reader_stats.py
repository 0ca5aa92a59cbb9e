"""What an asynchronous reader has done so far."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from threading import Lock


@dataclass(frozen=True)
class ReaderStats:
    """`requests`: reads that ended, well or not. `bytes_read`: of those that ended well, without alignment padding.

    `busy_sec`: time during which at least one read was in flight, so bytes_read / busy_sec is the medium's rate.
    `retries`: second tries after an I/O error; `errors`: reads that failed for good.
    """

    requests: int = 0
    bytes_read: int = 0
    busy_sec: float = 0.0
    retries: int = 0
    errors: int = 0

    def __sub__(self, earlier: ReaderStats) -> ReaderStats:
        return ReaderStats(*(getattr(self, name) - getattr(earlier, name) for name in vars(self)))


class ReaderMeter:
    """Counts; safe for several threads."""

    def __init__(self) -> None:
        self._lock = Lock()
        self._requests = self._bytes = self._retries = self._errors = self._in_flight = 0
        self._busy_sec = self._since = 0.0

    @contextmanager
    def in_flight(self) -> Iterator[None]:
        """Around every read."""
        with self._lock:
            if not self._in_flight:
                self._since = time.perf_counter()
            self._in_flight += 1
        try:
            yield
        finally:
            with self._lock:
                self._in_flight -= 1
                if not self._in_flight:
                    self._busy_sec += time.perf_counter() - self._since

    def ended(self, nbytes: int | None) -> None:
        """A read ended with `nbytes` bytes, or failed (None)."""
        with self._lock:
            self._requests += 1
            self._bytes += nbytes or 0
            self._errors += nbytes is None

    def retried(self) -> None:
        """A read is tried again."""
        with self._lock:
            self._retries += 1

    def snapshot(self) -> ReaderStats:
        """The counts up to now."""
        with self._lock:
            running = time.perf_counter() - self._since if self._in_flight else 0.0
            busy = self._busy_sec + running
            return ReaderStats(self._requests, self._bytes, busy, self._retries, self._errors)
