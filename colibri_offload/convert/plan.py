"""What a conversion will write: the layout of every resident tensor and of every layer's expert blocks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from colibri_offload.checkpoint.base import Tensor
from colibri_offload.convert.quants import FALLBACK, LARGEST, WIDE, Quant
from colibri_offload.convert.rows import RowReader
from colibri_offload.graph.layout import PAGE, ExpertLayout, Layout, MatrixLayout, pad
from colibri_offload.graph.source import (
    CheckpointSource,
    expert_slots,
    experts_of,
    resident_name,
    resident_records,
)
from colibri_offload.jit.formats import get_format
from colibri_offload.storage.base import ExpertKey

_MATRICES = ("gate", "up", "down")


@dataclass(frozen=True)
class Plan:
    """`tensors`: resident matrix → its tensor; `records`: resident record → its parts' tensors."""

    residents: Mapping[str, Layout | ExpertLayout]
    experts: Mapping[int, ExpertLayout]
    tensors: Mapping[str, Tensor]
    records: Mapping[str, Mapping[str, Tensor]]
    keys: tuple[ExpertKey, ...]

    @property
    def nbytes(self) -> int:
        """Bytes of all records."""
        return self._total(1)

    @property
    def disk_nbytes(self) -> int:
        """Bytes of the files: records are padded to pages."""
        return self._total(PAGE)

    def _total(self, multiple: int) -> int:
        blocks = Counter(key.layer for key in self.keys)
        residents = sum(pad(layout.nbytes, multiple) for layout in self.residents.values())
        return residents + sum(n * pad(self.experts[layer].nbytes, multiple) for layer, n in blocks.items())


def make_plan(source: CheckpointSource, quant: Quant, reader: RowReader) -> Plan:
    """Decide every format. Tensors that may leave the range of F16 are read once for it; nothing else is read."""
    return _Planner(source, quant, reader).plan()


class _Planner:
    def __init__(self, source: CheckpointSource, quant: Quant, reader: RowReader):
        self._source, self._quant, self._reader = source, quant, reader

    def plan(self) -> Plan:
        source, spec = self._source, self._source.spec
        residents = dict(source.residents)
        tensors: dict[str, Tensor] = {}
        for slot, layer in source.weights.slots():
            name = resident_name(slot, layer)
            layout = residents.get(name)
            if isinstance(layout, MatrixLayout):
                tensors[name] = source.weights.tensor(slot, layer)
                fmt = self._format(slot, [tensors[name]])
                residents[name] = MatrixLayout(get_format(fmt), layout.rows, layout.cols, layout.batches)
        records: dict[str, dict[str, Tensor]] = {}
        for layer in range(len(spec.layers)):
            for name, slots in resident_records(spec, layer).items():
                parts = {part: source.weights.tensor(slot, layer) for part, slot in slots.items()}
                name = resident_name(name, layer)
                records[name] = parts
                residents[name] = self._record(slots, {part: [t] for part, t in parts.items()})
        experts = {layer: self._experts(layer) for layer in source.expert_layouts}
        keys = tuple(ExpertKey(layer, i) for layer in experts for i in range(experts_of(spec, layer)))
        return Plan(residents, experts, tensors, records, keys)

    def _experts(self, layer: int) -> ExpertLayout:
        spec = self._source.spec
        parts = [self._source.parts(ExpertKey(layer, i)) for i in range(experts_of(spec, layer))]
        return self._record(expert_slots(spec, layer), {n: [p[n] for p in parts] for n in parts[0]})

    def _record(self, slots: Mapping[str, str], tensors: Mapping[str, list[Tensor]]) -> ExpertLayout:
        intermediate, hidden = tensors["gate"][0].shape
        gate, up, down = (get_format(self._format(slots[n], tensors[n])) for n in _MATRICES)
        return ExpertLayout(hidden, intermediate, gate, up, down, bias="gate.bias" in slots)

    def _format(self, slot: str, tensors: list[Tensor]) -> str:
        fmt = self._quant.format(slot, tensors[0].shape[-1], tensors[0].fmt)
        return WIDE if fmt == FALLBACK and self._overflows(tensors) else fmt

    def _overflows(self, tensors: Iterable[Tensor]) -> bool:
        """Whether a value of one of them is beyond F16's range."""
        wide = (t for t in tensors if t.fmt != FALLBACK)
        return any(self._reader.largest(t) > LARGEST[FALLBACK] for t in wide)
