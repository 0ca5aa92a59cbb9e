"""The stored tensors that belong to one quantised module, checked, and the collection of what a scheme made of them."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NoReturn

from colibri_offload.checkpoint.base import Tensor
from colibri_offload.checkpoint.files import shown
from colibri_offload.checkpoint.hub_quant.candidates import Candidate
from colibri_offload.checkpoint.hub_types import Stored
from colibri_offload.errors import CheckpointError, UnsupportedError

FLOATS = ("F32", "F16", "BF16")


@dataclass
class Folded:
    """Logical tensors, and the names of the stored ones that went into them or have no further use."""

    candidates: list[Candidate] = field(default_factory=list)
    used: set[str] = field(default_factory=set)

    def add(self, made: Candidate | Tensor, *parts: Stored | None) -> None:
        self.candidates.append(Candidate(made) if isinstance(made, Tensor) else made)
        self.used.update(p.name for p in parts if p is not None)


def modules(stored: Mapping[str, Stored], suffix: str) -> Iterator[tuple[str, Stored]]:
    """(prefix, tensor) for every tensor whose name ends in `suffix`."""
    for name, tensor in stored.items():
        if name.endswith(suffix):
            yield name.removesuffix(suffix), tensor


def partner(stored: Mapping[str, Stored], name: str, of: Stored) -> Stored:
    """The tensor that must accompany `of`."""
    if name not in stored:
        raise CheckpointError(
            f"{of.slice.path}: tensor {shown(of.name)} is quantised, but {shown(name)} is missing; "
            "download the model again"
        )
    return stored[name]


def expect(tensor: Stored, dtypes: tuple[str, ...], *shapes: tuple[int, ...]) -> None:
    """CheckpointError unless the tensor has one of the types and, where any are given, one of the shapes."""
    if tensor.dtype not in dtypes:
        _disagree(tensor, f"the type {tensor.dtype}", " or ".join(dtypes))
    if shapes and tensor.shape not in shapes:
        _disagree(tensor, f"the shape {list(tensor.shape)}", " or ".join(str(list(s)) for s in dict.fromkeys(shapes)))


def _disagree(tensor: Stored, found: str, expected: str) -> NoReturn:
    raise CheckpointError(
        f"{tensor.slice.path}: tensor {shown(tensor.name)} has {found}, its quantisation calls for {expected}; "
        "download the model and its config.json again"
    )


def matrix(tensor: Stored, dtypes: tuple[str, ...]) -> tuple[int, int]:
    """The shape of a tensor that must have two axes, neither empty."""
    expect(tensor, dtypes)
    if len(tensor.shape) != 2 or 0 in tensor.shape:
        _disagree(tensor, f"the shape {list(tensor.shape)}", "a matrix")
    return tensor.shape[0], tensor.shape[1]


def columns_per_group(settings: Mapping[str, Any], default: int) -> int:
    """The quantization_config's group_size: how many columns share a scale, −1 for all of a row."""
    value = settings.get("group_size", default)
    if type(value) is not int or (value < 1 and value != -1):
        raise CheckpointError(
            f"config.json: quantization_config.group_size is {shown(value)}, neither -1 nor a positive integer; "
            "download it again"
        )
    return value


def choice(settings: Mapping[str, Any], key: str, allowed: tuple[Any, ...], default: Any = None) -> Any:
    """A setting that must be one of `allowed`; UnsupportedError lists them."""
    value = settings.get(key, default)
    if value not in allowed:
        listed = ", ".join(str(a) for a in allowed)
        raise UnsupportedError(
            f"config.json: quantization_config.{key} is {shown(value)}; supported: {listed}; use another checkpoint"
        )
    return value


def groups(columns: int, group_size: int) -> int:
    """How many groups of `group_size` columns (−1: one for all; the last may be partial) there are."""
    return 1 if group_size == -1 else -(-columns // group_size)
