"""Eviction policies by name. A new policy is one file and one line in POLICIES."""

from __future__ import annotations

from collections.abc import Callable

from colibri_offload.errors import UsageError
from colibri_offload.scheduler.policies.base import EvictionPolicy
from colibri_offload.scheduler.policies.belady import Belady
from colibri_offload.scheduler.policies.lfru import LFRU
from colibri_offload.scheduler.policies.lru import LRU

__all__ = ["DEFAULT_POLICY", "LFRU", "LRU", "POLICIES", "Belady", "EvictionPolicy", "make_policy"]

DEFAULT_POLICY = "lru"
# Name → how to make it for a model with so many routed experts. Belady needs the future: only replay.py makes it.
POLICIES: dict[str, Callable[[int], EvictionPolicy]] = {
    DEFAULT_POLICY: lambda experts: LRU(),
    "lfru": LFRU.for_experts,
}


def make_policy(name: str, experts: int) -> EvictionPolicy:
    """The policy `name` for a model whose layers have `experts` routed experts together.

    Raises: UsageError listing the names.
    """
    if name not in POLICIES:
        raise UsageError(f"--eviction: unknown policy {name!r}; choose one of {', '.join(sorted(POLICIES))}")
    return POLICIES[name](experts)
