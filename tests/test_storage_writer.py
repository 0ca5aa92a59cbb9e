"""The writer's refusals and failures: space, names, repetitions, foreign directories, full disks, other writers."""

import errno
import json
import os
import shutil
import subprocess
import sys

import numpy as np
import pytest
from storage_support import make_blocks, read_block, write_store

from colibri_offload.errors import StoreError, UsageError
from colibri_offload.storage import expert_sinks, record_file
from colibri_offload.storage.base import ExpertKey
from colibri_offload.storage.lmdb_env import LmdbEnv
from colibri_offload.storage.open import open_store, verify_store
from colibri_offload.storage.writer import StoreWriter

KINDS = pytest.mark.parametrize("kind", ["file", "lmdb"])
BLOCKS = make_blocks(7)


def test_free_space_is_checked_first(tmp_path):
    with pytest.raises(StoreError, match=r"needs 1,000,000,000,000,000,000 bytes but only [\d,]+ are free.*--output"):
        StoreWriter(tmp_path / "store", model={}, expected_bytes=10**18)
    assert not (tmp_path / "store").exists()


def test_what_is_already_written_counts_towards_the_space(tmp_path, monkeypatch):
    with StoreWriter(tmp_path / "store", model={}) as out:
        out.add_expert((0, 0), bytes(100_000))
        out.add_resident("r", bytes(50_000))
    usage = shutil.disk_usage(tmp_path)
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage._replace(free=60_000))
    StoreWriter(tmp_path / "store", model={}, expected_bytes=200_000, resume=True).close()
    with pytest.raises(StoreError, match="needs 60,001 bytes"):
        StoreWriter(tmp_path / "store", model={}, expected_bytes=210_001, resume=True)


@KINDS
def test_numpy_data_and_json_values(tmp_path, kind):
    model = {"config": {"layers": (1, 2), "ü": None, "x": 0.1}, "files": {"tokenizer.json": "{}"}}
    matrix = np.arange(3000, dtype=np.float32).reshape(30, 100)
    with StoreWriter(tmp_path / "store", kind, model=model) as out:
        out.add_resident("matrix", matrix, {"shape": matrix.shape, "fmt": "F32"})
        out.add_expert((1, 2), matrix[3:5])
        out.add_resident("empty", np.empty((0, 4), np.float32))
        with pytest.raises(UsageError, match=r"layer 1 expert 3: .*contiguous"):
            out.add_expert((1, 3), matrix[:, ::2])
        out.finish()
    with open_store(tmp_path / "store") as store:
        assert store.model == {**model, "config": {**model["config"], "layers": [1, 2]}}
        assert store.resident_meta("matrix") == {"shape": [30, 100], "fmt": "F32"}
        assert (np.frombuffer(store.resident("matrix"), np.float32).reshape(30, 100) == matrix).all()
        assert read_block(store, ExpertKey(1, 2)) == matrix[3:5].tobytes()
        buffer = memoryview(bytearray(4096 * 4))
        assert store.resident_into("matrix", buffer) == 12000 and bytes(buffer[:12000]) == matrix.tobytes()
        with pytest.raises(StoreError, match="12000 bytes do not fit"):
            store.resident_into("matrix", buffer[:11999])
        with pytest.raises(KeyError):
            store.resident("none")


@KINDS
def test_a_store_without_experts(tmp_path, kind):
    with open_store(write_store(tmp_path / "store", kind, {}, {"w": b"1"})) as store:
        assert list(store.keys()) == [] and bytes(store.resident("w")) == b"1"


@pytest.mark.parametrize("model", [{"x": float("nan")}, {"x": object()}, {1, 2}, b"bytes"])
def test_a_model_that_is_no_json(tmp_path, model):
    with pytest.raises(UsageError, match="no JSON"):
        StoreWriter(tmp_path / "store", model=model)
    assert os.listdir(tmp_path) == []


@KINDS
def test_repetitions(tmp_path, kind):
    with StoreWriter(tmp_path / "store", kind, model={}) as out:
        for _ in range(2):
            out.add_expert((0, 1), b"block")
            out.add_resident("r", b"data", [1])
        for data, meta in ((b"other", [1]), (b"data", [2])):
            with pytest.raises(StoreError, match="'r' was written before"):
                out.add_resident("r", data, meta)
        with pytest.raises(StoreError, match="layer 0 expert 1 was written before"):
            out.add_expert((0, 1), b"blocK")
        with pytest.raises(UsageError, match="at least one byte"):
            out.add_expert((0, 2), b"")
        with pytest.raises(UsageError, match="layer -1"):
            out.add_expert((-1, 2), b"x")
        assert out.has_expert(ExpertKey(0, 1)) and not out.has_expert(ExpertKey(0, 2))
        assert out.has_resident("r") and not out.has_resident("s")
        out.finish()
    assert verify_store(tmp_path / "store") == []


