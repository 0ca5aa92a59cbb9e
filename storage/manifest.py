"""manifest.json of a converted store: what lies where, with every field checked before it is believed.

    {"format": "colibri-store", "version": 1, "kind": "file" | "lmdb", "digest": SHA-256 of all the rest,
     "model": anything the caller supplied,
     "residents": {name: {"offset", "nbytes", "crc32c", "meta"}},
     "experts": [[layer, expert, offset, nbytes, crc32c], …] in reading order, or null when LMDB holds the table}
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from colibri_offload.errors import StoreError, UsageError
from colibri_offload.storage.arena import ALIGNMENT, round_up
from colibri_offload.storage.base import ExpertKey
from colibri_offload.storage.failure import translated
from colibri_offload.storage.header import HEADER_NBYTES, VERSION

FORMAT = "colibri-store"
MANIFEST, RESIDENT_BIN, EXPERTS_BIN, EXPERTS_LMDB = "manifest.json", "resident.bin", "experts.bin", "experts.lmdb"
Kind = Literal["file", "lmdb"]
_MAX_NBYTES = 1 << 29  # a larger manifest is hostile: 100,000 experts and a tokenizer take 30 MB
_MAX_INDEX = 1 << 31
_AGAIN = "convert the model again"


@dataclass(frozen=True)
class Record:
    """Bytes in a .bin file. `offset` is a multiple of 4096; `crc32c` covers the nbytes, not the padding after them."""

    offset: int
    nbytes: int
    crc32c: int


@dataclass(frozen=True)
class Resident:
    """A resident tensor's record and the JSON value that the caller stored with it."""

    record: Record
    meta: Any


@dataclass(frozen=True)
class Manifest:
    """`experts` is None in an LMDB store, whose environment holds the table."""

    kind: Kind
    model: Any
    residents: Mapping[str, Resident]
    experts: Mapping[ExpertKey, Record] | None

    @property
    def digest(self) -> str:
        """64 hex digits that tie the store's files together."""
        return digest_of(self._body())

    def dump(self) -> bytes:
        """The text of manifest.json; equal manifests give equal bytes."""
        return canonical({**self._body(), "digest": self.digest})

    def _body(self) -> dict[str, Any]:
        rows = [[*key, r.offset, r.nbytes, r.crc32c] for key, r in (self.experts or {}).items()]
        return {
            "format": FORMAT,
            "version": VERSION,
            "kind": self.kind,
            "model": self.model,
            "residents": {name: {**vars(r.record), "meta": r.meta} for name, r in self.residents.items()},
            "experts": None if self.experts is None else rows,
        }


def canonical(value: Any) -> bytes:
    """JSON text that depends on the value only."""
    return json.dumps(value, sort_keys=True, separators=(",", ":"), allow_nan=False).encode()


def plain_json(what: str, value: Any) -> Any:
    """`value` as JSON gives it back (tuples become lists). UsageError when it is no JSON."""
    try:
        return json.loads(canonical(value))
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"{what} is no JSON ({error}): use text, finite numbers, lists and dicts") from error


def digest_of(value: Any) -> str:
    """SHA-256 of the canonical JSON, in hex."""
    return hashlib.sha256(canonical(value)).hexdigest()


def is_store(path: Path) -> bool:
    """Whether `path` looks like a converted store, whole or damaged."""
    return (path / MANIFEST).is_file() and (path / RESIDENT_BIN).is_file()


def load_manifest(directory: Path) -> Manifest:
    """Read and check manifest.json. StoreError names the field, the value and the remedy.

    What depends on the .bin files' sizes is checked by check_extent.
    """
    path = directory / MANIFEST
    with translated(str(path)), open(path, "rb") as file:
        text = file.read(_MAX_NBYTES + 1)
    if len(text) > _MAX_NBYTES:
        raise StoreError(f"{path}: larger than {_MAX_NBYTES} bytes: not a manifest; {_AGAIN}")
    try:
        document = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise StoreError(f"{path}: not JSON ({error}): the file is damaged; {_AGAIN}") from error
    return _Checker(path).manifest(document)


