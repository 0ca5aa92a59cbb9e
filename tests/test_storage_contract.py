"""What every expert store must do, asked of each store and wrapper; and stores against a plain dict."""

import errno
import os
import tempfile
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from storage_support import STORES, arena_for, make_blocks, read_block, slice_store, write_store

from colibri_offload.errors import ColibriError, CorruptRecordError, StoreError
from colibri_offload.storage.arena import Arena
from colibri_offload.storage.base import ExpertKey
from colibri_offload.storage.lmdb_store import LmdbStore
from colibri_offload.storage.open import open_store
from colibri_offload.storage.plan import Slice, coalesce
from colibri_offload.storage.slices import SliceStore
from colibri_offload.storage.wrappers import CountingStore, FaultyStore, VerifyingStore

BLOCKS = make_blocks()


@pytest.fixture(params=STORES)
def store(request, tmp_path):
    with STORES[request.param](tmp_path, BLOCKS) as store:
        yield store


def test_keys_come_in_the_order_of_writing(store):
    assert list(store.keys()) == list(BLOCKS)
    assert len(store.keys()) == len(BLOCKS) and set(store.keys()) == set(BLOCKS)


def test_blocks_come_back(store):
    for key, data in BLOCKS.items():
        assert store.nbytes(key) == len(data)
        assert store.medium_nbytes(key) == len(data)
        with arena_for(store) as arena:
            slot = arena.slot(0)
            assert store.read_into(key, slot) == len(data)
            assert bytes(slot[: len(data)]) == data


def test_plain_tuples_are_keys(store):
    layer, expert = next(iter(BLOCKS))
    assert store.nbytes((layer, expert)) == len(BLOCKS[layer, expert])


def test_unknown_key(store):
    buffer = memoryview(bytearray(4096))
    for call in (store.nbytes, store.medium_nbytes, lambda key: store.read_into(key, buffer)):
        with pytest.raises(KeyError):
            call(ExpertKey(99, 0))


@pytest.mark.parametrize("buffer", [bytearray(4096), bytes(1 << 16)], ids=["short", "read-only"])
def test_unusable_buffer(store, buffer):
    key = max(BLOCKS, key=lambda key: len(BLOCKS[key]))
    with pytest.raises(StoreError, match=f"layer {key.layer} expert {key.expert}"):
        store.read_into(key, memoryview(buffer))


def test_many_threads(store):
    def check(key):
        return all(read_block(store, key) == BLOCKS[key] for _ in range(5))

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(check, list(BLOCKS) * 4))


def test_close_is_idempotent_and_final(store):
    key = next(iter(BLOCKS))
    read_block(store, key)
    store.close()
    store.close()
    with pytest.raises(StoreError, match="closed"):
        store.read_into(key, memoryview(bytearray(1 << 16)))


blocks_strategy = st.dictionaries(
    st.builds(ExpertKey, st.integers(0, 3) | st.just(2**31 - 1), st.integers(0, 3) | st.just(2**31 - 1)),
    st.binary(min_size=1, max_size=9000),
    max_size=6,
)


@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    st.sampled_from(["file", "lmdb"]),
    blocks_strategy,
    st.dictionaries(st.text(max_size=8), st.binary(max_size=9000), max_size=3),
)
def test_a_store_is_a_dict(kind, blocks, residents):
    with tempfile.TemporaryDirectory() as directory:
        path = write_store(Path(directory) / "store", kind, blocks, residents)
        with open_store(path) as store:
            assert list(store.keys()) == list(blocks)
            assert [read_block(store, key) for key in blocks] == list(blocks.values())
            assert {name: bytes(store.resident(name)) for name in store.resident_names()} == residents
            assert all(store.resident_meta(name) == {"len": len(data)} for name, data in residents.items())


@settings(max_examples=10, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(sorted(BLOCKS)), st.binary(min_size=1, max_size=20000)), max_size=6))
def test_replacing_in_lmdb_is_assigning_in_a_dict(changes):
    expected = dict(BLOCKS)
    with tempfile.TemporaryDirectory() as directory:
        path = write_store(Path(directory) / "store", "lmdb", BLOCKS)
        with LmdbStore(path, writable=True) as store:
            for key, data in changes:
                store.replace(key, data)
                expected[key] = data
                assert read_block(store, key) == data
        with open_store(path) as store:
            assert list(store.keys()) == list(BLOCKS)
            assert [read_block(store, key) for key in expected] == list(expected.values())


# --- slices ---------------------------------------------------------------------------------------------------------


