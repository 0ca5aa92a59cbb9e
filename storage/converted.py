"""What both kinds of converted store share: the manifest and the resident tensors."""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any, Literal

from colibri_offload.errors import StoreError
from colibri_offload.storage.arena import anonymous
from colibri_offload.storage.base import check_room
from colibri_offload.storage.checksum import check_crc, compare_crc, crc32c
from colibri_offload.storage.files import FileSet
from colibri_offload.storage.header import RESIDENT, check_header
from colibri_offload.storage.manifest import RESIDENT_BIN, Kind, Manifest, check_extent, load_manifest

Verify = Literal["first", "always", "never"]
_CHUNK = 4 << 20  # bytes read at once when a tensor is only checked


class ConvertedStore:
    """A store directory. Safe for several threads.

    `verify`: check the CRC32C of a record when it is read for the first time, always, or never.
    """

    kind: Kind

    def __init__(self, path: str | Path, verify: Verify = "first") -> None:
        self.path = Path(path)
        self.verify = verify
        self.manifest: Manifest = load_manifest(self.path)
        if self.manifest.kind != self.kind:
            raise StoreError(f"{self.path}: a store of kind {self.manifest.kind!r}, not {self.kind!r}: use open_store")
        self._resident_bin = self.path / RESIDENT_BIN
        size = check_header(self._resident_bin, RESIDENT, self.manifest.digest)
        records = ((f"resident {name!r}", entry.record) for name, entry in self.manifest.residents.items())
        check_extent(self._resident_bin, size, records)
        self._resident_files = FileSet(str(self.path))
        self._verified_residents: set[str] = set()

    @property
    def model(self) -> Any:
        """The JSON value that the converter stored: architecture, provenance, tokenizer…"""
        return self.manifest.model

    def resident_names(self) -> Collection[str]:
        """Names of the resident tensors, in alphabetical order."""
        return self.manifest.residents.keys()

    def resident_meta(self, name: str) -> Any:
        """The JSON value stored with the tensor. KeyError for an unknown name."""
        return self.manifest.residents[name].meta

    def resident_nbytes(self, name: str) -> int:
        """Size of the tensor. KeyError for an unknown name."""
        return self.manifest.residents[name].record.nbytes

    def resident(self, name: str) -> memoryview:
        """The tensor's bytes in page-aligned memory of their own, which is freed with the last view of it."""
        view = memoryview(anonymous(self.resident_nbytes(name)))[: self.resident_nbytes(name)]
        self.resident_into(name, view)
        return view

    def resident_into(self, name: str, buffer: memoryview) -> int:
        """Fill buffer[:resident_nbytes(name)] (format 'B') and return its size. CorruptRecordError when damaged."""
        record = self.manifest.residents[name].record
        check_room(f"{self._resident_bin}: resident {name!r}", record.nbytes, buffer)
        view = buffer[: record.nbytes]
        self._resident_files.read(f"resident {name!r}", self._resident_bin, record.offset, view)
        if self.verify == "always" or (self.verify == "first" and name not in self._verified_residents):
            check_crc(f"{self._resident_bin}: resident {name!r}", view, record.crc32c)
            self._verified_residents.add(name)
        return record.nbytes

    def check_resident(self, name: str) -> None:
        """CorruptRecordError when the tensor is damaged. Needs 4 MiB of memory, however large the tensor is."""
        record = self.manifest.residents[name].record
        scratch = memoryview(bytearray(min(_CHUNK, record.nbytes)))
        crc, end = 0, record.offset + record.nbytes
        for offset in range(record.offset, end, _CHUNK):
            view = scratch[: min(_CHUNK, end - offset)]
            self._resident_files.read(f"resident {name!r}", self._resident_bin, offset, view)
            crc = crc32c(view, crc)
        compare_crc(f"{self._resident_bin}: resident {name!r}", crc, record.crc32c)

    def _close_residents(self) -> None:
        self._resident_files.close()
