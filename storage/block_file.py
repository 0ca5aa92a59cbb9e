"""The default converted store: all experts in one file, each a contiguous 4096-aligned record."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path

from colibri_offload.storage.base import ExpertKey, key_name
from colibri_offload.storage.checksum import check_crc
from colibri_offload.storage.converted import ConvertedStore, Verify
from colibri_offload.storage.header import EXPERTS, check_header
from colibri_offload.storage.manifest import EXPERTS_BIN, check_extent
from colibri_offload.storage.plan import Cut, PlannedStore, ReadPlan, Slice


class BlockFileStore(ConvertedStore, PlannedStore):
    """Reader of a directory with manifest.json, resident.bin and experts.bin. StoreError when any of them is wrong."""

    kind = "file"

    def __init__(self, path: str | Path, verify: Verify = "first") -> None:
        ConvertedStore.__init__(self, path, verify)
        PlannedStore.__init__(self, str(path))
        self._experts_bin = self.path / EXPERTS_BIN
        self._records = dict(self.manifest.experts or {})
        size = check_header(self._experts_bin, EXPERTS, self.manifest.digest)
        check_extent(self._experts_bin, size, ((key_name(key), record) for key, record in self._records.items()))
        self._verified: set[ExpertKey] = set()

    def keys(self) -> Collection[ExpertKey]:
        return self._records.keys()

    def nbytes(self, key: ExpertKey) -> int:
        return self._records[key].nbytes

    def plan(self, key: ExpertKey) -> ReadPlan:
        record = self._records[key]
        part = Slice(self._experts_bin, record.offset, record.nbytes)
        return ReadPlan((part,), (Cut(0, 0, record.nbytes),), in_place=True)

    def finish(self, key: ExpertKey, raws: list[memoryview], out: memoryview) -> None:
        if self.verify == "always" or (self.verify == "first" and key not in self._verified):
            check_crc(f"{self._experts_bin}: {key_name(key)}", raws[0], self._records[key].crc32c)
            self._verified.add(key)

    def close(self) -> None:
        self._close_residents()
        PlannedStore.close(self)
