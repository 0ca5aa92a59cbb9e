"""A directory gets its final name only when it is whole and on the medium."""

from __future__ import annotations

import os
import shutil
from contextlib import suppress
from pathlib import Path

from colibri_offload.storage.failure import translated


def fsync_directory(path: Path) -> None:
    """Bring a directory's entries to the medium, where the platform can."""
    if os.name == "nt":
        return
    with translated(str(path)):
        fd = os.open(path, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)


def write_durably(path: Path, data: bytes) -> None:
    """Write a whole file and fsync it."""
    with translated(str(path)), open(path, "wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())


def _aside(final: Path) -> Path:
    """Where a replaced directory waits for its removal."""
    return final.with_name(f".{final.name}.colibri-replaced")


def recover(final: Path) -> None:
    """Undo or complete a publication that a kill interrupted between its renames."""
    aside = _aside(final)
    if not aside.exists():
        return
    with translated(str(aside)):
        if final.exists():
            shutil.rmtree(aside)
        else:
            os.rename(aside, final)


def publish_directory(partial: Path, final: Path) -> None:
    """Rename `partial` to `final`. What was there is moved aside first and removed last.

    A kill in between leaves `final` whole, old or new, or absent until recover() brings the old one back.
    """
    fsync_directory(partial)
    with translated(f"{final}: publishing {partial.name}"):
        if final.exists():
            os.rename(final, _aside(final))
        os.rename(partial, final)
    fsync_directory(final.parent)
    recover(final)


def is_empty_directory(path: Path) -> bool:
    """Whether `path` is a directory without entries."""
    with suppress(OSError):
        return path.is_dir() and not any(path.iterdir())
    return False
