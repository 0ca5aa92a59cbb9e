"""The expert cache, step by step, with a reader whose reads end when the test says so."""

from __future__ import annotations

import threading
import time

import pytest
from scheduler_readers import BLOCK, MEDIUM_BYTES, SteppedReader, content, make_slots

from colibri_offload.errors import CorruptRecordError, StoreError, UsageError
from colibri_offload.scheduler.cache import ExpertCache
from colibri_offload.storage.base import ExpertKey as K

EXPERTS = {0: 8, 1: 8, 2: 8}


class Rig:
    """A cache, its reader and its slots."""

    def __init__(self, slots: int, **options) -> None:
        self.reader, self.slots = SteppedReader(), make_slots(slots)
        options.setdefault("timeout_sec", 5.0)
        self.cache = ExpertCache(self.reader, BLOCK, self.slots, EXPERTS, **options)

    def load(self, *keys: K) -> None:
        """Stream keys one after another; the order is that of their use."""
        for key in keys:
            with self.cache.stream(key.layer, [key.expert]) as batches:
                if key in self.reader.queued:
                    self.reader.finish(key)
                assert [expert for batch in batches for expert, _ in batch] == [key.expert]

    def resident(self) -> set[K]:
        found = set()
        for layer, experts in EXPERTS.items():
            for expert in range(experts):
                slot = self.cache.resident_slot(K(layer, expert))
                if slot is not None:
                    assert self.slots[slot] == content(K(layer, expert))
                    found.add(K(layer, expert))
        return found


def test_resident_experts_come_first_and_missing_ones_as_they_arrive():
    rig = Rig(6)
    rig.load(K(0, 1), K(0, 2))
    with rig.cache.stream(0, [5, 1, 6, 2]) as batches:
        assert set(rig.reader.queued) == {K(0, 5), K(0, 6)}, "all missing experts are requested up front"
        assert all(rig.reader.demand.values())
        assert [expert for expert, _ in next(batches)] == [1, 2]
        rig.reader.finish(K(0, 6))
        ((expert, slot),) = next(batches)
        assert expert == 6 and rig.slots[slot] == content(K(0, 6))
        rig.reader.finish(K(0, 5))
        assert [expert for expert, _ in next(batches)] == [5]
        assert list(batches) == []
    stats = rig.cache.stats
    assert (stats.hits, stats.misses, stats.bytes_read, stats.evictions) == (2, 4, 4 * MEDIUM_BYTES, 0)


def test_an_expert_named_twice_comes_once_and_no_expert_is_fine():
    rig = Rig(2)
    with rig.cache.stream(0, [3, 3]) as batches:
        rig.reader.finish(K(0, 3))
        assert [[expert for expert, _ in batch] for batch in batches] == [[3]]
    with rig.cache.stream(0, []) as batches:
        assert list(batches) == []


@pytest.mark.parametrize("slots", [1, 2, 3])
def test_a_layer_larger_than_the_cache_reads_each_expert_once(slots):
    rig = Rig(slots)
    rig.load(K(1, 0))
    seen = []
    with rig.cache.stream(1, range(8)) as batches:
        rig.reader.finish(*rig.reader.queued)
        for batch in batches:
            for expert, slot in batch:
                assert rig.slots[slot] == content(K(1, expert))
                seen.append(expert)
            rig.reader.finish(*rig.reader.queued)
            if len(seen) < 8 and not rig.reader.queued:  # what is missing is requested when this batch is given back
                threading.Timer(0.02, lambda: rig.reader.finish(*rig.reader.queued)).start()
    assert sorted(seen) == list(range(8))
    assert set(rig.reader.reads.values()) == {1}


def test_a_leased_block_keeps_its_slot():
    rig = Rig(2)
    with rig.cache.stream(0, [0]) as held:
        rig.reader.finish(K(0, 0))
        ((_, slot),) = next(held)
        rig.load(K(1, 1), K(1, 2), K(1, 3))
        assert rig.slots[slot] == content(K(0, 0))
        assert rig.cache.prefetch([K(2, 0), K(2, 1)]) == 1, "one slot is leased"
    assert K(0, 0) in rig.resident()


def test_lru_evicts_the_least_recently_used():
    rig = Rig(3)
    rig.load(K(0, 0), K(1, 1), K(2, 2), K(0, 0), K(0, 5))
    assert rig.resident() == {K(2, 2), K(0, 0), K(0, 5)}
    assert rig.cache.stats.evictions == 1


