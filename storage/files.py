"""Blocking reads at an offset from any number of files, from any number of threads."""

from __future__ import annotations

import io
import os
from contextlib import suppress
from pathlib import Path
from threading import Lock

from colibri_offload.errors import CorruptRecordError
from colibri_offload.storage.failure import is_eio, translated
from colibri_offload.storage.gate import Gate


class FileSet:
    """Files opened on first use, one handle each, buffered by the page cache. Closed together."""

    def __init__(self, what: str) -> None:
        self._gate = Gate(what)
        self._lock = Lock()
        self._files: dict[Path, io.FileIO] = {}

    def read(self, what: str, path: Path, offset: int, view: memoryview) -> None:
        """Fill `view` from `offset` of `path`; an I/O error is tried once more. `what` names the record in errors."""
        with self._gate.use(), translated(f"{path}: {what}"):
            try:
                self._fill(what, path, offset, view)
            except OSError as error:
                if not is_eio(error):
                    raise
                self._fill(what, path, offset, view)

    def _fill(self, what: str, path: Path, offset: int, view: memoryview) -> None:
        file = self._open(path)
        done = 0
        while done < len(view):
            n = self._read_at(file, view[done:], offset + done)
            if n == 0:
                raise truncated(path, what, len(view) - done)
            done += n

    def _open(self, path: Path) -> io.FileIO:
        with self._lock:
            file = self._files.get(path)
            if file is None:
                file = self._files[path] = io.FileIO(path, "rb")
            return file

    def _read_at(self, file: io.FileIO, view: memoryview, offset: int) -> int:
        if hasattr(os, "preadv"):
            return os.preadv(file.fileno(), [view], offset)
        with self._lock:  # Windows: a handle has one position, shared by all threads
            file.seek(offset)
            return file.readinto(view) or 0

    def close(self) -> None:
        """Close every handle once the running reads have ended. Idempotent."""
        if self._gate.shut():
            for file in self._files.values():
                with suppress(OSError):
                    file.close()


def truncated(path: Path, what: str, missing: int) -> CorruptRecordError:
    """The error for a file that ends `missing` bytes before the record does."""
    return CorruptRecordError(f"{path}: {what}: the file ends {missing} bytes too early: truncated; copy it again")
