"""The Python API: load a model, ask for logits, generate, stream, look at the routing."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from threading import Lock
from typing import Any

import numpy as np

from colibri_offload.errors import ColibriError, UsageError
from colibri_offload.families.spec import ModelSpec
from colibri_offload.graph.model import Routing
from colibri_offload.options import LoadOptions
from colibri_offload.runtime import Progress, Runtime
from colibri_offload.session import Generation, RunStats, Session
from colibri_offload.text.sampling import Sampling
from colibri_offload.text.stream import TextStream
from colibri_offload.text.tokenizer import Tokenizer

Prompt = str | Sequence[int]


@dataclass(frozen=True)
class Output:
    """A finished generation: the new text, the new token ids, what it cost."""

    text: str
    token_ids: list[int]
    stats: RunStats


class Engine:
    """A loaded model. Methods may be called from several threads; they take turns."""

    def __init__(self, runtime: Runtime):
        self.runtime = runtime
        self._lock = Lock()
        self._closed = False

    @classmethod
    def load(cls, model: str | Path, *, progress: Progress | None = None, **options: Any) -> Engine:
        """Load a GGUF file, a safetensors directory, a converted store, or "demo".

        Keywords are the fields of LoadOptions, which have the names of the command line's flags:
        expert_cache=8, memory_budget="8GiB", threads=2, prefetch=True, gpu_layers=0, activations="int8" …
        `progress(what, done, total)` is called while weights are loaded.
        Raises: ColibriError: UsageError for an option, CheckpointError or StoreError for a broken model,
        UnsupportedError, BudgetError when the minimum does not fit.
        """
        if "lazy" in options:  # the other name of preload=False, as on the command line
            lazy = options.pop("lazy")
            if lazy and options.get("preload"):
                raise UsageError("preload and lazy exclude each other; give one of them")
            options.setdefault("preload", not lazy)
        unknown = sorted(set(options) - set(LoadOptions.names()))
        if unknown:
            raise UsageError(f"unknown option {unknown[0]!r}; known: {', '.join(LoadOptions.names())}")
        chosen = LoadOptions(**options)
        if chosen.gpu_options():
            asked = ", ".join(chosen.gpu_options())
            warnings.warn(f"{asked}: this version has no GPU backend; everything runs on the CPU", stacklevel=2)
        return cls(Runtime(model, chosen, progress))

    @property
    def spec(self) -> ModelSpec:
        """The architecture."""
        return self.runtime.source.spec

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return self.runtime.load_tokenizer()

    def encode_prompt(self, prompt: Prompt) -> list[int]:
        """Token ids of a prompt: a string through the tokenizer, ids as they are."""
        return self.tokenizer.encode(prompt) if isinstance(prompt, str) else [int(i) for i in prompt]

    @property
    def eos_ids(self) -> frozenset[int]:
        """Ids that end a text: those of the model's configuration and of its tokenizer, if it has one."""
        try:
            return frozenset(self.spec.eos_ids) | self.tokenizer.eos_ids
        except ColibriError:
            return frozenset(self.spec.eos_ids)

    def logits(self, ids: Sequence[int]) -> np.ndarray:
        """float32 [T, vocab] of the token ids as a fresh text."""
        ids = [int(i) for i in ids]
        with self._session() as session:
            session.make_room(ids)
            with self._turn():
                return session.logits(ids)

    def generate(
        self, prompt: Prompt, max_tokens: int = 128, sampling: Sampling | None = None, ignore_eos: bool = False,
        stop: Sequence[str] = (),
    ) -> Output:  # fmt: skip
        """Continue the prompt. `stop`: strings that end the text (and are not part of it)."""
        with self._session() as session:
            run = self._begin(session, prompt, max_tokens, sampling, ignore_eos)
            with self._turn():
                text = "".join(_pieces(run, self._text_stream(stop)))
                return Output(text, list(run.token_ids), run.stats())

    def stream(
        self, prompt: Prompt, max_tokens: int = 128, sampling: Sampling | None = None, ignore_eos: bool = False,
        stop: Sequence[str] = (), on_finish: Callable[[RunStats], None] | None = None,
    ) -> Iterator[str]:  # fmt: skip
        """The same as pieces of text, as they come. A piece never ends inside a character or inside a stop string.

        Other calls take turns with an unfinished stream, token by token; until it is closed or forgotten, it keeps its
        part of the KV cache.
        """
        with self._session() as session:
            run = self._begin(session, prompt, max_tokens, sampling, ignore_eos)
            yield from self._in_turns(_pieces(run, self._text_stream(stop)))
        if on_finish:
            on_finish(run.stats())

    def _begin(
        self, session: Session, prompt: Prompt, max_tokens: int, sampling: Sampling | None, ignore_eos: bool
    ) -> Generation:
        """A generation for which there is room in the KV cache. Waits for the room before it asks for the turn."""
        self._check_open()
        ids = self.encode_prompt(prompt)
        run = session.generate(ids, max_tokens, sampling or Sampling(), frozenset() if ignore_eos else self.eos_ids)
        session.make_room(ids, max_tokens)
        return run

    def _in_turns(self, pieces: Iterator[str]) -> Iterator[str]:
        """Each piece in its turn. Between pieces nobody is kept waiting: the caller may never come back."""
        while True:
            with self._turn():
                piece = next(pieces, None)
            if piece is None:
                return
            if piece:
                yield piece

    def _text_stream(self, stop: Sequence[str]) -> TextStream | None:
        """None for a model without a tokenizer (it can still continue token ids)."""
        try:
            tokenizer = self.tokenizer
        except ColibriError:
            if stop:
                raise
            return None
        return TextStream(tokenizer, stop)

    @contextmanager
    def record_routing(self) -> Iterator[Routing]:
        """with engine.record_routing() as routing: … → routing.topk_ids[layer] int [T, K], .topk_weights[layer]
        float32."""
        routing = self.runtime.model.routing = Routing()
        try:
            yield routing
        finally:
            self.runtime.model.routing = None

    def chat(self) -> Chat:
        """A conversation that keeps its KV cache between turns."""
        return Chat(self)

    def _session(self) -> Session:
        return Session(self.runtime)

    @contextmanager
    def _turn(self) -> Iterator[None]:
        with self._lock:
            self._check_open()
            yield

    def _check_open(self) -> None:
        if self._closed:
            raise UsageError("the engine is closed; load the model again")

    def close(self) -> None:
        """Give memory, threads and files back. Idempotent."""
        with self._lock:
            self._closed = True
            self.runtime.close()

    def __enter__(self) -> Engine:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class Chat:
    """A conversation: messages in, pieces of the answer out. Raises TextError for a model without a chat template."""

    def __init__(self, engine: Engine):
        self._engine, self._session = engine, engine._session()
        self.messages: list[dict[str, str]] = []
        self.stats: RunStats | None = None

    def say(self, text: str, max_tokens: int = 512, sampling: Sampling | None = None) -> Iterator[str]:
        """Add a user message and stream the answer. An interrupted answer is kept as far as it came."""
        messages = [*self.messages, {"role": "user", "content": text}]
        ids = self._engine.tokenizer.encode_chat(messages)
        answer, run, engine = "", None, self._engine
        try:
            run = engine._begin(self._session, ids, max_tokens, sampling, ignore_eos=False)
            for piece in engine._in_turns(_pieces(run, engine._text_stream(()))):
                answer += piece
                yield piece
        finally:
            self._session.settle()
            self.messages = [*messages, {"role": "assistant", "content": answer}]
            self.stats = run.stats() if run else None

    def close(self) -> None:
        self._session.close()


def _pieces(run: Generation, text: TextStream | None) -> Iterator[str]:
    """Pieces of text as tokens come, often ""; all are "" without a tokenizer."""
    for token in run:
        yield text.push(token) if text else ""
        if text and text.stopped:
            run.finish_reason = "stop"
            return
    yield text.finish() if text else ""
