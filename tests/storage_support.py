"""Blocks, and every kind of store that can hold them, for the tests of the storage package."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from pathlib import Path

from colibri_offload.storage.arena import Arena
from colibri_offload.storage.base import ExpertKey, ExpertStore
from colibri_offload.storage.open import open_store
from colibri_offload.storage.plan import Slice
from colibri_offload.storage.slices import SliceStore
from colibri_offload.storage.wrappers import CountingStore, FaultyStore, VerifyingStore, WrapperStore
from colibri_offload.storage.writer import StoreWriter

Blocks = Mapping[ExpertKey, bytes]


def make_blocks(seed: int = 1, layers: int = 2, experts: int = 5) -> dict[ExpertKey, bytes]:
    """Blocks of odd sizes, in an order that is not the keys' order."""
    rng = random.Random(seed)
    keys = [ExpertKey(layer, expert) for layer in range(layers) for expert in range(experts)]
    rng.shuffle(keys)
    sizes = [1, 4095, 4096, 4097, 9001, 12288]
    return {key: rng.randbytes(sizes[i % len(sizes)]) for i, key in enumerate(keys)}


def write_store(path: Path, kind: str, blocks: Blocks, residents: Mapping[str, bytes] | None = None) -> Path:
    with StoreWriter(path, kind, model={"name": "test"}, expected_bytes=sum(map(len, blocks.values()))) as writer:
        for name, data in (residents or {}).items():
            writer.add_resident(name, data, {"len": len(data)})
        for key, data in blocks.items():
            writer.add_expert(key, data)
        return writer.finish()


def slice_store(directory: Path, blocks: Blocks) -> SliceStore:
    """Each block in three unaligned pieces, the first two touching, in two files, bits inverted."""
    directory.mkdir(exist_ok=True)
    paths = (directory / "a b.bin", directory / "é.bin")
    files = [bytearray(b"x" * 7), bytearray(b"y" * 4099)]
    records = {}
    for key, data in blocks.items():
        stored = bytes(255 - byte for byte in data)
        cuts = (0, len(stored) // 3, len(stored) // 2, len(stored))
        parts = []
        for i, n in enumerate((0, 0, 1)):
            piece = stored[cuts[i] : cuts[i + 1]]
            parts.append(Slice(paths[n], len(files[n]), len(piece)))
            files[n] += piece
        files[0] += b"gap"
        records[key] = parts
    for path, content in zip(paths, files, strict=True):
        path.write_bytes(content)

    def finish(key: ExpertKey, raws: list[memoryview], out: memoryview) -> None:
        joined = b"".join(bytes(raw) for raw in raws)
        out[: len(joined)] = bytes(255 - byte for byte in joined)

    return SliceStore(records, finish, nbytes={key: len(data) for key, data in blocks.items()})


def file_store(path: Path, blocks: Blocks) -> ExpertStore:
    return open_store(write_store(path / "store", "file", blocks))


STORES: dict[str, Callable[[Path, Blocks], ExpertStore]] = {
    "file": file_store,
    "lmdb": lambda path, blocks: open_store(write_store(path / "store", "lmdb", blocks)),
    "slices": lambda path, blocks: slice_store(path / "slices", blocks),
    "wrapper": lambda path, blocks: WrapperStore(file_store(path, blocks)),
    "counting": lambda path, blocks: CountingStore(slice_store(path / "slices", blocks)),
    "faulty, no fault": lambda path, blocks: FaultyStore(file_store(path, blocks)),
    "verifying": lambda path, blocks: VerifyingStore(slice_store(path / "slices", blocks)),
}


def arena_for(store: ExpertStore, slots: int = 1) -> Arena:
    return Arena(max(map(store.nbytes, store.keys())), slots)


def read_block(store: ExpertStore, key: ExpertKey) -> bytes:
    with arena_for(store) as arena:
        slot = arena.slot(0)
        store.read_into(key, slot)
        return bytes(slot[: store.nbytes(key)])
