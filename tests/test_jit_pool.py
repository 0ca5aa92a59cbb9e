"""The worker pool and programs: every task once, stages as barriers, sleep and waking, the end of threads."""

from __future__ import annotations

import gc
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import llvmlite.ir as ir
import numpy as np
import pytest
from jit_util import CACHE_DIR

from colibri_offload.errors import UnsupportedError
from colibri_offload.jit import pool as pool_module
from colibri_offload.jit.compiler import Compiler
from colibri_offload.jit.emit import Fn, Struct, Val, i64, ptr
from colibri_offload.jit.emit.types import const
from colibri_offload.jit.kernels import Kernels
from colibri_offload.jit.pool import Op, Stage, WorkerPool
from colibri_offload.jit.program import Program
from colibri_offload.jit.targets import get_target

# counts: i64 per task; finished: i64 shared by a program; before: tasks of all earlier stages; early: where tasks that
# began too soon are counted
Probe = Struct("Probe", counts=ptr, finished=ptr, early=ptr, before=i64, work=i64)
# arrived: i64; wanted: tasks that must be running at once; met: i64, tasks that saw this happen
Meeting = Struct("Meeting", arrived=ptr, met=ptr, wanted=i64)
PATIENCE = 100_000_000  # spins; about two seconds


def add_one(k: Fn, p: Val) -> None:
    k.b.atomic_rmw("add", p.v, const(i64, 1), "seq_cst")


def read(k: Fn, p: Val) -> Val:
    return Val(k, k.b.load_atomic(p.v, "seq_cst", 8, typ=i64))


@cache
def compiler() -> Compiler:
    return Compiler(get_target(), CACHE_DIR)


@cache
def probe() -> int:
    """Task: count itself, and complain when an earlier stage is not done."""
    target = compiler().target

    def build(module: ir.Module) -> None:
        with Fn(module, target, "probe", {"args": ptr, "task": i64}) as k:
            a = Probe.at(k.args)
            with k.when(read(k, a.finished) < a.before):
                add_one(k, a.early)
            with k.range(0, a.work * (k.task & 3)):
                target.pause(k)
            add_one(k, a.counts + k.task * 8)
            add_one(k, a.finished)

    return compiler().link("test.probe", build, "probe")[0]


@cache
def meeting() -> int:
    """Task: wait until `wanted` tasks run at the same time."""
    target = compiler().target

    def build(module: ir.Module) -> None:
        with Fn(module, target, "meeting", {"args": ptr, "task": i64}) as k:
            a = Meeting.at(k.args)
            add_one(k, a.arrived)
            spins = k.var(k.const(i64, 0))
            with k.loop() as loop:
                loop.leave_if(read(k, a.arrived) >= a.wanted)
                loop.leave_if(spins() >= PATIENCE)
                spins.set(spins() + 1)
                target.pause(k)
            with k.when(read(k, a.arrived) >= a.wanted):
                add_one(k, a.met)

    return compiler().link("test.meeting", build, "meeting")[0]


@pytest.fixture
def pools() -> Iterator[list[WorkerPool]]:
    """A list whose pools are closed at the end."""
    made: list[WorkerPool] = []
    yield made
    for pool in made:
        pool.close()


def workers() -> int:
    return sum(t.name.startswith("colibri-worker") for t in threading.enumerate())


