"""Opens a converted store of either kind, and checks one from end to end."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from colibri_offload.errors import StoreError
from colibri_offload.storage.arena import anonymous
from colibri_offload.storage.base import key_name
from colibri_offload.storage.block_file import BlockFileStore
from colibri_offload.storage.converted import Verify
from colibri_offload.storage.lmdb_store import LmdbStore
from colibri_offload.storage.manifest import is_store, load_manifest

Progress = Callable[[int, int], None]  # (bytes checked, bytes in all)


def open_store(path: str | Path, verify: Verify = "first") -> BlockFileStore | LmdbStore:
    """The store at `path`, as its manifest says. StoreError when it is none or when its files are wrong."""
    path = Path(path)
    if not is_store(path):
        raise StoreError(f"{path}: no converted store: manifest.json or resident.bin is missing: check the path")
    return BlockFileStore(path, verify) if load_manifest(path).kind == "file" else LmdbStore(path, verify)


def verify_store(path: str | Path, progress: Progress = lambda done, total: None) -> list[str]:
    """Check every checksum and return the names of the broken records: "resident NAME" or "layer L expert E".

    StoreError when the store cannot be opened at all. Needs memory for one expert block.
    """
    broken: list[str] = []
    with open_store(path, "always") as store:
        keys = store.keys()
        sizes = {key: store.nbytes(key) for key in keys}
        total = sum(sizes.values()) + sum(store.resident_nbytes(name) for name in store.resident_names())
        done = 0
        for name in store.resident_names():
            try:
                store.check_resident(name)
            except StoreError:
                broken.append(f"resident {name}")
            done += store.resident_nbytes(name)
            progress(done, total)
        buffer = memoryview(anonymous(max(sizes.values(), default=0)))
        for key, size in sizes.items():
            try:
                store.read_into(key, buffer)
            except StoreError:
                broken.append(key_name(key))
            done += size
            progress(done, total)
    return broken
