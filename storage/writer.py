"""Writes a converted store: under a temporary name, resumable after a kill at any moment, published whole."""

from __future__ import annotations

import os
import shutil
from pathlib import Path
from typing import Any, Self

from colibri_offload.errors import StoreError, UsageError
from colibri_offload.storage.base import ExpertKey, key_name
from colibri_offload.storage.checksum import crc32c
from colibri_offload.storage.expert_sinks import ExpertSink, FileSink, LmdbSink
from colibri_offload.storage.failure import translated
from colibri_offload.storage.header import RESIDENT, VERSION
from colibri_offload.storage.journal import Journal
from colibri_offload.storage.manifest import (
    MANIFEST,
    RESIDENT_BIN,
    Kind,
    Manifest,
    Record,
    Resident,
    digest_of,
    is_store,
    plain_json,
)
from colibri_offload.storage.publish import is_empty_directory, publish_directory, recover, write_durably
from colibri_offload.storage.record_file import RecordFile

Data = Any  # anything with a C-contiguous buffer: bytes, memoryview, numpy array


class StoreWriter:
    """Adds records in reading order (hottest expert first), then finish() makes the store appear under its name.

    `model`: any JSON value, kept for the reader. `expected_bytes`: size of all records together, checked against the
    free space. `resume=True` continues an unfinished conversion of the same `identity` (a JSON value that determines
    all records; by default `model`, which may also hold a date); the caller adds everything again in the same order,
    and may skip what has_resident() and has_expert() know. `overwrite=True` replaces a store.
    Leaving the `with` block without finish() keeps the unfinished conversion. Not for several threads.
    Errors: StoreError for files and disks, UsageError for arguments.
    """

    def __init__(
        self,
        directory: str | Path,
        kind: Kind = "file",
        *,
        model: Any,
        identity: Any = None,
        expected_bytes: int = 0,
        resume: bool = False,
        overwrite: bool = False,
    ) -> None:
        if kind not in ("file", "lmdb"):
            raise UsageError(f"--store {kind}: unknown kind of store: use file or lmdb")
        self.path = Path(os.path.abspath(directory))
        self.partial = self.path.with_name(self.path.name + ".partial")
        self._kind = kind
        self._model = plain_json("the model's description", model)
        self._identity = self._model if identity is None else plain_json("the conversion's identity", identity)
        self._residents: dict[str, Resident] = {}
        with translated(str(self.path.parent)):
            self.path.parent.mkdir(parents=True, exist_ok=True)
        recover(self.path)
        self._drop_stale_journal()
        self._check_target(overwrite)
        self._open_partial(resume, overwrite)
        try:
            self._check_space(expected_bytes)
        except BaseException:
            self.close()
            raise

    # --- opening -----------------------------------------------------------------------------------------------

    @property
    def _journal_path(self) -> Path:
        return self.partial.with_name(self.partial.name + ".journal")

    def _drop_stale_journal(self) -> None:
        """A kill between the publication and the journal's removal, or before the first directory, leaves it alone."""
        if self._journal_path.exists() and not self.partial.exists():
            Journal(self._journal_path).delete()

    def _check_target(self, overwrite: bool) -> None:
        if not self.path.exists() or is_empty_directory(self.path):
            return
        if not is_store(self.path):
            raise StoreError(f"{self.path}: exists and is no converted store: choose another --output")
        if not overwrite:
            raise StoreError(f"{self.path}: a store is already there: choose another --output or delete it")

    def _open_partial(self, resume: bool, overwrite: bool) -> None:
        if self.partial.exists() and not self._journal_path.exists():
            raise StoreError(f"{self.partial}: exists but has no journal, so it is no conversion: move it away")
        unfinished = self.partial.exists()
        if unfinished and not resume and not overwrite:
            raise StoreError(f"{self.partial}: an unfinished conversion: continue it with --resume, or delete it")
        self._journal = Journal(self._journal_path)
        try:
            if not (unfinished and resume and self._journal.entries):
                self._start()
            elif self._journal.entries[0] != self._first_line():
                raise StoreError(
                    f"{self.partial}: was begun with another model or other settings: repeat those, or delete it"
                )
            self._resident_file = RecordFile(self.partial / RESIDENT_BIN, RESIDENT)
            self._experts: ExpertSink = (
                FileSink(self.partial, self._journal) if self._kind == "file" else LmdbSink(self.partial)
            )
            self._restore()
        except BaseException:
            self.close()
            raise

    def _start(self) -> None:
        with translated(str(self.partial)):
            if self.partial.exists():
                shutil.rmtree(self.partial)
            self._journal.keep(0)
            self.partial.mkdir()
        self._journal.append(self._first_line())

    def _first_line(self) -> dict[str, Any]:
        return {"version": VERSION, "kind": self._kind, "model": digest_of(self._identity)}

    def _restore(self) -> None:
        """Believe the journal as far as the files confirm it."""
        entries = self._journal.entries
        good = 1
        while good < len(entries) and self._restore_entry(entries[good]):
            good += 1
        self._journal.keep(good)

    def _restore_entry(self, entry: dict[str, Any]) -> bool:
        try:
            record = Record(*entry["record"])
            if "expert" in entry:
                key = ExpertKey(*entry["expert"])
                return isinstance(self._experts, FileSink) and self._experts.restore(key, record)
            if not self._resident_file.holds(record):
                return False
            self._residents[entry["resident"]] = Resident(record, entry["meta"])
        except (TypeError, KeyError):  # a line that a power failure left as something else
            return False
        return True

    def _check_space(self, expected_bytes: int) -> None:
        needed = expected_bytes - sum(resident.record.nbytes for resident in self._residents.values())
        needed -= sum(nbytes for nbytes, _ in self._experts.written.values())
        with translated(str(self.partial)):
            free = shutil.disk_usage(self.partial).free
        if needed > free:
            raise StoreError(
                f"{self.path.parent}: the store still needs {needed:,} bytes but only {free:,} are free: "
                "free disk space or choose an --output on another disk"
            )

    # --- adding ------------------------------------------------------------------------------------------------

    def has_resident(self, name: str) -> bool:
        """Whether the tensor is already written."""
        return name in self._residents

    def has_expert(self, key: ExpertKey) -> bool:
        """Whether the block is already written."""
        return key in self._experts.written

    def add_resident(self, name: str, data: Data, meta: Any = None) -> None:
        """Write a resident tensor; `meta` is any JSON value. Adding the same again changes nothing."""
        view = _bytes_of(f"resident {name!r}", data)
        meta = plain_json(f"the description of resident {name!r}", meta)
        if name in self._residents:
            known = self._residents[name]
            same = (known.record.nbytes, known.record.crc32c, known.meta) == (len(view), crc32c(view), meta)
            return self._repeated(f"resident {name!r}", same)
        record = self._resident_file.append(f"resident {name!r}", view)
        self._journal.append({"resident": name, "record": [record.offset, record.nbytes, record.crc32c], "meta": meta})
        self._residents[name] = Resident(record, meta)

    def add_expert(self, key: ExpertKey, data: Data) -> None:
        """Write an expert block of at least one byte. Adding the same again changes nothing."""
        key = ExpertKey(*key)
        if not all(0 <= n < 1 << 31 for n in key):
            raise UsageError(f"{key_name(key)}: layer and expert must be from 0 to {(1 << 31) - 1}")
        view = _bytes_of(key_name(key), data)
        if not len(view):
            raise UsageError(f"{key_name(key)}: an expert block must have at least one byte")
        if key in self._experts.written:
            return self._repeated(key_name(key), self._experts.written[key] == (len(view), crc32c(view)))
        self._experts.add(key, view)

    def _repeated(self, what: str, same: bool) -> None:
        if not same:
            raise StoreError(
                f"{self.partial}: {what} was written before with other content: delete it and start the conversion anew"
            )

    # --- ending ------------------------------------------------------------------------------------------------

    def finish(self) -> Path:
        """Bring everything to the medium and publish the store under its name, which is returned."""
        manifest = Manifest(self._kind, self._model, self._residents, self._experts.table())
        self._resident_file.seal(manifest.digest)
        self._experts.seal(manifest.digest)
        self._resident_file.close()
        write_durably(self.partial / MANIFEST, manifest.dump())
        publish_directory(self.partial, self.path)
        self._journal.delete()
        return self.path

    def close(self) -> None:
        """Release the files; an unfinished conversion stays for resume=True. Idempotent."""
        for part in ("_resident_file", "_experts", "_journal"):
            if hasattr(self, part):
                getattr(self, part).close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _bytes_of(what: str, data: Data) -> memoryview:
    view = memoryview(data)
    if not view.c_contiguous:
        raise UsageError(f"{what}: the data is not contiguous: copy it first (numpy.ascontiguousarray)")
    return view.cast("B") if view.nbytes else memoryview(b"")