def test_floor_spares_a_layers_last_blocks_while_there_are_other_victims():
    rig = Rig(6, floor=2)
    rig.load(K(0, 0), K(0, 1), *[K(1, e) for e in range(4)], *[K(2, e) for e in range(2)])
    assert rig.resident() == {K(0, 0), K(0, 1), K(1, 2), K(1, 3), K(2, 0), K(2, 1)}
    rig.load(K(2, 7))
    assert {K(0, 0), K(0, 1), K(1, 2), K(1, 3)} < rig.resident(), "at its floor, a layer takes from itself"


def test_floor_never_blocks_a_demand():
    rig = Rig(3, floor=1)
    rig.load(K(0, 0), K(1, 1), K(2, 2))
    with rig.cache.stream(2, [2]) as held:
        next(held)
        rig.load(K(2, 3))  # its own block is leased: another layer has to give its last one
        assert rig.resident() == {K(1, 1), K(2, 2), K(2, 3)}


def test_a_floor_beyond_the_slots_is_lowered():
    rig = Rig(11, floor=100)
    rig.load(*[K(0, e) for e in range(8)], K(1, 0), K(1, 1), K(2, 0))
    assert rig.cache.prefetch([K(1, e) for e in range(2, 7)] + [K(2, e) for e in range(1, 8)]) == 10
    rig.reader.finish(*rig.reader.queued)
    assert {key for key in rig.resident() if key.layer == 0} == {K(0, 7)}, "each layer keeps one, eight are shared"


def test_a_large_stream_makes_do_with_its_own_slots_rather_than_take_protected_ones():
    rig = Rig(6, floor=1)
    rig.load(K(0, 0), K(1, 0), *[K(2, e) for e in range(2)])
    rig.cache.prefetch([K(1, 3), K(1, 4)])
    rig.reader.finish(K(1, 3), K(1, 4))
    seen = []
    with rig.cache.stream(2, range(2, 8)) as batches:
        assert len(rig.reader.queued) == 3, "two blocks of its own layer, and one that nothing protects"
        rig.reader.finish(*rig.reader.queued)
        for batch in batches:
            seen += [expert for expert, _ in batch]
            threading.Timer(0.02, lambda: rig.reader.finish(*rig.reader.queued)).start()
    assert sorted(seen) == [2, 3, 4, 5, 6, 7]
    assert {K(0, 0), K(1, 3), K(1, 4)} < rig.resident()


def test_prefetched_block_in_flight_is_promoted_not_read_again():
    rig = Rig(4)
    assert rig.cache.prefetch([K(1, 3)]) == 1
    assert rig.reader.demand == {K(1, 3): False}
    with rig.cache.stream(1, [3]) as batches:
        assert rig.reader.demand == {K(1, 3): True}
        rig.reader.finish(K(1, 3))
        assert [expert for batch in batches for expert, _ in batch] == [3]
    stats = rig.cache.stats
    assert rig.reader.reads == {K(1, 3): 1}
    assert (stats.prefetch_issued, stats.prefetch_bytes_used, stats.prefetch_bytes_wasted) == (1, MEDIUM_BYTES, 0)
    assert (stats.hits, stats.misses) == (0, 1)


def test_prefetch_accounts_used_and_wasted_bytes_at_the_layers_next_pass():
    rig = Rig(8)
    rig.cache.prefetch([K(1, 0), K(1, 1), K(1, 2)])
    rig.reader.begin(K(1, 2))
    rig.reader.finish(K(1, 0), K(1, 1))
    assert rig.cache.stats.prefetch_bytes_read == 2 * MEDIUM_BYTES
    rig.load(K(1, 0))
    stats = rig.cache.stats
    assert (stats.hits, stats.prefetch_bytes_used, stats.prefetch_bytes_wasted) == (1, MEDIUM_BYTES, MEDIUM_BYTES)
    rig.reader.finish(K(1, 2))
    assert rig.cache.stats.prefetch_bytes_wasted == 2 * MEDIUM_BYTES, "it could not be cancelled any more"
    rig.load(K(1, 1))
    assert rig.cache.stats.prefetch_bytes_used == MEDIUM_BYTES, "the first verdict stands"


def test_a_wrong_guess_that_is_still_in_flight_when_it_is_needed_stays_wrong_but_is_not_read_again():
    rig = Rig(8)
    rig.cache.prefetch([K(1, 2)])
    rig.reader.begin(K(1, 2))
    rig.load(K(1, 0), K(1, 2))
    assert rig.reader.reads[K(1, 2)] == 1
    assert rig.cache.stats.prefetch_bytes_wasted == MEDIUM_BYTES


