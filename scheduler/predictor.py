"""Guessing the next MoE layer's experts from its own router, applied one layer early and corrected.

The hidden state changes little from one layer to the next, so the next router's logits on the current state name most
of its experts; a linear map from these logits to the true routing, fitted while the model runs, finds some of the
others. Axis letters: T tokens, E experts of the layer, K top-k.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from colibri_offload.scheduler.ridge import OnlineRidge
from colibri_offload.scheduler.worth import PrefetchWorth

_FIRST_FIT = 2  # rows per unknown of one output before the first fit; each further fit waits for twice as many
_LONGEST_WAIT = 4096  # rows between two fits of one layer
_FIT_EVERY = 8  # calls of observe, of any layer, between two fits: the layers do not all fit on one token
_ROWS = 128  # of one call that are learned from, evenly spread: a long prompt must not cost more than it tells
_FADE = 0.99  # of the recall, per row
_WORTHWHILE, _RANK_STEP = 0.5, 0.15  # precision below which a rank is not read; weight of the newest row in it


class RoutingPredictor:
    """Guesses top_k + extra experts per layer.

    experts_per_layer: MoE layer → E. Each layer uses its raw logits or the corrected ones, whichever named more of
    the true experts lately. Not thread-safe.
    """

    def __init__(self, experts_per_layer: Mapping[int, int], top_k: int, extra: int = 2) -> None:
        self._layers = {
            layer: _Layer(experts, min(experts, top_k + extra)) for layer, experts in experts_per_layer.items()
        }
        self._worth = PrefetchWorth()
        self._since_fit = _FIT_EVERY
        self.observations = 0  # tokens, summed over layers

    @property
    def enabled(self) -> bool:
        """Whether prefetching on these guesses pays, or is being tried again."""
        return self._worth.enabled

    def account(self, used: int, wasted: int) -> None:
        """Bytes of prefetches that turned out used and wasted since the last call. To be called at every step."""
        self._worth.account(used, wasted)

    def predict(self, layer: int, logits: np.ndarray) -> list[int]:
        """Likely experts of `layer`, best first, from its router logits on an earlier state: float32 [E] or [T, E].

        Of several tokens: the guesses of each, those named by most tokens first.
        """
        guess = self._layers[layer].guess(np.atleast_2d(logits))
        experts, first, votes = np.unique(guess, return_index=True, return_counts=True)
        rank = first % guess.shape[1]
        return [int(expert) for expert in experts[np.lexsort((experts, rank, -votes))]]

    def worthwhile(self, layer: int) -> int:
        """How many of one token's guesses are worth reading: the ranks that lately came true at least half the time."""
        return self._layers[layer].worthwhile

    def observe(self, layer: int, logits: np.ndarray, topk_ids: np.ndarray) -> None:
        """Learn what became of a guess: its logits [E] or [T, E], and the true experts, int [K] or [T, K]."""
        logits, topk_ids = np.atleast_2d(logits), np.atleast_2d(topk_ids)
        stride = -(-len(logits) // _ROWS)
        logits, topk_ids = logits[::stride], topk_ids[::stride]
        finite = np.isfinite(logits).all(axis=1)
        if not finite.any():
            return
        state = self._layers[layer]
        state.observe(logits[finite], topk_ids[finite])
        self.observations += int(finite.sum())
        self._since_fit += 1
        if state.due and self._since_fit >= _FIT_EVERY:
            state.fit()
            self._since_fit = 0

    def recall(self, layer: int | None = None) -> float:
        """Share of the true experts among the recent guesses, of one layer or on average; 0 before the first."""
        layers = self._layers.values() if layer is None else [self._layers[layer]]
        seen = [state.recall for state in layers if state.rows]
        return float(np.mean(seen)) if seen else 0.0


class _Layer:
    """The correction of one layer and its record."""

    def __init__(self, experts: int, guesses: int) -> None:
        self.experts, self.guesses, self.rows = experts, guesses, 0
        self._ridge = OnlineRidge(experts + 1, experts)
        self._weights: np.ndarray | None = None  # [E+1, E]
        self._wait = self._next_fit = _FIRST_FIT * (experts + 1)
        self._recall = {False: _Recall(), True: _Recall()}  # corrected?
        self._rank_precision = np.ones(self.guesses)  # optimistic, so that a rank is tried before it is judged

    @property
    def recall(self) -> float:
        return self._recall[self._corrects].value

    @property
    def worthwhile(self) -> int:
        """How many ranks of a guess are worth reading. Precision falls with the rank, but for noise."""
        return max(1, int((self._rank_precision >= _WORTHWHILE).sum()))

    @property
    def due(self) -> bool:
        return self.rows >= self._next_fit

    def guess(self, logits: np.ndarray) -> np.ndarray:
        """[T, E] → int [T, guesses], best first."""
        scores = logits
        if self._corrects and self._weights is not None:
            scores = _inputs(logits) @ self._weights
        return _top(scores, self.guesses)

    def observe(self, logits: np.ndarray, topk_ids: np.ndarray) -> None:
        """Judge both guesses before learning from the rows: the record is of the future, not of the past."""
        truth = np.zeros((len(logits), self.experts), np.float32)
        np.put_along_axis(truth, topk_ids, 1, axis=1)
        inputs = _inputs(logits)
        came_true = np.take_along_axis(truth, self.guess(logits), axis=1)
        for row in came_true:
            self._rank_precision += _RANK_STEP * (row - self._rank_precision)
        self._recall[False].add(truth, _top(logits, self.guesses))
        if self._weights is not None:
            self._recall[True].add(truth, _top(inputs @ self._weights, self.guesses))
        self._ridge.add(inputs, truth)
        self.rows += len(logits)

    def fit(self) -> None:
        self._weights = self._ridge.solve()
        self._wait = min(2 * self._wait, _LONGEST_WAIT)
        self._next_fit = self.rows + self._wait

    @property
    def _corrects(self) -> bool:
        return self._recall[True].value > self._recall[False].value


class _Recall:
    """Mean share of the true experts found, fading with age."""

    def __init__(self) -> None:
        self._found = self._weight = 0.0

    @property
    def value(self) -> float:
        return self._found / self._weight if self._weight else 0.0

    def add(self, truth: np.ndarray, guess: np.ndarray) -> None:
        """truth: 0 or 1 [T, E]; guess: int [T, guesses]."""
        share = np.take_along_axis(truth, guess, axis=1).sum(axis=1) / truth.sum(axis=1)
        fade = _FADE ** len(share)
        self._found = self._found * fade + float(share.sum())
        self._weight = self._weight * fade + len(share)


def _inputs(logits: np.ndarray) -> np.ndarray:
    """[T, E] → [T, E+1]: rows standardised, so that the penalty means the same in every model, and a 1."""
    centred = logits - logits.mean(axis=1, keepdims=True)
    scaled = centred / (centred.std(axis=1, keepdims=True) + 1e-6)
    return np.concatenate([scaled, np.ones((len(logits), 1), logits.dtype)], axis=1)


def _top(scores: np.ndarray, count: int) -> np.ndarray:
    """The `count` best columns of each row, best first; ties go to the lower one."""
    return np.argsort(-scores, axis=1, kind="stable")[:, :count]
