"""Which family a checkpoint belongs to: by model_type in hub directories, by general.architecture in GGUF files."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from colibri_offload.errors import CheckpointError, UnsupportedError
from colibri_offload.families.deepseek_v2 import DEEPSEEK_V2
from colibri_offload.families.deepseek_v3 import DEEPSEEK_V3
from colibri_offload.families.family import Family
from colibri_offload.families.gguf_keys import GgufKeys
from colibri_offload.families.gpt_oss import GPT_OSS
from colibri_offload.families.llama import LLAMA
from colibri_offload.families.mixtral import MIXTRAL
from colibri_offload.families.olmoe import OLMOE
from colibri_offload.families.qwen2_moe import QWEN2_MOE
from colibri_offload.families.qwen3 import QWEN3
from colibri_offload.families.qwen3_moe import QWEN3_MOE

FAMILIES: tuple[Family, ...] = (
    LLAMA,
    MIXTRAL,
    QWEN3,
    QWEN2_MOE,
    QWEN3_MOE,
    OLMOE,
    DEEPSEEK_V2,
    DEEPSEEK_V3,
    GPT_OSS,
)

BY_MODEL_TYPE: Mapping[str, Family] = {name: family for family in FAMILIES for name in family.model_types}


def hub_family(config: Mapping[str, Any], origin: str) -> Family:
    """The family of a config.json. Raises UnsupportedError listing the known types."""
    model_type = config.get("model_type")
    if not isinstance(model_type, str):
        raise CheckpointError(f"{origin}: model_type is {model_type!r}, not a name; fetch config.json again")
    if model_type not in BY_MODEL_TYPE:
        raise UnsupportedError(f"{origin}: model_type {model_type!r} is not supported; known: {_list(BY_MODEL_TYPE)}")
    return BY_MODEL_TYPE[model_type]


def gguf_family(keys: GgufKeys) -> Family:
    """The family of a GGUF file. Raises UnsupportedError listing the known architectures."""
    for family in FAMILIES:
        if family.gguf_arch == keys.arch and family.gguf_match(keys):
            return family
    known = {family.gguf_arch: None for family in FAMILIES}
    raise UnsupportedError(f"{keys.origin}: architecture {keys.arch!r} is not supported; known: {_list(known)}")


def _list(names: Mapping[str, Any]) -> str:
    return ", ".join(sorted(names))
