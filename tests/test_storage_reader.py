"""The asynchronous reader: bytes, order, bounds, failures and ends, on every store."""

import errno
import io
import logging
import os
import threading
import time
from concurrent.futures import CancelledError, wait
from pathlib import Path

import pytest
from storage_support import STORES, arena_for, file_store, make_blocks, slice_store

from colibri_offload.errors import CorruptRecordError, StoreError, UsageError
from colibri_offload.storage import direct, read_slot
from colibri_offload.storage.arena import Arena
from colibri_offload.storage.base import ExpertKey
from colibri_offload.storage.plan import Slice
from colibri_offload.storage.read_slot import ReadSlot
from colibri_offload.storage.reader import AsyncReader
from colibri_offload.storage.slices import SliceStore
from colibri_offload.storage.wrappers import FaultyStore, WrapperStore

BLOCKS = make_blocks(4)
KEYS = list(BLOCKS)
TIMEOUT = 20  # seconds until a test calls something hung


class HeldStore(WrapperStore):
    """Reads wait until `release` is set; `order` is the order in which they began, `most` how many ran at once."""

    def __init__(self, inner):
        super().__init__(inner)
        self.release = threading.Event()
        self.order = []
        self.running = self.most = 0
        self._lock = threading.Lock()

    def read_into(self, key, buffer):
        with self._lock:
            self.order.append(key)
            self.running += 1
            self.most = max(self.most, self.running)
        try:
            assert self.release.wait(TIMEOUT)
            return super().read_into(key, buffer)
        finally:
            with self._lock:
                self.running -= 1

    def wait_for_reads(self, count):
        end = time.monotonic() + TIMEOUT
        while len(self.order) < count and time.monotonic() < end:
            time.sleep(0.001)
        assert len(self.order) >= count


@pytest.fixture
def held(tmp_path):
    with HeldStore(file_store(tmp_path, BLOCKS)) as store:
        yield store
        store.release.set()


@pytest.mark.parametrize("mode", ["auto", "direct", "buffered"])
@pytest.mark.parametrize("name", STORES)
def test_every_store_in_every_mode(tmp_path, name, mode):
    with STORES[name](tmp_path, BLOCKS) as store, arena_for(store, len(BLOCKS)) as arena:
        with AsyncReader(store, 3, mode) as reader:
            futures = {key: reader.submit(key, arena.slot(i), i % 2 == 0) for i, key in enumerate(KEYS)}
            for i, key in enumerate(KEYS):
                assert futures[key].result(TIMEOUT) == store.medium_nbytes(key)
                assert bytes(arena.slot(i)[: len(BLOCKS[key])]) == BLOCKS[key]
            stats = reader.stats
        assert stats.requests == len(BLOCKS) and stats.errors == stats.retries == 0
        assert stats.bytes_read == sum(map(len, BLOCKS.values()))
        assert 0 < stats.busy_sec < TIMEOUT
        assert (stats - stats).requests == 0


