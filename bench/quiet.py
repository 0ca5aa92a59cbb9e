"""How much of the machine others used while something was timed: a timing on a busy machine says little.

llama.cpp spins at its barriers, so a neighbour on one of two cores can cost it nine tenths of its speed.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import TypeVar

import psutil

T = TypeVar("T")

QUIET = 0.05  # share of all cores that others may use


@dataclass(frozen=True)
class CpuTimes:
    """CPU seconds since start-up, of the whole machine (what the hypervisor took included) and of our processes."""

    wall: float
    busy: float
    own: float

    @classmethod
    def now(cls, pids: Iterable[int]) -> CpuTimes:
        t = psutil.cpu_times()
        own = sum(sum(psutil.Process(pid).cpu_times()[:2]) for pid in pids)
        idle = t.idle + getattr(t, "iowait", 0.0)
        # Guests' time is part of user time.
        total = sum(t) - getattr(t, "guest", 0.0) - getattr(t, "guest_nice", 0.0)
        return cls(time.perf_counter(), total - idle, own)


def others(before: CpuTimes, after: CpuTimes) -> float:
    """Share of all cores that other processes used in between."""
    cores = psutil.cpu_count() or 1
    taken = (after.busy - before.busy) - (after.own - before.own)
    return max(0.0, taken) / (cores * (after.wall - before.wall))


def when_quiet(measure: Callable[[], T], pids: Iterable[int], tries: int) -> tuple[T, float]:
    """Measure, again while the machine was not quiet meanwhile, at most `tries` times.

    Returns the result of the quietest try and the share that others used in it. `pids`: our processes beside this one.
    """
    ours = (os.getpid(), *pids)
    best: tuple[T, float] | None = None
    for attempt in range(tries):
        if attempt:
            time.sleep(1)
        before = CpuTimes.now(ours)
        result = measure()
        load = others(before, CpuTimes.now(ours))
        if best is None or load < best[1]:
            best = result, load
        if load <= QUIET:
            break
    if best is None:
        raise ValueError(f"tries {tries}: must be at least 1")
    return best
