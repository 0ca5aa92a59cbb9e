"""Opening files that may be missing, foreign or hostile: every failure becomes one line that names the file."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

from colibri_offload.errors import CheckpointError

LFS_POINTER = b"version https://git-lfs"
MAX_JSON_BYTES = 256 << 20  # the index of a model with a million tensors is a third of this


def shown(value: object, limit: int = 80) -> str:
    """repr of an untrusted value, on one line and cut short, so that a hostile name cannot flood or break a message."""
    if isinstance(value, int) and abs(value) >= 1 << 128:
        return "a number beyond 2^128"  # repr of thousands of digits raises ValueError
    if isinstance(value, list | tuple | dict):
        return f"a {type(value).__name__} of {len(value)}" if len(value) > 8 else _cut(_flat(value), limit)
    return _cut(repr(value), limit)


def _flat(value: list | tuple | dict) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{shown(k)}: …" for k in value) + "}"
    items = (f"a {type(v).__name__}" if isinstance(v, list | tuple | dict) else shown(v) for v in value)
    return "[" + ", ".join(items) + "]"


def _cut(text: str, limit: int) -> str:
    return text if len(text) <= limit else text[: limit - 1] + "…"


@contextmanager
def open_checked(path: Path) -> Iterator[tuple[BinaryIO, int]]:
    """The file, opened for buffered reading, and its size in bytes. OSErrors inside become CheckpointErrors."""
    try:
        with open(path, "rb") as f:
            size = f.seek(0, 2)
            f.seek(0)
            yield f, size
    except OSError as error:
        reason = error.strerror or str(error)
        raise CheckpointError(f"{path}: cannot be read ({reason}); check its permissions and the disk") from error


def refuse_lfs_pointer(path: Path, head: bytes) -> None:
    """CheckpointError when `head`, the file's first bytes, is a Git LFS pointer instead of the model."""
    if head.startswith(LFS_POINTER):
        raise CheckpointError(f"{path}: is a Git LFS pointer, not the file; run `git lfs pull` or download it again")


def read_json(path: Path) -> dict[str, Any]:
    """The JSON object in a file. CheckpointError when it is missing, too large or not an object."""
    with open_checked(path) as (f, size):
        if size > MAX_JSON_BYTES:
            raise CheckpointError(f"{path}: {size} bytes is too large for a JSON description; download it again")
        text = f.read()
    refuse_lfs_pointer(path, text[:64])
    return parse_object(text, path)


def parse_object(text: bytes, path: Path) -> dict[str, Any]:
    """The JSON object in `text`, which lies in `path`; a key given twice is an error."""

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        out = dict(pairs)
        if len(out) != len(pairs):
            twice = Counter(key for key, _ in pairs).most_common(1)[0][0]
            raise CheckpointError(f"{path}: the key {shown(twice)} occurs twice in its JSON; download it again")
        return out

    try:
        value = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except RecursionError as error:
        raise CheckpointError(f"{path}: its JSON is nested too deeply; download it again") from error
    except ValueError as error:  # JSONDecodeError, UnicodeDecodeError, numbers of thousands of digits
        raise CheckpointError(f"{path}: its JSON is broken ({_cut(str(error), 120)}); download it again") from error
    if not isinstance(value, dict):
        raise CheckpointError(f"{path}: its JSON is a {type(value).__name__}, not an object; download it again")
    return value