class Programs:
    """`count` random programs, all in a few arrays: 0–4 stages of 0–3 operations of 0–6 tasks."""

    def __init__(self, count: int, seed: int, work: int = 0):
        rng = np.random.default_rng(seed)
        stages_of = rng.integers(0, 5, count)
        ops_of = rng.integers(0, 4, stages_of.sum())
        tasks_of = rng.integers(0, 7, ops_of.sum())
        self.stages, self.ops, self.probes = Stage.new(len(ops_of)), Op.new(len(tasks_of)), Probe.new(len(tasks_of))
        self.counts = np.zeros(int(tasks_of.sum()), np.int64)
        self.finished, self.early = np.zeros(count, np.int64), np.zeros(1, np.int64)
        self.calls, self.expected = [], np.zeros(count, np.int64)
        at_stage = at_op = at_task = 0
        for program in range(count):
            first_stage, first_op, before = at_stage, at_op, 0
            for _ in range(stages_of[program]):
                tasks = tasks_of[at_op : at_op + ops_of[at_stage]]
                self.stages[at_stage] = (at_op - first_op, len(tasks), tasks.sum())
                for n in tasks:
                    p = self.probes[at_op]
                    p["counts"] = self.counts.ctypes.data + 8 * at_task
                    p["finished"] = self.finished.ctypes.data + 8 * program
                    p["early"], p["before"], p["work"] = self.early.ctypes.data, before, work
                    self.ops[at_op] = (probe(), self.probes.ctypes.data + Probe.nbytes * at_op, n)
                    at_op, at_task = at_op + 1, at_task + n
                before += tasks.sum()
                at_stage += 1
            self.expected[program] = before
            self.calls.append(
                (self.stages.ctypes.data + Stage.nbytes * first_stage, int(stages_of[program]),
                 self.ops.ctypes.data + Op.nbytes * first_op)
            )  # fmt: skip

    def run(self, pool: WorkerPool) -> None:
        for call in self.calls:
            pool.run(*call)

    def check(self) -> None:
        assert (self.counts == 1).all()
        assert np.array_equal(self.finished, self.expected)
        assert self.early[0] == 0


@pytest.mark.parametrize("threads", [1, 2, 3, 4])
def test_random_programs_run_every_task_once(threads: int, pools: list[WorkerPool]) -> None:
    """7,500 programs for each number of threads: no task lost, none run twice, no stage before its time."""
    pools.append(WorkerPool(compiler(), threads))
    programs = Programs(7500, seed=threads)
    programs.run(pools[0])
    programs.check()


def test_stages_are_barriers_for_long_tasks(pools: list[WorkerPool]) -> None:
    """Tasks of uneven length make a thread that starts the next stage too early almost certain."""
    pools.append(WorkerPool(compiler(), 2))
    programs = Programs(400, seed=9, work=300)
    programs.run(pools[0])
    programs.check()


def meet(pool: WorkerPool, wanted: int) -> int:
    """How many of `wanted` tasks saw all others running."""
    arrived, met = np.zeros(1, np.int64), np.zeros(1, np.int64)
    program = Program(pool)
    program.stage()
    program.add(meeting(), Meeting, wanted, arrived=arrived.ctypes.data, met=met.ctypes.data, wanted=wanted)
    program.seal()
    program.run()
    return int(met[0])


@pytest.mark.parametrize("threads", [2, 3])
def test_sleeping_workers_wake(threads: int, pools: list[WorkerPool]) -> None:
    """After a pause all threads take part again, and while they sleep they cost nothing."""
    pools.append(WorkerPool(compiler(), threads))
    for _ in range(3):
        cpu, wall = time.process_time(), time.perf_counter()
        time.sleep(0.1)
        cpu, wall = time.process_time() - cpu, time.perf_counter() - wall
        assert cpu < wall / 4
        assert meet(pools[0], threads) == threads


def test_waking_races_with_falling_asleep(pools: list[WorkerPool]) -> None:
    """Work that comes just when a worker goes to sleep (after some 4000 spins) is not missed."""
    pools.append(WorkerPool(compiler(), 2))
    for step in range(200):
        until = time.perf_counter() + step * 2e-6
        while time.perf_counter() < until:
            pass
        assert meet(pools[0], 2) == 2


def test_close_ends_the_threads() -> None:
    before = workers()
    pool = WorkerPool(compiler(), 3)
    assert workers() == before + 2
    pool.close()
    assert workers() == before
    pool.close()


def test_a_closed_pool_still_works_alone() -> None:
    pool = WorkerPool(compiler(), 2)
    pool.close()
    programs = Programs(50, seed=5)
    programs.run(pool)
    programs.check()


def test_close_interrupts_sleep_and_spin() -> None:
    before = workers()
    for pause in (0, 0.00005, 0.0002, 0.05):
        pool = WorkerPool(compiler(), 2)
        time.sleep(pause)
        started = time.perf_counter()
        pool.close()
        assert time.perf_counter() - started < 2 and workers() == before


def test_a_forgotten_pool_ends_its_threads() -> None:
    before = workers()
    pool = WorkerPool(compiler(), 2)
    assert workers() == before + 1
    del pool
    gc.collect()
    assert workers() == before


