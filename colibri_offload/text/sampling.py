"""Choosing the next token from logits.

Order of the filters, as in llama.cpp's default chain: repeat penalty → top-k → top-p → min-p → temperature. So top-p
and min-p see the model's own probabilities, and temperature only reshapes what they leave.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from colibri_offload.errors import NumericsError, UsageError


@dataclass(frozen=True)
class Sampling:
    """How tokens are picked. UsageError names the flag whose value is out of range.

    temperature     0 is greedy; above, logits are divided by it.
    top_k           keep the k likeliest tokens; 0 keeps all.
    top_p           keep the likeliest tokens whose probabilities first sum to p; 1 keeps all.
    min_p           keep tokens at least min_p times as probable as the likeliest; 0 keeps all.
    repeat_penalty  divide (if positive, else multiply) the logits of the last `repeat_last_n` tokens; 1 changes
                    nothing.
    seed            the same seed and logits give the same tokens; None draws a fresh one.
    """

    temperature: float = 0.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    repeat_penalty: float = 1.0
    repeat_last_n: int = 64
    seed: int | None = None

    def __post_init__(self) -> None:
        _require(
            "--temperature", self.temperature, _is_number(self.temperature) and self.temperature >= 0, "a number ≥ 0"
        )
        _require("--top-k", self.top_k, _is_integer(self.top_k) and self.top_k >= 0, "an integer ≥ 0 (0: all)")
        _require(
            "--top-p", self.top_p, _is_number(self.top_p) and 0 < self.top_p <= 1, "above 0 and at most 1 (1: all)"
        )
        _require("--min-p", self.min_p, _is_number(self.min_p) and 0 <= self.min_p <= 1, "from 0 to 1 (0: all)")
        penalty = self.repeat_penalty
        _require(
            "--repeat-penalty", penalty, _is_number(penalty) and 0.01 <= penalty <= 100, "from 0.01 to 100 (1: none)"
        )
        last = self.repeat_last_n
        _require("--repeat-last-n", last, _is_integer(last) and last >= 0, "an integer ≥ 0 (0: no penalty)")
        seed = self.seed
        _require(
            "--seed", seed, seed is None or (_is_integer(seed) and 0 <= seed < 2**64), "an integer from 0 to 2⁶⁴-1"
        )

    @property
    def greedy(self) -> bool:
        """Whether the likeliest token is always taken, so that no random number is drawn."""
        return self.temperature == 0 or self.top_k == 1


def _require(flag: str, value: Any, ok: bool, range_text: str) -> None:
    if not ok:
        raise UsageError(f"{flag} {value}: must be {range_text}")


def _is_number(value: Any) -> bool:
    return (
        isinstance(value, int | float | np.floating | np.integer)
        and not isinstance(value, bool)
        and math.isfinite(value)
    )


def _is_integer(value: Any) -> bool:
    return isinstance(value, int | np.integer) and not isinstance(value, bool)


class Sampler:
    """Picks the tokens of one sequence; keeps that sequence's random numbers, so neighbours in a batch do not
    matter."""

    def __init__(self, sampling: Sampling) -> None:
        self.sampling = sampling
        self._random = np.random.Generator(np.random.Philox(sampling.seed))

    def pick(self, logits: np.ndarray, recent: Sequence[int] = ()) -> int:
        """The next token's id.

        logits: float32 [V], not changed; -inf forbids a token. recent: ids so far, newest last. Ties go to the lower
        id. Raises NumericsError when a logit is NaN or +inf, or all are -inf.
        """
        # max() propagates NaN, so one pass over the logits finds every fault.
        best = float(logits.max()) if logits.size else -math.inf
        if not math.isfinite(best):
            raise NumericsError(_fault(logits))
        s = self.sampling
        if s.repeat_penalty != 1 and s.repeat_last_n and len(recent):
            logits = _penalised(logits, recent[-s.repeat_last_n :], s.repeat_penalty)
        if s.greedy:
            return int(logits.argmax())
        ids = _filtered(logits, s)
        weights = np.exp((logits[ids].astype(np.float64) - float(logits.max())) / s.temperature)
        cumulative = np.cumsum(weights)
        drawn = int(np.searchsorted(cumulative, self._random.random() * cumulative[-1], side="right"))
        return int(ids[min(drawn, len(ids) - 1)])


def _fault(logits: np.ndarray) -> str:
    bad = np.flatnonzero(np.isnan(logits) | np.isposinf(logits))
    if bad.size:
        first = f"{logits[bad[0]]} at token {bad[0]}"
        return f"logits: {bad.size} of {logits.size} are NaN or +inf, first {first}; try --activations float32"
    return f"logits: all {logits.size} are -inf, no token is allowed; loosen the mask"


def _penalised(logits: np.ndarray, recent: Sequence[int], penalty: float) -> np.ndarray:
    """Source: Keskar et al. 2019, arXiv:1909.05858 (CTRL), section 4.1, for either sign as in llama.cpp."""
    ids = np.unique(np.asarray(recent, dtype=np.int64))
    ids = ids[(ids >= 0) & (ids < logits.size)]
    out = logits.copy()
    seen = out[ids]
    out[ids] = np.where(seen > 0, seen / penalty, seen * penalty)
    return out


def _filtered(logits: np.ndarray, s: Sampling) -> np.ndarray:
    """Ids that may be drawn."""
    ids = np.arange(logits.size) if s.top_k == 0 else _likeliest(logits, s.top_k)
    if s.top_p < 1:
        ids = _nucleus(logits, ids, s.top_p)
    if s.min_p > 0:
        kept = logits[ids]
        ids = ids[kept >= kept.max() + math.log(s.min_p)]
    return ids


def _likeliest(logits: np.ndarray, k: int) -> np.ndarray:
    """The k ids of the largest logits, largest first, ties to the lower id."""
    ids = np.arange(logits.size)
    if k < logits.size:
        # Partition first: sorting a whole vocabulary costs as much as a small model's layer.
        ids = np.flatnonzero(logits >= np.partition(logits, logits.size - k)[logits.size - k])
    return ids[np.argsort(-logits[ids], kind="stable")][:k]


def _nucleus(logits: np.ndarray, ids: np.ndarray, p: float) -> np.ndarray:
    """The shortest run of likeliest `ids` that holds at least p of their probability.

    Source: Holtzman et al. 2019, arXiv:1904.09751.
    """
    among = logits[ids].astype(np.float64)
    weights = np.exp(among - among.max())
    target = p * float(weights.sum())
    k = min(256, ids.size)
    while True:
        top = _likeliest(logits[ids], k)
        held = np.cumsum(weights[top])
        if held[-1] >= target or k == ids.size:
            return ids[top[: int(np.searchsorted(held, target)) + 1]]
        k = min(k * 16, ids.size)
