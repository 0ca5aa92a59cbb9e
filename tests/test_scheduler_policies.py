"""Policies, the victim queue and replay against oracles written independently."""

from __future__ import annotations

import itertools
import math
import random
from collections import OrderedDict
from functools import cache

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri_offload.errors import UsageError
from colibri_offload.scheduler.policies import LFRU, LRU, POLICIES, make_policy
from colibri_offload.scheduler.replay import simulate
from colibri_offload.scheduler.victims import VictimQueue
from colibri_offload.storage.base import ExpertKey as K

KEYS = [K(layer, expert) for layer in range(2) for expert in range(4)]
traces = st.lists(st.sampled_from(KEYS), max_size=60)


def one_by_one(trace):
    return [[key] for key in trace]


@given(traces, st.integers(1, 6))
def test_lru_against_an_ordered_dict(trace, capacity):
    cached: OrderedDict[K, None] = OrderedDict()
    hits = 0
    for key in trace:
        if key in cached:
            hits += 1
            cached.move_to_end(key)
        else:
            if len(cached) == capacity:
                cached.popitem(last=False)
            cached[key] = None
    assert simulate(one_by_one(trace), capacity, "lru") == hits / max(1, len(trace))


@given(traces, st.sampled_from([0.5, 0.9, 0.999]))
def test_lfru_ranks_like_the_sum_of_its_definition(trace, decay):
    policy = LFRU(decay)
    for key in trace:
        policy.on_hit(key)
    count = {key: sum(decay ** (len(trace) - 1 - t) for t, other in enumerate(trace) if other == key) for key in KEYS}
    for a, b in itertools.combinations(KEYS, 2):
        if not math.isclose(count[a], count[b], rel_tol=1e-9):
            assert (policy.rank(a) < policy.rank(b)) == (count[a] < count[b])


def test_lfru_neither_overflows_nor_forgets_order_after_many_uses():
    policy = LFRU(0.9)
    for t in range(100_000):
        policy.on_hit(KEYS[t % 3 % 2])
    assert math.isfinite(policy.rank(KEYS[0])) and policy.rank(KEYS[0]) > policy.rank(KEYS[1])


def test_lfru_remembers_uses_across_eviction_and_arrival_is_no_use():
    policy = LFRU(0.999)
    for key in [K(0, 0)] * 3 + [K(0, 1)]:
        policy.on_insert(key)
        policy.on_hit(key)
    policy.on_insert(K(0, 2))
    policy.on_evict(K(0, 0))
    policy.on_insert(K(0, 0))
    assert policy.rank(K(0, 2)) < policy.rank(K(0, 1)) < policy.rank(K(0, 0))


def test_lfru_horizon_follows_the_number_of_experts():
    assert LFRU.for_experts(200)._step == pytest.approx(-math.log(0.999), rel=1e-9)


@pytest.mark.parametrize("policy", [LRU(), LFRU()])
def test_ranks_never_fall(policy):
    rng = random.Random(3)
    ranks: dict[K, float] = {}
    for _ in range(2000):
        key = rng.choice(KEYS)
        (policy.on_hit if key in ranks and rng.random() < 0.8 else policy.on_insert)(key)
        assert policy.rank(key) >= ranks.get(key, -math.inf)
        ranks[key] = policy.rank(key)


def best_possible_hits(steps, capacity):
    """Every possible choice of victims, step by step; a step's own keys may not be chosen."""

    @cache
    def best(i, cached):
        if i == len(steps):
            return 0
        step = frozenset(steps[i])
        others = sorted(cached - step)
        kept = min(len(others), capacity - len(step))
        return len(step & cached) + max(
            best(i + 1, step | frozenset(choice)) for choice in itertools.combinations(others, kept)
        )

    return best(0, frozenset())


@settings(deadline=None, max_examples=60)
@given(st.lists(st.sets(st.sampled_from(KEYS[:6]), min_size=1, max_size=2), max_size=10), st.integers(2, 4))
def test_belady_is_the_best_of_all_choices(steps, capacity):
    steps = [sorted(step) for step in steps]
    uses = sum(map(len, steps))
    assert simulate(steps, capacity, "belady") == pytest.approx(best_possible_hits(steps, capacity) / max(1, uses))


@pytest.mark.parametrize("seed", range(3))
def test_belady_is_a_ceiling_and_lfru_beats_lru_on_skewed_steps(seed):
    rng = random.Random(seed)
    weights = [1 / (1 + e) for e in range(16)]
    steps = [
        [K(layer, e) for e in dict.fromkeys(rng.choices(range(16), weights, k=3))]
        for _ in range(150) for layer in range(4)
    ]  # fmt: skip
    for capacity in (12, 24, 48):
        lru, lfru, best = (simulate(steps, capacity, name) for name in ("lru", "lfru", "belady"))
        assert lru < lfru < best < 1, capacity


def test_replay_of_steps_floors_and_oversized_steps():
    a, b, c, d = (K(0, e) for e in range(4))
    assert simulate([[a, b], [a, a, b]], 2, "lru") == 0.5, "a key named twice in a step counts once"
    assert simulate([[a, b, c, d], [a, b, c, d]], 2, "lru") < 1, "a step larger than the cache runs"
    cycle = [[K(layer, 0)] for _ in range(10) for layer in range(4)]
    assert simulate(cycle, 3, "lru") == 0
    assert simulate([[K(0, 0)], [K(1, 0)], [K(1, 1)], [K(1, 2)], [K(0, 0)]], 2, "lru", floor=1) == 1 / 5
    assert simulate([], 2, "belady") == 0


def test_unknown_names_are_refused_with_the_list():
    for name in ("fifo", "", "belady"):
        with pytest.raises(UsageError, match=r"--eviction: .*lfru, lru"):
            make_policy(name, 8)
    with pytest.raises(UsageError, match="0 slots"):
        simulate([[K(0, 0)]], 0, "lru")
    assert all(make_policy(name, 8) is not make_policy(name, 8) for name in POLICIES)


actions = st.sampled_from(["offer", "withdraw", "raise", "lower", "take"])


@given(st.lists(st.tuples(actions, st.sampled_from(KEYS), st.integers(1, 9))))
def test_victim_queue_against_a_sorted_list(steps):
    rank = dict.fromkeys(KEYS, 0)
    queue, offered = VictimQueue(range(2), rank.__getitem__), set()
    for action, key, number in steps:
        if action == "raise":
            rank[key] += number
        elif action == "lower":
            rank[key] -= number
            if key in offered:
                queue.offer(key)
        elif action == "offer":
            queue.offer(key)
            offered.add(key)
        elif action == "withdraw":
            queue.withdraw(key)
            offered.discard(key)
        else:
            spared = number % 3  # layer 0, layer 1 or none
            expected = min((k for k in offered if k.layer != spared), key=lambda k: (rank[k], k), default=None)
            assert queue.take(lambda layer, spared=spared: layer != spared) == expected
            offered.discard(expected)


def test_victim_queue_does_not_grow_with_use():
    queue = VictimQueue([0], lambda key: 0)
    for _ in range(10_000):
        queue.offer(KEYS[0])
        queue.withdraw(KEYS[0])
    assert len(queue._heaps[0]) < 200
