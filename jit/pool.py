"""Persistent native workers. A Python thread enters worker_loop once and stays there, with the GIL released.

Protocol: one 64-bit word `generation << 32 | tasks left`, from which every thread takes tasks by compare-and-swap,
and a counter of finished tasks. An idle worker spins for about 0.1 ms, then sleeps in futex. A stage's tasks all
finish before the next stage starts; its operations are independent of each other.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import threading
import weakref

import llvmlite.ir as ir
import numpy as np

from colibri_offload.errors import UnsupportedError
from colibri_offload.jit.compiler import Compiler
from colibri_offload.jit.emit import Fn, Struct, Val, i32, i64, ptr, void
from colibri_offload.jit.emit.types import const

Op = Struct("Op", fn=ptr, args=ptr, tasks=i64)
Stage = Struct("Stage", first=i64, count=i64, tasks=i64)
# fields of the shared context, one cache line each
WORD, DONE, OPS, SLEEPERS, WAKE, STOP, CONTEXT_NBYTES = 0, 64, 128, 192, 256, 320, 384
SPINS = 4000
_SYS_FUTEX = {"x86_64": 202, "aarch64": 98}
_FUTEX_WAIT_PRIVATE, _FUTEX_WAKE_PRIVATE = 128, 129


def _load(k: Fn, p: Val, t: ir.Type, order: str = "acquire") -> Val:
    return Val(k, k.b.load_atomic(p.v, order, t.width // 8, typ=t))


def _store(k: Fn, p: Val, x: Val, order: str) -> None:
    # IRBuilder.store_atomic still asks for a pointer's pointee type
    k.b._insert(ir.instructions.StoreAtomicInstr(k.b.block, x.v, p.v, order, x.t.width // 8))


def _add(k: Fn, p: Val, n: int, t: ir.Type, order: str = "acq_rel") -> None:
    k.b.atomic_rmw("add", p.v, const(t, n), order)


def emit_pool(module: ir.Module, compiler: Compiler) -> None:
    """worker_loop(ctx) and run_program(ctx, stages, n, ops)."""
    target = compiler.target
    syscall = ir.Function(module, ir.FunctionType(i64, [i64], var_arg=True), "syscall")
    number = _SYS_FUTEX.get(os.uname().machine, -1)  # without one there are no workers and nothing sleeps

    def futex(k: Fn, address: Val, operation: int, value: Val) -> None:
        args = [const(i64, number), address.v, const(i64, operation), value.zext(i64).v, const(i64, 0)]
        k.b.call(syscall, args)

    with Fn(module, target, "run_task", {"ops": ptr, "task": i64}, inline=True) as k:
        op, task = k.var(k.ops), k.var(k.task)
        with k.loop() as loop:  # find the operation that the stage's task number falls into
            n = Op.at(op()).tasks
            loop.leave_if(task() < n)
            task.set(task() - n)
            op.set(op() + Op.nbytes)
        o = Op.at(op())
        k.call_pointer(o.fn, void, o.args, task())
    run_task = k

    with Fn(module, target, "take_tasks", {"ctx": ptr}, inline=False) as k:
        with k.loop() as loop:
            word = _load(k, k.ctx + WORD, i64)
            left = word & 0xFFFFFFFF
            loop.leave_if(left.eq(0))
            swap = k.b.cmpxchg((k.ctx + WORD).v, word.v, (word - 1).v, "acq_rel", "acquire")
            loop.again_if(Val(k, k.b.extract_value(swap, 1)).eq(0))
            # the job's fields are stable from here on: the stage cannot end before this task is counted as done
            k.call(run_task, (k.ctx + OPS).load(ptr), (k.ctx + OPS).load(i64, 8) - left)
            _add(k, k.ctx + DONE, 1, i64)
    take_tasks = k

    with Fn(module, target, "worker_loop", {"ctx": ptr}) as k:
        spins = k.var(k.const(i64, 0))
        with k.loop() as forever:
            spins.set(k.const(i64, 0))
            with k.loop() as spin:
                spin.leave_if((_load(k, k.ctx + WORD, i64) & 0xFFFFFFFF).ne(0))
                spin.leave_if(spins() >= SPINS)
                spins.set(spins() + 1)
                target.pause(k)
            k.call(take_tasks, k.ctx)
            forever.again_if(spins() < SPINS)
            wake = _load(k, k.ctx + WAKE, i32, "seq_cst")
            _add(k, k.ctx + SLEEPERS, 1, i32, "seq_cst")
            stop = _load(k, k.ctx + STOP, i32, "seq_cst")
            idle = (_load(k, k.ctx + WORD, i64, "seq_cst") & 0xFFFFFFFF).eq(0)
            with k.when(idle), k.when(stop.eq(0)):
                futex(k, k.ctx + WAKE, _FUTEX_WAIT_PRIVATE, wake)
            _add(k, k.ctx + SLEEPERS, -1, i32, "seq_cst")
            forever.leave_if(stop.ne(0))

    with Fn(module, target, "run_stage", {"ctx": ptr, "ops": ptr, "tasks": i64}, inline=False) as k:
        ops_at = k.ctx + OPS
        ops_at.store(k.ops)
        ops_at.store(k.tasks, 8)
        _store(k, k.ctx + DONE, k.const(i64, 0), "monotonic")
        generation = (_load(k, k.ctx + WORD, i64, "monotonic") >> 32) + 1
        k.b.atomic_rmw("xchg", (k.ctx + WORD).v, ((generation << 32) | k.tasks).v, "seq_cst")
        with k.when(_load(k, k.ctx + SLEEPERS, i32, "seq_cst").ne(0)):
            _add(k, k.ctx + WAKE, 1, i32, "seq_cst")
            futex(k, k.ctx + WAKE, _FUTEX_WAKE_PRIVATE, k.const(i32, 0x7FFFFFFF))
        k.call(take_tasks, k.ctx)
        with k.loop() as wait:
            wait.leave_if(_load(k, k.ctx + DONE, i64).eq(k.tasks))
            target.pause(k)
    run_stage = k

    # ctx null: no workers, everything runs in the calling thread
    with Fn(module, target, "run_program", {"ctx": ptr, "stages": ptr, "count": i64, "ops": ptr}) as k:
        alone = k.not_null(k.ctx).eq(0)
        with k.range(0, k.count) as i:
            s = Stage.at(k.stages + i * Stage.nbytes)
            ops, tasks = k.ops + s.first * Op.nbytes, s.tasks
            inline = Val(k, k.b.or_(alone.v, tasks.eq(1).v))
            with k.either(inline) as (yes, no):
                with yes, k.range(0, tasks) as t:
                    k.call(run_task, ops, t)
                with no, k.when(tasks > 0):
                    k.call(run_stage, k.ctx, ops, tasks)


def emit_run_tasks(module: ir.Module, compiler: Compiler) -> None:
    """run_tasks(task, args, count): tasks 0 … count−1 in the calling thread, in one native call."""
    with (
        Fn(module, compiler.target, "run_tasks", {"task": ptr, "args": ptr, "count": i64}) as k,
        k.range(0, k.count) as t,
    ):
        k.call_pointer(k.task, void, k.args, t)


class WorkerPool:
    """`threads` threads in all: the caller and threads − 1 workers. run() may be called by one thread at a time."""

    def __init__(self, compiler: Compiler, threads: int):
        if threads > 1 and os.uname().machine not in _SYS_FUTEX:
            raise UnsupportedError(f"no worker threads on {os.uname().machine}; use --threads 1")
        self.threads = threads
        self._compiler = compiler  # owns the machine code that the workers run
        loop, program = compiler.link(
            "pool" + os.uname().machine, lambda m: emit_pool(m, compiler), "worker_loop", "run_program"
        )
        self._loop = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(loop)
        self._program = ctypes.CFUNCTYPE(None, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p)(
            program
        )
        self._memory = np.zeros(CONTEXT_NBYTES + 64, np.uint8)
        address = self._memory.ctypes.data
        self._offset = -address % 64
        self._ctx: int | None = address + self._offset if threads > 1 else None
        self._workers = [
            threading.Thread(target=self._loop, args=(self._ctx,), name=f"colibri-worker-{i}", daemon=True)
            for i in range(threads - 1)
        ]
        for w in self._workers:
            w.start()
        self._finalizer = weakref.finalize(self, _stop, self._memory, self._offset, self._workers)
        atexit.register(self._finalizer)

    def run(self, stages: int, count: int, ops: int) -> None:
        """Run `count` stages (address of Stage[], address of Op[]) one after another."""
        self._program(self._ctx, stages, count, ops)

    def close(self) -> None:
        """End the workers. Idempotent."""
        self._finalizer()
        atexit.unregister(self._finalizer)


def _stop(memory: np.ndarray, offset: int, workers: list[threading.Thread]) -> None:
    if not workers:
        return

    def word(at: int) -> np.ndarray:
        return memory[offset + at : offset + at + 4].view(np.int32)

    word(STOP)[0] = 1
    word(WAKE)[0] += 1
    libc = ctypes.CDLL(None, use_errno=True)
    address = memory.ctypes.data + offset + WAKE
    while any(w.is_alive() for w in workers):  # a worker may be between its last look at STOP and its sleep
        libc.syscall(_SYS_FUTEX[os.uname().machine], ctypes.c_void_p(address), _FUTEX_WAKE_PRIVATE, 0x7FFFFFFF, None)
        for w in workers:
            w.join(0.01)
