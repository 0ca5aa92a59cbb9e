"""A ModelSpec as JSON values and back, exactly: converted stores keep it in their manifest."""

from __future__ import annotations

from dataclasses import fields, is_dataclass
from typing import Any

from colibri_offload.errors import CheckpointError
from colibri_offload.families.spec import (
    Activation,
    Attention,
    Dense,
    LatentAttention,
    Layer,
    ModelSpec,
    MoE,
    Norm,
    Rope,
    Router,
    Shared,
)

_CLASSES: dict[str, type] = {
    c.__name__: c
    for c in (Activation, Attention, Dense, LatentAttention, Layer, ModelSpec, MoE, Norm, Rope, Router, Shared)
}


def spec_to_json(spec: ModelSpec) -> dict[str, Any]:
    """Objects, lists, numbers, strings and null for json.dumps; every object names its class under "is"."""
    return _pack(spec)


def spec_from_json(data: Any) -> ModelSpec:
    """The spec that spec_to_json was given. Raises CheckpointError for anything that is not such a value."""
    spec = _unpack(data)
    if not isinstance(spec, ModelSpec):
        raise CheckpointError("the stored architecture is no ModelSpec; convert the model again")
    return spec


def _pack(value: Any) -> Any:
    if is_dataclass(value):
        return {"is": type(value).__name__} | {f.name: _pack(getattr(value, f.name)) for f in fields(value)}
    return [_pack(v) for v in value] if isinstance(value, tuple) else value


def _unpack(value: Any) -> Any:
    if isinstance(value, list):
        return tuple(_unpack(v) for v in value)
    if not isinstance(value, dict):
        return value
    name = value.get("is")
    if not isinstance(name, str) or name not in _CLASSES:
        raise CheckpointError(f"the stored architecture has a part {name!r}; this version knows {', '.join(_CLASSES)}")
    facts = {key: _unpack(v) for key, v in value.items() if key != "is"}
    known = {f.name for f in fields(_CLASSES[name])}
    if facts.keys() != known:
        odd = sorted(facts.keys() ^ known)
        raise CheckpointError(f"the stored architecture's {name} has missing or unknown fields {odd}; convert it again")
    return _CLASSES[name](**facts)
