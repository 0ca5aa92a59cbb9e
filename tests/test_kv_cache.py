"""--kv-cache: what each type costs in memory and in exactness, and what is refused."""

from __future__ import annotations

import numpy as np
import pytest
from golden_util import GOLDEN

from colibri_offload import Engine
from colibri_offload.errors import UsageError

IDS = [(7 * i) % 4000 + 50 for i in range(150)]


def booked(engine: Engine) -> int:
    return sum(line.nbytes for line in engine.runtime.budget.lines() if line.category == "kv_cache")


def test_narrower_types_take_less_memory_and_cost_little_exactness() -> None:
    logits, nbytes = {}, {}
    for kv_type in ("f32", "f16", "q8_0"):
        # without the rounding of activations, which would amplify the least difference
        with Engine.load("demo", kv_cache=kv_type, activations="float32") as engine:
            logits[kv_type], nbytes[kv_type] = engine.logits(IDS), booked(engine)
    assert nbytes["f16"] == pytest.approx(nbytes["f32"] / 2, rel=0.05)
    assert nbytes["q8_0"] == pytest.approx(nbytes["f32"] * 9 / 32, rel=0.05)
    scale = np.abs(logits["f32"]).max()
    assert 0 < np.median(np.abs(logits["f16"] - logits["f32"]).max(1)) < 1e-3 * scale
    assert 0 < np.median(np.abs(logits["q8_0"] - logits["f32"]).max(1)) < 2e-2 * scale


def test_the_same_bits_whatever_the_chunks() -> None:
    results = []
    for batch_size in (1, 7, 150):
        with Engine.load("demo", kv_cache="q8_0", batch_size=batch_size) as engine:
            results.append(engine.logits(IDS))
    assert all(np.array_equal(results[0], other) for other in results[1:])


def test_q8_0_refuses_heads_that_it_cannot_split() -> None:
    with pytest.raises(UsageError, match=r"--kv-cache q8_0: head width 16 is no multiple of 32; use f16"):
        Engine.load(GOLDEN / "llama", kv_cache="q8_0")
