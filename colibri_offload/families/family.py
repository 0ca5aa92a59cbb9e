"""What a family is: a name, a function from configuration to ModelSpec, and tables of tensor names."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from colibri_offload.families.config import Config
from colibri_offload.families.gguf_keys import GgufKeys
from colibri_offload.families.spec import ModelSpec, TensorTable


@dataclass(frozen=True)
class Family:
    """`spec` reads hub keys; `gguf_keys` turns a GGUF's metadata into those keys (see gguf_keys.common).

    `hub` and `gguf` give the tables for a spec (some entries depend on head counts). `gguf_arch` may be shared by
    families; then `gguf_match` says whose file it is. `model_types`: the hub's names.
    """

    model_types: Collection[str]
    spec: Callable[[Config], ModelSpec]
    hub: Callable[[ModelSpec], TensorTable]
    gguf_arch: str
    gguf_keys: Callable[[GgufKeys], dict[str, Any]]
    gguf: Callable[[ModelSpec], TensorTable]
    gguf_match: Callable[[GgufKeys], bool] = lambda keys: True
