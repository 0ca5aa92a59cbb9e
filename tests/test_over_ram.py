"""A model three times as large as the memory it is given: it finishes, within the limit, with the same tokens."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from cgroup_util import memory_cgroup
from engine_util import finish_child, gen_moe, run_child, start_child

SHAPE = gen_moe.Shape(type="Q4_0", layers=18, experts=64, hidden=1024, ffn=768, heads=16, branch=0.1, skew=0.6)
FREE_DISK, MODEL = 6 << 30, 1_500_000_000
PROMPT = np.random.default_rng(3).integers(0, 256, 40).tolist()
POLL_SEC = 0.02

pytestmark = pytest.mark.slow


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    folder = tmp_path_factory.mktemp("over_ram")
    if shutil.disk_usage(folder).free < FREE_DISK:
        pytest.skip("less than 6 GB of disk are free")
    path = folder / "model.gguf"
    try:
        yield gen_moe.generate(path, SHAPE)
    finally:
        path.unlink(missing_ok=True)  # pytest keeps the directories of its last runs


def forget_cached_pages(path: Path) -> None:
    """Drop the file from the page cache: its pages are charged to whoever read or wrote them first."""
    with open(path, "rb") as f:
        os.fsync(f.fileno())
        os.posix_fadvise(f.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)


@pytest.mark.parametrize("io", ["auto", "buffered"])
def test_a_model_of_three_times_the_memory_runs_within_the_limit(model: Path, free: list[int], io: str) -> None:
    size = model.stat().st_size
    assert size > MODEL
    limit = size // 3
    forget_cached_pages(model)
    with memory_cgroup(limit) as group:
        options = {"memory_budget": "auto", "threads": 2, "io": io, "ctx": 512}
        job = {"model": str(model), "options": options, "prompt": PROMPT, "max_tokens": 8}
        child = start_child(job | {"cgroup": str(group.procs)})
        peak_anonymous = 0
        while child.poll() is None:
            peak_anonymous = max(peak_anonymous, group.anonymous_bytes())
            try:
                child.wait(POLL_SEC)
            except subprocess.TimeoutExpired:
                continue
        report = finish_child(child)
        assert group.oom_kills() == 0
    stats, budget = report["stats"], report["budget"]["total_bytes"]
    print(f"budget {budget:,}, peak {stats['peak_memory_bytes']:,}, anonymous {peak_anonymous:,} of limit {limit:,}")
    assert budget <= limit
    assert stats["peak_memory_bytes"] <= budget
    assert limit // 2 < peak_anonymous <= budget
    assert stats["expert_misses"] > 0
    assert stats["bytes_read"] > size // 2
    assert report["token_ids"] == free


@pytest.fixture(scope="module")
def free(model: Path) -> list[int]:
    """The tokens of a run without a limit."""
    report = run_child({"model": str(model), "options": {"threads": 2}, "prompt": PROMPT, "max_tokens": 8})
    assert len(set(report["token_ids"])) > 1
    return report["token_ids"]
