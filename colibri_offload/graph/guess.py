"""Guessing the next layer's experts: its router, run on this layer's state, and the reads that follow from it."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from colibri_offload.families.spec import ModelSpec, MoE
from colibri_offload.graph.context import Context
from colibri_offload.graph.ops import Builder, Packed
from colibri_offload.graph.step import stride
from colibri_offload.jit.kernels.activations import FLOAT32
from colibri_offload.scheduler.cache import ExpertCache
from colibri_offload.scheduler.predictor import RoutingPredictor
from colibri_offload.storage.base import ExpertKey

_MAX_TOKENS = 4  # a longer step touches most experts anyway


class Guesser:
    """Prefetches for the next layer with experts. In a dense model the next layer is certain; else the predictor says.

    Costs one router product per layer; switched off as a whole while everything is resident or guesses do not pay.
    """

    def __init__(self, spec: ModelSpec, cache: ExpertCache, predictor: RoutingPredictor | None, total_blocks: int):
        self._cache, self.predictor, self._total = cache, predictor, total_blocks
        with_experts = list(spec.moe_layers) or list(range(len(spec.layers)))
        self._next = dict(pairwise(with_experts))
        self._spec = spec
        self._pending: dict[int, np.ndarray] = {}
        self._accounted = (0, 0)

    @property
    def active(self) -> bool:
        """Whether there is anything left to prefetch."""
        return self._cache.block_count < self._total

    def _next_moe(self, layer: int) -> tuple[int, MoE] | None:
        """The layer whose experts are guessed from `layer`'s state, when there is one and it routes."""
        after = self._next.get(layer)
        ffn = None if after is None else self._spec.layers[after].ffn
        return (after, ffn) if after is not None and isinstance(ffn, MoE) else None

    def add(self, c: Context, b: Builder, layer: int) -> None:
        """The next router's logits on this layer's state after attention, at the end of the layer's first program."""
        guessed = self._next_moe(layer)
        if guessed is None or self.predictor is None:
            return
        after, moe = guessed
        r, spec = c.resident, self._spec
        x = Packed(c.workspace["x_guess"], FLOAT32, spec.hidden)

        def count(n: int) -> int:
            return n if n <= _MAX_TOKENS else 0

        b.stage()
        b.pack(
            c.step.hidden, x, columns=spec.hidden, weight=r.vector("post_norm", after),
            eps=spec.layers[after].post_norm.eps, count=count,
        )  # fmt: skip
        b.stage()
        b.matmul(
            r.matrix("router", after),
            x,
            c.rows("guess_logits", moe.experts),
            bias=r.vector("router.bias", after),
            count=count,
        )
        self._workspace = c.workspace

    def observe(self, layer: int, n: int, ids: np.ndarray) -> None:
        """Learn what a guess became, and keep the new one."""
        if self.predictor is None or n > _MAX_TOKENS:
            return
        made = self._pending.pop(layer, None)
        if made is not None and len(made) == n:
            self.predictor.observe(layer, made, ids)
        guessed = self._next_moe(layer)
        if guessed is not None:
            after, moe = guessed
            rows = self._workspace.array("guess_logits", (n, stride(moe.experts) // 4), np.float32)
            self._pending[after] = rows[:, : moe.experts].copy()

    def prefetch(self, layer: int, n: int) -> None:
        """Start the reads that the next layer will probably want."""
        after = self._next.get(layer)
        if after is None or not self.active:
            return
        if self._next_moe(layer) is None:
            self._cache.prefetch([ExpertKey(after, 0)])
            return
        if self.predictor is None:
            return
        stats = self._cache.stats
        used, wasted = stats.prefetch_bytes_used, stats.prefetch_bytes_wasted
        self.predictor.account(used - self._accounted[0], wasted - self._accounted[1])
        self._accounted = (used, wasted)
        if self.predictor.enabled and n <= _MAX_TOKENS and after in self._pending:
            guess = self.predictor.predict(after, self._pending[after])
            self._cache.prefetch(ExpertKey(after, e) for e in guess[: n * self.predictor.worthwhile(after)])
