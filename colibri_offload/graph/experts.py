"""Running expert blocks on their tokens: the fused kernels' descriptors, filled for each batch of experts."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from colibri_offload.families.spec import Activation
from colibri_offload.graph.context import Context
from colibri_offload.graph.layout import ExpertLayout
from colibri_offload.graph.ops import Builder, x_blocks
from colibri_offload.jit.kernels.activations import Activations, activations_for, tile_counts
from colibri_offload.jit.kernels.experts import ExpertActivation, Experts, Segment


class ExpertRunner:
    """The two fused operations, up and down, for blocks of one layout.

    x_act, h_act: activation layouts of the packed inputs and of the hidden units. h, y: names of shared buffers.
    """

    def __init__(self, c: Context, layout: ExpertLayout, activation: Activation, *, h: str, y: str, max_segments: int):
        self.layout, self.count = layout, 0
        # the float32 layout serves every format: one packed input for gate and up, even if only one of them is float
        wanted = layout.up if layout.gate.integer else layout.gate
        self.x_act: Activations = activations_for(wanted, c.mode)
        self.h_act: Activations = activations_for(layout.down, c.mode)
        f = ExpertActivation(activation.kind, activation.alpha, activation.limit)
        self._segments = Segment.new(max_segments)
        self._h, self.y = c.workspace[h], c.rows(y, layout.hidden)
        self._h_token_nbytes = x_blocks(layout.intermediate) * self.h_act.token_nbytes
        self._up_fn = c.kernels.experts_up(layout.gate, layout.up, self.x_act, self.h_act, f)
        self._down_fn = c.kernels.experts_down(layout.down, self.h_act)
        self._fields = {
            "segments": self._segments.ctypes.data, "y": self.y.address, "y_stride": self.y.stride,
            "x_blocks": x_blocks(layout.hidden), "h_blocks": x_blocks(layout.intermediate),
            "hidden_blocks": layout.hidden_blocks, "gate_steps": layout.gate_steps,
            "up_steps": layout.up_steps, "down_steps": layout.down_steps,
            "down_at": layout.down_at, "bias_at": layout.bias_at, "groups": layout.groups,
        }  # fmt: skip

    def add_up(self, b: Builder) -> None:
        self._add(b, "up", self._up_fn, self.layout.hidden_blocks)

    def add_down(self, b: Builder) -> None:
        self._add(b, "down", self._down_fn, self.layout.groups)

    def _add(self, b: Builder, half: str, fn: int, units: int) -> None:
        """An operation that splits every segment's `units` into chunks."""
        args = b.add(fn, Experts, **self._fields)

        def tasks(n: int) -> int:
            args[f"{half}_chunk"] = chunk = b.chunk(self.count * units, units, n)
            args[f"{half}_tasks"] = per = -(-units // chunk)
            return self.count * per

        b.counted(tasks)

    @property
    def segments_address(self) -> int:
        return int(self._segments.ctypes.data)

    def set(
        self,
        records: Sequence[int] | np.ndarray,
        x: int | Sequence[int],
        first: Sequence[int],
        tokens: Sequence[int],
        rows: int,
    ) -> None:
        """One segment per record address: its packed input, first position in h and in the row table, token count."""
        n = self.count = len(records)
        s = self._segments[:n]
        s["record"], s["x"] = records, x
        positions = np.asarray(first, np.int64)
        s["h"] = self._h + positions * self._h_token_nbytes
        s["rows"] = rows + positions * 4
        s["full_tiles"], s["tail_tile"] = zip(*map(tile_counts, tokens), strict=True) if n else ((), ())
