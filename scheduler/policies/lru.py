"""Least recently used."""

from __future__ import annotations

from colibri_offload.storage.base import ExpertKey


class LRU:
    """Rank: the time of the last use or arrival, counted in events."""

    def __init__(self) -> None:
        self._clock = 0
        self._last: dict[ExpertKey, int] = {}

    def on_insert(self, key: ExpertKey) -> None:
        self.on_hit(key)

    def on_hit(self, key: ExpertKey) -> None:
        self._clock += 1
        self._last[key] = self._clock

    def on_evict(self, key: ExpertKey) -> None:
        del self._last[key]

    def rank(self, key: ExpertKey) -> float:
        return self._last[key]
