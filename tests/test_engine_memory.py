"""The memory budget is kept: the measured peak of a process stays under it, also where it is as tight as can be."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest
from engine_util import GGUF, gen_moe, run_child

from colibri_offload import Engine
from colibri_offload.errors import BudgetError
from colibri_offload.scheduler.memory import parse_size

# A large vocabulary and a wide KV cache, so that head, embedding and cache matter beside the experts.
SHAPE = gen_moe.Shape(
    type="Q4_0", layers=3, experts=12, topk=4, hidden=512, ffn=768, heads=16, kv=8, branch=0.1, vocab=48000
)
SLACK = 4 << 20  # a process is not always equally large when it begins to load
PROMPTS = {n: np.random.default_rng(n).integers(0, SHAPE.vocab, n).tolist() for n in (16, 1000)}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    path = gen_moe.generate(tmp_path_factory.mktemp("memory") / "model.gguf", SHAPE)
    yield path
    path.unlink()


def tight_budget(model: Path, options: dict[str, Any]) -> int:
    """What these options need: what they book in a process that is given plenty."""
    job = {"model": str(model), "options": options | {"memory_budget": "4GiB"}, "prompt": [1], "max_tokens": 1}
    return run_child(job)["budget"]["booked_bytes"] + SLACK


@pytest.fixture(scope="module")
def tight(model: Path) -> dict[tuple[int, int], int]:
    """(ctx, batch_size) → bytes with one expert per layer."""
    return {
        (ctx, batch): tight_budget(model, {"ctx": ctx, "batch_size": batch, "expert_cache": 1, "threads": 2})
        for ctx, batch in ((512, 0), (512, 8), (1024, 0), (4096, 0), (4096, 8))
    }


def check_peak(report: dict[str, Any]) -> None:
    peak, budget = report["stats"]["peak_memory_bytes"], report["budget"]["total_bytes"]
    print(f"peak {peak / 2**20:.1f} MiB of {budget / 2**20:.1f} MiB")
    assert budget // 3 < peak <= budget


@pytest.mark.parametrize("expert_cache", [1, "auto"])
@pytest.mark.parametrize("batch_size", [0, 8])
@pytest.mark.parametrize(("ctx", "tokens"), [(512, 16), (4096, 16), (4096, 1000)])
def test_peak_memory_stays_under_a_tight_budget(
    model: Path, tight: dict[tuple[int, int], int], ctx: int, tokens: int, batch_size: int, expert_cache: int | str
) -> None:
    budget = tight[ctx, batch_size] + (0 if expert_cache == 1 else 10 << 20)
    options = {
        "ctx": ctx, "batch_size": batch_size, "expert_cache": expert_cache, "threads": 2, "memory_budget": budget,
        "io": "buffered",
    }  # fmt: skip
    report = run_child({"model": str(model), "options": options, "prompt": PROMPTS[tokens], "max_tokens": 4})
    check_peak(report)
    if expert_cache == 1:
        assert report["stats"]["expert_misses"] > 0


def test_compiling_every_kernel_and_filling_the_context_is_within_the_budget(
    model: Path, tight: dict[tuple[int, int], int], tmp_path: Path
) -> None:
    options = {"ctx": 1024, "expert_cache": 1, "threads": 2, "memory_budget": tight[1024, 0]}
    job = {"model": str(model), "options": options, "prompt": PROMPTS[1000], "max_tokens": 24}
    check_peak(run_child(job, COLIBRI_CACHE=str(tmp_path)))
    assert any(tmp_path.rglob("*.o"))


@pytest.mark.slow
def test_loading_a_large_embedding_is_within_the_budget(tmp_path: Path) -> None:
    """Embedding and head of 200 MB each were read whole before they were packed, beside their place in memory."""
    shape = gen_moe.Shape(type="Q8_0", layers=1, experts=4, topk=2, hidden=2048, ffn=256, heads=4, vocab=90000)
    model = gen_moe.generate(tmp_path / "model.gguf", shape)
    options = {"ctx": 512, "expert_cache": 1, "threads": 2}
    options["memory_budget"] = tight_budget(model, options)
    check_peak(run_child({"model": str(model), "options": options, "prompt": [1, 2, 3], "max_tokens": 3}))
    model.unlink()


def test_a_prompt_longer_than_the_context_is_refused(model: Path) -> None:
    options = {"ctx": 512, "expert_cache": 1, "threads": 2, "memory_budget": "1GiB"}
    report = run_child({"model": str(model), "options": options, "prompt": PROMPTS[1000], "max_tokens": 4})
    assert report["error"] == "UsageError"
    assert "1000" in report["message"] and "512" in report["message"] and "--ctx" in report["message"]


@pytest.mark.parametrize("expert_cache", ["auto", 1, "10MiB"])
def test_what_a_refusal_advises_ends_in_a_model_that_loads(model: Path, expert_cache: int | str) -> None:
    budget, refusals = "64MiB", 0
    while True:
        try:
            with Engine.load(model, memory_budget=budget, ctx=512, expert_cache=expert_cache, threads=1) as engine:
                assert engine.runtime.budget.remaining >= 0
            break
        except BudgetError as error:
            message = str(error)
        assert "\n" not in message and " of the memory budget of " in message
        advised = message.split("give --memory-budget ")[1].split(" ")[0]
        assert parse_size(advised) > parse_size(budget)
        budget, refusals = advised, refusals + 1
        gc.collect()
        assert refusals < 20
    assert refusals > 0


def test_loading_again_and_again_does_not_grow() -> None:
    process = psutil.Process()

    def load_some(times: int) -> tuple[int, int, int]:
        for _ in range(times):
            with Engine.load(GGUF / "qwen3_moe-Q4_0.gguf", memory_budget="2GiB", threads=2) as engine:
                engine.generate([1, 2, 3], max_tokens=2)
        del engine
        gc.collect()
        return process.memory_info().rss, process.num_fds(), process.num_threads()

    load_some(10)
    rss, files, threads = load_some(5)
    later_rss, later_files, later_threads = load_some(20)
    assert later_files <= files and later_threads <= threads
    assert later_rss - rss < 20 * (1 << 20)
