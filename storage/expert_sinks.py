"""Where a writer puts expert blocks: a record file or an LMDB environment."""

from __future__ import annotations

import shutil
from abc import ABC, abstractmethod
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path

import lmdb

from colibri_offload.errors import StoreError
from colibri_offload.storage.base import ExpertKey, key_name
from colibri_offload.storage.checksum import crc32c
from colibri_offload.storage.header import EXPERTS
from colibri_offload.storage.journal import Journal
from colibri_offload.storage.lmdb_env import DIGEST, ENTRY, KEY, Entry, LmdbEnv, pack_key
from colibri_offload.storage.lmdb_store import check_block
from colibri_offload.storage.manifest import EXPERTS_BIN, EXPERTS_LMDB, Record
from colibri_offload.storage.record_file import RecordFile

_BATCH_NBYTES = 32 << 20  # per LMDB transaction: each one ends with an fsync, and none may hold much memory


class ExpertSink(ABC):
    """Takes blocks in reading order. `written` maps the keys of complete blocks to (nbytes, crc32c)."""

    written: dict[ExpertKey, tuple[int, int]]

    @abstractmethod
    def add(self, key: ExpertKey, data: memoryview) -> None:
        """Append a block that is not there yet."""

    @abstractmethod
    def table(self) -> Mapping[ExpertKey, Record] | None:
        """What the manifest says about the experts."""

    @abstractmethod
    def seal(self, digest: str) -> None:
        """Bring everything to the medium, tied to the manifest's digest, and close."""

    @abstractmethod
    def close(self) -> None:
        """Idempotent."""


class FileSink(ExpertSink):
    """experts.bin; its complete records are in the journal."""

    def __init__(self, directory: Path, journal: Journal) -> None:
        self._file = RecordFile(directory / EXPERTS_BIN, EXPERTS)
        self._journal = journal
        self._records: dict[ExpertKey, Record] = {}
        self.written = {}

    def restore(self, key: ExpertKey, record: Record) -> bool:
        """Take up a record of the journal. False when the file does not hold it."""
        if not self._file.holds(record):
            return False
        self._keep(key, record)
        return True

    def add(self, key: ExpertKey, data: memoryview) -> None:
        record = self._file.append(key_name(key), data)
        self._journal.append({"expert": [*key], "record": [record.offset, record.nbytes, record.crc32c]})
        self._keep(key, record)

    def _keep(self, key: ExpertKey, record: Record) -> None:
        self._records[key] = record
        self.written[key] = (record.nbytes, record.crc32c)

    def table(self) -> Mapping[ExpertKey, Record]:
        return self._records

    def seal(self, digest: str) -> None:
        self._file.seal(digest)
        self.close()

    def close(self) -> None:
        self._file.close()


class LmdbSink(ExpertSink):
    """experts.lmdb; its table is its own journal. Blocks are committed in batches, so a kill loses the last batch."""

    def __init__(self, directory: Path) -> None:
        self._path = directory / EXPERTS_LMDB
        # The journal's lock says that no other process writes: a lock file left by a killed one is void.
        (self._path / "lock.mdb").unlink(missing_ok=True)
        try:
            self._env = self._open()
        except StoreError:
            shutil.rmtree(self._path, ignore_errors=True)  # torn by a kill while it was made: nothing is lost but time
            self._env = self._open()
        self._pending: list[tuple[ExpertKey, bytes]] = []
        self._pending_nbytes = 0
        try:
            entries = self._env.write(self._sound_entries)
        except BaseException:
            self._env.close()
            raise
        self._next = max((entry.position for entry in entries.values()), default=-1) + 1
        self.written = {key: (entry.nbytes, entry.crc32c) for key, entry in entries.items()}

    def _open(self) -> LmdbEnv:
        return LmdbEnv(self._path, writable=True, create=True)

    def _sound_entries(self, txn: lmdb.Transaction) -> dict[ExpertKey, Entry]:
        """The table, without the blocks that are damaged: these are deleted and written again."""
        entries: dict[ExpertKey, Entry] = {}
        for raw_key, raw in list(txn.cursor(db=self._env.table)):
            entry = Entry(*ENTRY.unpack(raw))
            value = txn.get(raw_key, db=self._env.records)
            if value is not None and len(value) == entry.nbytes and crc32c(value) == entry.crc32c:
                entries[ExpertKey(*KEY.unpack(raw_key))] = entry
            else:
                txn.delete(raw_key, db=self._env.records)
                txn.delete(raw_key, db=self._env.table)
        return entries

    def add(self, key: ExpertKey, data: memoryview) -> None:
        check_block(f"{self._path}: {key_name(key)}", data)
        self._pending.append((key, data.tobytes()))
        self._pending_nbytes += len(data)
        self.written[key] = (len(data), crc32c(data))
        if self._pending_nbytes >= _BATCH_NBYTES:
            self._flush()

    def _flush(self) -> None:
        self._env.write(self._put_pending)
        self._next += len(self._pending)
        self._pending.clear()
        self._pending_nbytes = 0

    def _put_pending(self, txn: lmdb.Transaction) -> None:
        for i, (key, data) in enumerate(self._pending):
            entry = Entry(self._next + i, *self.written[key])
            txn.put(pack_key(key), data, db=self._env.records)
            txn.put(pack_key(key), ENTRY.pack(*entry), db=self._env.table)

    def table(self) -> None:
        return None

    def seal(self, digest: str) -> None:
        self._flush()
        self._env.write(lambda txn: txn.put(DIGEST, digest.encode(), db=self._env.info))
        self.close()
        with suppress(OSError):
            (self._path / "lock.mdb").unlink(missing_ok=True)  # every reader makes its own

    def close(self) -> None:
        self._env.close()
