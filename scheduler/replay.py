"""Offline simulation of eviction policies on a recorded trace, with Belady's optimum as the ceiling."""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from itertools import chain

from colibri_offload.errors import UsageError
from colibri_offload.scheduler.floors import layer_floors
from colibri_offload.scheduler.policies import Belady, EvictionPolicy, make_policy
from colibri_offload.scheduler.victims import VictimQueue
from colibri_offload.storage.base import ExpertKey

OPTIMUM = "belady"


def simulate(trace: Sequence[Sequence[ExpertKey]], capacity: int, policy_name: str, floor: int = 0) -> float:
    """Share of uses that a cache of `capacity` blocks would have served, starting empty.

    Each step of `trace` lists what one layer needs at once: none of it is evicted before the step ends, unless the step
    alone exceeds the capacity. A key named twice in a step counts once. A layer's last `floor` blocks are not taken by
    other layers while there is another victim. "belady" is the optimum, for floor 0 and steps that fit.
    Raises: UsageError for a capacity below 1 or an unknown policy.
    """
    if capacity < 1:
        raise UsageError(f"--expert-cache: {capacity} slots cannot hold an expert; give at least 1")
    steps = [tuple(dict.fromkeys(step)) for step in trace]
    keys = set(chain.from_iterable(steps))
    future = chain.from_iterable(steps)
    policy = Belady(future) if policy_name == OPTIMUM else make_policy(policy_name, len(keys))
    cache = _SimulatedCache(policy, Counter(key.layer for key in keys), capacity, floor)
    hits = sum(cache.step(step) for step in steps)
    return hits / max(1, sum(map(len, steps)))


class _SimulatedCache:
    """Which keys are cached; the rules of ExpertCache without slots, reads or threads."""

    def __init__(self, policy: EvictionPolicy, experts_per_layer: Mapping[int, int], capacity: int, floor: int):
        self._policy, self._capacity = policy, capacity
        self._floors = layer_floors(capacity, experts_per_layer, floor)
        self._cached: Counter[int] = Counter()
        self._keys: set[ExpertKey] = set()
        self._victims = VictimQueue(experts_per_layer, policy.rank)

    def step(self, keys: Sequence[ExpertKey]) -> int:
        """Number of hits."""
        held = [key for key in keys if key in self._keys]
        missing = [key for key in keys if key not in self._keys]
        hits = len(held)
        for key in held:
            self._victims.withdraw(key)
            self._policy.on_hit(key)
        for key in missing:
            if len(self._keys) == self._capacity and not self._evict(key.layer):
                self._release(held)
                held = []
                self._evict(key.layer)
            self._keys.add(key)
            self._cached[key.layer] += 1
            self._policy.on_insert(key)
            self._policy.on_hit(key)
            held.append(key)
        self._release(held)
        return hits

    def _release(self, keys: Sequence[ExpertKey]) -> None:
        for key in keys:
            self._victims.offer(key)

    def _evict(self, layer: int) -> bool:
        victim = self._victims.take(lambda other: other == layer or self._cached[other] > self._floors[other])
        if victim is None:
            victim = self._victims.take(lambda other: True)
        if victim is None:
            return False
        self._keys.remove(victim)
        self._cached[victim.layer] -= 1
        self._policy.on_evict(victim)
        return True
