"""Belady's optimum: evict what is needed again last. Only for replay, where the future is known.

Source: Belady 1966, doi:10.1147/sj.52.0078.
"""

from __future__ import annotations

import math
from collections import defaultdict, deque
from collections.abc import Iterable

from colibri_offload.storage.base import ExpertKey


class Belady:
    """Rank: minus the position of the next use. `future` holds every use, in the order of the calls to on_hit."""

    def __init__(self, future: Iterable[ExpertKey]) -> None:
        self._uses: defaultdict[ExpertKey, deque[int]] = defaultdict(deque)
        for position, key in enumerate(future):
            self._uses[key].append(position)

    def on_insert(self, key: ExpertKey) -> None:
        """The next use is known without it."""

    def on_hit(self, key: ExpertKey) -> None:
        self._uses[key].popleft()

    def on_evict(self, key: ExpertKey) -> None:
        """The next use stays what it is."""

    def rank(self, key: ExpertKey) -> float:
        uses = self._uses[key]
        return -uses[0] if uses else -math.inf
