"""What tests of the whole engine share: stores made from checkpoints, and grids that cover every pair of settings."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from colibri_offload.families.spec_json import spec_to_json
from colibri_offload.graph.packer import Packer, aligned
from colibri_offload.graph.source import StoreSource
from colibri_offload.jit.compiler import Compiler
from colibri_offload.jit.kernels import Kernels
from colibri_offload.jit.targets import get_target
from colibri_offload.models import open_model
from colibri_offload.storage.arena import anonymous
from colibri_offload.storage.manifest import Kind
from colibri_offload.storage.writer import StoreWriter

GGUF = Path(__file__).parent / "golden" / "gguf"


def build_store(model: Path, output: Path, kind: Kind) -> Path:
    """A converted store with the weights of `model` exactly as it has them."""
    source, tokenizer = open_model(model, Packer(Kernels(Compiler(get_target()))))
    with source.store:
        experts = {str(layer): layout.to_json() for layer, layout in source.expert_layouts.items()}
        description = {
            "layout_version": StoreSource.LAYOUT_VERSION, "spec": spec_to_json(source.spec), "experts": experts,
        }  # fmt: skip
        with StoreWriter(output, kind, model=description) as writer:
            for name, layout in source.residents.items():
                data = aligned(layout.nbytes)
                source.load_resident(name, data.ctypes.data)
                writer.add_resident(name, data, layout.to_json())
            buffer = memoryview(anonymous(source.slot_nbytes))
            for key in list(source.store.keys()):
                source.store.read_into(key, buffer)
                writer.add_expert(key, buffer[: source.store.nbytes(key)])
            path = writer.finish()
    tokenizer().save(path)
    return path


def pairwise(axes: Mapping[str, Sequence[Any]]) -> list[dict[str, Any]]:
    """Few rows (one value per axis) in which every pair of values of two axes occurs. The same rows every time."""
    names = list(axes)
    missing = {
        frozenset({(a, x), (b, y)})
        for a, b in itertools.combinations(names, 2)
        for x, y in itertools.product(axes[a], axes[b])
    }
    every = [dict(zip(names, values, strict=True)) for values in itertools.product(*axes.values())]
    rows = []
    while missing:
        best = max(every, key=lambda row: len(missing & _pairs(row)))
        missing -= _pairs(best)
        rows.append(best)
    return rows


def _pairs(row: Mapping[str, Any]) -> set[frozenset[tuple[str, Any]]]:
    return {frozenset(pair) for pair in itertools.combinations(row.items(), 2)}
