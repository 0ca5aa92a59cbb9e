"""The reference model against recorded runs: proves that the specs and the tensor tables say what the families are."""

from __future__ import annotations

import pytest
from golden_util import FIXTURES, Fixture, check_logits, check_routing, load_golden
from reference import reference_forward

from colibri_offload.checkpoint.open import open_checkpoint
from colibri_offload.families.resolve import load_model_spec

# Float64 against float32: far below what the fixtures allow an engine.
REFERENCE_TOLERANCE = 1e-5


@pytest.mark.parametrize("fixture", FIXTURES, ids=lambda f: f.name)
def test_reference_gives_recorded_logits_and_routing(fixture: Fixture) -> None:
    spec, weights = load_model_spec(open_checkpoint(fixture.path))
    golden = load_golden(fixture)
    for sequence in (0, 1):
        logits, routing = reference_forward(spec, weights, golden[f"input_ids_{sequence}"])
        check_logits(logits, golden, sequence, REFERENCE_TOLERANCE)
        check_routing(routing, golden, sequence, REFERENCE_TOLERANCE)
    assert weights.unused() == []
