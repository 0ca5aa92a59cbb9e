"""A checkpoint seen through a family's table: every slot's tensor, its shape checked, composed when asked for."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping

from colibri_offload.checkpoint.base import Checkpoint, Tensor
from colibri_offload.errors import CheckpointError
from colibri_offload.families.compose import compose, drop_unit_axes, is_blocked
from colibri_offload.families.shapes import Shapes, global_shapes, layer_shapes
from colibri_offload.families.spec import EXPERT_SLOTS, ModelSpec, MoE, Source, TensorTable

# Tensors that released checkpoints carry and no text decoder needs: rotary buffers, prediction layers of
# speculative decoding, other modalities, scales of a quantised KV cache or of static activations.
_IGNORABLE = re.compile(
    r"rotary_emb\.inv_freq$|attn_rot_embd|^rope_freqs\.weight$|(^|\.)mtp\b|nextn|masked_bias$"
    r"|(^|\.)(visual|vision_tower|vision_model|multi_modal_projector|audio_tower)\."
    r"|\.(k|v)_scale$|\.(input|activation)_scale$|^(v|mm)\."
)
_LAYER_NUMBER = re.compile(r"^(?:model\.)?(?:layers|blk)\.(\d+)\.")


class Weights:
    """The tensors of a model by slot (spec.py lists the slots).

    Raises CheckpointError on construction when a slot's tensor is missing or has another shape than the spec asks for.
    """

    def __init__(self, spec: ModelSpec, table: TensorTable, checkpoint: Checkpoint) -> None:
        self.spec = spec
        self._table = table
        self._checkpoint = checkpoint
        self._tensors: Mapping[str, Tensor] = checkpoint.tensors
        self._globals = global_shapes(spec)
        # Equal layers share one object, so the shapes of a deep model are worked out once.
        by_layer = {layer: layer_shapes(layer, spec.hidden) for layer in set(spec.layers)}
        self._layers = [by_layer[layer] for layer in spec.layers]
        self._sources: dict[tuple[str, int | None], Source] = {}
        self._used: set[str] = set()
        for slot, layer in self.slots():
            self._resolve(slot, layer)

    def slots(self) -> Iterator[tuple[str, int | None]]:
        """Every slot of the model with its layer; None for the global ones."""
        yield from ((slot, None) for slot in self._globals)
        for n, shapes in enumerate(self._layers):
            yield from ((slot, n) for slot in shapes)

    def has(self, slot: str, layer: int | None = None) -> bool:
        """Whether the model has this slot (in this layer)."""
        return (slot, layer) in self._sources

    def tensor(self, slot: str, layer: int | None = None, expert: int | None = None) -> Tensor:
        """The tensor of a slot, of the shape that the spec states; routed experts one at a time.

        Raises: KeyError for a slot that the model lacks; IndexError for an expert that it lacks.
        """
        source = self._sources[slot, layer]
        if slot not in EXPERT_SLOTS:
            return self._composed(source, slot, layer, None)
        count = self._experts(layer)
        if expert is None or not 0 <= expert < count:
            raise IndexError(f"slot {slot} of layer {layer} has experts 0 to {count - 1}, not {expert}")
        return self._composed(source, slot, layer, expert)

    def unused(self) -> list[str]:
        """Checkpoint tensors that no slot takes and that are not known to be dispensable, sorted by name."""
        return sorted(name for name in self._tensors if name not in self._used and not self._dispensable(name))

    def _dispensable(self, name: str) -> bool:
        layer = _LAYER_NUMBER.match(name)
        beyond = layer is not None and int(layer[1]) >= len(self.spec.layers)
        tied_head = self.spec.tied and name in {s.name for s in self._table.sources("head")}
        return beyond or tied_head or _IGNORABLE.search(name) is not None

    def _resolve(self, slot: str, layer: int | None) -> None:
        """Choose the layout of a slot and check all its tensors."""
        source = self._choose(slot, layer)
        self._sources[slot, layer] = source
        experts: Iterable[int | None] = (None,)
        if slot in EXPERT_SLOTS:
            count = self._experts(layer)
            experts = range(count)
            if "{expert}" not in source.name:
                merged = self._stored(source, layer, None)
                if not merged.shape or merged.shape[0] != count:
                    raise CheckpointError(
                        f"{self._checkpoint.path}: {merged.name} has shape {list(merged.shape)}, "
                        f"expected {count} experts on its first axis; download the file again"
                    )
                experts = (0,)  # the others have the same shape
        for expert in experts:
            self._used.add(_name(source, layer, expert))
            tensor = self._composed(source, slot, layer, expert)
            expected = self._shape(slot, layer)
            if tensor.shape != expected:
                stored = self._stored(source, layer, expert)
                raise CheckpointError(
                    f"{self._checkpoint.path}: {stored.name} has shape {list(stored.shape)}, which gives "
                    f"{list(tensor.shape)} for {_place(slot, layer)}, expected {list(expected)}; "
                    "the configuration and the weights disagree: download both again"
                )

    def _choose(self, slot: str, layer: int | None) -> Source:
        sources = self._table.sources(slot)
        for source in sources:
            tensor = self._tensors.get(_name(source, layer, 0))
            if tensor is not None and source.blocks in (None, is_blocked(tensor.fmt)):
                return source
        wanted = " or ".join(dict.fromkeys(_name(s, layer, 0) for s in sources)) or "none is known"
        raise CheckpointError(
            f"{self._checkpoint.path}: tensor for {_place(slot, layer)} is missing ({wanted}); "
            "the file is incomplete: download it again"
        )

    def _stored(self, source: Source, layer: int | None, expert: int | None) -> Tensor:
        name = _name(source, layer, expert)
        try:
            return self._tensors[name]
        except KeyError:
            raise CheckpointError(
                f"{self._checkpoint.path}: tensor {name} is missing; the file is incomplete: download it again"
            ) from None

    def _composed(self, source: Source, slot: str, layer: int | None, expert: int | None) -> Tensor:
        tensor = self._stored(source, layer, expert)
        if expert is not None and "{expert}" not in source.name:
            tensor = tensor.index(expert)
        return drop_unit_axes(compose(tensor, source), self._shape(slot, layer))

    def _shape(self, slot: str, layer: int | None) -> tuple[int, ...]:
        shapes: Shapes = self._globals if layer is None else self._layers[layer]
        return shapes[slot]

    def _experts(self, layer: int | None) -> int:
        ffn = self.spec.layers[layer].ffn if layer is not None else None
        return ffn.experts if isinstance(ffn, MoE) else 0


def _name(source: Source, layer: int | None, expert: int | None) -> str:
    return source.name.replace("{layer}", str(layer)).replace("{expert}", str(expert))


def _place(slot: str, layer: int | None) -> str:
    return f"slot {slot}" if layer is None else f"slot {slot} of layer {layer}"
