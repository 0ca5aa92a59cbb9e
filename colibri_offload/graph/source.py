"""Where a model's weights come from: a checkpoint read in place, or a converted store. Both give the same layouts.

Resident tensors are addressed by name: "embed", "head", "final_norm", "layers.3.q" …; resident feed-forward weights are
records like those of experts: "layers.0.ffn" (a dense layer of a model with experts), "layers.3.shared".
"""

from __future__ import annotations

import ctypes
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from colibri_offload.checkpoint.base import Checkpoint, Tensor
from colibri_offload.checkpoint.rows import row_blocks
from colibri_offload.errors import StoreError, UnsupportedError
from colibri_offload.families.resolve import load_model_spec, spec_from_json
from colibri_offload.families.spec import EXPERT_SLOTS, Dense, ModelSpec, MoE
from colibri_offload.graph.layout import ExpertLayout, Layout, MatrixLayout, VectorLayout, layout_from_json
from colibri_offload.graph.packer import Packer
from colibri_offload.jit.formats import FORMATS, get_format
from colibri_offload.storage.base import ExpertKey, ExpertStore
from colibri_offload.storage.block_file import BlockFileStore
from colibri_offload.storage.lmdb_store import LmdbStore
from colibri_offload.storage.slices import SliceStore

# Slots that are float32 vectors; routers and gates are float32 matrices whatever the checkpoint holds.
_VECTORS = (
    "input_norm", "post_norm", "final_norm", "q_norm", "k_norm", "q_a_norm", "kv_a_norm", "sinks", "router.choice_bias",
)  # fmt: skip
_FLOAT32 = ("router", "shared_gate")
_PIECE_NBYTES = 16 << 20  # of a tensor, read at once
_DENSE_SLOTS = {"gate": "gate", "up": "up", "down": "down"}


def resident_name(slot: str, layer: int | None = None) -> str:
    return slot if layer is None else f"layers.{layer}.{slot}"


def is_vector(slot: str) -> bool:
    return slot in _VECTORS or slot.endswith(".bias")


def streams_dense(spec: ModelSpec) -> bool:
    """A model without routed experts streams its feed-forward layers as one always-active expert each."""
    return not spec.moe_layers


def experts_of(spec: ModelSpec, layer: int) -> int:
    """Expert blocks of a layer: routed experts, or 1 for a streamed dense layer, or 0."""
    ffn = spec.layers[layer].ffn
    if isinstance(ffn, MoE):
        return ffn.experts
    return 1 if streams_dense(spec) else 0


def expert_slots(spec: ModelSpec, layer: int) -> dict[str, str]:
    """Part of a record → slot, for a layer that has expert blocks."""
    ffn = spec.layers[layer].ffn
    if isinstance(ffn, Dense):
        return dict(_DENSE_SLOTS)
    names = {n: f"experts.{n}" for n in ("gate", "up", "down")}
    return names | ({f"{n}.bias": f"experts.{n}.bias" for n in ("gate", "up", "down")} if ffn.bias else {})


def resident_records(spec: ModelSpec, layer: int) -> dict[str, dict[str, str]]:
    """Name → (part of the record → slot), for the feed-forward weights of a layer that stay in memory."""
    ffn = spec.layers[layer].ffn
    if isinstance(ffn, Dense):
        return {} if streams_dense(spec) else {"ffn": dict(_DENSE_SLOTS)}
    return {"shared": {n: f"shared.{n}" for n in _DENSE_SLOTS}} if ffn.shared is not None else {}


def _in_record(slot: str) -> bool:
    return slot in EXPERT_SLOTS or slot in _DENSE_SLOTS or slot.removeprefix("shared.") in _DENSE_SLOTS


def memory_at(address: int, nbytes: int) -> memoryview:
    """The memory at an address; the caller keeps it alive."""
    return memoryview((ctypes.c_uint8 * nbytes).from_address(address)).cast("B")


class ModelSource(ABC):
    """A model's spec and weights. `residents`: name → layout; `expert_layouts`: layer → layout of its expert blocks."""

    path: Path
    spec: ModelSpec
    residents: Mapping[str, Layout | ExpertLayout]
    expert_layouts: Mapping[int, ExpertLayout]

    @abstractmethod
    def load_resident(self, name: str, dst: int) -> None:
        """Write the tensor in its layout to address dst (64-byte aligned, zeroed)."""

    @property
    @abstractmethod
    def store(self) -> ExpertStore:
        """The expert blocks."""

    @property
    @abstractmethod
    def kind(self) -> str:
        """How the model lies on disk, for people: "GGUF in place" …"""

    @property
    def experts_per_layer(self) -> dict[int, int]:
        return {layer: experts_of(self.spec, layer) for layer in self.expert_layouts}

    @property
    def resident_nbytes(self) -> int:
        return sum(layout.nbytes for layout in self.residents.values())

    @property
    def slot_nbytes(self) -> int:
        """Size of the largest expert block."""
        return max(layout.nbytes for layout in self.expert_layouts.values())

    def close(self) -> None:
        self.store.close()


