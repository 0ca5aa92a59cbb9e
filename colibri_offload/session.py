"""Generating text on one sequence: prefill in chunks, decode token by token, measured as it goes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np

from colibri_offload.errors import UsageError
from colibri_offload.graph.memory import Sequence as KvSequence
from colibri_offload.graph.step import Part
from colibri_offload.runtime import Runtime
from colibri_offload.scheduler.memory import peak_memory_bytes
from colibri_offload.scheduler.stats import CacheStats
from colibri_offload.text.sampling import Sampler, Sampling


@dataclass(frozen=True)
class RunStats:
    """What one generation did. Times in seconds, sizes in bytes; rates are 0 when nothing of the kind happened."""

    prompt_tokens: int
    generated_tokens: int
    ttft_sec: float
    prefill_tokens_per_sec: float
    decode_tokens_per_sec: float
    expert_hits: int
    expert_misses: int
    expert_hit_rate: float
    bytes_read: int
    prefetch_bytes_used: int
    prefetch_bytes_wasted: int
    predictor_recall: float
    stall_sec: float
    peak_memory_bytes: int
    memory_budget_bytes: int
    finish_reason: str


class Session:
    """One text. Tokens that a new prompt shares with what is already in the KV cache are not computed again."""

    def __init__(self, runtime: Runtime):
        self._runtime = runtime
        self._sequence = KvSequence(runtime.model.kv, runtime.sizes.ctx)
        self._tokens: list[int] = []
        self._latest: Generation | None = None

    def close(self) -> None:
        self._sequence.close()
        self._tokens = []

    def __enter__(self) -> Session:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _feed(self, ids: Sequence[int], logits: int) -> np.ndarray:
        """Compute all of ids in chunks; float32 [logits, V] of the last ones."""
        out, size = [], self._runtime.sizes.tokens
        for start in range(0, len(ids), size):
            chunk = np.asarray(ids[start : start + size], np.int32)
            wanted = max(0, min(len(chunk), start + len(chunk) - (len(ids) - logits)))
            part = Part(self._sequence, chunk, wanted)
            try:
                out.append(self._runtime.model.forward([part]))
            except BaseException:
                self._sequence.rewind(len(self._tokens))
                raise
            self._tokens += chunk.tolist()
        return np.concatenate(out)

    def check_prompt(self, ids: Sequence[int]) -> None:
        vocab, ctx = self._runtime.model.spec.vocab, self._runtime.sizes.ctx
        if not ids:
            raise UsageError("the prompt is empty: give at least one token")
        bad = next((i for i in ids if not 0 <= i < vocab), None)
        if bad is not None:
            raise UsageError(f"token id {bad} is outside the vocabulary of {vocab}")
        if len(ids) > ctx:
            raise UsageError(
                f"the prompt has {len(ids)} tokens, the context holds {ctx}; shorten it or give a larger --ctx"
            )

    def make_room(self, ids: Sequence[int], max_tokens: int = 0) -> None:
        """Check a prompt and wait until the KV cache has room for it and its continuation, until settle() or close().

        Raises: UsageError for the prompt, BudgetError when there will be no room.
        """
        self.check_prompt(ids)
        self._sequence.make_room(len(ids) + max(0, max_tokens))

    def settle(self) -> None:
        """The continuation is over; what there is stays."""
        self._sequence.settle()

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        """float32 [T, V] of a fresh text."""
        self.check_prompt(ids)
        self._latest = None
        self._rewind(0)
        return self._feed(ids, len(ids))

    def _rewind(self, length: int) -> None:
        self._sequence.rewind(length)
        del self._tokens[length:]

    def generate(
        self, prompt: Sequence[int], max_tokens: int, sampling: Sampling, eos_ids: frozenset[int] = frozenset()
    ) -> Generation:
        """Token ids one by one; see Generation."""
        self.check_prompt(prompt)
        if max_tokens < 0:
            raise UsageError(f"max_tokens {max_tokens}: must not be negative")
        return Generation(self, self._runtime, prompt, max_tokens, sampling, eos_ids)


class Generation:
    """An iterator over new token ids. Ends at an end-of-text token (not given), the limit, or the context's end.

    stats() may be asked for at any time; `finish_reason` is "stop", "length" or, while running, "".
    """

    def __init__(
        self, session: Session, runtime: Runtime, prompt: Sequence[int], max_tokens: int, sampling: Sampling,
        eos_ids: frozenset[int],
    ):  # fmt: skip
        self._session, self._runtime, self._prompt = session, runtime, list(prompt)
        self._max_tokens, self._sampler, self._eos_ids = max_tokens, Sampler(sampling), eos_ids
        self.token_ids: list[int] = []
        self.finish_reason = ""
        self._before: CacheStats = runtime.cache.stats
        self._prefill_sec = self._decode_sec = 0.0
        self._computed = self._decoded = 0

    def __iter__(self) -> Iterator[int]:
        session, ctx = self._session, self._runtime.sizes.ctx
        session._latest, self._before = self, self._runtime.cache.stats
        start = time.perf_counter()
        shared = _common_prefix(session._tokens, self._prompt[:-1])
        session._rewind(shared)
        self._computed = len(self._prompt) - shared
        if self._max_tokens == 0:
            self.finish_reason = "length"
            return
        logits = session._feed(self._prompt[shared:], 1)[0]
        self._prefill_sec = time.perf_counter() - start
        seen = list(self._prompt)
        while True:
            token = self._sampler.pick(logits, seen)
            if token in self._eos_ids:
                self.finish_reason = "stop"
                return
            self.token_ids.append(token)
            seen.append(token)
            if len(self.token_ids) == self._max_tokens or len(session._tokens) >= ctx:
                self.finish_reason = "length"
                yield token
                return
            yield token
            if session._latest is not self:
                raise UsageError("a later generation has taken over this session; this one cannot go on")
            start = time.perf_counter()
            logits = session._feed([token], 1)[0]
            self._decode_sec += time.perf_counter() - start
            self._decoded += 1

    def stats(self) -> RunStats:
        runtime = self._runtime
        d = runtime.cache.stats - self._before
        return RunStats(
            prompt_tokens=len(self._prompt),
            generated_tokens=len(self.token_ids),
            ttft_sec=self._prefill_sec,
            prefill_tokens_per_sec=self._computed / self._prefill_sec if self._prefill_sec else 0.0,
            decode_tokens_per_sec=self._decoded / self._decode_sec if self._decode_sec else 0.0,
            expert_hits=d.hits,
            expert_misses=d.misses,
            expert_hit_rate=d.hit_rate,
            bytes_read=d.bytes_read,
            prefetch_bytes_used=d.prefetch_bytes_used,
            prefetch_bytes_wasted=d.prefetch_bytes_wasted,
            predictor_recall=runtime.predictor.recall() if runtime.predictor else 0.0,
            stall_sec=d.stall_seconds,
            peak_memory_bytes=peak_memory_bytes(),
            memory_budget_bytes=runtime.budget.total_bytes,
            finish_reason=self.finish_reason,
        )


def _common_prefix(a: Sequence[int], b: Sequence[int]) -> int:
    n = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        n += 1
    return n
