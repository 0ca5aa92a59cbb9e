"""The memory budget: never silently over, and helpful when it refuses."""

from __future__ import annotations

import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from colibri_offload.errors import BudgetError, UsageError
from colibri_offload.scheduler.budget import BudgetLine, MemoryBudget, Reservation
from colibri_offload.scheduler.memory import parse_size

MIB = 1024**2


def test_lines_and_remaining_follow_the_reservations():
    budget = MemoryBudget(100)
    weights = budget.reserve("resident weights", 40, "weights")
    cache = budget.reserve("KV cache", 30, "kv_cache")
    assert budget.remaining == 30
    weights.resize(50)
    assert budget.lines() == (BudgetLine("resident weights", "weights", 50), BudgetLine("KV cache", "kv_cache", 30))
    cache.release()
    cache.release()
    assert (budget.remaining, weights.nbytes) == (50, 50)
    with budget.reserve("workspace", 50, "workspace"):
        assert budget.remaining == 0
    assert budget.remaining == 50


def test_refusal_states_what_is_needed_left_held_and_to_be_done():
    budget = MemoryBudget(100 * MIB)
    for name, size in [("tiny", 1), ("resident weights", 50), ("KV cache", 30), ("workspace", 9)]:
        budget.reserve(name, size * MIB, name)
    with pytest.raises(BudgetError) as caught:
        budget.reserve("expert cache", 20 * MIB, "expert_cache")
    message = str(caught.value)
    assert message.startswith("expert cache: needs 20.00 MiB but 10.00 MiB of the memory budget of 100.00 MiB")
    assert "largest: resident weights 50.00 MiB, KV cache 30.00 MiB, workspace 9.00 MiB)" in message
    for remedy in ("--memory-budget 110MiB", "--ctx", "--expert-cache", "smaller quant"):
        assert remedy in message
    assert "\n" not in message
    assert budget.remaining == 10 * MIB


def test_the_advised_budget_is_enough_and_hardly_more():
    def fill(total: int) -> None:
        budget = MemoryBudget(total)
        budget.reserve("weights", 70 * MIB + 1, "weights")
        budget.reserve("cache", 40 * MIB + 1, "expert_cache")

    with pytest.raises(BudgetError) as caught:
        fill(100 * MIB)
    advice = parse_size(str(caught.value).split("--memory-budget ")[1].split()[0])
    fill(advice)
    assert advice - (110 * MIB + 2) < MIB


def test_a_resize_that_does_not_fit_changes_nothing():
    budget = MemoryBudget(100)
    held = budget.reserve("a", 60, "weights")
    budget.reserve("b", 30, "weights")
    with pytest.raises(BudgetError, match="a: needs 71 B but 70 B"):
        held.resize(71)
    assert (held.nbytes, budget.remaining) == (60, 10)
    held.resize(70)
    assert budget.remaining == 0


@pytest.mark.parametrize("total", [0, -1])
def test_an_empty_budget_is_refused(total):
    with pytest.raises(UsageError, match="--memory-budget"):
        MemoryBudget(total)


def test_negative_reservations_are_bugs():
    with pytest.raises(ValueError, match="kv"):
        MemoryBudget(10).reserve("kv", -1, "kv_cache")


@given(st.lists(st.tuples(st.sampled_from(["reserve", "resize", "release"]), st.integers(0, 9), st.integers(0, 60))))
def test_the_ledger_agrees_with_a_dictionary(steps):
    budget = MemoryBudget(100)
    held: dict[int, Reservation] = {}
    sizes: dict[int, int] = {}
    for action, name, nbytes in steps:
        others = sum(size for other, size in sizes.items() if other != name)
        fits = others + nbytes <= 100
        if action == "release" and name in held:
            held.pop(name).release()
            del sizes[name]
        elif (action == "reserve" and name not in held) or (action == "resize" and name in held):
            try:
                if name in held:
                    held[name].resize(nbytes)
                else:
                    held[name] = budget.reserve(str(name), nbytes, "weights")
                assert fits
                sizes[name] = nbytes
            except BudgetError:
                assert not fits
        assert budget.remaining == 100 - sum(sizes.values())


def test_threads_never_go_over_together():
    budget, granted = MemoryBudget(1000), []

    def take() -> None:
        for _ in range(200):
            try:
                granted.append(budget.reserve("part", 7, "staging"))
            except BudgetError:
                return

    threads = [threading.Thread(target=take) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(granted) == 1000 // 7 and budget.remaining == 1000 % 7
