"""Least frequently and recently used: a use count that fades.

Source: LRFU, Lee et al. 2001, doi:10.1109/TC.2001.970573.
"""

from __future__ import annotations

import math

from colibri_offload.storage.base import ExpertKey

# On a model of 192 routed experts a decay of 0.999 per use closes about 40 % of the gap between LRU and Belady's
# optimum. A horizon of 1000 uses is five per expert there, and it would be two tokens of a model that uses 500
# experts per token: so it grows with the number of experts.
USES_PER_EXPERT = 5


class LFRU:
    """Rank: log of Σ decay^(uses of any key since each use of this one).

    All counts fade alike, so the order of two keys changes only when one is used. Hence a use at time t may add
    decay^-t instead, and its logarithm grows by a constant step and never overflows. Counts survive eviction.
    """

    def __init__(self, decay: float = 0.999) -> None:
        self._step = -math.log(decay)
        self._now = 0.0
        self._log_count: dict[ExpertKey, float] = {}

    @classmethod
    def for_experts(cls, experts: int) -> LFRU:
        """The policy for a model with `experts` routed experts in all its layers together."""
        return cls(1 - 1 / (USES_PER_EXPERT * max(1, experts)))

    def on_insert(self, key: ExpertKey) -> None:
        """Arriving is not a use: a block that was prefetched in vain is the first to go."""

    def on_hit(self, key: ExpertKey) -> None:
        self._now = now = self._now + self._step
        old = self._log_count.get(key)
        # log(exp(old) + exp(now)) without overflow; old may exceed now, by at most the log of the horizon
        self._log_count[key] = now if old is None else max(old, now) + math.log1p(math.exp(-abs(old - now)))

    def on_evict(self, key: ExpertKey) -> None:
        """The count is kept: it is what tells a returning expert from a new one."""

    def rank(self, key: ExpertKey) -> float:
        return self._log_count.get(key, -math.inf)
