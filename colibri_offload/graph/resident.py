"""The resident weights in memory: matrices and vectors by name."""

from __future__ import annotations

from collections.abc import Callable

from colibri_offload.graph.layout import ExpertLayout, MatrixLayout
from colibri_offload.graph.memory import Region
from colibri_offload.graph.ops import Matrix
from colibri_offload.graph.source import ModelSource, resident_name
from colibri_offload.scheduler.budget import MemoryBudget

Progress = Callable[[int, int], None]


class Resident:
    """All resident tensors of a model: booked at once, filled by load()."""

    def __init__(self, source: ModelSource, budget: MemoryBudget):
        self._source = source
        sizes = {name: layout.nbytes for name, layout in source.residents.items()}
        self._region = Region(budget, "resident weights", "weights", sizes)
        self.nbytes = self._region.nbytes

    def load(self, progress: Progress | None = None) -> None:
        """Read everything; `progress(done_bytes, total_bytes)` after each tensor."""
        done, total = 0, sum(layout.nbytes for layout in self._source.residents.values())
        for name, layout in self._source.residents.items():
            self._source.load_resident(name, self._region[name])
            done += layout.nbytes
            if progress:
                progress(done, total)

    def matrix(self, slot: str, layer: int | None = None) -> Matrix:
        name = resident_name(slot, layer)
        layout = self._source.residents[name]
        assert isinstance(layout, MatrixLayout), name
        return Matrix(layout, self._region[name])

    def vector(self, slot: str, layer: int | None = None) -> int:
        """Address of a float32 vector; 0 when the model has no such slot."""
        name = resident_name(slot, layer)
        return self._region.get(name)

    def record(self, name: str, layer: int) -> tuple[ExpertLayout, int]:
        """Layout and address of a resident feed-forward record ("ffn", "shared")."""
        full = resident_name(name, layer)
        layout = self._source.residents[full]
        assert isinstance(layout, ExpertLayout), full
        return layout, self._region[full]

    def close(self) -> None:
        self._region.close()