def test_wrong_guesses_that_have_not_begun_are_cancelled_by_their_layers_pass():
    rig = Rig(8)
    rig.cache.prefetch([K(1, 0), K(1, 1)])
    rig.cache.prefetch([K(2, 0)])
    with rig.cache.stream(1, [0]) as batches:
        assert set(rig.reader.queued) == {K(1, 0), K(2, 0)}
        rig.reader.finish(K(1, 0))
        list(batches)
    assert rig.cache.stats.prefetch_bytes_wasted == 0


def test_prefetch_is_bounded_and_takes_what_is_cached_as_it_is():
    rig = Rig(8, prefetch_limit=2)
    rig.load(K(1, 0))
    assert rig.cache.prefetch([K(1, e) for e in range(5)]) == 2
    assert set(rig.reader.queued) == {K(1, 1), K(1, 2)}
    assert rig.cache.prefetch([K(2, 0)]) == 0
    rig.reader.finish(K(1, 1))
    assert rig.cache.prefetch([K(1, 1), K(2, 0), K(2, 1)]) == 1


def test_prefetch_evicts_neither_what_it_names_nor_other_prefetches():
    rig = Rig(4)
    rig.load(K(1, 0), K(0, 0), K(0, 1), K(0, 2))
    assert rig.cache.prefetch([K(1, 0), K(1, 1)]) == 1
    rig.reader.finish(K(1, 1))
    assert rig.resident() == {K(1, 0), K(1, 1), K(0, 1), K(0, 2)}, "the oldest block is named, so it stays"
    assert rig.cache.prefetch([K(2, e) for e in range(4)]) == 2
    rig.reader.finish(*rig.reader.queued)
    assert rig.resident() == {K(1, 0), K(1, 1), K(2, 0), K(2, 1)}
    assert rig.cache.prefetch([K(0, 5)]) == 0


def test_prefetch_respects_the_floor():
    rig = Rig(4, floor=1)
    rig.load(K(0, 0), K(1, 0), K(1, 1), K(2, 0))
    assert rig.cache.prefetch([K(0, 1), K(2, 1), K(2, 2)]) == 3
    rig.reader.finish(*rig.reader.queued)
    # 0 takes its own last one or layer 1's spare one, whichever is older; layer 1 keeps its last one
    assert K(1, 1) in rig.resident()


def test_protection_ends_with_the_layers_pass_and_with_cancel():
    rig = Rig(2)
    rig.cache.prefetch([K(1, 0), K(1, 1)])
    rig.reader.finish(K(1, 0), K(1, 1))
    assert rig.cache.prefetch([K(2, 0)]) == 0
    rig.load(K(1, 0))
    assert rig.cache.prefetch([K(2, 0)]) == 1
    rig.cache.cancel_prefetch()
    assert not rig.reader.queued
    assert rig.resident() == {K(1, 0)}
    rig.cache.prefetch([K(2, 3)])
    rig.reader.finish(K(2, 3))
    rig.cache.cancel_prefetch()
    assert rig.cache.stats.prefetch_bytes_wasted == 2 * MEDIUM_BYTES
    assert rig.cache.prefetch([K(0, 3), K(0, 4)]) == 2


def test_demand_takes_the_slot_of_a_guess_that_has_not_begun():
    rig = Rig(1)
    rig.cache.prefetch([K(1, 0)])
    with rig.cache.stream(0, [0]) as batches:
        assert set(rig.reader.queued) == {K(0, 0)}
        rig.reader.finish(K(0, 0))
        assert [expert for batch in batches for expert, _ in batch] == [0]


def test_demand_waits_for_the_slot_of_a_guess_that_has_begun():
    rig = Rig(1)
    rig.cache.prefetch([K(1, 0)])
    rig.reader.begin(K(1, 0))
    with rig.cache.stream(0, [0]) as batches:
        assert set(rig.reader.queued) == {K(1, 0)}
        threading.Timer(0.02, lambda: rig.reader.finish(K(1, 0))).start()
        threading.Timer(0.06, lambda: rig.reader.finish(K(0, 0))).start()
        assert [expert for batch in batches for expert, _ in batch] == [0]
    assert rig.cache.stats.stall_seconds >= 0.02
    assert rig.cache.stats.prefetch_bytes_wasted == MEDIUM_BYTES


