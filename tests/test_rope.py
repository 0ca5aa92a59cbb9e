"""Rotary frequencies against the formulas as transformers writes them, in NumPy."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

from colibri_offload.errors import CheckpointError, UnsupportedError
from colibri_offload.families.config import Config
from colibri_offload.families.rope import rope

DIM = 64


def freqs(config: dict[str, Any], **keys: Any) -> np.ndarray:
    return np.array(rope(Config(config, "config.json"), DIM, **keys).inv_freq)


def plain(theta: float) -> np.ndarray:
    return 1.0 / theta ** (np.arange(0, DIM, 2) / DIM)


@pytest.mark.parametrize(
    "config",
    [
        {"rope_theta": 5e5},
        {"rope_theta": 500000, "rope_scaling": None},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "default"}},
        {"rope_theta": 5e5, "rope_scaling": {"type": "default"}},
    ],
)
def test_default(config: dict[str, Any]) -> None:
    np.testing.assert_allclose(freqs(config), plain(5e5), rtol=1e-12)


def test_theta_of_the_family_is_the_fallback() -> None:
    np.testing.assert_allclose(freqs({}, theta=1e6), plain(1e6), rtol=1e-12)


def test_linear() -> None:
    scaling = {"type": "linear", "factor": 4.0}
    np.testing.assert_allclose(freqs({"rope_theta": 1e4, "rope_scaling": scaling}), plain(1e4) / 4, rtol=1e-12)


def test_llama3() -> None:
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    inv = plain(5e5)
    wavelength = 2 * math.pi / inv
    smooth = (8192 / wavelength - 1) / (4 - 1)
    expected = np.where(wavelength > 8192, inv / 8, inv)
    between = (wavelength <= 8192) & (wavelength >= 8192 / 4)
    expected = np.where(between, (1 - smooth) * inv / 8 + smooth * inv, expected)
    assert between.any() and (wavelength > 8192).any()
    np.testing.assert_allclose(freqs({"rope_theta": 5e5, "rope_scaling": scaling}), expected, rtol=1e-12)


@pytest.mark.parametrize("truncate", [True, False])
def test_yarn(truncate: bool) -> None:
    scaling = {"rope_type": "yarn", "factor": 32.0, "original_max_position_embeddings": 4096, "truncate": truncate}
    found = rope(Config({"rope_theta": 150000, "rope_scaling": scaling}, "config.json"), DIM)
    low, high = (DIM * math.log(4096 / (n * 2 * math.pi)) / (2 * math.log(150000)) for n in (32, 1))
    if truncate:
        low, high = math.floor(low), math.ceil(high)
    keep = 1 - np.clip((np.arange(DIM // 2) - low) / (high - low), 0, 1)
    inv = plain(150000)
    np.testing.assert_allclose(found.inv_freq, inv / 32 * (1 - keep) + inv * keep, rtol=1e-12)
    assert found.attention_factor == pytest.approx(0.1 * math.log(32) + 1)


@pytest.mark.parametrize(
    ("keys", "factor"),
    [
        ({"mscale": 1.0, "mscale_all_dim": 1.0}, 1.0),
        ({"mscale": 1.0, "mscale_all_dim": 0.5}, (0.1 * math.log(40) + 1) / (0.05 * math.log(40) + 1)),
        ({"mscale": 0.7}, 0.1 * math.log(40) + 1),
        ({"attention_factor": 1.25}, 1.25),
    ],
)
def test_yarn_attention_factor(keys: dict[str, float], factor: float) -> None:
    scaling = {"type": "yarn", "factor": 40, "original_max_position_embeddings": 4096} | keys
    found = rope(Config({"rope_scaling": scaling}, "config.json"), DIM)
    assert found.attention_factor == pytest.approx(factor)


def test_factors_of_a_gguf_divide_the_frequencies() -> None:
    factors = list(np.linspace(1, 8, DIM // 2))
    np.testing.assert_allclose(freqs({"rope_freq_factors": factors}), plain(1e4) / factors, rtol=1e-12)


@pytest.mark.parametrize("kind", ["dynamic", "longrope", "mrope"])
def test_other_scalings_are_refused(kind: str) -> None:
    with pytest.raises(UnsupportedError, match=f"{kind}.*'default', 'linear', 'llama3', 'yarn'"):
        freqs({"rope_scaling": {"rope_type": kind, "factor": 2.0}})


@pytest.mark.parametrize(
    "config",
    [
        {"rope_theta": 1.0},
        {"rope_theta": -1e4},
        {"rope_theta": float("nan")},
        {"rope_scaling": {"type": "linear"}},
        {"rope_scaling": {"type": "linear", "factor": 0.0}},
        {"rope_scaling": {"type": "yarn", "factor": 1e300}},
        {"rope_freq_factors": [1.0]},
    ],
)
def test_broken_numbers_are_refused(config: dict[str, Any]) -> None:
    with pytest.raises(CheckpointError, match=r"config\.json"):
        freqs(config)
