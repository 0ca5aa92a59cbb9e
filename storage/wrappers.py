"""Stores around any other store: each adds one thing to read_into and leaves the rest as it is."""

from __future__ import annotations

import errno
import os
import time
from collections import Counter
from collections.abc import Collection, Mapping
from threading import Lock

from colibri_offload.storage.base import ExpertKey, ExpertStore, key_name
from colibri_offload.storage.checksum import check_crc, crc32c
from colibri_offload.storage.failure import translated


class WrapperStore(ExpertStore):
    """Passes everything on to `inner`, which it closes."""

    def __init__(self, inner: ExpertStore) -> None:
        self.inner = inner

    def keys(self) -> Collection[ExpertKey]:
        return self.inner.keys()

    def nbytes(self, key: ExpertKey) -> int:
        return self.inner.nbytes(key)

    def medium_nbytes(self, key: ExpertKey) -> int:
        return self.inner.medium_nbytes(key)

    def read_into(self, key: ExpertKey, buffer: memoryview) -> int:
        return self.inner.read_into(key, buffer)

    def close(self) -> None:
        self.inner.close()


class CountingStore(WrapperStore):
    """Counts reads that succeeded: `reads` by key, and `bytes_read` from the medium."""

    def __init__(self, inner: ExpertStore) -> None:
        super().__init__(inner)
        self.reads: Counter[ExpertKey] = Counter()
        self.bytes_read = 0
        self._lock = Lock()

    def read_into(self, key: ExpertKey, buffer: memoryview) -> int:
        nbytes = super().read_into(key, buffer)
        with self._lock:
            self.reads[key] += 1
            self.bytes_read += nbytes
        return nbytes


class FaultyStore(WrapperStore):
    """Fails the `fail_at`-th read (from 1; 0: none) with `error_number`, and all later ones when `persistent`.

    Every read first takes `latency_sec`. `reads` counts all of them, `failures` the failed ones.
    """

    def __init__(
        self,
        inner: ExpertStore,
        fail_at: int = 0,
        *,
        persistent: bool = False,
        error_number: int = errno.EIO,
        latency_sec: float = 0.0,
    ) -> None:
        super().__init__(inner)
        self._fail_at = fail_at
        self._persistent = persistent
        self._error_number = error_number
        self._latency_sec = latency_sec
        self._lock = Lock()
        self.reads = 0
        self.failures = 0

    def read_into(self, key: ExpertKey, buffer: memoryview) -> int:
        with self._lock:
            self.reads += 1
            due = self.reads >= self._fail_at if self._persistent else self.reads == self._fail_at
            fails = self._fail_at > 0 and due
            self.failures += fails
        if self._latency_sec:
            time.sleep(self._latency_sec)
        if fails:
            with translated(f"injected fault: {key_name(key)}"):
                raise OSError(self._error_number, os.strerror(self._error_number))
        return super().read_into(key, buffer)


class VerifyingStore(WrapperStore):
    """Checks every read against `checksums` (CRC32C by key); a key without one must give the same bytes each time."""

    def __init__(self, inner: ExpertStore, checksums: Mapping[ExpertKey, int] | None = None) -> None:
        super().__init__(inner)
        self._checksums = dict(checksums or {})

    def read_into(self, key: ExpertKey, buffer: memoryview) -> int:
        nbytes = super().read_into(key, buffer)
        block = buffer[: self.nbytes(key)]
        if key in self._checksums:
            check_crc(key_name(key), block, self._checksums[key])
        else:
            self._checksums.setdefault(key, crc32c(block))
        return nbytes
