"""One LMDB environment: opened for readers or a writer, grown when full, its errors translated.

Databases: `records` (key → block), `table` (key → position, nbytes, crc32c) and `info` (b"digest" → hex digits).
Keys are big-endian, so that LMDB's order is (layer, expert).
"""

from __future__ import annotations

import logging
import os
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple, TypeVar

import lmdb

from colibri_offload.errors import StoreError
from colibri_offload.storage.base import ExpertKey
from colibri_offload.storage.gate import Gate

T = TypeVar("T")
KEY = struct.Struct(">II")
ENTRY = struct.Struct("<IQI")
DIGEST = b"digest"
_NAMES = (b"records", b"table", b"info")
_FIRST_MAP = 64 << 20
_HEADROOM = 1 << 30  # bytes of address space beyond the file, so that readers seldom meet a grown one
_MAX_READERS = 512
_log = logging.getLogger(__name__)


class Entry(NamedTuple):
    """A row of the table. `position` orders keys(); `crc32c` covers the whole block."""

    position: int
    nbytes: int
    crc32c: int


class LmdbEnv:
    """Reads and writes as functions of a transaction. Safe for several threads; one process opens a path only once."""

    def __init__(self, path: Path, *, writable: bool = False, create: bool = False) -> None:
        self.path = path
        self.writable = writable
        self._gate = Gate(str(path))
        with translated_lmdb(path):
            self._env = self._open(create)
            try:
                self._check_size()
                self.records, self.table, self.info = (self._env.open_db(name, create=create) for name in _NAMES)
            except BaseException:
                self._env.close()
                raise

    def _open(self, create: bool) -> lmdb.Environment:
        if not create and not (self.path / "data.mdb").is_file():
            raise StoreError(f"{self.path}: data.mdb is missing: the store is incomplete; convert the model again")
        if self.writable:
            return self._environment(map_size=max(_FIRST_MAP, self._file_nbytes()), readonly=False, lock=True)
        room = 2 * self._file_nbytes() + _HEADROOM
        try:
            env = self._environment(map_size=room, readonly=True, lock=True)
        except (lmdb.Error, OSError) as error:
            if not _is_refused_lock(error):
                raise
            _log.warning("%s: no lock file here (%s): do not write to the store while it is read", self.path, error)
            return self._environment(map_size=room, readonly=True, lock=False)
        env.reader_check()  # frees the slots of readers that were killed
        return env

    def _environment(self, *, map_size: int, readonly: bool, lock: bool) -> lmdb.Environment:
        return lmdb.open(
            str(self.path), map_size=map_size, readonly=readonly, lock=lock, max_dbs=len(_NAMES),
            max_readers=_MAX_READERS, readahead=False, create=not readonly, mode=0o644,
        )  # fmt: skip

    def _file_nbytes(self) -> int:
        data = self.path / "data.mdb"
        return data.stat().st_size if data.exists() else 0

    def _check_size(self) -> None:
        """A map beyond the end of a truncated file would kill the process at the first touch."""
        needed = (self._env.info()["last_pgno"] + 1) * self._env.stat()["psize"]
        found = self._file_nbytes()
        if 0 < found < needed:
            raise StoreError(f"{self.path}/data.mdb: {found} of {needed} bytes: truncated; convert or copy it again")

    def read(self, work: Callable[[lmdb.Transaction], T]) -> T:
        """work(transaction) on a snapshot; values are memoryviews that are valid inside `work` only."""
        while True:
            try:
                with self._gate.use(), translated_lmdb(self.path), self._env.begin(buffers=True) as txn:
                    return work(txn)
            except _Resized:
                self._resize(0)

    def write(self, work: Callable[[lmdb.Transaction], T]) -> T:
        """work(transaction) as one atomic, durable change. It runs again when the map had to grow first."""
        while True:
            try:
                with self._gate.use(), translated_lmdb(self.path), self._env.begin(write=True) as txn:
                    return work(txn)
            except _Resized:
                self._resize(0)
            except _Full as error:
                self._grow(error)

    def _grow(self, full: StoreError) -> None:
        size = 2 * self._env.info()["map_size"]
        try:
            self._resize(size)
        except (lmdb.Error, OSError, OverflowError, MemoryError) as error:
            raise StoreError(
                f"{self.path}: the map is full and cannot grow to {size} bytes ({error}): "
                "raise the limit of address space (ulimit -v)"
            ) from full

    def _resize(self, nbytes: int) -> None:
        with self._gate.alone():  # LMDB forbids it while a transaction of this process is open
            self._env.set_mapsize(nbytes)  # 0: adopt the size that another process has set

    def close(self) -> None:
        """Idempotent. Waits for running transactions: unmapping under them would kill the process."""
        if self._gate.shut():
            self._env.close()


class _Resized(StoreError):
    """Another process has grown the file beyond this map."""


class _Full(StoreError):
    """The map has no room for the change."""


_KINDS: dict[type, type[StoreError]] = {lmdb.MapResizedError: _Resized, lmdb.MapFullError: _Full}


@contextmanager
def translated_lmdb(path: Path) -> Iterator[None]:
    """Raise LMDB's errors as StoreErrors that name the environment and the remedy, keeping the cause."""
    try:
        yield
    except (lmdb.Error, OSError) as error:
        raise _KINDS.get(type(error), StoreError)(f"{path}: {error}: {_remedy(error)}") from error


def _remedy(error: BaseException) -> str:
    text = str(error)
    if "No space left" in text or "quota" in text or "File too large" in text:
        return "free disk space (or raise the quota or file size limit), then run the same command again"
    if "Input/output error" in text:  # LMDB's answer to a short write, too
        return "the disk is full or failing: free disk space or check it, then run the same command again"
    if "already open" in text:
        return "close the other store first"
    if isinstance(error, lmdb.ReadersFullError):
        return f"close some of the {_MAX_READERS} reading processes"
    if isinstance(error, (lmdb.CorruptedError, lmdb.PageNotFoundError, lmdb.InvalidError, lmdb.VersionMismatchError)):
        return "the store is damaged or of another version; convert the model again"
    if _is_refused_lock(error) or isinstance(error, lmdb.ReadonlyError):
        return "check the permissions, or copy the store to a writable disk"
    return "check the disk and its permissions, or convert the model again"


def _is_refused_lock(error: BaseException) -> bool:
    text = str(error)
    return any(os.strerror(number) in text for number in (1, 13, 30, 38, 95))  # EPERM EACCES EROFS ENOSYS ENOTSUP


def pack_key(key: ExpertKey) -> bytes:
    """(layer, expert) as eight bytes."""
    return KEY.pack(*key)