def test_unknown_kind(tmp_path):
    with pytest.raises(UsageError, match="--store tape"):
        StoreWriter(tmp_path / "store", "tape", model={})


@KINDS
def test_an_existing_store_is_kept_unless_overwriting(tmp_path, kind):
    path = write_store(tmp_path / "store", kind, BLOCKS)
    for resume in (False, True):
        with pytest.raises(StoreError, match="already there"):
            StoreWriter(path, model={}, resume=resume)
    with StoreWriter(path, model={"new": 1}, overwrite=True) as out:
        out.add_expert((7, 7), b"new")
        with open_store(path) as store:  # the old one serves until the new one is whole
            assert list(store.keys()) == list(BLOCKS)
        out.finish()
    with open_store(path) as store:
        assert store.model == {"new": 1} and list(store.keys()) == [(7, 7)]
    assert os.listdir(tmp_path) == ["store"]


@pytest.mark.parametrize("overwrite", [False, True])
def test_a_directory_that_is_no_store_is_never_touched(tmp_path, overwrite):
    (tmp_path / "photos").mkdir()
    (tmp_path / "photos" / "a.jpg").write_bytes(b"x")
    with pytest.raises(StoreError, match="no converted store"):
        StoreWriter(tmp_path / "photos", model={}, overwrite=overwrite)
    (tmp_path / "photos.partial").mkdir()
    shutil.rmtree(tmp_path / "photos")
    with pytest.raises(StoreError, match="has no journal"):
        StoreWriter(tmp_path / "photos", model={}, overwrite=overwrite)
    assert (tmp_path / "photos.partial").exists()


def test_an_empty_directory_and_missing_parents_are_welcome(tmp_path):
    (tmp_path / "out").mkdir()
    write_store(tmp_path / "out", "file", BLOCKS)
    write_store(tmp_path / "a" / "b c" / "ö", "file", BLOCKS)
    assert verify_store(tmp_path / "out") == verify_store(tmp_path / "a" / "b c" / "ö") == []


@KINDS
def test_an_unfinished_conversion_is_neither_lost_nor_mixed(tmp_path, kind):
    with StoreWriter(tmp_path / "store", kind, model={"m": 1}) as out:
        out.add_resident("r", b"data")
    with pytest.raises(StoreError, match=r"unfinished.*--resume"):
        StoreWriter(tmp_path / "store", kind, model={"m": 1})
    with pytest.raises(StoreError, match="another model"):
        StoreWriter(tmp_path / "store", kind, model={"m": 2}, resume=True)
    with pytest.raises(StoreError, match="another model"):
        StoreWriter(tmp_path / "store", "lmdb" if kind == "file" else "file", model={"m": 1}, resume=True)
    with StoreWriter(tmp_path / "store", kind, model={"m": 1}, resume=True) as out:
        assert out.has_resident("r")
    with StoreWriter(tmp_path / "store", kind, model={"m": 2}, overwrite=True) as out:
        assert not out.has_resident("r")


def test_two_writers_of_one_store(tmp_path):
    with StoreWriter(tmp_path / "store", model={}) as out:
        for options in ({"resume": True}, {"overwrite": True}):
            with pytest.raises(StoreError, match="another process is writing"):
                StoreWriter(tmp_path / "store", model={}, **options)
        out.finish()
    assert verify_store(tmp_path / "store") == []


@pytest.mark.parametrize("damage", ["resident.bin", "experts.bin", "journal", "torn", "newline", "twice", "zeros"])
def test_resuming_after_a_power_failure(tmp_path, damage):
    """Data may be lost though the journal knows it, and the other way round: checksums decide what is kept."""
    residents = {f"r{i}": bytes([i]) * 5000 for i in range(4)}
    write_store(tmp_path / "expected", "file", BLOCKS, residents)

    def add(out, most):
        for name, data in residents.items():
            out.add_resident(name, data, {"len": len(data)})
        for key, data in list(BLOCKS.items())[:most]:
            out.add_expert(key, data)

    with StoreWriter(tmp_path / "store", model={"name": "test"}) as out:
        add(out, 6)
    journal = tmp_path / "store.partial.journal"
    if damage.endswith(".bin"):
        path = tmp_path / "store.partial" / damage
        content = bytearray(path.read_bytes())
        content[9000] ^= 1
        path.write_bytes(content[:-5000])
    elif damage == "journal":
        lines = journal.read_bytes().splitlines(keepends=True)
        journal.write_bytes(b"".join(lines[:4]) + b'{"expert": 5}\n' + b"".join(lines[4:]))
    elif damage == "twice":  # blocks may be equal, so a checksum alone does not tell where one lies
        lines = journal.read_bytes().splitlines(keepends=True)
        journal.write_bytes(b"".join(lines[:7]) + lines[6] + b"".join(lines[7:]))
    elif damage == "newline":
        journal.write_bytes(journal.read_bytes()[:-1])
    elif damage == "torn":
        journal.write_bytes(journal.read_bytes()[:-9])
    else:
        journal.write_bytes(journal.read_bytes()[:-40] + bytes(40))
    with StoreWriter(tmp_path / "store", model={"name": "test"}, resume=True) as out:
        assert not all(out.has_expert(key) for key in list(BLOCKS)[:6]), "damage was not noticed"
        add(out, len(BLOCKS))
        out.finish()
    for name in ("resident.bin", "experts.bin", "manifest.json"):
        assert (tmp_path / "store" / name).read_bytes() == (tmp_path / "expected" / name).read_bytes()