def test_two_pools_live_together(pools: list[WorkerPool]) -> None:
    """Two Python threads, each with a pool of its own, run at the same time."""
    pools += [WorkerPool(compiler(), 2), WorkerPool(compiler(), 2)]
    both = [Programs(1500, seed=s) for s in (11, 12)]
    runners = [threading.Thread(target=p.run, args=(pool,)) for p, pool in zip(both, pools, strict=True)]
    for runner in runners:
        runner.start()
    for runner in runners:
        runner.join(60)
        assert not runner.is_alive()
    for programs in both:
        programs.check()


SCRIPT = """
import gc, sys
sys.path.insert(0, sys.argv[1])
from pathlib import Path
from test_jit_pool import Compiler, Programs, WorkerPool, get_target, probe
probe()
pool = WorkerPool(Compiler(get_target(), Path(sys.argv[2])), 2)
gc.collect()
programs = Programs(100, seed=1)
programs.run(pool)
programs.check()
"""


def test_a_pool_keeps_its_code_and_a_process_ends_with_a_live_pool(tmp_path: Path) -> None:
    """The pool's compiler is referenced nowhere else, and nobody closes the pool before the interpreter ends.

    A process of its own, because the failure is a crash or a hang.
    """
    command = [sys.executable, "-c", SCRIPT, str(Path(__file__).parent), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stderr


def test_platforms_without_futex(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """One thread works everywhere; more are refused with the way out."""
    monkeypatch.setattr(pool_module.os, "uname", lambda: SimpleNamespace(machine="s390x"))
    with pytest.raises(UnsupportedError, match="no worker threads on s390x; use --threads 1"):
        WorkerPool(compiler(), 2)
    programs = Programs(20, seed=1)
    programs.run(WorkerPool(Compiler(get_target(), tmp_path), 1))
    programs.check()


def test_running_a_kernel_in_the_calling_thread(tmp_path: Path) -> None:
    """Kernels.run: every task once, none when there are none."""
    counts, shared = np.zeros(7, np.int64), np.zeros(2, np.int64)
    args = Probe.new()
    for name, value in probe_fields(counts, shared, 0).items():
        args[name] = value
    kernels = Kernels(Compiler(get_target(), tmp_path))
    for tasks in (0, 1, 5):
        counts[:] = 0
        kernels.run(probe(), args.ctypes.data, tasks)
        assert counts.tolist() == [1] * tasks + [0] * (7 - tasks)


# ---- programs
def probe_fields(counts: np.ndarray, shared: np.ndarray, before: int) -> dict[str, int]:
    return {
        "counts": counts.ctypes.data, "finished": shared.ctypes.data, "early": shared[1:].ctypes.data, "before": before
    }  # fmt: skip


@pytest.mark.parametrize("threads", [1, 2])
def test_program_with_new_counts_and_changed_descriptors(threads: int, pools: list[WorkerPool]) -> None:
    """Sealed once, run often: task counts (0 too) and descriptor fields may change between runs."""
    pools.append(WorkerPool(compiler(), threads))
    shared = np.zeros(2, np.int64)
    counts = np.zeros((3, 8), np.int64)
    program = Program(pools[0])
    program.stage()
    program.add(probe(), Probe, 3, **probe_fields(counts[0], shared, 0))
    second = program.add(probe(), Probe, 8, **probe_fields(counts[1], shared, 0))
    program.stage()  # an empty stage is no work and no error
    program.stage()
    last = program.add(probe(), Probe, 2, **probe_fields(counts[2], shared, 11))
    program.seal()
    program.run()
    assert counts.sum(1).tolist() == [3, 8, 2] and shared.tolist() == [13, 0]
    for a, b, c in ((0, 5, 1), (4, 0, 0), (0, 0, 3), (0, 0, 0), (8, 8, 8)):
        counts[:] = shared[:] = 0
        last["before"] = a + b
        program.set_tasks([a, b, c])
        program.run()
        assert counts.sum(1).tolist() == [a, b, c] and counts.max() <= 1 and shared.tolist() == [a + b + c, 0]
    elsewhere = np.zeros(8, np.int64)
    second["counts"] = elsewhere.ctypes.data
    counts[:] = 0
    program.run()
    assert elsewhere.tolist() == [1] * 8 and not counts[1].any()


def test_an_empty_program_runs(pools: list[WorkerPool]) -> None:
    pools.append(WorkerPool(compiler(), 2))
    program = Program(pools[0])
    program.seal()
    program.run()
