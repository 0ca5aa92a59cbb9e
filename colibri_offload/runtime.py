"""Everything that a loaded model holds: kernels, workers, memory, cache, reader. Put together here, taken apart
here."""

from __future__ import annotations

import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import psutil

from colibri_offload.errors import BudgetError, UsageError
from colibri_offload.families.spec import ModelSpec
from colibri_offload.graph.attention import kv_dims
from colibri_offload.graph.guess import Guesser
from colibri_offload.graph.layout import MatrixLayout, pad
from colibri_offload.graph.memory import KvCache, Region
from colibri_offload.graph.model import Model, kv_offsets
from colibri_offload.graph.packer import Packer
from colibri_offload.graph.resident import Resident
from colibri_offload.graph.source import ModelSource
from colibri_offload.graph.step import workspace_sizes
from colibri_offload.jit.compiler import Compiler
from colibri_offload.jit.kernels import Kernels
from colibri_offload.jit.kernels.kv_types import KV_TYPES, PAGE
from colibri_offload.jit.pool import WorkerPool
from colibri_offload.jit.targets import get_target
from colibri_offload.models import TokenizerLoader, open_model
from colibri_offload.options import LoadOptions
from colibri_offload.scheduler.budget import MemoryBudget
from colibri_offload.scheduler.cache import ExpertCache
from colibri_offload.scheduler.memory import available_memory, format_size, parse_size
from colibri_offload.scheduler.predictor import RoutingPredictor
from colibri_offload.storage.arena import Arena
from colibri_offload.storage.reader import AsyncReader

Progress = Callable[[str, int, int], None]  # what, done, total

DEFAULT_CTX, DEFAULT_BATCH, READ_DEPTH = 4096, 512, 4
_PROGRAM_GROWTH = 96 << 20  # what Python, LLVM and the tokenizer still take after loading began
_AUTO_SHARE = 0.9  # of the available memory: the rest is for the page cache and everybody else


@dataclass(frozen=True)
class Sizes:
    """What was chosen: tokens per step, context length, expert slots."""

    threads: int
    tokens: int
    ctx: int
    slots: int
    total_blocks: int
    kv_type: str


