"""A .bin file while it is written: a header, then records, each padded with zeros to a multiple of 4096."""

from __future__ import annotations

import io
import os
from pathlib import Path

from colibri_offload.storage.arena import round_up
from colibri_offload.storage.checksum import crc32c
from colibri_offload.storage.failure import translated
from colibri_offload.storage.header import HEADER_NBYTES, pack_header
from colibri_offload.storage.manifest import Record

_CHUNK = 4 << 20


class RecordFile:
    """Appends records. A failed append leaves the file as if it had not been tried. Not for several threads."""

    def __init__(self, path: Path, kind: int) -> None:
        self.path = path
        self._kind = kind
        self.end = HEADER_NBYTES
        with translated(str(path)):
            self._file = io.FileIO(os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o644), "r+")
            self._write(0, bytes(HEADER_NBYTES))

    def append(self, what: str, data: memoryview) -> Record:
        """Write `data` behind the last record. StoreError with a remedy when the disk is full."""
        padded = round_up(len(data))
        with translated(f"{self.path}: {what}"):
            self._write(self.end, data)
            self._write(self.end + len(data), bytes(padded - len(data)))
        record = Record(self.end, len(data), crc32c(data))
        self.end += padded
        return record

    def holds(self, record: Record) -> bool:
        """Whether `record` lies right behind the last one and its bytes are whole; then it becomes the last one."""
        if record.offset != self.end:
            return False
        crc, left = 0, record.nbytes
        with translated(str(self.path)):
            self._file.seek(record.offset)
            while left:
                chunk = self._file.read(min(left, _CHUNK))
                if not chunk:
                    return False
                crc = crc32c(chunk, crc)
                left -= len(chunk)
        if crc != record.crc32c:
            return False
        self.end += round_up(record.nbytes)
        return True

    def seal(self, digest: str) -> None:
        """Write the header and bring everything to the medium."""
        with translated(str(self.path)):
            self._file.truncate(self.end)  # drops the rest of an interrupted append, completes lost padding
            self._write(0, pack_header(self._kind, digest))
            os.fsync(self._file.fileno())

    def close(self) -> None:
        """Idempotent."""
        self._file.close()

    def _write(self, offset: int, data: memoryview | bytes) -> None:
        self._file.seek(offset)
        view = memoryview(data)
        while view:
            view = view[self._file.write(view) :]
