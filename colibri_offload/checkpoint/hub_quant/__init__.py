"""Quantised hub checkpoints: which scheme a config names, and the tensors that the scheme puts together.

A scheme is one file with `fold(stored, settings) -> Folded`. It turns several stored tensors into one logical tensor
named like the unquantised one, in a block format (blocks.py) where that is exact (candidates.py) and else in F32.
Tensors that it does not claim (skip lists) stay as they are.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from colibri_offload.checkpoint.base import Tensor
from colibri_offload.checkpoint.files import shown
from colibri_offload.checkpoint.hub_quant import awq, compressed_tensors, fp8, gptq, mxfp4
from colibri_offload.checkpoint.hub_quant.candidates import settle
from colibri_offload.checkpoint.hub_quant.parts import Folded
from colibri_offload.checkpoint.hub_types import Stored
from colibri_offload.errors import CheckpointError, UnsupportedError

SCHEMES: dict[str, Callable[[Mapping[str, Stored], Mapping[str, Any]], Folded]] = {
    "awq": awq.fold,
    "compressed-tensors": compressed_tensors.fold,
    "fp8": fp8.fold,
    "gptq": gptq.fold,
    "mxfp4": mxfp4.fold,
}

# Names that only quantised checkpoints have: without settings their neighbours would be read as if they were weights.
TELLTALES = (".qweight", ".weight_packed", ".weight_scale", ".weight_scale_inv", "_proj_blocks")


def fold(
    stored: Mapping[str, Stored], config: Mapping[str, Any], folder: Path
) -> tuple[dict[str, Tensor], list[Stored]]:
    """The logical tensors that the config's scheme makes, and the stored ones that it leaves alone.

    Raises UnsupportedError for an unknown scheme or variant, CheckpointError when parts are missing or disagree.
    """
    settings = _settings(config)
    if settings is None:
        for name in stored:
            if name.endswith(TELLTALES):
                raise CheckpointError(
                    f"{folder / 'config.json'}: has no quantization_config, but tensor {shown(name)} is quantised; "
                    "download the config.json that belongs to these weights"
                )
        return {}, list(stored.values())
    method = settings.get("quant_method")
    scheme = SCHEMES.get(method) if isinstance(method, str) else None
    if scheme is None:
        known = ", ".join(SCHEMES)
        raise UnsupportedError(
            f"{folder / 'config.json'}: quant_method {shown(method)} is not supported; use a checkpoint in {known}, "
            "an unquantised one or a GGUF file"
        )
    folded = scheme(stored, settings)
    return settle(folded.candidates), [s for s in stored.values() if s.name not in folded.used]


def _settings(config: Mapping[str, Any]) -> Mapping[str, Any] | None:
    """The quantization_config, which multimodal models keep with their text model's settings."""
    text = config.get("text_config")
    for place in (config, text if isinstance(text, dict) else {}):
        found = place.get("quantization_config")
        if isinstance(found, dict) and found:
            return found
    return None
