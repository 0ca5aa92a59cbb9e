"""The expert cache under random calls: single-threaded against a model, and with threads, latencies and failures."""

from __future__ import annotations

import itertools
import random
import threading
import time

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule
from scheduler_readers import BLOCK, MEDIUM_BYTES, SteppedReader, ThreadedReader, content, make_slots

from colibri_offload.errors import StoreError
from colibri_offload.scheduler.cache import ExpertCache
from colibri_offload.storage.base import ExpertKey as K

EXPERTS = {0: 6, 1: 6, 2: 1}
KEYS = [K(layer, expert) for layer, count in EXPERTS.items() for expert in range(count)]


class OpenStream:
    """A stream, what it has delivered and what it holds. The cache's timeout is 0, so that next() never blocks."""

    def __init__(self, cache: ExpertCache, layer: int, experts: list[int]) -> None:
        self.layer, self.wanted = layer, set(experts)
        self.stream = cache.stream(layer, experts).__enter__()
        self.delivered: list[int] = []
        self.held: dict[int, K] = {}
        self.ended = False

    def step(self) -> StoreError | None:
        self.held = {}
        try:
            batch = next(self.stream)
        except StopIteration:
            self.ended = True
            return None
        except StoreError as error:
            return error
        assert batch, "an empty batch"
        self.delivered += [expert for expert, _ in batch]
        self.held = {slot: K(self.layer, expert) for expert, slot in batch}
        return None

    def leave(self) -> None:
        self.stream.__exit__(None, None, None)


def is_timeout(error: StoreError) -> bool:
    return "its read has not ended" in str(error) or "no slot" in str(error)


class CacheMachine(RuleBasedStateMachine):
    """Streams, prefetches and ends of reads in any order, all in one thread."""

    @initialize(slots=st.integers(1, 7), floor=st.integers(0, 3), policy=st.sampled_from(["lru", "lfru"]))
    def make(self, slots, floor, policy):
        self.reader, self.slots = SteppedReader(), make_slots(slots)
        self.cache = ExpertCache(
            self.reader, BLOCK, self.slots, EXPERTS, policy, floor, prefetch_limit=3, timeout_sec=0.0
        )
        self.streams: list[OpenStream] = []
        self.failed: set[K] = set()

    @precondition(lambda self: len(self.streams) < 3)
    @rule(layer=st.sampled_from(list(EXPERTS)), data=st.data())
    def open_stream(self, layer, data):
        experts = data.draw(st.lists(st.integers(0, EXPERTS[layer] - 1), max_size=7))
        resident = {e for e in experts if self.cache.resident_slot(K(layer, e)) is not None}
        before = self.cache.stats
        opened = OpenStream(self.cache, layer, experts)
        change = self.cache.stats - before
        assert (change.hits, change.misses) == (len(resident), len(set(experts) - resident))
        if resident:
            assert opened.step() is None
            assert set(opened.delivered) == resident, "the first batch is what is resident"
        self.streams.append(opened)

    @precondition(lambda self: self.streams)
    @rule(data=st.data())
    def step_stream(self, data):
        stream = data.draw(st.sampled_from(self.streams))
        error = stream.step()
        if error is not None and not is_timeout(error):
            key = next(key for key in self.failed if f"layer {key.layer} expert {key.expert}:" in str(error))
            assert key.layer == stream.layer and key.expert in stream.wanted
            stream.leave()
            self.streams.remove(stream)
        elif stream.ended:
            assert sorted(stream.delivered) == sorted(stream.wanted), "each expert exactly once"
            stream.leave()
            self.streams.remove(stream)

    @precondition(lambda self: self.streams)
    @rule(data=st.data())
    def abandon_stream(self, data):
        stream = data.draw(st.sampled_from(self.streams))
        stream.leave()
        self.streams.remove(stream)

    @rule(keys=st.lists(st.sampled_from(KEYS), max_size=5))
    def prefetch(self, keys):
        before = {key for key in KEYS if self.cache.resident_slot(key) is not None}
        started = self.cache.prefetch(keys)
        after = {key for key in KEYS if self.cache.resident_slot(key) is not None}
        assert started <= 3
        assert not (before - after) & set(keys), "a prefetch evicts what it names"

    @rule()
    def cancel_prefetch(self):
        self.cache.cancel_prefetch()

    @precondition(lambda self: self.reader.queued)
    @rule(data=st.data(), end=st.sampled_from(["begin", "finish", "finish", "finish", "fail"]))
    def read(self, data, end):
        key = data.draw(st.sampled_from(sorted(self.reader.queued)))
        if end == "fail":
            self.failed.add(key)
            self.reader.fail(key, OSError("EIO"))
        elif end == "finish":
            self.reader.finish(key)
        elif key not in self.reader.begun:
            self.reader.begin(key)

    @invariant()
    def leased_slots_hold_their_block(self):
        held = [(slot, key) for stream in self.streams for slot, key in stream.held.items()]
        for slot, key in held:
            assert self.slots[slot] == content(key), "a leased slot was reused"
        assert len({slot for slot, _ in held}) == len({key for _, key in held}), "a block lies in two slots"

    @invariant()
    def reads_and_leases_never_share_a_slot(self):
        written = [id(buffer) for _, buffer in self.reader.queued.values()]
        held = {id(self.slots[slot]) for stream in self.streams for slot in stream.held}
        assert len(set(written)) == len(written) and not held & set(written)

    @invariant()
    def resident_blocks_are_whole(self):
        for key in KEYS:
            slot = self.cache.resident_slot(key)
            assert slot is None or self.slots[slot] == content(key)

    @invariant()
    def prefetched_bytes_add_up(self):
        stats = self.cache.stats
        assert stats.prefetch_bytes_used + stats.prefetch_bytes_wasted <= stats.prefetch_bytes_read <= stats.bytes_read

    def teardown(self):
        """Nothing is stuck: once reads succeed every stream comes to its end, and no slot has been lost."""
        if not hasattr(self, "cache"):
            return
        for _ in range(200):
            self.reader.finish(*self.reader.queued)
            for stream in list(self.streams):
                error = stream.step()
                if stream.ended or (error is not None and not is_timeout(error)):
                    stream.leave()
                    self.streams.remove(stream)
        assert not self.streams
        self.cache.cancel_prefetch()
        self.reader.finish(*self.reader.queued)
        for stream in [OpenStream(self.cache, layer, list(range(count))) for layer, count in EXPERTS.items()]:
            while not stream.ended:
                self.reader.finish(*self.reader.queued)
                error = stream.step()
                assert error is None or is_timeout(error)
            stream.leave()
        found = {self.cache.resident_slot(key) for key in KEYS} - {None}
        assert len(found) == len(self.slots), "a slot has been lost"


