"""The whole forward pass: embedding, layers, head."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from colibri_offload.errors import NumericsError
from colibri_offload.families.spec import Attention, ModelSpec
from colibri_offload.graph.attention import build_attention, build_latent_attention, kv_dims
from colibri_offload.graph.context import Context
from colibri_offload.graph.ffn import FeedForward
from colibri_offload.graph.guess import Guesser
from colibri_offload.graph.memory import KvCache, Region
from colibri_offload.graph.ops import Builder, Packed
from colibri_offload.graph.resident import Resident
from colibri_offload.graph.source import ModelSource
from colibri_offload.graph.step import LOGIT_ROWS, Part, Step, ropes, stride
from colibri_offload.interrupts import postponed_interrupts
from colibri_offload.jit.kernels import Kernels
from colibri_offload.jit.kernels.activations import activations_for
from colibri_offload.jit.kernels.attention import kv_page_nbytes
from colibri_offload.jit.kernels.rows import GatherRows
from colibri_offload.jit.pool import WorkerPool
from colibri_offload.scheduler.cache import ExpertCache
from colibri_offload.storage.base import ExpertKey


def kv_offsets(spec: ModelSpec, kv_type: str) -> tuple[tuple[int, ...], int]:
    """Where each layer's part of a KV page starts, and the size of a page."""
    offsets, at = [], 0
    for layer in spec.layers:
        offsets.append(at)
        at += kv_page_nbytes(*kv_dims(layer.mixer), kv_type)
    return tuple(offsets), at


@dataclass
class Routing:
    """What a forward pass routed: per layer int32 [T, K] and float32 [T, K], best first."""

    topk_ids: dict[int, np.ndarray] = field(default_factory=dict)
    topk_weights: dict[int, np.ndarray] = field(default_factory=dict)

    def add(self, layer: int, ids: np.ndarray, weights: np.ndarray) -> None:
        for store, new in ((self.topk_ids, ids), (self.topk_weights, weights)):
            old = store.get(layer)
            store[layer] = new.copy() if old is None else np.concatenate([old, new])


