"""The Python API, word by word: what it takes, what it gives, what it refuses."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from engine_util import GGUF

from colibri_offload import ColibriError, Engine, Sampling
from colibri_offload.errors import BudgetError, CheckpointError, StoreError, UsageError
from colibri_offload.graph import memory
from colibri_offload.session import RunStats

MODEL = GGUF / "qwen3_moe-Q4_0.gguf"
OTHER = GGUF / "gpt_oss-MXFP4.gguf"
CTX, LAYERS, EXPERTS, TOP_K, VOCAB = 128, 3, 8, 4, 512
PROMPT = "Once upon a time"
IDS = [17, 300, 4, 88, 201, 9, 9, 45]


def load(model: Path = MODEL, **options: Any) -> Engine:
    return Engine.load(model, **({"ctx": CTX, "memory_budget": "2GiB", "expert_cache": 2} | options))


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    with load() as engine:
        yield engine


def test_the_api_is_as_documented() -> None:
    with Engine.load(
        str(MODEL), expert_cache=8, memory_budget="8GiB", threads=2, prefetch=True, gpu_layers=0, activations="int8"
    ) as engine:
        logits = engine.logits([1, 2, 3])
        assert logits.dtype == np.float32 and logits.shape == (3, VOCAB)
        out = engine.generate(PROMPT, max_tokens=32, sampling=Sampling(temperature=0.0, seed=7), ignore_eos=False)
        assert isinstance(out.text, str)
        assert out.token_ids and all(type(i) is int and 0 <= i < VOCAB for i in out.token_ids)
        assert len(out.token_ids) <= 32
        assert isinstance(out.stats, RunStats)
        pieces = list(engine.stream(PROMPT, max_tokens=32))
        assert "".join(pieces) == out.text
        with engine.record_routing() as routing:
            engine.logits([1, 2, 3])
        assert list(routing.topk_ids) == list(routing.topk_weights) == list(range(LAYERS))
        for layer in routing.topk_ids:
            ids, weights = routing.topk_ids[layer], routing.topk_weights[layer]
            assert ids.shape == weights.shape == (3, TOP_K)
            assert np.issubdtype(ids.dtype, np.integer) and weights.dtype == np.float32
            assert all(len(set(row)) == TOP_K for row in ids.tolist())
            np.testing.assert_allclose(weights.sum(axis=1), 1, rtol=1e-5)
        assert engine.tokenizer.decode(engine.tokenizer.encode(PROMPT)) == PROMPT
        assert (engine.spec.family, engine.spec.vocab, len(engine.spec.layers)) == ("qwen3_moe", VOCAB, LAYERS)


def test_routing_is_recorded_only_inside_the_block(engine: Engine) -> None:
    with engine.record_routing() as routing:
        engine.logits(IDS)
        engine.logits(IDS[:2])
    engine.logits(IDS)
    assert {len(ids) for ids in routing.topk_ids.values()} == {len(IDS) + 2}


# ---- prompts and results


def test_a_prompt_may_be_text_or_ids(engine: Engine) -> None:
    ids = engine.tokenizer.encode(PROMPT)
    expected = engine.generate(PROMPT, max_tokens=6, ignore_eos=True).token_ids
    for prompt in (ids, tuple(ids), np.array(ids, np.int64)):
        assert engine.generate(prompt, max_tokens=6, ignore_eos=True).token_ids == expected


def test_only_new_tokens_are_returned_and_text_is_theirs(engine: Engine) -> None:
    out = engine.generate(IDS, max_tokens=20, ignore_eos=True)
    assert len(out.token_ids) == 20
    assert out.text == engine.tokenizer.decode(out.token_ids)
    assert engine.logits(IDS + out.token_ids)[len(IDS) - 1 : -1].argmax(axis=1).tolist() == out.token_ids


def test_pieces_of_a_stream_join_to_the_text(engine: Engine) -> None:
    finished: list[RunStats] = []
    pieces = list(engine.stream(IDS, max_tokens=40, ignore_eos=True, on_finish=finished.append))
    out = engine.generate(IDS, max_tokens=40, ignore_eos=True)
    assert "".join(pieces) == out.text
    assert len(pieces) > 5 and all(pieces)
    assert finished[0].generated_tokens == 40


def test_a_stop_string_ends_the_text_and_is_not_part_of_it(engine: Engine) -> None:
    whole = engine.generate(IDS, max_tokens=40, ignore_eos=True)
    stop = whole.text[7:10]
    expected = whole.text[: whole.text.index(stop)]
    out = engine.generate(IDS, max_tokens=40, ignore_eos=True, stop=["never said", stop])
    assert out.text == expected
    assert out.stats.finish_reason == "stop"
    assert out.token_ids == whole.token_ids[: len(out.token_ids)] and len(out.token_ids) < 40
    assert "".join(engine.stream(IDS, max_tokens=40, ignore_eos=True, stop=[stop])) == expected


def test_an_empty_stop_string_is_refused(engine: Engine) -> None:
    with pytest.raises(UsageError, match="stop"):
        engine.generate(IDS, stop=[""])


def test_a_seed_repeats_its_text(engine: Engine) -> None:
    def tokens(seed: int | None) -> list[int]:
        sampling = Sampling(temperature=1.5, top_p=0.95, seed=seed)
        return engine.generate(IDS, max_tokens=16, sampling=sampling, ignore_eos=True).token_ids

    assert tokens(7) == tokens(7)
    assert len({tuple(tokens(seed)) for seed in range(4)}) == 4
    assert tokens(None) != tokens(None)


def test_an_end_token_ends_the_text_unless_ignored(engine: Engine) -> None:
    """Hot sampling meets an end token sooner or later; the same seed must then stop just before it."""
    assert engine.eos_ids
    for seed in range(50):
        sampling = Sampling(temperature=20.0, seed=seed)
        whole = engine.generate(IDS, max_tokens=64, sampling=sampling, ignore_eos=True).token_ids
        ends = [i for i, token in enumerate(whole) if token in engine.eos_ids]
        if ends and ends[0] > 0:
            break
    out = engine.generate(IDS, max_tokens=64, sampling=sampling)
    assert out.token_ids == whole[: ends[0]]
    assert out.stats.finish_reason == "stop"


@pytest.mark.parametrize("prompt", ["", [], ()])
def test_an_empty_prompt_is_refused(engine: Engine, prompt: Any) -> None:
    with pytest.raises(UsageError, match="prompt is empty"):
        engine.generate(prompt)


@pytest.mark.parametrize("bad", [-1, VOCAB, 2**31, -(2**40)])
def test_ids_outside_the_vocabulary_are_refused(engine: Engine, bad: int) -> None:
    for call in (engine.generate, engine.logits, lambda ids: list(engine.stream(ids))):
        with pytest.raises(UsageError, match=f"token id {bad} .* {VOCAB}"):
            call([1, bad, 2])


def test_a_prompt_that_fills_the_context_works_and_a_longer_one_is_refused(engine: Engine) -> None:
    out = engine.generate([5] * CTX, max_tokens=5, ignore_eos=True)
    assert (len(out.token_ids), out.stats.finish_reason) == (1, "length")
    for call in (engine.generate, engine.logits):
        with pytest.raises(UsageError, match=f"{CTX + 1} tokens.*{CTX}.*--ctx"):
            call([5] * (CTX + 1))


def test_generation_ends_where_the_context_does(engine: Engine) -> None:
    out = engine.generate([5] * (CTX - 10), max_tokens=1000, ignore_eos=True)
    assert (len(out.token_ids), out.stats.finish_reason) == (11, "length")


@pytest.mark.parametrize("count", [0, 1, 3])
def test_max_tokens_is_exact(engine: Engine, count: int) -> None:
    out = engine.generate(IDS, max_tokens=count, ignore_eos=True)
    assert (len(out.token_ids), out.stats.finish_reason) == (count, "length")


def test_a_negative_max_tokens_is_refused(engine: Engine) -> None:
    with pytest.raises(UsageError, match="max_tokens -1"):
        engine.generate(IDS, max_tokens=-1)


# ---- statistics


def test_hits_misses_and_bytes_are_exact() -> None:
    """One token per step, nothing read ahead: each layer asks for top-k experts of each token."""
    with load(expert_cache=EXPERTS, preload=False, prefetch=False, batch_size=1, threads=1) as engine:
        out = engine.generate(IDS, max_tokens=5, ignore_eos=True)
        with engine.record_routing() as routing:
            engine.logits(IDS + out.token_ids[:-1])
        used = {(layer, e) for layer, ids in routing.topk_ids.items() for e in np.unique(ids).tolist()}
        store = engine.runtime.source.store
        medium = {tuple(key): store.medium_nbytes(key) for key in store.keys()}  # noqa: SIM118  a store is no dict
    stats = out.stats
    assert (stats.prompt_tokens, stats.generated_tokens) == (len(IDS), 5)
    assert stats.expert_misses == len(used)
    assert stats.expert_hits + stats.expert_misses == (len(IDS) + 4) * LAYERS * TOP_K
    assert stats.expert_hit_rate == stats.expert_hits / (stats.expert_hits + stats.expert_misses)
    assert stats.bytes_read == sum(medium[key] for key in used)


def test_a_resident_model_reads_nothing_and_misses_nothing() -> None:
    with load(expert_cache=EXPERTS) as engine:
        stats = engine.generate(IDS, max_tokens=5, ignore_eos=True).stats
    assert (stats.expert_misses, stats.bytes_read, stats.stall_sec) == (0, 0, 0)
    assert stats.expert_hits >= 4 * LAYERS * TOP_K


def test_times_and_memory_are_measured(engine: Engine) -> None:
    stats = engine.generate(IDS, max_tokens=5, ignore_eos=True).stats
    assert stats.ttft_sec > 0
    assert stats.prefill_tokens_per_sec == pytest.approx(len(IDS) / stats.ttft_sec)
    assert stats.decode_tokens_per_sec > 0
    assert stats.peak_memory_bytes >= psutil.Process().memory_info().rss
    assert stats.memory_budget_bytes == 2 << 30


# ---- options and files


@pytest.mark.parametrize(
    "options",
    [
        {"treads": 2}, {"threads": -1}, {"threads": True}, {"ctx": "many"}, {"ctx": 10**9}, {"io": "mmap"},
        {"eviction": "random"}, {"activations": "int4"}, {"expert_cache": 0}, {"expert_cache": -2},
        {"expert_cache": "lots"}, {"expert_cache": 2.5}, {"memory_budget": "8 apples"}, {"memory_budget": 0},
        {"batch_size": -1}, {"kv_cache": "q4"},
    ],
    ids=str,
)  # fmt: skip
def test_an_option_that_cannot_be_used_is_refused_by_name(options: dict[str, Any]) -> None:
    (name,) = options
    with pytest.raises(UsageError) as refused:
        load(**options)
    assert name.replace("_", "-") in str(refused.value).replace("_", "-")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize("content", [None, b"", b"GGUF", b"not a model at all " * 100], ids=repr)
def test_a_file_that_is_no_model_is_named(tmp_path: Path, content: bytes | None) -> None:
    path = tmp_path / "model.gguf"
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ColibriError) as refused:
        load(path)
    assert isinstance(refused.value, CheckpointError | UsageError | StoreError)
    assert str(path) in str(refused.value) and "\n" not in str(refused.value)


def test_a_failed_load_leaves_nothing_behind(tmp_path: Path) -> None:
    process = psutil.Process()

    def fail() -> None:
        with pytest.raises(ColibriError):
            load(eviction="random")

    fail()
    files, threads = process.num_fds(), threading.active_count()
    for _ in range(5):
        fail()
    assert (process.num_fds(), threading.active_count()) == (files, threads)


# ---- life and death


def test_a_closed_engine_says_so() -> None:
    engine = load()
    stream = engine.stream(IDS, max_tokens=9, ignore_eos=True)
    next(stream)
    engine.close()
    engine.close()
    for call in (engine.generate, engine.logits, lambda ids: list(engine.stream(ids)), lambda ids: next(stream)):
        with pytest.raises(UsageError, match="closed"):
            call(IDS)


def test_a_stream_left_half_way_stops_nobody(engine: Engine) -> None:
    expected = engine.generate(IDS, max_tokens=12, ignore_eos=True)
    left = engine.stream(IDS, max_tokens=12, ignore_eos=True)
    begun = next(left)
    assert engine.generate(IDS, max_tokens=12, ignore_eos=True).token_ids == expected.token_ids
    results = []
    other = threading.Thread(
        target=lambda: results.append(engine.generate(IDS, max_tokens=12, ignore_eos=True)), daemon=True
    )
    other.start()
    other.join(20)
    assert [out.token_ids for out in results] == [expected.token_ids]
    assert begun + "".join(left) == expected.text


def test_a_stream_that_keeps_the_whole_context_is_not_waited_for_endlessly(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(memory, "PATIENCE_SEC", 0.2)
    left = engine.stream([5] * 100, max_tokens=99, ignore_eos=True)
    next(left)
    with pytest.raises(BudgetError, match=r"unfinished texts.*--ctx"):
        engine.generate(IDS)
    left.close()
    assert engine.generate(IDS, max_tokens=3, ignore_eos=True).token_ids


def test_an_idle_chat_keeps_only_what_it_has() -> None:
    with load(ctx=128) as engine:
        chat = engine.chat()
        list(chat.say("Hi", max_tokens=5))
        assert engine.generate(IDS, max_tokens=50, ignore_eos=True).stats.generated_tokens == 50
        with pytest.raises(BudgetError, match="chats"):
            engine.generate(IDS, max_tokens=100)
        chat.close()
        assert engine.generate(IDS, max_tokens=100, ignore_eos=True).stats.generated_tokens == 100


def test_streams_that_are_forgotten_give_their_memory_back(engine: Engine) -> None:
    free = len(engine.runtime.model.kv._free)
    for _ in range(10):  # each takes more than half of the KV cache
        stream = engine.stream([5] * 100, max_tokens=9, ignore_eos=True)
        next(stream)
        del stream
    assert len(engine.runtime.model.kv._free) == free


def test_threads_get_what_they_would_get_alone(engine: Engine) -> None:
    prompts = [IDS[i:] + IDS[:i] for i in range(4)]
    expected = [engine.generate(prompt, max_tokens=8, ignore_eos=True) for prompt in prompts]
    results: dict[int, Any] = {}

    def work(i: int) -> None:
        tokens = engine.generate(prompts[i], max_tokens=8, ignore_eos=True).token_ids
        results[i] = tokens, "".join(engine.stream(prompts[i], max_tokens=8, ignore_eos=True))

    threads = [threading.Thread(target=work, args=(i,), daemon=True) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    assert results == {i: (out.token_ids, out.text) for i, out in enumerate(expected)}


def test_two_engines_live_side_by_side(engine: Engine) -> None:
    with load(OTHER) as other:
        alone = [e.generate(IDS, max_tokens=10, ignore_eos=True).text for e in (engine, other)]
        streams = [e.stream(IDS, max_tokens=10, ignore_eos=True) for e in (engine, other)]
        turns = list(itertools.zip_longest(*streams, fillvalue=""))
        assert ["".join(pieces) for pieces in zip(*turns, strict=True)] == alone
    assert engine.generate(IDS, max_tokens=10, ignore_eos=True).text == alone[0]


# ---- chat


def test_a_chat_answers_like_a_fresh_prompt_and_computes_only_what_is_new() -> None:
    with load(ctx=512) as engine:
        chat = engine.chat()
        for question in ("Hi", "Why?", "Tell me more"):
            messages = [*chat.messages, {"role": "user", "content": question}]
            answer = "".join(chat.say(question, max_tokens=10))
            ids = engine.tokenizer.encode_chat(messages)
            assert answer == engine.generate(ids, max_tokens=10).text
            assert chat.messages == [*messages, {"role": "assistant", "content": answer}]
        chat.close()


def test_an_answer_cannot_go_on_after_the_next_question() -> None:
    with load(ctx=512) as engine:
        chat = engine.chat()
        first = chat.say("Hi", max_tokens=30)
        next(first)
        list(chat.say("Or rather: hello", max_tokens=5))
        with pytest.raises(UsageError, match="taken over"):
            list(first)
