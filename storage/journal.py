"""Which records of an unfinished conversion are complete: one JSON line each, written after the record itself."""

from __future__ import annotations

import io
import json
import os
from contextlib import suppress
from pathlib import Path
from typing import Any

from colibri_offload.errors import StoreError
from colibri_offload.storage.failure import translated

try:
    import fcntl
except ImportError:  # Windows: a second converter on the same output is not noticed
    fcntl = None  # type: ignore[assignment]


class Journal:
    """An append-only list of JSON values, locked for one process. A line that a kill tore off is forgotten."""

    def __init__(self, path: Path) -> None:
        self.path = path
        with translated(str(path)):
            self._file = io.FileIO(os.open(path, os.O_RDWR | os.O_CREAT | getattr(os, "O_BINARY", 0), 0o644), "r+")
        try:
            self._lock()
            self._ends, self._entries = self._load()
        except BaseException:
            self._file.close()
            raise

    def _lock(self) -> None:
        if fcntl is None:
            return
        try:
            fcntl.flock(self._file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise StoreError(f"{self.path}: another process is writing this store: wait for it or stop it") from error
        except OSError:
            pass  # some network filesystems have no locks: then a second converter is not noticed

    def _load(self) -> tuple[list[int], list[Any]]:
        ends: list[int] = []
        entries: list[Any] = []
        end = 0
        for line in self._file.readall().splitlines(keepends=True):
            end += len(line)
            try:
                entry = json.loads(line)
            except (ValueError, RecursionError):
                break
            if not line.endswith(b"\n"):
                break
            ends.append(end)
            entries.append(entry)
        return ends, entries

    @property
    def entries(self) -> list[Any]:
        """All values, oldest first."""
        return list(self._entries)

    def append(self, entry: Any) -> None:
        """Add a value. It survives a kill of the process from here on; fsync is left to the end of the conversion."""
        line = json.dumps(entry, separators=(",", ":")).encode() + b"\n"
        end = self._ends[-1] if self._ends else 0
        with translated(str(self.path)):
            self._file.seek(end)
            view = memoryview(line)
            while view:
                view = view[self._file.write(view) :]
        self._ends.append(end + len(line))
        self._entries.append(entry)

    def keep(self, count: int) -> None:
        """Forget all but the first `count` values."""
        del self._ends[count:], self._entries[count:]
        with translated(str(self.path)):
            self._file.truncate(self._ends[-1] if self._ends else 0)

    def close(self) -> None:
        """Unlock. Idempotent."""
        self._file.close()

    def delete(self) -> None:
        """Remove the file and unlock."""
        with suppress(FileNotFoundError), translated(str(self.path)):
            os.unlink(self.path)
        self.close()
