"""Arenas: alignment, independence of slots, laziness, lifetime."""

import ctypes

import psutil
import pytest

from colibri_offload.errors import BudgetError, UsageError
from colibri_offload.storage.arena import Arena, anonymous, round_up


@pytest.mark.parametrize(("n", "expected"), [(0, 0), (1, 4096), (4096, 4096), (4097, 8192)])
def test_round_up(n, expected):
    assert round_up(n, 4096) == expected


def test_slots_are_aligned_and_apart():
    with Arena(5000, 3) as arena:
        assert arena.slot_nbytes == 8192 and arena.nbytes == 3 * 8192
        for i in range(3):
            arena.slot(i)[:] = bytes([i + 1]) * 8192
        for i in range(3):
            assert arena.address(i) % 4096 == 0
            assert ctypes.string_at(arena.address(i), 8192) == bytes([i + 1]) * 8192
        with pytest.raises(IndexError):
            arena.slot(3)
        with pytest.raises(IndexError):
            arena.address(-1)


def test_untouched_slots_cost_nothing():
    before = psutil.Process().memory_info().rss
    with Arena(64 << 20, 16) as arena:
        arena.slot(15)[0] = 1
        assert psutil.Process().memory_info().rss - before < 16 << 20


def test_memory_is_private_so_that_huge_pages_apply():
    """Python maps anonymous memory as shared by default, which is shmem: no huge pages, and other accounting."""
    with Arena(4096, 1) as arena, open("/proc/self/maps") as maps:
        address = arena.address(0)
        for line in maps:
            start, end = (int(n, 16) for n in line.split()[0].split("-"))
            if start <= address < end:
                assert line.split()[1] == "rw-p"
                return
    pytest.fail("the arena is in no map")


def test_a_held_slot_outlives_close():
    arena = Arena(4096, 1)
    slot = arena.slot(0)
    arena.close()
    arena.close()
    slot[:5] = b"still"
    assert bytes(slot[:5]) == b"still"


def test_bad_sizes():
    with pytest.raises(UsageError, match="0 slots"):
        Arena(4096, 0)
    with pytest.raises(BudgetError, match="--memory-budget"):
        anonymous(1 << 62)
