"""What the blocks of a graph are built with."""

from __future__ import annotations

from dataclasses import dataclass

from colibri_offload.graph.memory import Region
from colibri_offload.graph.ops import Builder, Matrix, Packed, Rows
from colibri_offload.graph.resident import Resident
from colibri_offload.graph.step import Step, stride
from colibri_offload.jit.kernels import Kernels
from colibri_offload.jit.kernels.activations import Activations, activations_for
from colibri_offload.jit.pool import WorkerPool


@dataclass(frozen=True)
class Context:
    """Handed to every block. mode: the activations flag; kv_type: one of KV_TYPES; kv_at: layer → offset in a page."""

    kernels: Kernels
    pool: WorkerPool
    resident: Resident
    workspace: Region
    step: Step
    mode: str
    kv_type: str
    kv_at: tuple[int, ...]

    def builder(self) -> Builder:
        return Builder(self.kernels, self.pool)

    def rows(self, buffer: str, columns: int) -> Rows:
        """A shared buffer as float rows."""
        return Rows(self.workspace[buffer], stride(columns))

    def act(self, m: Matrix) -> Activations:
        return activations_for(m.layout.fmt, self.mode)

    def pack_for(
        self, b: Builder, matrices: list[Matrix], src: Rows, prefix: str, columns: int, **options: object
    ) -> dict[str, Packed]:
        """Pack `src` once per activation layout that the matrices want; buffers are prefix + "_int8" or just prefix."""
        out = {}
        for act in dict.fromkeys(self.act(m) for m in matrices):
            name = f"{prefix}_{act.name}" if f"{prefix}_{act.name}" in self.workspace else prefix
            out[act.name] = Packed(self.workspace[name], act, columns)
            b.pack(src, out[act.name], columns=columns, **options)  # type: ignore[arg-type]
        return out
