"""Golden fixtures: tiny models whose logits and routing were recorded with HF transformers in float32.

Keys of a fixture (s = sequence 0 or 1, n = layer): input_ids_s [T]; logits_s [T, V]; router_idx_s_ln [T, K] in
ascending order; router_w_s_ln [T, K] in the same order; greedy_s [24], the greedy continuation.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

GOLDEN = Path(__file__).parent / "golden"


@dataclass(frozen=True)
class Fixture:
    """A model's path (directory or .gguf) and the error of the logits allowed, relative to the largest logit."""

    path: Path
    tolerance: float

    @property
    def name(self) -> str:
        return self.path.name

    @property
    def golden(self) -> Path:
        """The recorded arrays."""
        return self.path.with_suffix(".golden.npz") if self.path.suffix == ".gguf" else self.path / "golden.npz"


EXACT, QUANTISED = 2e-4, 1e-3

_FLOAT = [
    "qwen3_moe",
    "mixtral",
    "mixtral_swa",
    "mixtral_swa_sharded",
    "mixtral_bf16",
    "llama",
    "qwen3",
    "qwen2_moe",
    "olmoe",
    "deepseek_v2",
    "deepseek_v2_lite",
    "deepseek_v3",
    "gpt_oss",
]
_QUANTISED = [
    "mixtral_gptq",
    "qwen3_moe_awq",
    "qwen3_moe_fp8",
    "qwen3_moe_gptq_actorder",
    "deepseek_v3_ct_int4",
    "deepseek_v3_fp8",
    "gpt_oss_mxfp4",
]

HUB = [Fixture(GOLDEN / name, EXACT) for name in _FLOAT] + [Fixture(GOLDEN / name, QUANTISED) for name in _QUANTISED]
GGUF = [
    Fixture(path, EXACT if path.stem.endswith(("F32", "F16")) else QUANTISED)
    for path in sorted((GOLDEN / "gguf").glob("*.gguf"))
]
FIXTURES = HUB + GGUF

Routing = dict[int, tuple[np.ndarray, np.ndarray]]


def load_golden(fixture: Fixture) -> dict[str, np.ndarray]:
    """All recorded arrays of a fixture."""
    with np.load(fixture.golden) as data:
        return {key: data[key] for key in data.files}


def canonical(ids: np.ndarray, weights: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """ids and weights [T, K], each row in ascending expert order: routing has no order of its own."""
    order = np.argsort(ids, axis=-1, kind="stable")
    return np.take_along_axis(ids, order, -1), np.take_along_axis(weights, order, -1)


def golden_routing(golden: dict[str, np.ndarray], sequence: int) -> Routing:
    """{layer: (ids, weights)} as recorded, canonical."""
    prefix = f"router_idx_{sequence}_l"
    layers = [int(key.removeprefix(prefix)) for key in golden if key.startswith(prefix)]
    return {n: (golden[f"{prefix}{n}"], golden[f"router_w_{sequence}_l{n}"]) for n in sorted(layers)}


def check_routing(got: Routing, golden: dict[str, np.ndarray], sequence: int, tolerance: float = 1e-4) -> None:
    """Asserts the same layers, the same experts for every token, and weights within `tolerance`."""
    expected = golden_routing(golden, sequence)
    assert sorted(got) == sorted(expected)
    for layer, (ids, weights) in expected.items():
        got_ids, got_weights = canonical(*got[layer])
        np.testing.assert_array_equal(got_ids, ids, err_msg=f"experts of layer {layer}")
        np.testing.assert_allclose(got_weights, weights, tolerance, tolerance, err_msg=f"weights of layer {layer}")


def check_logits(got: np.ndarray, golden: dict[str, np.ndarray], sequence: int, tolerance: float) -> None:
    """Asserts that the largest error is within `tolerance` times the largest recorded logit."""
    expected = golden[f"logits_{sequence}"].astype(np.float64)
    assert got.shape == expected.shape
    error, limit = np.abs(got - expected).max(), tolerance * np.abs(expected).max()
    assert error <= limit, f"logits differ by {error:.3g}, allowed {limit:.3g}"