def check_extent(path: Path, size: int, records: Iterable[tuple[str, Record]]) -> None:
    """Check that named records lie inside the file `path` of `size` bytes, after its header, without overlap."""
    end, before = HEADER_NBYTES, "the header"
    # an empty record shares its offset with the next one
    for name, record in sorted(records, key=lambda item: (item[1].offset, item[1].nbytes)):
        if record.offset < end:
            raise StoreError(f"{path}: {name} at {record.offset} overlaps {before}, which ends at {end}: {_AGAIN}")
        end, before = record.offset + round_up(record.nbytes), name
        if end > size:
            raise StoreError(f"{path}: {name} ends at {end} but the file has {size} bytes: it is truncated; {_AGAIN}")


class _Checker:
    """Turns parsed JSON that nobody vouches for into a Manifest."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def manifest(self, document: Any) -> Manifest:
        document = self._dict("the manifest", document)
        if document.get("format") != FORMAT:
            raise self._wrong("format", document.get("format"), f"{FORMAT!r}: not a converted store")
        if document.get("version") != VERSION:
            raise self._wrong("version", document.get("version"), f"{VERSION}: update the program, or {_AGAIN}")
        kind = document.get("kind")
        if kind not in ("file", "lmdb"):
            raise self._wrong("kind", kind, "'file' or 'lmdb'")
        digest = document.pop("digest", None)
        if digest != digest_of(document):
            raise self._wrong("digest", digest, f"the one of its content: the file was changed or damaged; {_AGAIN}")
        residents = self._dict("residents", document.get("residents"))
        return Manifest(
            kind=kind,
            model=document.get("model"),
            residents={name: self._resident(name, entry) for name, entry in residents.items()},
            experts=self._experts(document.get("experts")) if kind == "file" else None,
        )

    def _resident(self, name: str, entry: Any) -> Resident:
        entry = self._dict(f"resident {name!r}", entry)
        record = self._record(f"resident {name!r}", *(entry.get(key) for key in ("offset", "nbytes", "crc32c")))
        return Resident(record, entry.get("meta"))

    def _experts(self, rows: Any) -> dict[ExpertKey, Record]:
        if not isinstance(rows, list):
            raise self._wrong("experts", type(rows).__name__, "a list")
        table: dict[ExpertKey, Record] = {}
        for i, row in enumerate(rows):
            if not isinstance(row, list) or len(row) != 5:
                raise self._wrong(f"experts[{i}]", row, "[layer, expert, offset, nbytes, crc32c]")
            key = ExpertKey(*(self._integer(f"experts[{i}]", n, _MAX_INDEX) for n in row[:2]))
            if key in table:
                raise self._wrong(f"experts[{i}]", list(key), "a key that was not there before")
            table[key] = self._record(f"experts[{i}]", *row[2:])
            if not table[key].nbytes:
                raise self._wrong(f"experts[{i}] nbytes", 0, "at least 1")
        return table

    def _record(self, what: str, offset: Any, nbytes: Any, crc: Any) -> Record:
        record = Record(
            self._integer(f"{what} offset", offset, 1 << 62),
            self._integer(f"{what} nbytes", nbytes, 1 << 62),
            self._integer(f"{what} crc32c", crc, 1 << 32),
        )
        if record.offset % ALIGNMENT:
            raise self._wrong(f"{what} offset", offset, f"a multiple of {ALIGNMENT}")
        return record

    def _integer(self, what: str, value: Any, limit: int) -> int:
        if type(value) is not int or not 0 <= value < limit:  # bool is an int to isinstance
            raise self._wrong(what, value, f"a whole number from 0 to {limit - 1}")
        return value

    def _dict(self, what: str, value: Any) -> dict[str, Any]:
        if not isinstance(value, dict):
            raise self._wrong(what, type(value).__name__, "an object")
        return value

    def _wrong(self, what: str, value: Any, expected: str) -> StoreError:
        shown = repr(value) if len(repr(value)) <= 60 else repr(value)[:57] + "…"
        return StoreError(f"{self._path}: {what} is {shown}, expected {expected}")
