"""The whole engine, through its public API, against logits, routing and text recorded with HF transformers.

With float32 activations every format is exact up to rounding. With int8 activations, the default, unquantised weights
are computed as before; quantised weights lose a few percent, which can move a router's choice between close experts,
so that only the error of the logits is bounded and its distribution printed (pytest -rP).
"""

from __future__ import annotations

import numpy as np
import pytest
from golden_util import EXACT, FIXTURES, Fixture, check_logits, check_routing, load_golden

from colibri_offload import Engine

ROUNDING = 2e-5  # of the largest logit; 3e-6 is usual
INT8_MEDIAN = 0.05

UNQUANTISED = [f for f in FIXTURES if f.tolerance == EXACT]
QUANTISED = [f for f in FIXTURES if f.tolerance != EXACT]


def name_of(fixture: Fixture) -> str:
    return fixture.name


def check_exact(fixture: Fixture, activations: str) -> None:
    """Logits to rounding, the same experts with the same weights, the same 24 tokens, for both sequences."""
    golden = load_golden(fixture)
    with Engine.load(fixture.path, activations=activations, threads=2, memory_budget="2GiB") as engine:
        for sequence in (0, 1):
            ids = golden[f"input_ids_{sequence}"]
            with engine.record_routing() as routing:
                logits = engine.logits(ids)
            check_logits(logits, golden, sequence, ROUNDING)
            got = {layer: (routing.topk_ids[layer], routing.topk_weights[layer]) for layer in routing.topk_ids}
            check_routing(got, golden, sequence, 1e-5)
            out = engine.generate(ids.tolist(), max_tokens=24, ignore_eos=True)
            assert out.token_ids == golden[f"greedy_{sequence}"].tolist()


@pytest.mark.parametrize("fixture", FIXTURES, ids=name_of)
def test_float32_activations_are_exact_for_every_format(fixture: Fixture) -> None:
    check_exact(fixture, "float32")


@pytest.mark.parametrize("fixture", UNQUANTISED, ids=name_of)
def test_default_mode_is_exact_for_unquantised_weights(fixture: Fixture) -> None:
    check_exact(fixture, "int8")


@pytest.mark.parametrize("fixture", QUANTISED, ids=name_of)
def test_default_mode_stays_close_for_quantised_weights(fixture: Fixture) -> None:
    golden = load_golden(fixture)
    errors = []
    with Engine.load(fixture.path, threads=2, memory_budget="2GiB") as engine:
        for sequence in (0, 1):
            expected = golden[f"logits_{sequence}"]
            error = np.abs(engine.logits(golden[f"input_ids_{sequence}"]) - expected).max(axis=1)
            errors.append(error / np.abs(expected).max())
    error = np.concatenate(errors)
    shares = " ".join(f"p{q} {np.percentile(error, q):.4f}" for q in (10, 50, 90, 100))
    print(f"{fixture.name}: error per token, of the largest logit: {shares}")
    assert np.median(error) <= INT8_MEDIAN
