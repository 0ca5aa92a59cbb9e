"""Programs: a list of stages that run natively in one call. Python fills descriptors, native code loops."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from colibri_offload.jit.emit import Struct
from colibri_offload.jit.pool import Op, Stage, WorkerPool

Tasks = Callable[[int], int]


class Program:
    """Stages of operations, built once. `seal()` fixes the addresses; then descriptors may still be changed in place.

    p.stage(); p.add(kernel_address, Struct, field=value, …) → the descriptor (a one-element structured array
    view).
    """

    def __init__(self, pool: WorkerPool):
        self._pool = pool
        self._ops: list[tuple[int, np.ndarray, int]] = []
        self._stages: list[list[int]] = []
        self._sealed: tuple[np.ndarray, np.ndarray] | None = None

    def stage(self) -> None:
        """Start a stage: what is added next waits for everything before it."""
        self._stages.append([])

    def add(self, fn: int, struct: Struct, tasks: int, **fields: Any) -> np.ndarray:
        """Add an operation of `tasks` tasks to the current stage; returns its descriptor."""
        args = struct.new()
        for name, value in fields.items():
            args[name] = value
        self._stages[-1].append(len(self._ops))
        self._ops.append((fn, args, tasks))
        return args

    def seal(self) -> None:
        ops, stages = Op.new(max(1, len(self._ops))), Stage.new(max(1, len(self._stages)))
        for i, (fn, args, tasks) in enumerate(self._ops):
            ops[i] = (fn, args.ctypes.data, tasks)
        for i, members in enumerate(self._stages):
            if members:
                stages[i] = (members[0], len(members), sum(self._ops[m][2] for m in members))
        self._sealed = (ops, stages)
        self._addresses = (stages.ctypes.data, len(self._stages), ops.ctypes.data)

    def set_tasks(self, counts: Sequence[int]) -> None:
        """New task counts, one per operation in the order in which they were added."""
        assert self._sealed is not None
        ops, stages = self._sealed
        ops["tasks"][: len(counts)] = counts
        for i, members in enumerate(self._stages):
            stages[i]["tasks"] = sum(counts[m] for m in members)

    def run(self) -> None:
        self._pool.run(*self._addresses)