class CheckpointSource(ModelSource):
    """GGUF or safetensors read in place: experts are repacked into the compute layout as they are read."""

    def __init__(self, checkpoint: Checkpoint, packer: Packer):
        self.path, self._packer = checkpoint.path, packer
        self.checkpoint = checkpoint
        self.spec, self.weights = load_model_spec(checkpoint)
        self._slots = {
            resident_name(slot, layer): (slot, layer) for slot, layer in self.weights.slots() if not _in_record(slot)
        }
        self._records = {
            resident_name(name, layer): (layer, slots)
            for layer in range(len(self.spec.layers))
            for name, slots in resident_records(self.spec, layer).items()
        }
        self.residents: dict[str, Layout | ExpertLayout] = {
            name: self._layout(slot, layer) for name, (slot, layer) in self._slots.items()
        }
        for name, (layer, slots) in self._records.items():
            self.residents[name] = self._record_layout({n: self.weights.tensor(s, layer) for n, s in slots.items()})
        layers = [i for i in range(len(self.spec.layers)) if experts_of(self.spec, i)]
        self.expert_layouts = {i: self._expert_layout(i) for i in layers}
        self._store = SliceStore(
            {key: self._slices(key) for key in self._keys()},
            self._finish,
            nbytes={key: self.expert_layouts[key.layer].nbytes for key in self._keys()},
        )

    @property
    def kind(self) -> str:
        return "GGUF in place" if self.checkpoint.kind == "gguf" else "safetensors in place"

    @property
    def store(self) -> ExpertStore:
        return self._store

    def _keys(self) -> Iterator[ExpertKey]:
        for layer in self.expert_layouts:
            for expert in range(experts_of(self.spec, layer)):
                yield ExpertKey(layer, expert)

    def _layout(self, slot: str, layer: int | None) -> Layout:
        tensor = self.weights.tensor(slot, layer)
        self._check_format(tensor)
        if is_vector(slot):
            return VectorLayout(int(np.prod(tensor.shape)))
        fmt = get_format("F32" if slot in _FLOAT32 else tensor.fmt)
        batches = tensor.shape[0] if len(tensor.shape) == 3 else 1
        return MatrixLayout(fmt, tensor.shape[-2], tensor.shape[-1], batches)

    def _check_format(self, tensor: Tensor) -> None:
        if tensor.fmt not in FORMATS:
            raise UnsupportedError(
                f"{self.path}: tensor {tensor.name} has format {tensor.fmt}, which has no kernels yet; "
                f"supported: {', '.join(FORMATS)}: choose another quantisation of the model"
            )

    def load_resident(self, name: str, dst: int) -> None:
        layout = self.residents[name]
        if isinstance(layout, ExpertLayout):
            layer, slots = self._records[name]
            parts = {n: self.weights.tensor(s, layer).read() for n, s in slots.items()}
            self._packer.expert(layout, parts, memory_at(dst, layout.nbytes))
            return
        slot, at = self._slots[name]
        tensor = self.weights.tensor(slot, at)
        if isinstance(layout, VectorLayout):
            self._packer.vector(layout, self.float32(tensor).reshape(-1) + self._offset(slot, at), dst)
        elif layout.fmt.name != tensor.fmt:
            self._packer.matrix(layout, self.float32(tensor).view(np.uint8), dst)
        elif layout.batches > 1 or not tensor.contiguous:
            self._packer.matrix(layout, tensor.read(), dst)
        else:  # an embedding of a gigabyte must not stand in memory twice
            for rows in row_blocks(tensor, _PIECE_NBYTES):
                self._packer.matrix(replace(layout, rows=len(rows)), rows, dst)
                dst += layout.fmt.matrix_nbytes(len(rows), layout.cols)

    def float32(self, tensor: Tensor, rows: np.ndarray | None = None) -> np.ndarray:
        """The tensor's values, float32 [shape]."""
        return self._packer.float32(tensor.fmt, tensor.read() if rows is None else rows, tensor.shape[-1])

    def _offset(self, slot: str, layer: int | None) -> float:
        """What a norm adds to its stored weight ("1 + w")."""
        if layer is None:
            return self.spec.final_norm.weight_offset if slot == "final_norm" else 0.0
        norms = {"input_norm": self.spec.layers[layer].input_norm, "post_norm": self.spec.layers[layer].post_norm}
        return norms[slot].weight_offset if slot in norms else 0.0

    def parts(self, key: ExpertKey) -> dict[str, Tensor]:
        """Part of a record → its tensor."""
        moe = isinstance(self.spec.layers[key.layer].ffn, MoE)
        slots = expert_slots(self.spec, key.layer)
        return {n: self.weights.tensor(s, key.layer, key.expert if moe else None) for n, s in slots.items()}

    def _expert_layout(self, layer: int) -> ExpertLayout:
        layout = self._record_layout(self.parts(ExpertKey(layer, 0)))
        formats = [layout.gate.name, layout.up.name, layout.down.name]
        for expert in range(1, experts_of(self.spec, layer)):
            parts = self.parts(ExpertKey(layer, expert))
            found = [parts[n].fmt for n in ("gate", "up", "down")]
            if found != formats:
                raise UnsupportedError(
                    f"{self.path}: layer {layer} expert {expert} has formats {', '.join(found)}, expert 0 has "
                    f"{', '.join(formats)}; the experts of a layer must agree: use a checkpoint without such exceptions"
                )
        return layout

    def _record_layout(self, parts: Mapping[str, Tensor]) -> ExpertLayout:
        for tensor in parts.values():
            self._check_format(tensor)
        intermediate, hidden = parts["gate"].shape
        gate, up, down = (get_format(parts[n].fmt) for n in ("gate", "up", "down"))
        return ExpertLayout(hidden, intermediate, gate, up, down, "gate.bias" in parts)

    def _slices(self, key: ExpertKey) -> list[tuple[Path, int, int]]:
        return [(s.path, s.offset, s.nbytes) for t in self.parts(key).values() for s in t.slices]

    def _finish(self, key: ExpertKey, raws: list[memoryview], out: memoryview) -> None:
        at, decoded = 0, {}
        for name, tensor in self.parts(key).items():
            rows = tensor.decode(raws[at : at + len(tensor.slices)])
            at += len(tensor.slices)
            decoded[name] = self._packer.float32(tensor.fmt, rows, tensor.shape[-1]) if "bias" in name else rows
        self._packer.expert(self.expert_layouts[key.layer], decoded, out)