def test_prefetch_starts_nothing_while_a_stream_lacks_slots():
    rig = Rig(2)
    with rig.cache.stream(0, range(4)) as batches:
        rig.reader.finish(*rig.reader.queued)
        next(batches)
        assert rig.cache.prefetch([K(1, 0)]) == 0
    assert rig.cache.prefetch([K(1, 0)]) == 1


def test_prefetch_leaves_a_slot_that_a_stream_waits_for():
    rig = Rig(2)
    rig.load(K(1, 0))
    with rig.cache.stream(1, [0]) as other:
        next(other)
        stream = rig.cache.stream(0, [0, 1])
        batches = stream.__enter__()
        assert set(rig.reader.queued) == {K(0, 0)}
    assert rig.cache.prefetch([K(2, 0)]) == 0, "the slot that the other stream gave back is asked for"
    rig.reader.finish(K(0, 0))
    next(batches)
    assert set(rig.reader.queued) == {K(0, 1)}
    stream.__exit__()


@pytest.mark.parametrize("error", [OSError(5, "Input/output error"), CorruptRecordError("layer 0 expert 2: bad CRC")])
def test_failed_read_surfaces_frees_its_slot_and_leaves_the_others_alone(error):
    rig = Rig(3)
    with rig.cache.stream(0, [1, 2, 3]) as batches:
        rig.reader.fail(K(0, 2), error)
        with pytest.raises(StoreError, match="layer 0 expert 2") as caught:
            list(batches)
        assert caught.value is error or caught.value.__cause__ is error
        assert "\n" not in str(caught.value)
    rig.reader.finish(K(0, 1), K(0, 3))
    assert rig.resident() == {K(0, 1), K(0, 3)}
    rig.load(K(0, 2))
    assert rig.resident() == {K(0, 1), K(0, 2), K(0, 3)}, "nothing had to be evicted"


def test_submit_that_raises_is_a_failed_read(monkeypatch):
    rig = Rig(1)
    monkeypatch.setattr(rig.reader, "submit", lambda *_: (_ for _ in ()).throw(OSError("reader stopped")))
    with rig.cache.stream(0, [1]) as batches:
        with pytest.raises(StoreError, match=r"layer 0 expert 1.*reader stopped"):
            list(batches)
    monkeypatch.undo()
    rig.load(K(0, 1))


def test_failed_prefetch_is_silent_and_read_again_on_demand():
    rig = Rig(2)
    rig.cache.prefetch([K(1, 1)])
    rig.reader.fail(K(1, 1), OSError("EIO"))
    rig.load(K(1, 1))
    assert rig.reader.reads[K(1, 1)] == 2


def test_waiting_for_a_read_ends_with_an_error_and_the_block_is_not_lost():
    rig = Rig(1, timeout_sec=0.05)
    with rig.cache.stream(2, [6]) as batches:
        with pytest.raises(StoreError, match=r"layer 2 expert 6.*0\.05 s"):
            next(batches)
    with rig.cache.stream(2, [7]) as batches:  # the slot cannot be reused: the late read may still write to it
        with pytest.raises(StoreError, match=r"layer 2 expert 7: no slot"):
            next(batches)
    rig.reader.finish(K(2, 6))
    rig.load(K(2, 7))


def test_waiting_for_a_slot_that_another_stream_holds():
    rig = Rig(1)
    rig.load(K(0, 0))
    got: list[int] = []

    def other() -> None:
        with rig.cache.stream(1, [1]) as batches:
            got.extend(expert for batch in batches for expert, _ in batch)

    thread = threading.Thread(target=other)
    with rig.cache.stream(0, [0]) as batches:
        next(batches)
        thread.start()
        time.sleep(0.02)
        assert not rig.reader.queued and not got
    for _ in range(200):
        if rig.reader.queued:
            break
        time.sleep(0.005)
    rig.reader.finish(K(1, 1))
    thread.join(5)
    assert got == [1]


def test_leaving_a_stream_early_releases_everything():
    rig = Rig(2)
    with pytest.raises(RuntimeError), rig.cache.stream(0, range(5)) as batches:
        rig.reader.finish(*rig.reader.queued)
        next(batches)
        raise RuntimeError("the kernel failed")
    rig.load(K(1, 0), K(1, 1))
    assert rig.resident() == {K(1, 0), K(1, 1)}
    assert rig.cache.prefetch([K(2, 0)]) == 1, "the stream no longer lacks slots"


