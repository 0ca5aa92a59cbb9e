"""Handing out the experts of one layer in batches, while the missing ones are read."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from typing import TYPE_CHECKING

from colibri_offload.scheduler.blocks import Block
from colibri_offload.storage.base import ExpertKey

if TYPE_CHECKING:
    from colibri_offload.scheduler.cache import ExpertCache


class ExpertStream:
    """One pass over some experts of a layer: see ExpertCache.stream. Used by one thread, once.

    A block is leased from the moment it is found or requested until the batch after its own is asked for.
    """

    __slots__ = ("_cache", "_experts", "_held", "_joined", "_layer", "_started", "_todo", "_waiting")

    def __init__(self, cache: ExpertCache, layer: int, experts: Iterable[int]) -> None:
        self._cache, self._layer = cache, layer
        self._experts = dict.fromkeys(experts)
        self._held: list[Block] = []  # the batch that is out, or about to go out
        self._waiting: list[Block] = []  # requested
        self._joined: set[Block] = set()  # of these, reads that somebody else had begun
        self._todo: deque[ExpertKey] = deque()  # no slot yet
        self._started = False

    def __enter__(self) -> ExpertStream:
        with self._cache.lock:
            self._held, self._todo = self._cache.hold(self._layer, self._experts)
        if self._todo:
            try:
                with self._cache.lock:
                    self._request()
            except BaseException:
                self.__exit__()
                raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._held or self._waiting or self._todo:
            with self._cache.lock:
                self._cache.release(self._held + self._waiting)
                self._cache.set_starving(self, False)
            self._held, self._waiting = [], []
            self._todo.clear()

    def __iter__(self) -> ExpertStream:
        return self

    def __next__(self) -> list[tuple[int, int]]:
        """The next batch of (expert, slot); ends the lease on the one before."""
        if self._started or not self._held:
            self._held = self._cache.wait_for(self._advance, self._blocked_on)
            if not self._held:
                raise StopIteration
        self._started = True
        return [(block.key[1], block.slot) for block in self._held]

    def _advance(self) -> list[Block] | None:
        """The blocks of the next batch, [] at the end, None as long as there is nothing to hand out."""
        self._cache.release(self._held)
        self._held = []
        self._take_over()
        if self._todo:
            self._request()
        arrived = [block for block in self._waiting if self._cache.settled(block)]
        if not arrived:
            return None if self._waiting or self._todo else []
        for block in arrived:
            self._cache.use(block)
        self._waiting = [block for block in self._waiting if not block.ready]
        return arrived

    def _take_over(self) -> None:
        """Read for ourselves what a guess, or a pass that has failed since, could not read."""
        failed = [block for block in self._joined if block.error is not None]
        if failed:
            self._cache.release(failed)
            self._joined.difference_update(failed)
            self._waiting = [block for block in self._waiting if block not in failed]
            self._todo.extendleft(block.key for block in failed)

    def _request(self) -> None:
        """Request blocks until no slot is left. What is protected goes only if this stream has no slot at all."""
        while self._todo:
            found = self._cache.request(self._todo[0], last_resort=not self._held and not self._waiting)
            if found is None:
                break
            block, joined = found
            self._todo.popleft()
            self._waiting.append(block)
            if joined:
                self._joined.add(block)
        self._cache.set_starving(self, bool(self._todo))

    def _blocked_on(self) -> tuple[str, ExpertKey]:
        return ("read", self._waiting[0].key) if self._waiting else ("slot", self._todo[0])