def test_touching_slices_are_read_at_once(tmp_path):
    store = slice_store(tmp_path / "s", BLOCKS)
    key = max(BLOCKS, key=lambda key: len(BLOCKS[key]))
    plan = store.plan(key)
    assert len(plan.cuts) == 3 and len(plan.reads) == 2 and plan.nbytes == len(BLOCKS[key])


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(0, 60), st.integers(0, 40)), max_size=8))
def test_coalesced_cuts_give_the_bytes_of_the_slices(parts):
    content = {name: bytes((i * 7 + ord(name)) % 251 for i in range(100)) for name in "ab"}
    slices = [Slice(Path(name), offset, nbytes) for name, offset, nbytes in parts]
    plan = coalesce(slices)
    reads = [content[part.path.name][part.offset : part.stop] for part in plan.reads]
    got = [reads[cut.read][cut.start : cut.start + cut.nbytes] for cut in plan.cuts]
    assert got == [content[name][offset : offset + nbytes] for name, offset, nbytes in parts]
    ranges = sorted(plan.reads)
    assert all(a.path != b.path or a.stop < b.offset for a, b in pairwise(ranges))


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (lambda d: Slice(d / "none.bin", 0, 10), "none.bin.*No such file.*shard"),
        (lambda d: Slice(d / "short.bin", 90, 20), "short.bin: layer 0 expert 1.*10 bytes too early"),
        (lambda d: Slice(d / "short.bin", 1 << 40, 20), "short.bin.*truncated"),
    ],
)
def test_slices_that_are_not_there(tmp_path, part, message):
    (tmp_path / "short.bin").write_bytes(bytes(100))
    with SliceStore({ExpertKey(0, 1): [part(tmp_path)]}, lambda key, raws, out: None, nbytes=20) as store:
        with pytest.raises(StoreError, match=message):
            store.read_into(ExpertKey(0, 1), memoryview(bytearray(4096)))


@pytest.mark.skipif(not hasattr(os, "preadv"), reason="reads another way here")
@pytest.mark.parametrize("failures", [1, 2])
def test_an_io_error_is_tried_once_more(tmp_path, monkeypatch, failures):
    key = next(iter(BLOCKS))
    left = [failures]
    real = os.preadv

    def preadv(*args):
        left[0] -= 1
        if left[0] >= 0:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return real(*args)

    with open_store(write_store(tmp_path / "store", "file", BLOCKS)) as store:
        monkeypatch.setattr(os, "preadv", preadv)
        if failures == 1:
            assert read_block(store, key) == BLOCKS[key]
        else:
            with pytest.raises(StoreError, match=r"experts\.bin: layer \d expert \d: Input/output error"):
                read_block(store, key)


# --- wrappers -------------------------------------------------------------------------------------------------------


def test_counting_store_counts_reads(tmp_path):
    store = CountingStore(slice_store(tmp_path / "s", BLOCKS))
    a, b, *_ = BLOCKS
    for key in (a, b, a):
        read_block(store, key)
    assert store.reads == {a: 2, b: 1}
    assert store.bytes_read == 2 * len(BLOCKS[a]) + len(BLOCKS[b])


@pytest.mark.parametrize(("persistent", "failed"), [(False, [3]), (True, [3, 4, 5])])
def test_faulty_store_fails_the_nth_read(tmp_path, persistent, failed):
    store = FaultyStore(slice_store(tmp_path / "s", BLOCKS), 3, persistent=persistent)
    key = next(iter(BLOCKS))
    seen = []
    for n in range(1, 6):
        try:
            assert read_block(store, key) == BLOCKS[key]
        except StoreError as error:
            assert isinstance(error.__cause__, OSError)
            seen.append(n)
    assert seen == failed and store.failures == len(failed) and store.reads == 5


def test_verifying_store_notices_other_bytes(tmp_path):
    inner = slice_store(tmp_path / "s", BLOCKS)
    store = VerifyingStore(inner)
    key = max(BLOCKS, key=lambda key: len(BLOCKS[key]))
    read_block(store, key)
    part = inner.plan(key).reads[0]
    content = bytearray(part.path.read_bytes())
    content[part.offset] ^= 1
    part.path.write_bytes(content)
    with pytest.raises(CorruptRecordError, match=f"layer {key.layer} expert {key.expert}: checksum"):
        read_block(store, key)
    with pytest.raises(CorruptRecordError):
        read_block(VerifyingStore(inner, {key: 12345}), key)


def test_errors_of_finish_reach_the_caller(tmp_path):
    class RepackError(ColibriError):
        pass

    def finish(key, raws, out):
        raise RepackError("no such layout")

    (tmp_path / "f").write_bytes(bytes(100))
    records = {ExpertKey(0, 0): [Slice(tmp_path / "f", 0, 10)]}
    with SliceStore(records, finish, nbytes=10) as store, Arena(10, 1) as arena:
        with pytest.raises(RepackError):
            store.read_into(ExpertKey(0, 0), arena.slot(0))
