"""CRC32C of any contiguous buffer. Source: RFC 3720, section 12.1 (Castagnoli polynomial)."""

from __future__ import annotations

import google_crc32c
import numpy as np

from colibri_offload.errors import CorruptRecordError

_CHUNK = 1 << 20  # bytes per call: the C code holds the GIL, and 1 MiB takes it for less than 0.1 ms


def crc32c(data: memoryview | bytes, crc: int = 0) -> int:
    """Checksum of `data`, continuing from `crc`."""
    whole = np.frombuffer(data, np.uint8) if len(data) else np.empty(0, np.uint8)
    native = google_crc32c.implementation == "c"
    for start in range(0, len(whole), _CHUNK):
        part = whole[start : start + _CHUNK]
        crc = google_crc32c.extend(crc, part if native else part.tobytes())
    return crc


def check_crc(what: str, data: memoryview, expected: int) -> None:
    """CorruptRecordError about `what` when the checksum of `data` is not `expected`."""
    compare_crc(what, crc32c(data), expected)


def compare_crc(what: str, found: int, expected: int) -> None:
    """CorruptRecordError about `what` when the checksums differ."""
    if found != expected:
        raise CorruptRecordError(
            f"{what}: checksum {found:08x} instead of {expected:08x}: it is damaged; convert or copy the store again"
        )
