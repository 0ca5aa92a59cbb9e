"""The contract of eviction policies: keys and events in, a rank per key out."""

from __future__ import annotations

from typing import Protocol

from colibri_offload.storage.base import ExpertKey


class EvictionPolicy(Protocol):
    """Ranks cached keys; among those that may go, the lowest rank is evicted first (ties: the lower key).

    The rank of a key changes only in on_insert and on_hit of that key, and in a cache it never falls: keys are kept in
    heaps, where a rank is looked at only when the key surfaces.
    All methods are O(1). The caller holds the cache's lock.
    """

    def on_insert(self, key: ExpertKey) -> None:
        """The block of `key` has arrived in the cache, on demand or by prefetch. Not a use."""

    def on_hit(self, key: ExpertKey) -> None:
        """The cached block is handed to a layer: one use, also right after a load on demand."""

    def on_evict(self, key: ExpertKey) -> None:
        """The block has left the cache."""

    def rank(self, key: ExpertKey) -> float:
        """The rank of a key that is in the cache."""