TestCacheMachine = CacheMachine.TestCase
TestCacheMachine.settings = settings(max_examples=120, stateful_step_count=40, deadline=None)


@pytest.mark.parametrize(
    ("seed", "slots", "policy", "floor"),
    [(0, 1, "lru", 0), (1, 2, "lfru", 1), (2, 5, "lru", 2), (3, 9, "lfru", 2), (4, 13, "lru", 0)],
)
def test_threads_latencies_and_failures(seed, slots, policy, floor):
    """Three threads stream, one prefetches and cancels; every fifth read of some keys fails, all of one key."""
    bad = K(1, 5)
    rng = random.Random(seed)
    flaky = {key for key in KEYS if rng.random() < 0.3}
    pauses = random.Random(seed + 1)

    def error_of(key: K, nth: int) -> Exception | None:
        return OSError(f"EIO {key}") if key == bad or (key in flaky and nth % 5 == 1) else None

    reader = ThreadedReader(3, lambda: pauses.choice([0, 0, 0, 0.0005, 0.002]), error_of)
    buffers = make_slots(slots)
    cache = ExpertCache(reader, BLOCK, buffers, EXPERTS, policy, floor, prefetch_limit=3, timeout_sec=20)
    problems: list[BaseException] = []
    done = threading.Event()

    def consume(worker: int) -> None:
        rng = random.Random(1000 * seed + worker)
        for _ in range(60):
            layer = rng.choice(list(EXPERTS))
            experts = rng.sample(range(EXPERTS[layer]), rng.randint(1, EXPERTS[layer]))
            delivered = []
            try:
                with cache.stream(layer, experts) as batches:
                    for batch in batches:
                        for pause in (0, 0.0003):  # at the beginning and at the end of the computation
                            time.sleep(pause)
                            for expert, slot in batch:
                                assert buffers[slot] == content(K(layer, expert)), "a leased slot was reused"
                        delivered += [expert for expert, _ in batch]
                assert sorted(delivered) == sorted(experts)
            except StoreError as error:
                assert "EIO" in str(error), error
                assert layer == bad.layer or any(K(layer, expert) in flaky for expert in experts)

    def guess() -> None:
        rng = random.Random(seed + 7)
        while not done.is_set():
            cache.prefetch(rng.sample(KEYS, 4))
            time.sleep(0.0005)
            if rng.random() < 0.1:
                cache.cancel_prefetch()

    def guarded(work, *args) -> None:
        try:
            work(*args)
        except BaseException as error:
            problems.append(error)

    threads = [threading.Thread(target=guarded, args=(consume, worker)) for worker in range(3)]
    guesser = threading.Thread(target=guarded, args=(guess,))
    for thread in [*threads, guesser]:
        thread.start()
    for thread in threads:
        thread.join(30)
    done.set()
    guesser.join(30)
    assert not problems, f"seed {seed}: {problems}"
    assert not any(thread.is_alive() for thread in threads)
    for key in [key for key in KEYS if key != bad] * 2:
        try:
            with cache.stream(key.layer, [key.expert]) as batches:
                list(batches)
        except StoreError:
            assert key in flaky
    cache.cancel_prefetch()
    cache.close()
    reader.stop()
    stats = cache.stats
    assert stats.bytes_read % MEDIUM_BYTES == 0 and stats.misses > 0
    assert stats.prefetch_bytes_used + stats.prefetch_bytes_wasted == stats.prefetch_bytes_read


