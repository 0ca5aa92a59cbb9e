"""The first 4096 bytes of resident.bin and experts.bin: what the file is, and which manifest it belongs to.

Layout, little endian: magic "COLI" | version u16 | kind u16 | digest 32 bytes | CRC32C u32 of these 40 bytes | zeros.
"""

from __future__ import annotations

import struct
from pathlib import Path

from colibri_offload.errors import StoreError
from colibri_offload.storage.arena import ALIGNMENT
from colibri_offload.storage.checksum import crc32c
from colibri_offload.storage.failure import translated

MAGIC = b"COLI"
VERSION = 1
HEADER_NBYTES = ALIGNMENT
RESIDENT, EXPERTS = 1, 2
_FIELDS = struct.Struct("<4sHH32s")
_CRC = struct.Struct("<I")
_AGAIN = "convert the model again"


def pack_header(kind: int, digest: str) -> bytes:
    """The block for a file of `kind` that belongs to the manifest with `digest` (64 hex digits)."""
    fields = _FIELDS.pack(MAGIC, VERSION, kind, bytes.fromhex(digest))
    return (fields + _CRC.pack(crc32c(fields))).ljust(HEADER_NBYTES, b"\0")


def check_header(path: Path, kind: int, digest: str) -> int:
    """Check the block at the head of `path` and return the file's size in bytes. StoreError says what is wrong."""
    with translated(str(path)), open(path, "rb") as file:
        head = file.read(HEADER_NBYTES)
        size = file.seek(0, 2)
    if head[:4] != MAGIC:
        raise StoreError(f"{path}: starts with {head[:4]!r} instead of {MAGIC!r}: not a file of a store; {_AGAIN}")
    if len(head) < HEADER_NBYTES:
        raise StoreError(f"{path}: {len(head)} bytes are too few for a header: the file is truncated; {_AGAIN}")
    _, version, found_kind, found_digest = _FIELDS.unpack_from(head)
    if version != VERSION:
        raise StoreError(f"{path}: format version {version}, this program reads {VERSION}: update it, or {_AGAIN}")
    if _CRC.unpack_from(head, _FIELDS.size)[0] != crc32c(head[: _FIELDS.size]):
        raise StoreError(f"{path}: the header's checksum is wrong: the file is damaged; {_AGAIN}")
    if found_kind != kind:
        raise StoreError(f"{path}: holds kind {found_kind} instead of {kind}: files were swapped; {_AGAIN}")
    if found_digest.hex() != digest:
        found = found_digest.hex()[:12]
        raise StoreError(f"{path}: belongs to another manifest.json ({found}, not {digest[:12]}): {_AGAIN}")
    return size