def test_direct_reads_use_o_direct_and_buffered_ones_do_not(tmp_path, monkeypatch):
    if direct.O_DIRECT == 0:
        pytest.skip("no O_DIRECT on this platform")
    seen = []
    real_open = os.open

    def spy(path, flags, *args, **kwargs):
        if str(path).endswith("experts.bin"):
            seen.append(bool(flags & direct.O_DIRECT))
        return real_open(path, flags, *args, **kwargs)

    with file_store(tmp_path, BLOCKS) as store, arena_for(store) as arena:
        if not direct.DirectPolicy("direct").probe(store.path / "experts.bin"):
            pytest.skip("this filesystem refuses O_DIRECT")
        monkeypatch.setattr(os, "open", spy)
        for mode, expected in (("direct", True), ("auto", True), ("buffered", False)):
            seen.clear()
            with AsyncReader(store, 1, mode) as reader:
                reader.submit(KEYS[0], arena.slot(0), True).result(TIMEOUT)
            assert any(seen) == expected


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.EFAULT])
@pytest.mark.parametrize("when", ["open", "read"])
@pytest.mark.parametrize("name", ["file", "slices"])
def test_a_filesystem_that_refuses_direct_io(tmp_path, monkeypatch, caplog, number, when, name):
    """The fall-back is announced once, and every byte still comes."""
    if direct.O_DIRECT == 0:
        pytest.skip("no O_DIRECT on this platform")
    refused = OSError(number, os.strerror(number))
    real_open = os.open

    def open_(path, flags, *args, **kwargs):
        if flags & direct.O_DIRECT:
            raise refused
        return real_open(path, flags, *args, **kwargs)

    if when == "open":
        monkeypatch.setattr(os, "open", open_)
    else:
        monkeypatch.setattr(direct, "_read_first_block", lambda path: (_ for _ in ()).throw(refused))
    with STORES[name](tmp_path, BLOCKS) as store, arena_for(store, len(BLOCKS)) as arena:
        with caplog.at_level(logging.INFO), AsyncReader(store, 2, "direct") as reader:
            futures = [reader.submit(key, arena.slot(i), True) for i, key in enumerate(KEYS)]
            for i, future in enumerate(futures):
                future.result(TIMEOUT)
                assert bytes(arena.slot(i)[: len(BLOCKS[KEYS[i]])]) == BLOCKS[KEYS[i]]
    messages = [record.message for record in caplog.records if "no direct I/O" in record.message]
    assert len(messages) == 1


def test_a_refusal_after_the_probe(tmp_path, monkeypatch):
    """Some filesystems take O_DIRECT at open and refuse the alignment of a later read ("Bad address")."""
    real_fill = ReadSlot._fill
    refused = []

    def fill(self, what, part, target, alignment):
        if alignment > 1:
            refused.append(part)
            raise OSError(errno.EFAULT, os.strerror(errno.EFAULT))
        return real_fill(self, what, part, target, alignment)

    monkeypatch.setattr(ReadSlot, "_fill", fill)
    with file_store(tmp_path, BLOCKS) as store, arena_for(store) as arena, AsyncReader(store, 1, "auto") as reader:
        for key in KEYS:
            reader.submit(key, arena.slot(0), True).result(TIMEOUT)
            assert bytes(arena.slot(0)[: len(BLOCKS[key])]) == BLOCKS[key]
    assert len(refused) <= 1


def test_at_most_depth_reads_in_flight(held):
    with arena_for(held, len(KEYS)) as arena, AsyncReader(held, 3) as reader:
        futures = [reader.submit(key, arena.slot(i), False) for i, key in enumerate(KEYS)]
        held.wait_for_reads(3)
        time.sleep(0.05)
        assert len(held.order) == 3
        held.release.set()
        wait(futures, TIMEOUT)
        assert held.most == 3 and sorted(held.order) == sorted(KEYS)


def test_demand_overtakes_prefetch_and_promotion_makes_demand(held):
    with arena_for(held, 6) as arena, AsyncReader(held, 1) as reader:
        first = reader.submit(KEYS[0], arena.slot(0), False)
        held.wait_for_reads(1)
        futures = [reader.submit(KEYS[i], arena.slot(i), False) for i in (1, 2, 3)]
        futures.append(reader.submit(KEYS[4], arena.slot(4), True))
        assert reader.promote(futures[2])
        assert not reader.promote(futures[3]) and not reader.promote(first)
        held.release.set()
        wait(futures, TIMEOUT)
        assert held.order == [KEYS[i] for i in (0, 4, 3, 1, 2)]
        assert not reader.promote(futures[0])


def test_cancel_drops_what_has_not_started(held):
    with arena_for(held, 3) as arena, AsyncReader(held, 1) as reader:
        running = reader.submit(KEYS[0], arena.slot(0), True)
        held.wait_for_reads(1)
        waiting = [reader.submit(KEYS[i], arena.slot(i), i == 1) for i in (1, 2)]
        assert not reader.cancel(running)
        assert all(reader.cancel(future) for future in waiting)
        assert not reader.cancel(waiting[0])
        held.release.set()
        assert running.result(TIMEOUT) == len(BLOCKS[KEYS[0]])
        with pytest.raises(CancelledError):
            waiting[0].result(TIMEOUT)
        assert held.order == [KEYS[0]]
        assert not reader.cancel(running)
        assert reader.submit(KEYS[2], arena.slot(2), True).result(TIMEOUT) == len(BLOCKS[KEYS[2]])


