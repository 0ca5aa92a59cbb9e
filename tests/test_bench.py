"""colibri bench and the measuring behind it: real work, the contract's keys, refusals."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from colibri_offload import Engine
from colibri_offload.errors import UsageError
from colibri_offload.tuning.bench import bench, random_prompt

KEYS = {
    "ttft_sec", "prefill_tokens_per_sec", "decode_tokens_per_sec", "peak_memory_bytes", "memory_budget_bytes",
    "expert_hit_rate", "bytes_read_per_token", "disk_bytes_per_sec", "stall_sec_per_token", "cpu_percent",
}  # fmt: skip


def test_json_has_the_keys_of_the_contract_and_plausible_values() -> None:
    flags = "--prompt-tokens 40 --decode-tokens 8 --runs 3 --expert-cache 8 --json"
    argv = [sys.executable, "-m", "colibri_offload.cli", "bench", "demo", *flags.split()]
    out = subprocess.run(argv, capture_output=True, text=True, check=True)
    values = json.loads(out.stdout)
    assert set(values) >= KEYS
    assert values["prefill_tokens_per_sec"] == pytest.approx(40 / values["ttft_sec"], rel=0.5)
    assert 0 < values["expert_hit_rate"] < 1 and values["bytes_read_per_token"] > 0
    assert values["peak_memory_bytes"] < values["memory_budget_bytes"]
    spread = values["spread"]["decode_tokens_per_sec"]
    assert 0 < spread["min"] <= values["decode_tokens_per_sec"] <= spread["max"]


def test_every_run_computes_its_whole_prompt() -> None:
    """A prompt shared between runs would be taken from the KV cache and measured as nothing."""
    with Engine.load("demo") as engine:
        report = bench(engine, prompt_tokens=30, decode_tokens=4, runs=2)
        assert all(run.stats.prompt_tokens == 30 and run.stats.generated_tokens == 4 for run in report.runs)
        assert random_prompt(4096, 30, 0) != random_prompt(4096, 30, 1)
        with pytest.raises(UsageError, match="--ctx"):
            bench(engine, prompt_tokens=1020, decode_tokens=64)
        with pytest.raises(UsageError, match="at least 1 run"):
            bench(engine, runs=0)


def test_lazy_is_the_opposite_of_preload() -> None:
    with Engine.load("demo", lazy=True) as engine:
        assert engine.runtime.cache.block_count == 0
    with Engine.load("demo", lazy=False) as engine:
        assert engine.runtime.cache.block_count == engine.runtime.sizes.total_blocks
    with pytest.raises(UsageError, match="exclude"):
        Engine.load("demo", lazy=True, preload=True)


def test_gpu_options_warn_and_run_on_the_cpu() -> None:
    with pytest.warns(UserWarning, match="gpu_layers: this version has no GPU backend"):
        engine = Engine.load("demo", gpu_layers=3)
    with engine:
        assert len(engine.generate([5, 6], max_tokens=2, ignore_eos=True).token_ids) == 2
