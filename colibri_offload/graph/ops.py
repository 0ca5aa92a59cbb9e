"""Building native programs: operations on named buffers, whose sizes follow the number of tokens of a step."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from colibri_offload.graph.layout import MatrixLayout, pad
from colibri_offload.jit.emit import Struct
from colibri_offload.jit.kernels import Kernels
from colibri_offload.jit.kernels.activations import FLOAT32, Activations, tile_counts
from colibri_offload.jit.kernels.matmul import Matmul
from colibri_offload.jit.kernels.pack import PackTokens
from colibri_offload.jit.pool import WorkerPool
from colibri_offload.jit.program import Program

TASKS_PER_THREAD = 4  # row chunks per thread: enough to even out a disturbed core, few enough to stream long runs


def x_blocks(columns: int) -> int:
    """Blocks of 32 columns of a packed token: whole super-blocks of 256, so that every format's step fits."""
    return pad(columns, 256) // 32


@dataclass(frozen=True)
class Matrix:
    """A resident matrix: where it lies and how."""

    layout: MatrixLayout
    address: int


@dataclass(frozen=True)
class Packed:
    """Packed tokens of `columns` columns; with batches, one after another, `batch_nbytes` apart."""

    address: int
    act: Activations
    columns: int
    batch_nbytes: int = 0

    @property
    def blocks(self) -> int:
        return x_blocks(self.columns)


@dataclass(frozen=True)
class Rows:
    """Float32 rows, `stride` bytes apart."""

    address: int
    stride: int

    def at(self, column: int) -> Rows:
        """The same rows from a later column on."""
        return Rows(self.address + 4 * column, self.stride)


class Builder:
    """A Program under construction whose task counts are functions of the number of tokens n."""

    def __init__(self, kernels: Kernels, pool: WorkerPool):
        self.kernels, self._pool = kernels, pool
        self.program = Program(pool)
        self._counts: list[Callable[[int], int]] = []
        self._shape: tuple[int, object] = (-1, None)

    def stage(self) -> None:
        """What follows waits for what came before."""
        self.program.stage()

    def add(self, fn: int, struct: Struct, tasks: Callable[[int], int] | None = None, **fields: Any) -> np.ndarray:
        """An operation of tasks(n) tasks (or given by counted()). Returns its descriptor."""
        self._counts.append(tasks or (lambda n: 0))
        return self.program.add(fn, struct, 0, **fields)

    def counted(self, tasks: Callable[[int], int]) -> None:
        """The task count of the operation added last; the function may also update its descriptor."""
        self._counts[-1] = tasks

    def seal(self) -> Builder:
        self.program.seal()
        return self

    def run(self, tokens: int, shape: object = None) -> None:
        """Run for `tokens` tokens. `shape`: whatever else the task counts depend on."""
        if (tokens, shape) != self._shape:
            self.program.set_tasks([count(tokens) for count in self._counts])
            self._shape = (tokens, shape)
        self.program.run()

    # ---- operations used by several blocks
    def pack(
        self,
        src: Rows,
        out: Packed | None,
        *,
        columns: int,
        weight: int = 0,
        eps: float = 0.0,
        rows_out: Rows | None = None,
        index: int = 0,
        batches: int = 1,
        src_batch: int = 0,
        count: Callable[[int], int] = lambda n: n,
    ) -> None:
        """Norm (when `weight`) and pack count(n) tokens; float rows of the result to rows_out."""
        args = self.add(
            self.kernels.pack_tokens(out.act if out else FLOAT32), PackTokens,
            src=src.address, index=index, weight=weight, out=out.address if out else 0,
            rows_out=rows_out.address if rows_out else 0, src_stride=src.stride,
            rows_out_stride=rows_out.stride if rows_out else 0, columns=columns, x_blocks=out.blocks if out else 0,
            src_batch=src_batch, out_batch=out.batch_nbytes if out else 0, eps=eps,
        )  # fmt: skip

        def tasks(n: int) -> int:
            n = count(n)
            full, tail = tile_counts(n)
            args["tokens"], args["full_tiles"], args["tail_tile"] = n, full, tail
            args["tiles_per_batch"] = max(1, full + (tail > 0))
            return batches * (full + (tail > 0))

        self.counted(tasks)

    def matmul(
        self, m: Matrix, x: Packed, y: Rows, *, bias: int = 0, accumulate: bool = False, y_batch: int = 0,
        count: Callable[[int], int] = lambda n: n,
    ) -> None:  # fmt: skip
        """y[t] = W·x[t] (+ bias) (+ y[t]) for count(n) tokens and every batch of the matrix."""
        layout = m.layout
        args = self.add(
            self.kernels.matmul(layout.fmt, x.act),
            Matmul,
            w=m.address,
            x=x.address,
            y=y.address,
            bias=bias,
            groups=layout.groups,
            steps=layout.steps,
            x_blocks=x.blocks,
            y_stride=y.stride,
            accumulate=int(accumulate),
            w_batch=layout.batch_nbytes,
            x_batch=x.batch_nbytes,
            y_batch=y_batch,
        )

        def tasks(n: int) -> int:
            n = count(n)
            args["full_tiles"], args["tail_tile"] = tile_counts(n)
            chunk = self.chunk(layout.groups * layout.batches, layout.groups, n)
            args["chunk"], per_batch = chunk, -(-layout.groups // chunk)
            args["tasks_per_batch"] = per_batch
            return layout.batches * per_batch if n else 0

        self.counted(tasks)

    def chunk(self, work: int, units: int, tokens: int) -> int:
        """Units per task when `work` units in all are to be spread over the threads; a task never exceeds `units`."""
        per_thread = TASKS_PER_THREAD if tokens == 1 else 4 * TASKS_PER_THREAD
        return max(1, min(units, -(-work // (self._pool.threads * per_thread))))


def packed_nbytes(act: Activations, tokens: int, columns: int) -> int:
    return act.nbytes(tokens, x_blocks(columns))