def test_preload_fills_free_slots_in_order_and_reports():
    rig = Rig(4)
    rig.load(K(0, 7))
    keys = [K(1, e) for e in range(8)]
    progress = []
    threading.Timer(0.02, lambda: rig.reader.finish(*list(rig.reader.queued)[::-1])).start()
    assert rig.cache.preload(keys, lambda done, total: progress.append((done, total))) == 3
    assert progress == [(1, 3), (2, 3), (3, 3)]
    assert rig.resident() == {K(0, 7), K(1, 0), K(1, 1), K(1, 2)}
    assert rig.cache.preload(keys) == 0
    assert rig.cache.stats.prefetch_issued == 0


def test_preload_reports_a_failed_read():
    rig = Rig(4)
    threading.Timer(0.02, lambda: rig.reader.fail(K(1, 0), OSError("EIO"))).start()
    with pytest.raises(StoreError, match="layer 1 expert 0"):
        rig.cache.preload([K(1, 0)])


def test_close_cancels_what_waits_and_waits_for_what_runs():
    rig = Rig(2)
    rig.cache.prefetch([K(0, 0), K(0, 1)])
    rig.reader.begin(K(0, 1))
    threading.Timer(0.05, lambda: rig.reader.finish(K(0, 1))).start()
    began = time.monotonic()
    rig.cache.close()
    assert time.monotonic() - began >= 0.04 and not rig.reader.queued
    rig.cache.close()
    with pytest.raises(StoreError, match="closed"), rig.cache.stream(0, [0]):
        pass


def test_close_gives_up_on_a_read_that_hangs():
    rig = Rig(2, timeout_sec=0.05)
    rig.cache.prefetch([K(0, 1)])
    rig.reader.begin(K(0, 1))
    with pytest.raises(StoreError, match="layer 0 expert 1"):
        rig.cache.close()


def test_close_ends_the_wait_of_another_thread():
    rig = Rig(1)
    raised = []

    def other() -> None:
        with rig.cache.stream(1, [1, 2]) as batches:
            try:
                list(batches)
            except StoreError as error:
                raised.append(error)

    thread = threading.Thread(target=other)
    thread.start()
    time.sleep(0.02)
    rig.cache.close()
    thread.join(5)
    assert len(raised) == 1


def test_close_ends_the_wait_for_a_slot():
    rig = Rig(1)
    rig.load(K(0, 0))
    raised = []

    def other() -> None:
        try:
            with rig.cache.stream(1, [1]) as batches:
                list(batches)
        except StoreError as error:
            raised.append(str(error))

    thread = threading.Thread(target=other)
    with rig.cache.stream(0, [0]) as batches:
        next(batches)
        thread.start()
        time.sleep(0.02)
        rig.cache.close()
        thread.join(2)
    assert len(raised) == 1 and "closed" in raised[0]


def test_constructor_refuses_what_cannot_work():
    with pytest.raises(UsageError, match="--expert-cache"):
        Rig(0)
    with pytest.raises(UsageError, match="lfru, lru"):
        Rig(1, policy="fifo")
    with pytest.raises(ValueError, match="64 bytes"):
        ExpertCache(SteppedReader(), BLOCK + 1, make_slots(1), EXPERTS)


def test_an_expert_that_does_not_exist_leaves_no_lease_behind():
    rig = Rig(1)
    rig.load(K(0, 0))
    with pytest.raises(KeyError, match="experts 0 to 7, not 8"), rig.cache.stream(0, [0, 8]):
        pass
    rig.load(K(0, 1))


def test_stats_subtract():
    rig = Rig(2)
    rig.load(K(0, 0))
    before = rig.cache.stats
    rig.load(K(0, 0), K(0, 0), K(0, 1))
    delta = rig.cache.stats - before
    assert (delta.hits, delta.misses, delta.bytes_read) == (2, 1, MEDIUM_BYTES)
    assert delta.hit_rate == pytest.approx(2 / 3)


def test_hits_are_cheap():
    """Eight resident experts cost a few dictionary look-ups, 6 µs where this was written; a wait costs far more."""
    rig = Rig(16)
    rig.load(*[K(0, e) for e in range(8)])
    experts = list(range(8))
    best = float("inf")
    for _ in range(20):
        began = time.perf_counter()
        for _ in range(100):
            with rig.cache.stream(0, experts) as batches:
                for _batch in batches:
                    pass
        best = min(best, (time.perf_counter() - began) / 100)
    assert best < 50e-6
