"""A cursor over a GGUF header that checks every count and length against the file before it reads or allocates."""

from __future__ import annotations

import struct
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np

from colibri_offload.checkpoint.files import shown
from colibri_offload.errors import CheckpointError

WINDOW_BYTES = 1 << 20
MAX_KEY_BYTES = 65535  # the limit that the GGUF specification sets
MAX_STRING_BYTES = 64 << 20  # chat templates, the longest texts in real files, take kilobytes
MAX_ELEMENTS = 1 << 24  # over all arrays of a file; the largest vocabularies and merge lists have under 2^21

# GGUF value types. Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
SCALARS = {0: "<u1", 1: "<i1", 2: "<u2", 3: "<i2", 4: "<u4", 5: "<i4", 6: "<f4", 10: "<u8", 11: "<i8", 12: "<f8"}
BOOL, STRING, ARRAY = 7, 8, 9


class Cursor:
    """Reads forward from the start of `f`, a file of `size` bytes. Every failure is a CheckpointError naming `path`."""

    def __init__(self, f: BinaryIO, size: int, path: Path) -> None:
        self.path, self.size = path, size
        self._f = f
        self._window = b""
        self._base = 0  # file offset of the window
        self._at = 0  # position inside the window
        self._elements_left = MAX_ELEMENTS

    @property
    def offset(self) -> int:
        return self._base + self._at

    @property
    def remaining(self) -> int:
        return self.size - self.offset

    def fail(self, what: str) -> NoReturn:
        raise CheckpointError(f"{self.path}: {what}; the file is damaged or incomplete: download it again")

    def peek(self, nbytes: int) -> bytes:
        """Up to `nbytes` of the bytes that come next, without moving."""
        self._refill(0)
        return self._window[:nbytes]

    def take(self, nbytes: int, what: str) -> bytes:
        """The next `nbytes` bytes, which hold `what`."""
        if nbytes > self.remaining:
            self.fail(f"{what} at byte {self.offset} claims {nbytes} bytes, but only {self.remaining} are left")
        if self._at + nbytes > len(self._window):
            self._refill(nbytes)
        self._at += nbytes
        return self._window[self._at - nbytes : self._at]

    def _refill(self, nbytes: int) -> None:
        self._base, self._at = self.offset, 0
        self._f.seek(self._base)
        self._window = self._f.read(max(nbytes, WINDOW_BYTES))
        if len(self._window) < nbytes:
            self.fail(f"has shrunk to {self._base + len(self._window)} bytes from {self.size}")

    def u32(self, what: str) -> int:
        return int.from_bytes(self.take(4, what), "little")

    def u64(self, what: str) -> int:
        return int.from_bytes(self.take(8, what), "little")

    def count(self, what: str, item_nbytes: int) -> int:
        """A count of items that take at least `item_nbytes` bytes each: refused when the file could not hold them."""
        n = self.u64(f"the number of {what}")
        if n * item_nbytes > self.remaining:
            self.fail(f"claims {n} {what}, but only {self.remaining} bytes are left")
        return n

    def name(self, what: str) -> str:
        """A key or a tensor's name: short, not empty, UTF-8."""
        length = self.u64(f"the length of {what}")
        if not 0 < length <= MAX_KEY_BYTES:
            self.fail(f"{what} at byte {self.offset} claims a length of {length} bytes")
        raw = self.take(length, what)
        try:
            return raw.decode("utf-8")
        except UnicodeDecodeError:
            self.fail(f"{what} {shown(raw)} is not UTF-8")

    def value(self, key: str) -> Any:
        """A value with its type in front: int, float, bool, str, or a list of one of them.

        Text that is not UTF-8: replaced in single strings (names, templates), kept by surrogate escapes in lists
        (vocabularies, where the bytes matter).
        """
        what = f"the value of {shown(key)}"
        kind = self.u32(what)
        if kind == STRING:
            return self._string(what).decode("utf-8", "replace")
        if kind == ARRAY:
            return self._array(what)
        return self._scalars(kind, 1, what)[0]

    def _string(self, what: str) -> bytes:
        length = self.u64(what)
        if length > MAX_STRING_BYTES:
            self.fail(f"{what} at byte {self.offset} claims to be {length} bytes of text")
        return self.take(length, what)

    def _array(self, what: str) -> list:
        kind = self.u32(what)
        if kind == ARRAY:
            self.fail(f"{what} is an array of arrays, which no model needs")
        item_nbytes = 8 if kind == STRING else 1 if kind == BOOL else self._dtype(kind, what).itemsize
        n = self.count(f"items in {what}", item_nbytes)
        if n > self._elements_left:
            self.fail(f"{what} has {n} items, more than the {self._elements_left} that metadata may still hold")
        self._elements_left -= n
        return self._strings(n, what) if kind == STRING else self._scalars(kind, n, what)

    def _dtype(self, kind: int, what: str) -> np.dtype:
        if kind not in SCALARS:
            self.fail(f"{what} has the unknown type {kind}")
        return np.dtype(SCALARS[kind])

    def _scalars(self, kind: int, n: int, what: str) -> list:
        if kind == BOOL:
            raw = self.take(n, what)
            if raw.strip(b"\0\1"):
                self.fail(f"{what} is a boolean with a byte other than 0 and 1")
            return [b == 1 for b in raw]
        dtype = self._dtype(kind, what)
        return np.frombuffer(self.take(n * dtype.itemsize, what), dtype).tolist()

    def _strings(self, n: int, what: str) -> list[str]:
        """n strings. Written without a call per string: vocabularies and merges have hundreds of thousands."""
        out: list[str] = []
        length_at = struct.Struct("<Q").unpack_from
        while len(out) < n:
            window, at, end = self._window, self._at, len(self._window)
            while len(out) < n and at + 8 <= end:
                begin = at + 8
                (length,) = length_at(window, at)
                if begin + length > end:
                    break
                at = begin + length
                out.append(window[begin:at].decode("utf-8", "surrogateescape"))
            self._at = at
            if len(out) < n:  # the next one crosses the window
                out.append(self._string(what).decode("utf-8", "surrogateescape"))
        return out