def workload(cache: ExpertCache, retries: int) -> tuple[list[tuple[int, int]], int]:
    """A fixed sequence of streams with prefetches; what was delivered, and the number of errors met."""
    delivered, errors = [], 0
    for step in range(6):
        layer = step % 2
        experts = [(step + i) % 6 for i in range(4)]
        for attempt in range(retries + 1):
            try:
                got = []
                with cache.stream(layer, experts) as batches:
                    cache.prefetch([K(1 - layer, (step + 1 + i) % 6) for i in range(2)])
                    for batch in batches:
                        got += [(layer, expert) for expert, _ in batch]
                delivered += sorted(got)
                break
            except StoreError:
                errors += 1
                if attempt == retries:
                    raise
    return delivered, errors


@pytest.mark.parametrize("slots", [1, 3, 6])
def test_failing_the_nth_read_once(slots):
    """N grows until no read fails: each failure costs at most one error, and never a result."""
    expected = [(step % 2, expert) for step in range(6) for expert in sorted((step + i) % 6 for i in range(4))]
    for n in itertools.count(1):
        number = itertools.count(1)
        failed: list[K] = []

        def error_of(key, nth, n=n, number=number, failed=failed):
            if next(number) != n:
                return None
            failed.append(key)
            return OSError("EIO")

        reader = ThreadedReader(1, error_of=error_of)
        cache = ExpertCache(reader, BLOCK, make_slots(slots), EXPERTS, floor=1, timeout_sec=5)
        delivered, errors = workload(cache, retries=1)
        assert delivered == expected and errors <= len(failed), f"read {n} failed"
        cache.close()
        reader.stop()
        if not failed:
            break
    assert n > 10


@pytest.mark.parametrize("slots", [1, 3])
def test_every_read_fails_from_the_nth_on_until_the_disk_is_back(slots):
    for n in range(1, 12):
        broken = threading.Event()
        number = itertools.count(1)

        def error_of(key, nth, n=n, number=number, broken=broken):
            if next(number) == n:
                broken.set()
            return OSError("EIO") if broken.is_set() else None

        reader = ThreadedReader(2, error_of=error_of)
        cache = ExpertCache(reader, BLOCK, make_slots(slots), EXPERTS, timeout_sec=5)
        with pytest.raises(StoreError, match="EIO"):
            workload(cache, retries=1)
        broken.clear()
        assert workload(cache, retries=2)[0]
        cache.close()
        reader.stop()
