"""Measuring prefill and decode of a loaded model: random prompts, a warm-up, several runs, medians and spread."""

from __future__ import annotations

import resource
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import numpy as np

from colibri_offload.engine import Engine
from colibri_offload.errors import UsageError
from colibri_offload.scheduler.memory import peak_memory_bytes
from colibri_offload.session import RunStats
from colibri_offload.text.sampling import Sampling

_SPECIAL = 256  # the lowest ids are often control tokens or single bytes


@dataclass(frozen=True)
class Run:
    """One measured generation: what the session says, and the processor time that all threads took."""

    stats: RunStats
    wall_sec: float
    cpu_sec: float

    @property
    def tokens(self) -> int:
        return self.stats.prompt_tokens + self.stats.generated_tokens


@dataclass(frozen=True)
class Spread:
    """Median, minimum and maximum over the runs."""

    median: float
    min: float
    max: float

    @classmethod
    def of(cls, values: list[float]) -> Spread:
        return cls(median(values), min(values), max(values))


@dataclass(frozen=True)
class Report:
    """All runs of a bench. `values()` gives the medians under the names of `colibri bench --json`."""

    runs: tuple[Run, ...]
    threads: int
    prompt_tokens: int
    decode_tokens: int

    def spreads(self) -> dict[str, Spread]:
        """Per figure. Rates in tokens or bytes per second, times in seconds, sizes in bytes."""
        figures: dict[str, Callable[[Run], float]] = {
            "ttft_sec": lambda r: r.stats.ttft_sec,
            "prefill_tokens_per_sec": lambda r: r.stats.prefill_tokens_per_sec,
            "decode_tokens_per_sec": lambda r: r.stats.decode_tokens_per_sec,
            "expert_hit_rate": lambda r: r.stats.expert_hit_rate,
            "bytes_read_per_token": lambda r: r.stats.bytes_read / r.tokens,
            "disk_bytes_per_sec": lambda r: r.stats.bytes_read / r.wall_sec,
            "stall_sec_per_token": lambda r: r.stats.stall_sec / r.tokens,
            "cpu_percent": lambda r: 100 * r.cpu_sec / r.wall_sec,
        }
        return {name: Spread.of([figure(r) for r in self.runs]) for name, figure in figures.items()}

    def values(self) -> dict[str, Any]:
        last = self.runs[-1].stats
        return {name: s.median for name, s in self.spreads().items()} | {
            "peak_memory_bytes": peak_memory_bytes(),
            "memory_budget_bytes": last.memory_budget_bytes,
            "predictor_recall": last.predictor_recall,
            "prompt_tokens": self.prompt_tokens,
            "decode_tokens": self.decode_tokens,
            "runs": len(self.runs),
            "threads": self.threads,
            "spread": {name: asdict(s) for name, s in self.spreads().items()},
        }


def random_prompt(vocab: int, tokens: int, seed: int) -> list[int]:
    """Token ids without meaning, so that no cache of the engine can know them."""
    low = min(_SPECIAL, vocab - 1)
    return np.random.default_rng(seed).integers(low, vocab, tokens).tolist()


def bench(
    engine: Engine, *, prompt_tokens: int = 512, decode_tokens: int = 64, runs: int = 5, seed: int = 0,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Report:  # fmt: skip
    """Measure `runs` generations after one warm-up. Each has another random prompt; the end-of-text token is ignored.

    Raises: UsageError when prompt and continuation do not fit the context.
    """
    if runs < 1 or prompt_tokens < 1 or decode_tokens < 2:
        raise UsageError("bench needs at least 1 run, 1 prompt token and 2 decode tokens")
    ctx = engine.runtime.sizes.ctx
    if prompt_tokens + decode_tokens > ctx:
        raise UsageError(
            f"{prompt_tokens} prompt and {decode_tokens} decode tokens exceed the context of {ctx}; give a larger --ctx"
        )
    measured = []
    for i in range(runs + 1):
        prompt = random_prompt(engine.spec.vocab, prompt_tokens, seed + i)
        cpu, start = _cpu_sec(), time.perf_counter()
        out = engine.generate(prompt, max_tokens=decode_tokens, sampling=Sampling(), ignore_eos=True)
        measured.append(Run(out.stats, time.perf_counter() - start, _cpu_sec() - cpu))
        progress(i + 1, runs + 1)
    return Report(tuple(measured[1:]), engine.runtime.sizes.threads, prompt_tokens, decode_tokens)


def _cpu_sec() -> float:
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime
