"""How a model is loaded, as one value. Every field has the name of its flag."""

from __future__ import annotations

from dataclasses import dataclass, fields, replace
from typing import Literal

from colibri_offload.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class LoadOptions:
    """threads 0: one per available core. ctx 0: the model's own limit, at most 4096. expert_cache: experts per MoE
    layer on
    average (int), a size ("4GiB") or "auto". memory_budget: a size or "auto". preload None: when every expert fits.
    batch_size: most prompt tokens per forward pass, 0: as large as the budget allows, at most 512.
    kv_cache "auto": f16 for quantised weights with int8 activations, else f32.
    """

    threads: int = 0
    ctx: int = 0
    expert_cache: int | str = "auto"
    memory_budget: int | str = "auto"
    activations: Literal["int8", "float32"] = "int8"
    prefetch: bool = True
    preload: bool | None = None
    eviction: str = "lru"
    io: Literal["direct", "buffered", "auto"] = "auto"
    kv_cache: Literal["auto", "f32", "f16", "q8_0"] = "auto"
    batch_size: int = 0
    gpu_layers: int = 0
    vram_budget: int | str = "auto"
    placement: str = ""

    def __post_init__(self) -> None:
        for name, low in (("threads", 0), ("ctx", 0), ("batch_size", 0), ("gpu_layers", 0)):
            value = getattr(self, name)
            if not isinstance(value, int) or isinstance(value, bool) or value < low:
                raise UsageError(f"{_flag(name)}: {value!r} is not a number ≥ {low}")
        for name, choices in (
            ("activations", ("int8", "float32")),
            ("io", ("direct", "buffered", "auto")),
            ("kv_cache", ("auto", "f32", "f16", "q8_0")),
        ):
            if getattr(self, name) not in choices:
                raise UsageError(f"{_flag(name)}: {getattr(self, name)!r}; choose one of {', '.join(choices)}")

    def gpu_options(self) -> list[str]:
        """Names of the GPU options that ask for something."""
        return [name for name, unset in _GPU.items() if getattr(self, name) != unset]

    def without_gpu(self) -> LoadOptions:
        return replace(self, **_GPU)  # type: ignore[arg-type]

    @classmethod
    def names(cls) -> list[str]:
        return [f.name for f in fields(cls)]


_GPU = {"gpu_layers": 0, "vram_budget": "auto", "placement": ""}  # field → the value that asks for nothing


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")