class StoreSource(ModelSource):
    """A converted store: everything already lies in the compute layout."""

    LAYOUT_VERSION = 1

    def __init__(self, path: Path, store: BlockFileStore | LmdbStore):
        self.path, self._store = path, store
        model = store.model
        try:
            version = model["layout_version"]
            if version != self.LAYOUT_VERSION:
                raise StoreError(
                    f"{path}: written for layout version {version}, this program reads {self.LAYOUT_VERSION}; "
                    "convert the model again"
                )
            self.spec = spec_from_json(model["spec"])
            self.residents = {n: layout_from_json(store.resident_meta(n)) for n in store.resident_names()}
            self.expert_layouts = {int(i): ExpertLayout.from_json(d) for i, d in model["experts"].items()}
        except (KeyError, TypeError, ValueError, AttributeError) as e:
            raise StoreError(
                f"{path}: the manifest's model section is incomplete ({e}); convert the model again"
            ) from e
        self._check()

    def _check(self) -> None:
        for name, layout in self.residents.items():
            if self._store.resident_nbytes(name) != layout.nbytes:
                raise StoreError(
                    f"{self.path}: {name} has {self._store.resident_nbytes(name)} bytes, its layout needs "
                    f"{layout.nbytes}; convert the model again"
                )
        keys = set(self._store.keys())
        for layer, layout in self.expert_layouts.items():
            for expert in range(experts_of(self.spec, layer)):
                key = ExpertKey(layer, expert)
                if key not in keys or self._store.nbytes(key) != layout.nbytes:
                    raise StoreError(
                        f"{self.path}: layer {layer} expert {expert} is missing or has the wrong size; "
                        "run `colibri verify`, or convert the model again"
                    )

    @property
    def kind(self) -> str:
        return "LMDB store" if isinstance(self._store, LmdbStore) else "block file store"

    @property
    def store(self) -> ExpertStore:
        return self._store

    @property
    def model(self) -> Mapping[str, Any]:
        return self._store.model

    def load_resident(self, name: str, dst: int) -> None:
        self._store.resident_into(name, memory_at(dst, self.residents[name].nbytes))
