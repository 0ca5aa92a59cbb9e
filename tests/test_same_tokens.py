"""Cache, prefetch, threads, chunks, stores and neighbours never change a bit of the logits, nor a token."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from engine_util import GGUF, copy_store, pairwise

from colibri_offload import Engine, Sampling
from colibri_offload.convert import convert
from colibri_offload.errors import UsageError
from colibri_offload.graph.memory import Sequence
from colibri_offload.graph.step import Part
from colibri_offload.models import is_store, model_path
from colibri_offload.scheduler.policies import POLICIES
from colibri_offload.storage.manifest import Kind

PROMPT_TOKENS, NEW_TOKENS = 37, 12
MODELS = ["qwen3_moe-Q4_0", "deepseek_v3-Q8_0", "gpt_oss-MXFP4"]

GRID = pairwise(
    {
        "store": ["as it is", "file", "lmdb"],
        "expert_cache": [1, 2, "half", "all"],
        "prefetch": [True, False],
        "preload": [True, False],
        "threads": [1, 2],
        "batch_size": [1, 7, 0],
        "eviction": sorted(POLICIES),
        "io": ["direct", "buffered"],
    }
)


@dataclass(frozen=True)
class Model:
    """One model in all three stores, and a prompt."""

    stores: dict[str, Path]
    prompt: list[int]
    experts: int

    def load(self, store: str = "as it is", **options: Any) -> Engine:
        """An engine; expert_cache may also be "half" or "all"."""
        shares = {"half": self.experts // 2, "all": self.experts}
        options["expert_cache"] = shares.get(options.get("expert_cache", "all"), options.get("expert_cache"))
        return Engine.load(self.stores[store], ctx=256, memory_budget="2GiB", **options)


def demo_path() -> Path | None:
    try:
        return model_path("demo")
    except UsageError:
        return None


def keep(path: Path, output: Path, kind: Kind) -> Path:
    return convert(path, output, "keep", store=kind).path


@pytest.fixture(scope="module", params=[*MODELS, "demo"])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Model:
    path = demo_path() if request.param == "demo" else GGUF / f"{request.param}.gguf"
    if path is None:
        pytest.skip("the bundled model has not been built")
    folder = tmp_path_factory.mktemp("stores")
    kinds: tuple[Kind, ...] = ("file", "lmdb")
    stores = {kind: (copy_store if is_store(path) else keep)(path, folder / kind, kind) for kind in kinds}
    with Engine.load(path, memory_budget="2GiB") as engine:
        experts = max(engine.runtime.source.experts_per_layer.values())
        vocab = engine.spec.vocab
    prompt = np.random.default_rng(5).integers(0, vocab, PROMPT_TOKENS).tolist()
    return Model({"as it is": path, **stores}, prompt, experts)


@dataclass(frozen=True)
class Observed:
    """Everything that must not change: the new tokens, and the logits [T, V] of the prompt and of them."""

    tokens: list[int]
    logits: np.ndarray


def observe(engine: Engine, prompt: list[int]) -> Observed:
    tokens = engine.generate(prompt, max_tokens=NEW_TOKENS, ignore_eos=True).token_ids
    return Observed(tokens, engine.logits(prompt + tokens))


@pytest.fixture(scope="module")
def expected(model: Model) -> Observed:
    with model.load(expert_cache="all", threads=1, prefetch=False, batch_size=1) as engine:
        seen = observe(engine, model.prompt)
    assert seen.logits[PROMPT_TOKENS - 1 : -1].argmax(axis=1).tolist() == seen.tokens
    return seen


def row_name(row: dict[str, Any]) -> str:
    return "-".join(f"{value}".replace(" ", "_") for value in row.values())


@pytest.mark.parametrize("row", GRID, ids=row_name)
def test_settings_never_change_a_bit(model: Model, expected: Observed, row: dict[str, Any]) -> None:
    with model.load(**row) as engine:
        seen = observe(engine, model.prompt)
        again = observe(engine, model.prompt)  # with whatever the first left in the cache
    for one in (seen, again):
        assert one.tokens == expected.tokens
        np.testing.assert_array_equal(one.logits.view(np.int32), expected.logits.view(np.int32))


def test_the_grid_covers_every_pair_of_settings() -> None:
    assert len(GRID) < 24
    for a in GRID[0]:
        for b in set(GRID[0]) - {a}:
            values = {row[a] for row in GRID}, {row[b] for row in GRID}
            assert len({(row[a], row[b]) for row in GRID}) == len(values[0]) * len(values[1])


def new_sequence(engine: Engine) -> Sequence:
    return Sequence(engine.runtime.model.kv, engine.runtime.sizes.ctx)


def ids(tokens: list[int]) -> np.ndarray:
    return np.asarray(tokens, np.int32)


@pytest.mark.parametrize("activations", ["int8", "float32"])
def test_neighbours_in_a_batch_never_change_a_bit(model: Model, activations: str) -> None:
    """Prompts side by side, then one text that decodes beside a prompt that starts, then both decoding."""
    a, b = model.prompt[:19], model.prompt[11:]
    steps = [(a[:5], b[:8]), (a[5:6], b[8:]), (a[6:7], []), (a[7:], a[:1])]
    with model.load(expert_cache=2, threads=2, activations=activations) as engine:
        forward = engine.runtime.model.forward
        together = new_sequence(engine), new_sequence(engine)
        alone = new_sequence(engine), new_sequence(engine)
        for step in steps:
            some = [(i, ids(tokens)) for i, tokens in enumerate(step) if tokens]
            joint = forward([Part(together[i], tokens, len(tokens)) for i, tokens in some])
            single = [forward([Part(alone[i], tokens, len(tokens))]) for i, tokens in some]
            np.testing.assert_array_equal(joint.view(np.int32), np.concatenate(single).view(np.int32))
        for sequence in (*together, *alone):
            sequence.close()


def test_a_rewound_text_continues_like_a_fresh_one(model: Model) -> None:
    """A chat that keeps the common beginning of two prompts in its KV cache."""
    shared = model.prompt[:20]
    first, second = shared + model.prompt[20:30], shared + model.prompt[30:]
    with model.load(expert_cache=2) as engine:
        forward = engine.runtime.model.forward
        used, fresh = new_sequence(engine), new_sequence(engine)
        forward([Part(used, ids(first))])
        used.rewind(len(shared))
        kept = forward([Part(used, ids(second[len(shared) :]), 3)])
        anew = forward([Part(fresh, ids(second), 3)])
        np.testing.assert_array_equal(kept.view(np.int32), anew.view(np.int32))
        with engine._session() as session:
            for prompt in (first, second, shared):
                run = session.generate(prompt, NEW_TOKENS, Sampling(temperature=0.0))
                assert list(run) == engine.generate(prompt, NEW_TOKENS, ignore_eos=True).token_ids