def test_a_future_cancelled_by_its_owner_is_skipped(held):
    with arena_for(held, 3) as arena, AsyncReader(held, 1) as reader:
        running = reader.submit(KEYS[0], arena.slot(0), True)
        held.wait_for_reads(1)
        dropped = reader.submit(KEYS[1], arena.slot(1), True)
        last = reader.submit(KEYS[2], arena.slot(2), True)
        assert dropped.cancel()
        held.release.set()
        wait([running, last], TIMEOUT)
        assert held.order == [KEYS[0], KEYS[2]]


# --- failures -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("persistent", [False, True])
def test_failing_the_nth_read_until_nothing_fails(tmp_path, persistent):
    """A transient I/O error is cured by the second try; a lasting one reaches just the reads that met it."""
    inner = file_store(tmp_path, BLOCKS)
    n = 0
    while True:
        n += 1
        store = FaultyStore(inner, n, persistent=persistent)
        with arena_for(store, len(KEYS)) as arena, AsyncReader(store, 1) as reader:
            futures = [reader.submit(key, arena.slot(i), True) for i, key in enumerate(KEYS)]
            wait(futures, TIMEOUT)
            failed = [i for i, future in enumerate(futures) if future.exception()]
            stats = reader.stats
            for i, key in enumerate(KEYS):
                if i not in failed:
                    assert bytes(arena.slot(i)[: len(BLOCKS[key])]) == BLOCKS[key]
        for i in failed:
            error = futures[i].exception()
            assert isinstance(error, StoreError) and f"expert {KEYS[i].expert}" in str(error)
        if not store.failures:
            break
        assert failed == (list(range(n - 1, len(KEYS))) if persistent else [])
        assert stats.errors == len(failed) and stats.retries == max(len(failed), 1) and stats.requests == len(KEYS)
    assert n == len(KEYS) + 1
    inner.close()


def test_other_errors_are_not_tried_again(tmp_path):
    with FaultyStore(file_store(tmp_path, BLOCKS), 1, error_number=errno.EACCES) as store, arena_for(store) as arena:
        with AsyncReader(store, 1) as reader:
            with pytest.raises(StoreError, match="permissions"):
                reader.submit(KEYS[0], arena.slot(0), True).result(TIMEOUT)
            assert reader.stats.retries == 0 and reader.stats.errors == 1


@pytest.mark.skipif(not os.path.exists("/proc/self/mem"), reason="needs a file that answers EIO")
@pytest.mark.parametrize("mode", ["direct", "buffered"])
def test_a_real_io_error(mode):
    """/proc/self/mem has nothing mapped at address 0 and says EIO."""
    key = ExpertKey(0, 0)
    store = SliceStore({key: [Slice(Path("/proc/self/mem"), 0, 100)]}, lambda key, raws, out: None, nbytes=100)
    with store, Arena(100, 1) as arena, AsyncReader(store, 2, mode) as reader:
        with pytest.raises(StoreError, match=r"/proc/self/mem: layer 0 expert 0: Input/output error.*check the disk"):
            reader.submit(key, arena.slot(0), True).result(TIMEOUT)
        assert reader.stats.retries == 1


def test_damage_truncation_and_missing_files_reach_their_own_future(tmp_path):
    with file_store(tmp_path, BLOCKS) as store, arena_for(store, len(KEYS)) as arena:
        path = store.path / "experts.bin"
        broken = KEYS[2]
        with open(path, "r+b") as file:
            file.seek(store.plan(broken).reads[0].offset)
            file.write(bytes([BLOCKS[broken][0] ^ 1]))
        with AsyncReader(store) as reader:
            futures = {key: reader.submit(key, arena.slot(i), True) for i, key in enumerate(KEYS)}
            wait(futures.values(), TIMEOUT)
        assert [key for key in KEYS if futures[key].exception()] == [broken]
        assert isinstance(futures[broken].exception(), CorruptRecordError)
        with open(path, "r+b") as file:
            file.truncate(4096 + 100)
        with AsyncReader(store) as reader, pytest.raises(CorruptRecordError, match="truncated"):
            reader.submit(KEYS[-1], arena.slot(0), True).result(TIMEOUT)
        path.unlink()
        with AsyncReader(store) as reader, pytest.raises(StoreError, match=r"experts\.bin.*No such file"):
            reader.submit(KEYS[-1], arena.slot(0), True).result(TIMEOUT)


