"""Floors per layer: dealt out evenly, within the slots, and worth having."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from scheduler_readers import BLOCK, SteppedReader, make_slots

from colibri_offload.scheduler.cache import ExpertCache
from colibri_offload.scheduler.floors import layer_floors
from colibri_offload.scheduler.replay import simulate
from colibri_offload.storage.base import ExpertKey as K


@given(st.integers(1, 60), st.dictionaries(st.integers(0, 20), st.integers(1, 9), min_size=1), st.integers(0, 12))
def test_floors_fit_and_are_even(slots, experts_per_layer, floor):
    floors = layer_floors(slots, experts_per_layer, floor)
    wanted = {layer: min(floor, experts) for layer, experts in experts_per_layer.items()}
    if sum(wanted.values()) <= slots:
        assert floors == wanted
        return
    assert slots - sum(floors.values()) == min(slots, max(2, *wanted.values())), "what one layer needs at once is left"
    short = [floors[layer] for layer in floors if floors[layer] < wanted[layer]]
    assert all(count <= min(short) + 1 for count in floors.values())
    assert short == sorted(short, reverse=True), "the first layers come first"


def test_a_dense_model_larger_than_the_cache_keeps_what_fits():
    """Without floors LRU evicts each layer just before it is needed again: a cycle of 10 in 6 slots never hits."""
    cycles = [[K(layer, 0)] for _ in range(20) for layer in range(10)]
    assert simulate(cycles, 6, "lru") == 0
    assert simulate(cycles, 6, "lru", floor=1) == 19 * 4 / 200
    reader = SteppedReader()
    cache = ExpertCache(reader, BLOCK, make_slots(6), dict.fromkeys(range(10), 1), floor=1)
    for (key,) in cycles:
        cache.prefetch([K((key.layer + 1) % 10, 0)])
        with cache.stream(key.layer, [0]) as batches:
            reader.finish(*reader.queued)
            assert len(list(batches)) == 1
    assert reader.reads[K(0, 0)] == 1 and reader.reads[K(9, 0)] == 20
    assert sum(reader.reads.values()) == 4 + 20 * 6


def test_too_few_slots_for_one_token_still_hit():
    """Each of 4 layers uses one expert always and one by turns: 6 slots for cycles of 8."""
    steps = [[K(layer, 1 + token % 7), K(layer, 0)] for token in range(50) for layer in range(4)]
    assert simulate(steps, 6, "lru") == 0
    assert simulate(steps, 6, "lru", floor=2) > 0.2
    assert simulate(steps, 6, "lfru", floor=2) == 49 * 4 / 400
