"""LMDB stores: other processes, growth, replacement, permissions, and every error of the library."""

import os
import shutil
import subprocess
import sys
import tempfile
import threading

import lmdb
import psutil
import pytest
from storage_support import arena_for, make_blocks, read_block, write_store

from colibri_offload.errors import ColibriError, CorruptRecordError, StoreError
from colibri_offload.storage import lmdb_env
from colibri_offload.storage.base import ExpertKey
from colibri_offload.storage.lmdb_env import LmdbEnv, translated_lmdb
from colibri_offload.storage.lmdb_store import LmdbStore
from colibri_offload.storage.open import open_store, verify_store

BLOCKS = make_blocks(8)
HERE = os.path.dirname(__file__)


@pytest.fixture
def path(tmp_path):
    return write_store(tmp_path / "store", "lmdb", BLOCKS)


def python(code, *args):
    command = [sys.executable, "-c", f"from test_storage_lmdb import *\n{code}", *map(str, args)]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, cwd=HERE)


def test_a_reader_sees_what_another_process_replaces(path):
    """Also when the replacement makes the file outgrow the reader's map, while the reader's threads are busy."""
    key, other = list(BLOCKS)[:2]
    code = (
        "with LmdbStore(sys.argv[1], writable=True) as store:\n"
        "    for line in sys.stdin:\n"
        "        store.replace(list(BLOCKS)[0], line.strip().encode() * 1000000); print('done', flush=True)\n"
    )
    with open_store(path) as store:
        store._env._resize(max((path / "experts.lmdb" / "data.mdb").stat().st_size, 1 << 16))  # no headroom
        assert read_block(store, key) == BLOCKS[key]
        stop = threading.Event()
        wrong = []

        def work():
            while not stop.is_set():
                if read_block(store, other) != BLOCKS[other]:
                    wrong.append(other)

        threads = [threading.Thread(target=work) for _ in range(2)]
        for thread in threads:
            thread.start()
        writer = python(code, path)
        for letter in ("a", "b", "c"):
            writer.stdin.write(letter + "\n")
            writer.stdin.flush()
            assert writer.stdout.readline() == "done\n"
            assert store.nbytes(key) == 1000000
            assert read_block(store, key) == letter.encode() * 1000000
        stop.set()
        for thread in threads:
            thread.join(20)
        assert not wrong
        assert writer.communicate(timeout=20)[0] == "" and writer.returncode == 0
    assert verify_store(path) == []


def test_many_reading_processes(path):
    code = "with open_store(sys.argv[1]) as store: print(all(read_block(store, k) == BLOCKS[k] for k in store.keys()))"
    with open_store(path) as store:
        children = [python(code, path) for _ in range(3)]
        assert [child.communicate(timeout=30)[0] for child in children] == ["True\n"] * 3
        assert read_block(store, next(iter(BLOCKS)))


def test_a_killed_replacement_leaves_the_old_block(path):
    code = (
        "with LmdbStore(sys.argv[1], writable=True) as store:\n"
        "    def work(txn):\n"
        "        txn.put(lmdb_env.pack_key(list(BLOCKS)[0]), b'half', db=store._env.records)\n"
        "        os.kill(os.getpid(), 9)\n"
        "    store._env.write(work)\n"
    )
    assert python(code, path).wait(30) == -9
    assert verify_store(path) == []
    with open_store(path) as store:
        assert {key: read_block(store, key) for key in BLOCKS} == BLOCKS


def test_the_slot_of_a_killed_reader_is_freed(path):
    """Else every crash would use up one of the readers that the store admits, and keep old pages from reuse."""
    code = "with open_store(sys.argv[1]) as store: store._env.read(lambda txn: os.kill(os.getpid(), 9))"
    look = "with open_store(sys.argv[1]) as store: print(store._env._env.readers())"
    with open_store(path):  # the last one to close a store resets all slots anyway
        assert python(code, path).wait(30) == -9
        assert "no active readers" in python(look, path).communicate(timeout=30)[0]


def test_replacing_grows_the_map(path, monkeypatch):
    monkeypatch.setattr(lmdb_env, "_FIRST_MAP", 1 << 16)
    key = list(BLOCKS)[3]
    with LmdbStore(path, writable=True) as store:
        before = store._env._env.info()["map_size"]
        store.replace(key, b"z" * 3_000_001)
        assert store._env._env.info()["map_size"] > before
        assert read_block(store, key) == b"z" * 3_000_001
        with pytest.raises(KeyError):
            store.replace(ExpertKey(55, 0), b"x")
        with pytest.raises(StoreError, match="0 bytes, but LMDB"):
            store.replace(key, b"")


def test_a_replacement_is_verified_anew(path):
    key = list(BLOCKS)[2]
    with LmdbStore(path, writable=True) as store:
        read_block(store, key)
        store.replace(key, b"abcdefgh" * 2000)
        data = path / "experts.lmdb" / "data.mdb"
        offset = data.read_bytes().index(b"abcdefgh" * 2000)
        with open(data, "r+b") as file:
            file.seek(offset)
            file.write(b"X")
        with pytest.raises(CorruptRecordError, match="checksum"):
            read_block(store, key)


