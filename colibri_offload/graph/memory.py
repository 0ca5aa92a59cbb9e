"""Memory of the graph: resident weights, the shared workspace and the paged KV cache. All of it is booked in the
budget."""

from __future__ import annotations

import threading
import time
from collections.abc import Mapping

import numpy as np

from colibri_offload.errors import BudgetError, UsageError
from colibri_offload.graph.layout import LINE, pad
from colibri_offload.jit.kernels.attention import PAGE
from colibri_offload.scheduler.budget import MemoryBudget
from colibri_offload.storage.arena import Arena

PATIENCE_SEC = 60.0  # how long to wait for pages while nobody computes


class Region:
    """Named parts of one arena, 64-byte aligned, zeroed, booked as one line of the budget."""

    def __init__(self, budget: MemoryBudget, name: str, category: str, sizes: Mapping[str, int]):
        self._addresses: dict[str, int] = {}
        offset = 0
        for part, nbytes in sizes.items():
            self._addresses[part] = offset
            offset += pad(nbytes + LINE, LINE)  # a line between parts: prefetching and whole-vector reads may run over
        self.nbytes = pad(max(offset, 1), 4096)
        self._reservation = budget.reserve(name, self.nbytes, category)
        self._arena = Arena(self.nbytes, 1)
        base = self._arena.address(0)
        self._addresses = {part: base + at for part, at in self._addresses.items()}

    def __getitem__(self, part: str) -> int:
        """Address of a part."""
        return self._addresses[part]

    def get(self, part: str) -> int:
        """Address of a part, 0 when there is no such part."""
        return self._addresses.get(part, 0)

    def __contains__(self, part: str) -> bool:
        return part in self._addresses

    def array(self, part: str, shape: tuple[int, ...], dtype: type[np.generic]) -> np.ndarray:
        """The beginning of a part as an array."""
        nbytes = int(np.prod(shape)) * np.dtype(dtype).itemsize
        start = self._addresses[part] - self._arena.address(0)
        return np.frombuffer(self._arena.slot(0)[start : start + nbytes], dtype).reshape(shape)

    def close(self) -> None:
        self._reservation.release()
        self._arena.close()


class KvCache:
    """Pages of 64 positions for all layers; a page belongs to one sequence. `page_nbytes`: all layers' parts."""

    def __init__(self, budget: MemoryBudget, page_nbytes: int, pages: int):
        self.pages = pages
        self._reservation = budget.reserve(
            f"KV cache, {pages * PAGE} positions", pages * pad(page_nbytes, 4096), "kv_cache"
        )
        self._arena = Arena(page_nbytes, pages)
        self._free = list(range(pages - 1, -1, -1))
        self._changed = threading.Condition()
        self._promised: dict[Sequence, int] = {}  # pages in all, to texts that are being continued
        self._used_at = 0.0

    def promise(self, sequence: Sequence, pages: int) -> None:
        """See to it that `sequence` can have `pages` pages in all, waiting for other texts to end.

        Raises: BudgetError when there are none to wait for, or when they have not moved for a while.
        """
        with self._changed:
            while not self._can_have(sequence, pages):
                patience = self._used_at + PATIENCE_SEC - time.monotonic()
                if self._promised.keys() <= {sequence} or patience <= 0:
                    raise self._full()
                self._changed.wait(patience)
            self._promised[sequence] = pages

    def _can_have(self, sequence: Sequence, pages: int) -> bool:
        others = sum(max(0, n - s.page_count) for s, n in self._promised.items() if s is not sequence)
        return pages - sequence.page_count <= len(self._free) - others

    def settle(self, sequence: Sequence) -> None:
        """`sequence` wants no more pages than it has."""
        with self._changed:
            self._promised.pop(sequence, None)
            self._changed.notify_all()

    def use(self) -> None:
        """Some text is being continued."""
        self._used_at = time.monotonic()

    def take(self) -> int:
        """Index of a free page, or BudgetError."""
        if not self._free:
            raise self._full()
        return self._free.pop()

    def _full(self) -> BudgetError:
        return BudgetError(
            f"the KV cache is full: unfinished texts and chats hold its {self.pages * PAGE} positions; "
            "close them or give a larger --ctx"
        )

    def give_back(self, pages: list[int]) -> None:
        self._free.extend(pages)

    def address(self, page: int) -> int:
        return self._arena.address(page)

    def close(self) -> None:
        self._reservation.release()
        self._arena.close()


class Sequence:
    """One text in the KV cache: `length` positions are filled. Close it to give its pages back."""

    def __init__(self, cache: KvCache, limit: int):
        self._cache, self.limit, self.length = cache, limit, 0
        self._pages: list[int] = []
        self.table = np.zeros(-(-limit // PAGE), np.uint64)  # addresses of the pages, for the kernels

    @property
    def page_count(self) -> int:
        return len(self._pages)

    def make_room(self, length: int) -> None:
        """Wait until this text can have `length` positions (at most the limit), until settle() or close().

        Raises: BudgetError as KvCache.promise does.
        """
        self._cache.promise(self, -(-min(length, self.limit) // PAGE))

    def settle(self) -> None:
        """No more positions are wanted for now: others need not count on them."""
        self._cache.settle(self)

    def reserve(self, tokens: int) -> None:
        """Make room for `tokens` more positions.

        Raises: UsageError beyond the context length.
        """
        self._cache.use()
        end = self.length + tokens
        if end > self.limit:
            raise UsageError(
                f"{end} positions are needed, the context holds {self.limit}; shorten the prompt or give a larger --ctx"
            )
        while len(self._pages) * PAGE < end:
            page = self._cache.take()
            self.table[len(self._pages)] = self._cache.address(page)
            self._pages.append(page)

    def rewind(self, length: int) -> None:
        """Forget the positions from `length` on."""
        self.length = min(self.length, length)

    def close(self) -> None:
        pages, self._pages, self.length = self._pages, [], 0  # first, lest an interrupt lets a page be given back twice
        self._cache.give_back(pages)
        self.settle()
