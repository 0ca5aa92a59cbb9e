"""The converted store on LMDB: crash-safe, readable by many processes, single experts replaceable."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

import lmdb
import numpy as np

from colibri_offload.errors import CorruptRecordError, StoreError
from colibri_offload.storage.arena import address_of
from colibri_offload.storage.base import ExpertKey, ExpertStore, check_room, key_name
from colibri_offload.storage.checksum import check_crc, crc32c
from colibri_offload.storage.converted import ConvertedStore, Verify
from colibri_offload.storage.lmdb_env import DIGEST, ENTRY, KEY, Entry, LmdbEnv, pack_key
from colibri_offload.storage.manifest import EXPERTS_LMDB
from colibri_offload.storage.map_advice import read_ahead, unmap_pages


class LmdbStore(ConvertedStore, ExpertStore):
    """Reader of a directory with manifest.json, resident.bin and experts.lmdb.

    Every read is its own snapshot, so a replacement by another process is seen at the next read. keys() is read once:
    a replacement changes a block, never the set of blocks. `writable=True` allows replace(); one process may open a
    store only once at a time.
    """

    kind = "lmdb"

    def __init__(self, path: str | Path, verify: Verify = "first", *, writable: bool = False) -> None:
        super().__init__(path, verify)
        self._env = LmdbEnv(self.path / EXPERTS_LMDB, writable=writable)
        self._verified: dict[ExpertKey, int] = {}  # checksum that was found right, as a replacement has another
        try:
            self._keys = self._env.read(self._load_keys)
        except BaseException:
            self._env.close()
            raise

    def _load_keys(self, txn: lmdb.Transaction) -> dict[ExpertKey, None]:
        digest = bytes(txn.get(DIGEST, b"", db=self._env.info)).decode("ascii", "replace")
        if digest != self.manifest.digest:
            raise StoreError(
                f"{self._env.path}: belongs to another manifest.json ({digest[:12]!r}, "
                f"not {self.manifest.digest[:12]!r}): convert the model again"
            )
        rows = []
        for raw_key, raw in txn.cursor(db=self._env.table):
            if len(raw_key) != KEY.size or len(raw) != ENTRY.size:
                raise CorruptRecordError(f"{self._env.path}: a damaged row in the table: convert the model again")
            rows.append((Entry(*ENTRY.unpack(raw)).position, ExpertKey(*KEY.unpack(raw_key))))
        return dict.fromkeys(key for _, key in sorted(rows))

    def keys(self) -> Collection[ExpertKey]:
        return self._keys.keys()

    def nbytes(self, key: ExpertKey) -> int:
        if key not in self._keys:
            raise KeyError(key)
        return self._env.read(lambda txn: self._entry(txn, key).nbytes)

    def medium_nbytes(self, key: ExpertKey) -> int:
        return self.nbytes(key)

    def read_into(self, key: ExpertKey, buffer: memoryview) -> int:
        if key not in self._keys:
            raise KeyError(key)
        entry = self._env.read(lambda txn: self._copy(txn, key, buffer))
        if self.verify == "always" or (self.verify == "first" and self._verified.get(key) != entry.crc32c):
            check_crc(self._name(key), buffer[: entry.nbytes], entry.crc32c)
            self._verified[key] = entry.crc32c
        return entry.nbytes

    def _copy(self, txn: lmdb.Transaction, key: ExpertKey, buffer: memoryview) -> Entry:
        entry = self._entry(txn, key)
        check_room(self._name(key), entry.nbytes, buffer)
        value = txn.get(pack_key(key), db=self._env.records)
        if value is None or len(value) != entry.nbytes:
            found = "no" if value is None else len(value)
            raise CorruptRecordError(f"{self._name(key)}: {found} bytes, not {entry.nbytes}: convert the model again")
        address = address_of(value)
        read_ahead(address, entry.nbytes)
        # numpy copies with the GIL released: the page faults of this copy are the reads from the disk
        np.copyto(np.frombuffer(buffer, np.uint8, entry.nbytes), np.frombuffer(value, np.uint8))
        unmap_pages(address, entry.nbytes)
        return entry

    def replace(self, key: ExpertKey, record: memoryview | bytes) -> None:
        """Put another block, of any size, in the key's place: one durable transaction. KeyError for an unknown key."""
        if not self._env.writable:
            raise StoreError(f"{self._name(key)}: the store is open for reading: open it with writable=True to replace")
        data = check_block(self._name(key), record)
        crc = crc32c(data)

        def work(txn: lmdb.Transaction) -> None:
            entry = self._entry(txn, key)
            txn.put(pack_key(key), data, db=self._env.records)
            txn.put(pack_key(key), ENTRY.pack(entry.position, len(data), crc), db=self._env.table)

        if key not in self._keys:
            raise KeyError(key)
        self._env.write(work)

    def _entry(self, txn: lmdb.Transaction, key: ExpertKey) -> Entry:
        raw = txn.get(pack_key(key), db=self._env.table)
        if raw is None or len(raw) != ENTRY.size:
            raise CorruptRecordError(f"{self._name(key)}: its row in the table is damaged: convert the model again")
        return Entry(*ENTRY.unpack(raw))

    def _name(self, key: ExpertKey) -> str:
        return f"{self._env.path}: {key_name(key)}"

    def close(self) -> None:
        self._close_residents()
        self._env.close()


def check_block(what: str, record: memoryview | bytes) -> memoryview:
    """The block as bytes. StoreError when it is empty or larger than LMDB can hold."""
    data = memoryview(record).cast("B")
    if not 0 < len(data) < 1 << 32:
        raise StoreError(f"{what}: {len(data)} bytes, but LMDB holds blocks of 1 to {(1 << 32) - 1}: use --store file")
    return data
