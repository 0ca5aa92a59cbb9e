"""Which evictable block goes next: a heap of ranks per layer, so that whole layers can be spared."""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterable

from colibri_offload.storage.base import ExpertKey

_SLACK = 64


class VictimQueue:
    """Keys, lowest `rank(key)` first (ties: the lower key). offer is amortised O(log n), take O(layers + log n).

    A rank that rises while its key is queued is noticed when the key surfaces, so that a use costs nothing here; after
    a fall the key has to be offered again.
    """

    def __init__(self, layers: Iterable[int], rank: Callable[[ExpertKey], float]) -> None:
        self._rank = rank
        self._keys: dict[int, set[ExpertKey]] = {layer: set() for layer in layers}
        # May hold keys that have left and the same key twice, until they surface or outnumber the rest.
        self._heaps: dict[int, list[tuple[float, ExpertKey]]] = {layer: [] for layer in self._keys}

    def offer(self, key: ExpertKey) -> None:
        """`key` may be evicted, or its rank has fallen."""
        keys, heap = self._keys[key.layer], self._heaps[key.layer]
        keys.add(key)
        heapq.heappush(heap, (self._rank(key), key))
        if len(heap) > 2 * len(keys) + _SLACK:
            heap[:] = [(self._rank(key), key) for key in keys]
            heapq.heapify(heap)

    def withdraw(self, key: ExpertKey) -> None:
        """`key` may no longer be evicted. Does nothing when it was not offered."""
        self._keys[key.layer].discard(key)

    def take(self, may_lose: Callable[[int], bool]) -> ExpertKey | None:
        """Withdraw and return the key of the lowest rank in the layers that may lose one; None when there is none."""
        heads = [head for layer in self._heaps if may_lose(layer) and (head := self._head(layer)) is not None]
        if not heads:
            return None
        _, key = min(heads)
        heapq.heappop(self._heaps[key.layer])
        self.withdraw(key)
        return key

    def _head(self, layer: int) -> tuple[float, ExpertKey] | None:
        keys, heap = self._keys[layer], self._heaps[layer]
        while heap:
            rank, key = heap[0]
            if key not in keys:
                heapq.heappop(heap)
            elif rank < (current := self._rank(key)):
                heapq.heapreplace(heap, (current, key))
            else:  # not above the current rank: a fall was offered as an entry of its own, which surfaces first
                return heap[0]
        return None