def test_a_failing_finish_reaches_its_own_future(tmp_path):
    def finish(key, raws, out):
        raise ValueError("cannot repack")

    (tmp_path / "f").write_bytes(bytes(100))
    key = ExpertKey(3, 1)
    with SliceStore({key: [Slice(tmp_path / "f", 1, 10)]}, finish, nbytes=10) as store, Arena(10, 1) as arena:
        with AsyncReader(store) as reader, pytest.raises(StoreError, match=r"layer 3 expert 1.*cannot repack"):
            reader.submit(key, arena.slot(0), True).result(TIMEOUT)


def test_short_reads_go_on(tmp_path, monkeypatch, caplog):
    """A read may deliver less than asked; a direct one then goes on from an aligned place."""

    class ShortFile(io.FileIO):
        def readinto(self, buffer):
            return min(super().readinto(buffer), 5000)

    monkeypatch.setattr(read_slot.io, "FileIO", ShortFile)
    caplog.set_level(logging.INFO)
    (tmp_path / "probe").write_bytes(bytes(4096))
    accepted = direct.DirectPolicy("buffered").probe(tmp_path / "probe")
    for name in ("file", "slices"):
        for mode in ("direct", "buffered"):
            directory = tmp_path / f"{name}-{mode}"
            directory.mkdir()
            with STORES[name](directory, BLOCKS) as store, arena_for(store) as arena:
                with AsyncReader(store, 1, mode) as reader:
                    for key in KEYS:
                        reader.submit(key, arena.slot(0), True).result(TIMEOUT)
                        assert bytes(arena.slot(0)[: len(BLOCKS[key])]) == BLOCKS[key]
    if accepted:
        assert not [record for record in caplog.records if "no direct I/O" in record.message]


@pytest.mark.parametrize(
    ("buffer", "message"),
    [
        (lambda arena: arena.slot(0)[:4096], "multiple of 4096"),
        (lambda arena: arena.slot(0)[:-1], "multiple of 4096"),
        (lambda arena: arena.slot(0).toreadonly(), "writable"),
        (lambda arena: memoryview(bytearray(1 << 16))[1:-4095], "address"),
    ],
)
def test_unusable_buffers(tmp_path, buffer, message):
    key = max(KEYS, key=lambda key: len(BLOCKS[key]))
    with slice_store(tmp_path / "s", BLOCKS) as store, arena_for(store) as arena, AsyncReader(store) as reader:
        error = reader.submit(key, buffer(arena), True).exception(TIMEOUT)
        assert isinstance(error, StoreError) and message in str(error) and f"expert {key.expert}" in str(error)


def test_unknown_key_and_bad_arguments(tmp_path):
    with slice_store(tmp_path / "s", BLOCKS) as store, arena_for(store) as arena:
        with AsyncReader(store) as reader:
            with pytest.raises(StoreError, match="layer 9 expert 9: the store has no such block"):
                reader.submit(ExpertKey(9, 9), arena.slot(0), True).result(TIMEOUT)
        with pytest.raises(UsageError, match="depth 0"):
            AsyncReader(store, 0)
        with pytest.raises(UsageError, match="--io fast"):
            AsyncReader(store, io="fast")


def test_staging_is_bounded_and_stated(tmp_path):
    with slice_store(tmp_path / "s", BLOCKS) as store, AsyncReader(store, 2) as reader:
        largest = max(len(data) for data in BLOCKS.values())
        assert 2 * largest <= reader.staging_nbytes <= 2 * (largest + 4 * 4096)
    with file_store(tmp_path, BLOCKS) as store, AsyncReader(store, 2) as reader:
        assert reader.staging_nbytes == 0