def test_a_map_that_cannot_grow(path, monkeypatch):
    monkeypatch.setattr(lmdb_env, "_FIRST_MAP", 1 << 16)
    with LmdbStore(path, writable=True) as store:

        def refuse(nbytes):
            raise lmdb.MemoryError("Cannot allocate memory")

        monkeypatch.setattr(store._env, "_resize", refuse)
        with pytest.raises(StoreError, match=r"map is full and cannot grow to \d+ bytes.*ulimit -v") as caught:
            store.replace(list(BLOCKS)[3], b"z" * 3_000_000)
        assert isinstance(caught.value.__cause__.__cause__, lmdb.MapFullError)
        assert read_block(store, list(BLOCKS)[3]) == BLOCKS[list(BLOCKS)[3]]


def test_a_reading_store_refuses_to_replace(path):
    with open_store(path) as store, pytest.raises(StoreError, match="writable=True"):
        store.replace(next(iter(BLOCKS)), b"x")


def test_a_store_opened_twice_in_one_process(path):
    with open_store(path):
        with pytest.raises(StoreError, match=r"already open.*close the other store"):
            open_store(path)
    with open_store(path) as store:
        assert read_block(store, next(iter(BLOCKS)))


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
@pytest.mark.parametrize("lock_file", [False, True])
def test_a_store_on_which_no_lock_file_may_be_written(lock_file, caplog):
    """As on read-only media: read without locking, and say so."""
    with tempfile.TemporaryDirectory() as directory:  # not tmp_path, whose parents only their owner may enter
        os.chmod(directory, 0o755)
        path = write_store(os.path.join(directory, "store"), "lmdb", BLOCKS)
        if lock_file:
            open_store(path).close()
            os.chmod(path / "experts.lmdb" / "lock.mdb", 0o444)
        for folder in (path, path / "experts.lmdb"):
            os.chmod(folder, 0o555)
        pid = os.fork()
        if not pid:
            status = 1
            try:
                if os.getuid() == 0:
                    os.setuid(65534)  # permissions do not bind root
                with open_store(path) as store:
                    right = all(read_block(store, key) == data for key, data in BLOCKS.items())
                said = any("no lock file" in record.message for record in caplog.records)
                status = 0 if right and said else 2
            finally:
                os._exit(status)
        _, status = os.waitpid(pid, 0)
        for folder in (path, path / "experts.lmdb"):
            os.chmod(folder, 0o755)
        assert os.WEXITSTATUS(status) == 0


def test_no_lock_file_is_published(path):
    assert os.listdir(path / "experts.lmdb") == ["data.mdb"]


@pytest.mark.parametrize("error", [c for c in vars(lmdb).values() if isinstance(c, type) and issubclass(c, lmdb.Error)])
def test_every_error_of_lmdb_is_translated(tmp_path, path, error):
    """A new class in a later version of the library must not escape."""
    with LmdbStore(path, writable=True) as store:
        env = store._env
        raised = []

        def work(txn):
            if raised:
                return "again"
            raised.append(1)
            raise error("boom")

        for call in (env.read, env.write):
            raised.clear()
            try:
                assert call(work) == "again"  # a map that was full or outgrown is cured
                assert error in (lmdb.MapFullError, lmdb.MapResizedError)
            except ColibriError as translated:
                assert isinstance(translated, StoreError) and "boom" in str(translated) and str(path) in str(translated)
                assert isinstance(translated.__cause__, error)


def test_a_file_that_is_no_environment(path):
    data = path / "experts.lmdb" / "data.mdb"
    data.write_bytes(b"\1" * data.stat().st_size)
    with pytest.raises(StoreError, match=r"experts\.lmdb.*damaged"):
        open_store(path)


def test_a_full_disk_names_the_remedy(tmp_path):
    with pytest.raises(StoreError, match="free disk space"):
        with translated_lmdb(tmp_path):
            raise lmdb.DiskError("mdb_txn_commit: No space left on device")


def test_close_waits_for_a_running_read(path):
    """Unmapping under a reader would end the process with a signal."""
    env = LmdbEnv(path / "experts.lmdb")
    inside, leave = threading.Event(), threading.Event()

    def work(txn):
        inside.set()
        leave.wait(20)
        return bytes(txn.get(lmdb_env.pack_key(next(iter(BLOCKS))), db=env.records))

    results = []
    reader = threading.Thread(target=lambda: results.append(env.read(work)))
    reader.start()
    inside.wait(20)
    closer = threading.Thread(target=env.close)
    closer.start()
    closer.join(0.05)
    assert closer.is_alive()
    leave.set()
    closer.join(20)
    reader.join(20)
    assert results == [BLOCKS[next(iter(BLOCKS))]] and not closer.is_alive()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads how Linux accounts for maps")
def test_reading_does_not_fill_the_process_with_the_map(tmp_path):
    """Pages of the map that stayed would count as the engine's memory, beyond its budget."""
    blocks = {ExpertKey(0, i): bytes([i]) * (8 << 20) for i in range(8)}
    path = write_store(tmp_path / "store", "lmdb", blocks)
    with open_store(path) as store, arena_for(store) as arena:
        slot = arena.slot(0)
        store.read_into(ExpertKey(0, 0), slot)
        before = psutil.Process().memory_info().shared
        for key in blocks:
            store.read_into(key, slot)
        assert psutil.Process().memory_info().shared - before < 8 << 20
    shutil.rmtree(path)