def test_lost_padding_is_completed(tmp_path):
    """The last record's bytes reached the medium before a power failure, the zeros after it did not."""
    for name in ("store", "expected"):
        with StoreWriter(tmp_path / name, model={}) as out:
            out.add_expert((0, 0), b"x" * 5000)
            if name == "expected":
                out.finish()
    with open(tmp_path / "store.partial" / "experts.bin", "r+b") as file:
        file.truncate(4096 + 5001)
    with StoreWriter(tmp_path / "store", model={}, resume=True) as out:
        assert out.has_expert(ExpertKey(0, 0))
        out.finish()
    content = (tmp_path / "store" / "experts.bin").read_bytes()
    assert content == (tmp_path / "expected" / "experts.bin").read_bytes()


def test_a_damaged_block_in_an_unfinished_lmdb_is_written_again(tmp_path, monkeypatch):
    monkeypatch.setattr(expert_sinks, "_BATCH_NBYTES", 1)
    keys = list(BLOCKS)
    with StoreWriter(tmp_path / "store", "lmdb", model={"name": "test"}) as out:
        for key in keys[:6]:
            out.add_expert(key, BLOCKS[key])
    data = tmp_path / "store.partial" / "experts.lmdb" / "data.mdb"
    content = bytearray(data.read_bytes())
    content[content.index(BLOCKS[keys[4]]) + 100] ^= 1
    data.write_bytes(content)
    with StoreWriter(tmp_path / "store", "lmdb", model={"name": "test"}, resume=True) as out:
        assert [out.has_expert(key) for key in keys[:6]] == [True] * 4 + [False, True]
        for key in keys:
            out.add_expert(key, BLOCKS[key])
        out.finish()
    assert verify_store(tmp_path / "store") == []


# --- full disks -----------------------------------------------------------------------------------------------------


@KINDS
def test_a_disk_that_fills_up_at_any_write(tmp_path, kind, monkeypatch):
    """ENOSPC at the nth write, raising n until the conversion gets through; then it is resumed each time."""
    monkeypatch.setattr(expert_sinks, "_BATCH_NBYTES", 20000)
    left = [0]

    def spend():
        left[0] -= 1
        if left[0] == 0:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    real_write, real_commit = record_file.RecordFile._write, LmdbEnv.write
    monkeypatch.setattr(record_file.RecordFile, "_write", lambda self, *a: (spend(), real_write(self, *a))[1])

    def commit(self, work):
        try:
            spend()
        except OSError as error:
            raise StoreError(f"{self.path}: free disk space") from error
        return real_commit(self, work)

    monkeypatch.setattr(LmdbEnv, "write", commit)
    failures = 0
    for n in range(1, 100):
        path, left[0] = tmp_path / f"store{n}", n
        try:
            write_store(path, kind, BLOCKS, {"r": bytes(9000)})
        except StoreError as error:
            failures += 1
            assert "free disk space" in str(error) and not path.exists()
        else:
            break
        left[0] = 0
        with StoreWriter(path, kind, model={"name": "test"}, resume=True) as out:
            out.add_resident("r", bytes(9000), {"len": 9000})
            for key, data in BLOCKS.items():
                out.add_expert(key, data)
            out.finish()
        assert verify_store(path) == []
    assert failures >= 4 and verify_store(path) == []


@KINDS
def test_a_real_limit_of_file_size(tmp_path, kind):
    code = (
        "import resource, sys; from storage_support import *; from colibri_offload.errors import StoreError\n"
        "resource.setrlimit(resource.RLIMIT_FSIZE, (60000, 60000))\n"
        "try: write_store(Path(sys.argv[1]), sys.argv[2], make_blocks(1, 5, 5))\n"
        "except StoreError as error: print(error)\n"
    )
    path = tmp_path / "store"
    command = [sys.executable, "-c", code, str(path), kind]
    done = subprocess.run(command, capture_output=True, text=True, cwd=os.path.dirname(__file__), check=True)
    assert "free disk space" in done.stdout and done.stdout.count("\n") == 1
    assert not path.exists()


def test_published_manifest_is_deterministic(tmp_path):
    paths = [write_store(tmp_path / name, "file", BLOCKS, {"b": b"1", "a": b"2"}) for name in "xy"]
    texts = [(path / "manifest.json").read_bytes() for path in paths]
    assert texts[0] == texts[1] and json.loads(texts[0])["residents"]["a"]["nbytes"] == 1
