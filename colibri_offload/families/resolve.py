"""From an open checkpoint to its architecture and its weights."""

from __future__ import annotations

from colibri_offload.checkpoint.base import Checkpoint
from colibri_offload.families.config import Config
from colibri_offload.families.gguf_keys import GgufKeys
from colibri_offload.families.registry import gguf_family, hub_family
from colibri_offload.families.spec import ModelSpec
from colibri_offload.families.spec_json import spec_from_json, spec_to_json
from colibri_offload.families.validate import validate
from colibri_offload.families.weights import Weights

__all__ = ["Weights", "load_model_spec", "spec_from_json", "spec_to_json"]


def load_model_spec(checkpoint: Checkpoint) -> tuple[ModelSpec, Weights]:
    """The model in `checkpoint`. No weights are read (but a GGUF's rope factors, a few hundred bytes).

    Raises: UnsupportedError for an unknown architecture or variant; CheckpointError for a missing or broken key, a
    missing tensor, or a tensor whose shape contradicts the configuration.
    """
    origin = str(checkpoint.path)
    if checkpoint.kind == "gguf":
        keys = GgufKeys.of(checkpoint)
        family = gguf_family(keys)
        spec = family.spec(Config(family.gguf_keys(keys), origin))
        table = family.gguf(spec)
    else:
        family = hub_family(checkpoint.metadata, origin)
        spec = family.spec(Config(checkpoint.metadata, f"{origin}: config.json"))
        table = family.hub(spec)
    validate(spec, origin)
    return spec, Weights(spec, table, checkpoint)