class Runtime:
    """A model in memory. close() gives everything back; it is safe after a failure half-way."""

    def __init__(self, model: str | Path, options: LoadOptions, progress: Progress | None = None):
        self.options = options
        self._stack = ExitStack()
        try:
            self._open(model, options, progress or (lambda what, done, total: None))
        except BaseException:
            self._stack.close()
            raise

    def _open(self, model: str | Path, o: LoadOptions, progress: Progress) -> None:
        threads = o.threads or available_cores()
        compiler = Compiler(get_target())
        self.kernels = Kernels(compiler)
        self.source, self.load_tokenizer = self._open_source(model)
        self.budget = MemoryBudget(_total_budget(o))
        self.budget.reserve("program", psutil.Process().memory_info().rss + _PROGRAM_GROWTH, "program")
        self.pool = WorkerPool(compiler, threads)
        self._stack.callback(self.pool.close)
        spec = self.source.spec
        kv_type = _kv_type(o, self.source)
        ctx = _context(o, spec)
        resident = Resident(self.source, self.budget)
        self._stack.callback(resident.close)
        _, page_nbytes = kv_offsets(spec, kv_type)
        kv = KvCache(self.budget, page_nbytes, -(-ctx // PAGE))
        self._stack.callback(kv.close)
        reader = AsyncReader(self.source.store, READ_DEPTH, o.io)
        self._stack.callback(reader.close)
        self.budget.reserve("read staging", reader.staging_nbytes, "staging")
        tokens, workspace = self._make_workspace(o, ctx)
        self._stack.callback(workspace.close)
        slots = self._slots(o)
        arena = Arena(self.source.slot_nbytes, slots)
        self._stack.callback(arena.close)
        self.budget.reserve(f"expert cache, {slots} blocks", arena.nbytes, "expert_cache")
        counts = self.source.experts_per_layer
        self.top_k = max((spec.layers[i].ffn.top_k for i in spec.moe_layers), default=1)  # type: ignore[union-attr]
        self.cache = ExpertCache(
            reader, self.source.slot_nbytes, [arena.slot(i) for i in range(slots)], counts, o.eviction, self.top_k,
            prefetch_limit=2 * self.top_k,
        )  # fmt: skip
        self._stack.callback(self.cache.close)
        total = sum(counts.values())
        self.sizes = Sizes(threads, tokens, ctx, slots, total, kv_type)
        predictor = RoutingPredictor({i: counts[i] for i in spec.moe_layers}, self.top_k) if spec.moe_layers else None
        guesser = Guesser(spec, self.cache, predictor, total) if o.prefetch else None
        addresses = np.array([arena.address(i) for i in range(slots)], np.uint64)
        resident.load(lambda done, all_: progress("loading resident weights", done, all_))
        self.model = Model(
            self.source, self.kernels, self.pool, resident, workspace, kv, self.cache, addresses, mode=o.activations,
            kv_type=kv_type, tokens=tokens, guesser=guesser,
        )  # fmt: skip
        self.predictor = predictor
        if slots >= total if o.preload is None else o.preload:
            self.cache.preload(self.source.store.keys(), lambda done, all_: progress("loading experts", done, all_))

    def _open_source(self, model: str | Path) -> tuple[ModelSource, TokenizerLoader]:
        source, tokenizer = open_model(model, Packer(self.kernels))
        self._stack.callback(source.close)
        return source, tokenizer

    def _make_workspace(self, o: LoadOptions, ctx: int) -> tuple[int, Region]:
        """The largest step that takes at most a quarter of what is left (or the one that was asked for)."""
        tokens = min(o.batch_size or DEFAULT_BATCH, ctx)
        if not o.batch_size:
            share = self.budget.remaining // 4
            while tokens > 8 and sum(workspace_sizes(self.source, tokens).values()) > share:
                tokens //= 2
        return tokens, Region(
            self.budget, f"workspace, {tokens} tokens", "workspace", workspace_sizes(self.source, tokens)
        )

    def _slots(self, o: LoadOptions) -> int:
        counts, slot = self.source.experts_per_layer, pad(self.source.slot_nbytes, 4096)
        total, want = sum(counts.values()), o.expert_cache
        if isinstance(want, str) and want.isdigit():
            want = int(want)
        if isinstance(want, int):
            if want < 1:
                raise UsageError(f"--expert-cache {want}: at least 1 expert per layer is needed")
            return min(total, want * len(counts))
        if want != "auto":
            slots = parse_size(want, "--expert-cache") // slot
            if slots < 1:
                raise BudgetError(
                    f"--expert-cache {want}: one expert of this model takes {format_size(slot)}; give at least that"
                )
            return min(total, slots)
        slots = min(total, self.budget.remaining // slot)
        least = min(total, max(getattr(layer.ffn, "top_k", 1) for layer in self.source.spec.layers))
        if slots < least:
            self.budget.reserve(f"expert cache, {least} blocks (the minimum)", least * slot, "expert_cache")
        return slots

    def close(self) -> None:
        """Give everything back. Idempotent."""
        self._stack.close()


def available_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _total_budget(o: LoadOptions) -> int:
    if o.memory_budget != "auto":
        return parse_size(o.memory_budget, "--memory-budget")
    memory = psutil.Process().memory_info()
    # Pages of libraries count as available: they may go and come back. Counting them twice would pass a cgroup's limit.
    anonymous = memory.rss - getattr(memory, "shared", 0)
    return int(anonymous + available_memory() * _AUTO_SHARE)


def _context(o: LoadOptions, spec: ModelSpec) -> int:
    if o.ctx > spec.max_context:
        raise UsageError(f"--ctx {o.ctx}: this model was made for at most {spec.max_context} positions")
    return o.ctx or min(spec.max_context, DEFAULT_CTX)


def _kv_type(o: LoadOptions, source: ModelSource) -> str:
    """f16 where the weights' own error hides it: quantised resident weights with int8 activations. Else f32."""
    if o.kv_cache != "auto":
        multiple = KV_TYPES[o.kv_cache].multiple
        odd = {d for layer in source.spec.layers for d in kv_dims(layer.mixer)[1:] if d % multiple}
        if odd:
            raise UsageError(f"--kv-cache {o.kv_cache}: head width {min(odd)} is no multiple of {multiple}; use f16")
        return o.kv_cache
    quantised = any(isinstance(m, MatrixLayout) and m.fmt.integer for m in source.residents.values())
    return "f16" if quantised and o.activations == "int8" else "f32"
