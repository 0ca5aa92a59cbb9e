"""Rotary frequencies from a configuration: default, linear, llama3 and yarn scaling.

Two spellings are read: `rope_theta` beside `rope_scaling` (classic) and `rope_parameters` (transformers 5).
`rope_freq_factors` (the values of a GGUF's rope_freqs.weight) divide the unscaled frequencies.
"""

from __future__ import annotations

import math

from colibri_offload.errors import CheckpointError
from colibri_offload.families.config import Config
from colibri_offload.families.spec import Rope

KINDS = ("default", "linear", "llama3", "yarn")


def rope(config: Config, dim: int, *, interleaved: bool = False, theta: float = 10000.0) -> Rope:
    """The rope of heads whose first `dim` elements turn; `theta` is the base when the configuration has none.

    Raises: UnsupportedError for other scalings (dynamic, longrope …); CheckpointError for broken values.
    """
    scaling = scaling_section(config)
    base = scaling.number("rope_theta", config.number("rope_theta", theta, low=2), low=2)
    if dim % 2:
        raise CheckpointError(f"{config.origin}: the rotary dimension {dim} is odd; fetch the configuration again")
    inv_freq = [base ** (-2.0 * i / dim) for i in range(dim // 2)]
    factors = config.get("rope_freq_factors")
    if factors is not None:
        if len(factors) != len(inv_freq):
            raise CheckpointError(
                f"{config.origin}: rope_freqs.weight has {len(factors)} values, the heads need {len(inv_freq)}; "
                "download the file again"
            )
        inv_freq = [f / float(factor) for f, factor in zip(inv_freq, factors, strict=True)]
    kind = scaling.choice("rope_type", scaling.get("type", "default"), KINDS)
    if kind == "default":
        return Rope(tuple(inv_freq), interleaved)
    if kind == "linear":
        factor = stretch(scaling)
        return Rope(tuple(f / factor for f in inv_freq), interleaved)
    if kind == "llama3":
        return Rope(tuple(_llama3(f, scaling) for f in inv_freq), interleaved)
    return _yarn(inv_freq, base, scaling, config, interleaved)


def scaling_section(config: Config) -> Config:
    """The object that holds the scaling's keys; empty when there is none."""
    return config.section("rope_parameters") or config.section("rope_scaling") or Config({}, config.origin)


def is_yarn(scaling: Config) -> bool:
    """Whether a scaling section asks for YaRN."""
    return scaling.get("rope_type", scaling.get("type")) == "yarn"


def stretch(scaling: Config) -> float:
    """By how much a scaling section lengthens the context."""
    return scaling.number("factor", low=1, high=1e6)


def yarn_mscale(factor: float, mscale: float) -> float:
    """0.1·mscale·ln(factor) + 1, and 1 without extension. Source: YaRN, arXiv:2309.00071, equation 22."""
    return 0.1 * mscale * math.log(factor) + 1.0 if factor > 1 else 1.0


def _llama3(freq: float, scaling: Config) -> float:
    """Long waves are stretched by `factor`, short ones kept, those between blended.

    Source: Llama 3.1's reference code, `apply_scaling` (github.com/meta-llama/llama-models, models/llama3/model.py).
    """
    factor = stretch(scaling)
    low, high = scaling.number("low_freq_factor"), scaling.number("high_freq_factor")
    turns = scaling.number("original_max_position_embeddings") * freq / (2 * math.pi)
    if turns <= low:
        return freq / factor
    if turns >= high:
        return freq
    blend = (turns - low) / (high - low)
    return (1 - blend) * freq / factor + blend * freq


def _yarn(inv_freq: list[float], base: float, scaling: Config, config: Config, interleaved: bool) -> Rope:
    """Frequencies that turn often over the original context are kept, rare ones divided by `factor`, a ramp between.

    Source: YaRN, arXiv:2309.00071, section 3.2. `truncate` rounds the ramp's ends to whole dimensions.
    """
    factor = stretch(scaling)
    context = scaling.number(
        "original_max_position_embeddings", config.number("max_position_embeddings", 2048)
    )
    dim = 2 * len(inv_freq)

    def dimension(turns: float) -> float:
        return dim * math.log(context / (turns * 2 * math.pi)) / (2 * math.log(base))

    low, high = dimension(scaling.number("beta_fast", 32)), dimension(scaling.number("beta_slow", 1))
    if scaling.flag("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    width = (high - low) or 0.001
    scaled = []
    for i, freq in enumerate(inv_freq):
        ramp = min(max((i - low) / width, 0.0), 1.0)
        scaled.append(freq * (1 - ramp) + freq / factor * ramp)
    return Rope(tuple(scaled), interleaved, _attention_factor(scaling, factor))


def _attention_factor(scaling: Config, factor: float) -> float:
    """What multiplies cos and sin: stated, or from mscale and mscale_all_dim (DeepSeek), or YaRN's own rule."""
    if scaling.get("attention_factor") is not None:
        return scaling.number("attention_factor")
    mscale, all_dim = scaling.number("mscale", 0, low=0), scaling.number("mscale_all_dim", 0, low=0)
    if mscale and all_dim:
        return yarn_mscale(factor, mscale) / yarn_mscale(factor, all_dim)
    return yarn_mscale(factor, 1.0)