class Model:
    """A model ready to compute. Used by one thread at a time; it owns nothing it was given."""

    def __init__(
        self,
        source: ModelSource,
        kernels: Kernels,
        pool: WorkerPool,
        resident: Resident,
        workspace: Region,
        kv: KvCache,
        cache: ExpertCache | None,
        slot_addresses: np.ndarray,
        *,
        mode: str,
        kv_type: str,
        tokens: int,
        guesser: Guesser | None,
    ):
        self.spec, self.kv, self.cache, self._guesser = source.spec, kv, cache, guesser
        self.step = Step(source, workspace, tokens)
        self.routing: Routing | None = None
        offsets, _ = kv_offsets(source.spec, kv_type)
        c = Context(kernels, pool, resident, workspace, self.step, mode, kv_type, offsets)
        self._c = c
        self._slot_addresses = slot_addresses
        padded = workspace.array("logits", (LOGIT_ROWS, stride(source.spec.vocab) // 4), np.float32)
        self._logit_rows = padded[:, : source.spec.vocab]
        self._blocks = source.experts_per_layer
        self._embed = c.builder()
        self._add_embed(self._embed)
        self._embed.seal()
        self._layers: list[tuple[Builder, FeedForward]] = []
        for i in range(len(source.spec.layers)):
            front, ffn = c.builder(), FeedForward(c, source, i, slot_addresses)
            self._add_front(front, i, ffn)
            if guesser:
                guesser.add(c, front, i)
            self._layers.append((front.seal(), ffn))
        self._head = c.builder()
        self._add_head(self._head)
        self._head.seal()
        self._token: Builder | None = None  # one decoded token as a single program, once every block is resident

    def _add_front(self, b: Builder, layer: int, ffn: FeedForward) -> None:
        """A layer up to the choice of experts."""
        spec = self.spec.layers[layer]
        args, all_ropes = (self._c, b, layer), ropes(self.spec)
        if isinstance(spec.mixer, Attention):
            build_attention(*args, spec.mixer, spec.input_norm, self.spec.hidden, all_ropes)
        else:
            build_latent_attention(*args, spec.mixer, spec.input_norm, self.spec.hidden, all_ropes)
        ffn.add_front(b)

    def _add_embed(self, b: Builder) -> None:
        c, m = self._c, self._c.resident.matrix("embed")
        b.stage()
        b.add(
            c.kernels.gather_rows(m.layout.fmt), GatherRows, lambda n: n,
            w=m.address, ids=c.workspace["ids"], out=c.step.hidden.address, steps=m.layout.steps, columns=m.layout.cols,
            out_stride=c.step.hidden.stride,
        )  # fmt: skip

    def _add_head(self, b: Builder) -> None:
        """Logits of the rows that step.index names (the first LOGIT_ROWS of them at a time)."""
        c, spec = self._c, self.spec
        m = c.resident.matrix("embed" if spec.tied else "head")
        x = Packed(c.workspace["final"], activations_for(m.layout.fmt, c.mode), spec.hidden)
        b.stage()
        b.pack(
            c.step.hidden, x, columns=spec.hidden, weight=c.resident.vector("final_norm"), eps=spec.final_norm.eps,
            index=c.workspace["index"],
        )  # fmt: skip
        b.stage()
        b.matmul(m, x, c.rows("logits", spec.vocab))

    def _token_program(self) -> Builder | None:
        """The whole of a decoded token, or None while a block is missing. A cache that holds all blocks never
        evicts."""
        if self._token is None and self.routing is None and self.cache is not None:
            if self.cache.block_count < sum(self._blocks.values()):
                return None
            slots = {i: [self.cache.resident_slot(ExpertKey(i, e)) for e in range(n)] for i, n in self._blocks.items()}
            if any(slot is None for row in slots.values() for slot in row):
                return None
            self._tables = {i: self._slot_addresses[row].copy() for i, row in slots.items()}  # type: ignore[index]
            b = self._c.builder()
            self._add_embed(b)
            for i, (_, ffn) in enumerate(self._layers):
                self._add_front(b, i, ffn)
                ffn.add_decode(b, self._tables.get(i, np.zeros(1, np.uint64)))
            self._add_head(b)
            self._token = b.seal()
            self._token_hits = sum(ffn.moe.top_k if ffn.moe else int(ffn.streamed) for _, ffn in self._layers)
        return self._token if self.routing is None else None

    def forward(self, parts: list[Part]) -> np.ndarray:
        """Compute the new tokens of every part and return float32 [Σ part.logits, V]. The KV cache advances.

        Raises: NumericsError naming the layer when logits are not finite; UsageError beyond the context; StoreError.
        """
        step = self.step
        with postponed_interrupts() as interruptible:
            step.fill(parts)
            token = self._token_program() if step.n == 1 and step.logit_count == 1 else None
            if token:
                token.run(1)
                self.cache.add_hits(self._token_hits)  # type: ignore[union-attr]
                logits = self._logit_rows[:1].copy()
            else:
                self._run_layers(lambda layer: interruptible())
                logits = self._logits()
            if not np.isfinite(logits).all():
                self._explain()
            step.advance(parts)
        return logits

    def _run_layers(self, after: Callable[[int], None]) -> None:
        """after(layer) is called when a layer is done."""
        n = self.step.n
        self._embed.run(n)
        for i, (front, ffn) in enumerate(self._layers):
            front.run(n)
            if ffn.moe and (self.routing or self._guesser):
                ids, weights = ffn.topk(n)
                if self.routing is not None:
                    self.routing.add(i, ids, weights)
                if self._guesser:
                    self._guesser.observe(i, n, ids)
            ffn.run(n, self.cache, lambda i=i: self._start_guesses(i))  # type: ignore[misc]
            after(i)

    def _start_guesses(self, layer: int) -> None:
        if self._guesser:
            self._guesser.prefetch(layer, self.step.n)

    def _logits(self) -> np.ndarray:
        count, index = self.step.logit_count, self.step.index
        out = np.empty((count, self.spec.vocab), np.float32)
        wanted = index[:count].copy()
        for start in range(0, count, LOGIT_ROWS):
            some = wanted[start : start + LOGIT_ROWS]
            index[: len(some)] = some
            self._head.run(len(some))
            out[start : start + len(some)] = self._logit_rows[: len(some)]
        return out

    def _explain(self) -> None:
        """Compute the step again and name the first layer whose result is not finite."""
        columns = stride(self.spec.hidden) // 4
        hidden = self._c.workspace.array("hidden", (self.step.n, columns), np.float32)[:, : self.spec.hidden]

        def check(layer: int) -> None:
            if not np.isfinite(hidden).all():
                raise NumericsError(
                    f"layer {layer} produced NaN or Inf; the weights are damaged (run `colibri verify`) "
                    "or the format is too coarse: try --activations float32"
                )

        recording, self.routing = self.routing, None
        try:
            self._run_layers(check)
        finally:
            self.routing = recording
        raise NumericsError("the head produced NaN or Inf; run `colibri verify`, or try --activations float32")