def test_handles_are_bounded(tmp_path):
    """A model of 200 shards must not use up the process's open files."""
    records = {}
    for i in range(60):
        (tmp_path / f"{i}.bin").write_bytes(bytes([i]) * 50)
        records[ExpertKey(0, i)] = [Slice(tmp_path / f"{i}.bin", i % 7, 40)]

    def finish(key, raws, out):
        out[:40] = raws[0]

    before = len(os.listdir("/proc/self/fd"))
    with SliceStore(records, finish, nbytes=40) as store, Arena(40, 1) as arena:
        with AsyncReader(store, 2) as reader:
            for key in [*records, *records]:
                reader.submit(key, arena.slot(0), True).result(TIMEOUT)
                assert bytes(arena.slot(0)[:40]) == bytes([key.expert]) * 40
            assert len(os.listdir("/proc/self/fd")) - before < 45
    assert len(os.listdir("/proc/self/fd")) <= before + 1


# --- ends -----------------------------------------------------------------------------------------------------------


def test_close_fails_what_waits_and_lets_running_reads_end(held):
    with arena_for(held, 5) as arena:
        reader = AsyncReader(held, 2)
        futures = [reader.submit(KEYS[i], arena.slot(i), i % 2 == 0) for i in range(5)]
        held.wait_for_reads(2)
        threading.Timer(0.1, held.release.set).start()
        reader.close()
        reader.close()
        assert all(future.done() for future in futures)
        failed = [future.exception() for future in futures if future.exception()]
        assert len(failed) == 3 and all("closed" in str(error) for error in failed)
        late = reader.submit(KEYS[0], arena.slot(0), True)
        assert isinstance(late.exception(0), StoreError) and "closed" in str(late.exception())


def test_close_gives_up_on_stuck_reads(held):
    with arena_for(held, 2) as arena:
        reader = AsyncReader(held, 2, close_timeout_sec=0.1)
        stuck = [reader.submit(KEYS[i], arena.slot(i), True) for i in range(2)]
        held.wait_for_reads(2)
        start = time.monotonic()
        reader.close()
        assert time.monotonic() - start < 2
        assert all(isinstance(future.exception(0), StoreError) for future in stuck)
        held.release.set()


def test_close_from_a_callback(tmp_path):
    with file_store(tmp_path, BLOCKS) as store, arena_for(store) as arena:
        reader = AsyncReader(store, 1)
        called = threading.Event()

        def callback(future):
            reader.close()
            called.set()

        reader.submit(KEYS[0], arena.slot(0), True).add_done_callback(callback)
        assert called.wait(TIMEOUT)
        reader.close()


def test_close_while_many_threads_submit(tmp_path):
    with file_store(tmp_path, BLOCKS) as store, arena_for(store, 4) as arena:
        for _ in range(10):
            reader = AsyncReader(store, 2)
            futures = []

            def work(n, reader=reader, futures=futures):
                while True:
                    future = reader.submit(KEYS[0], arena.slot(n), True)
                    futures.append(future)
                    if future.exception(TIMEOUT):
                        break

            threads = [threading.Thread(target=work, args=(n,)) for n in range(4)]
            for thread in threads:
                thread.start()
            time.sleep(0.01)
            reader.close()
            for thread in threads:
                thread.join(TIMEOUT)
            assert all(future.done() for future in futures)
            assert sum(future.exception() is not None for future in futures) == 4


def test_a_closed_store_fails_reads_only(tmp_path):
    with STORES["lmdb"](tmp_path, BLOCKS) as store, arena_for(store) as arena, AsyncReader(store) as reader:
        store.close()
        with pytest.raises(StoreError, match="closed"):
            reader.submit(KEYS[0], arena.slot(0), True).result(TIMEOUT)


def test_no_thread_is_left(tmp_path):
    before = threading.active_count()
    with file_store(tmp_path, BLOCKS) as store, arena_for(store) as arena, AsyncReader(store) as reader:
        reader.submit(KEYS[0], arena.slot(0), True).result(TIMEOUT)
    end = time.monotonic() + TIMEOUT
    while threading.active_count() > before and time.monotonic() < end:
        time.sleep(0.005)
    assert threading.active_count() <= before
