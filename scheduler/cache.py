"""The expert cache: one global pool of slots, reads in the background, blocks leased to whoever computes with them.

blocks.py knows slots and victims, loads.py the reads in flight, guesses.py what was prefetched, stream.py hands
blocks out; this file ties them together. Every decision is taken by the calling thread, under one lock, and results
of reads are applied in order of arrival, so that the same calls and arrivals always lead to the same state.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import fields
from functools import partial
from typing import TypeVar

from colibri_offload.errors import StoreError, UsageError
from colibri_offload.scheduler.blocks import Block, BlockTable, Claim
from colibri_offload.scheduler.guesses import Guesses
from colibri_offload.scheduler.loads import Loads
from colibri_offload.scheduler.memory import format_size
from colibri_offload.scheduler.policies import DEFAULT_POLICY, EvictionPolicy, make_policy
from colibri_offload.scheduler.reader import Reader
from colibri_offload.scheduler.stats import CacheStats
from colibri_offload.scheduler.stream import ExpertStream
from colibri_offload.storage.base import ExpertKey

T = TypeVar("T")


class ExpertCache:
    """Expert blocks in `slots`, read through `reader` when they are asked for. Any thread may call any method.

    nbytes: size of the largest block; every slot holds at least as much.
    slots: writable buffers, by slot id. The caller keeps them until close() has returned.
    experts_per_layer: layer → number of experts.
    policy: a name (see policies/) or a policy.
    floor: blocks per layer that other layers may not take while there is another victim; top-k is a good choice. Fewer
        where the slots do not suffice: see floors.py.
    prefetch_limit: prefetches in flight at once; twice top-k is a good choice.
    timeout_sec: the longest wait for one block.
    Raises: UsageError for an unknown policy or no slots.
    """

    def __init__(
        self,
        reader: Reader,
        nbytes: int,
        slots: Sequence[memoryview],
        experts_per_layer: Mapping[int, int],
        policy: str | EvictionPolicy = DEFAULT_POLICY,
        floor: int = 0,
        *,
        prefetch_limit: int = 16,
        timeout_sec: float = 60.0,
    ) -> None:
        if not slots:
            raise UsageError(f"--expert-cache: 0 slots; give room for at least one expert, {format_size(nbytes)}")
        smallest = min(slot.nbytes for slot in slots)
        if smallest < nbytes:
            raise ValueError(f"a slot of {smallest} bytes cannot hold an expert of {nbytes}")
        if isinstance(policy, str):
            policy = make_policy(policy, sum(experts_per_layer.values()))
        self._prefetch_limit, self._timeout_sec = prefetch_limit, timeout_sec
        self._lock = threading.Lock()
        self._counts: dict[str, float] = {f.name: 0 for f in fields(CacheStats)}
        self._blocks = BlockTable(len(slots), experts_per_layer, policy, floor)
        self._guesses = Guesses(self._blocks, experts_per_layer, self._counts)
        self._loads = Loads(reader, slots)
        self._starving: set[ExpertStream] = set()
        self._waiters = 0
        self._closed = False

    def stream(self, layer: int, experts: Iterable[int]) -> ExpertStream:
        """`with cache.stream(layer, experts) as batches:` gives lists of (expert, slot), each expert once.

        First comes what is resident, then what was missing, as it arrives. A batch is valid until the next one is asked
        for or the block is left. Any number of experts works with any number of slots; no expert is read twice.
        Raises, from the iteration: StoreError naming the expert that cannot be read or did not arrive in time. Other
        experts are not affected, and a later stream tries again.
        """
        return ExpertStream(self, layer, experts)

    @property
    def block_count(self) -> int:
        """Blocks that are resident or on their way."""
        return self._blocks.count

    def add_hits(self, count: int) -> None:
        """Count blocks that were used without asking, by a caller who knows that all of them are resident for good."""
        with self._lock:
            self._counts["hits"] += count

    def resident_slot(self, key: ExpertKey) -> int | None:
        """The slot of a block that is resident now. Without a lease it may be evicted at any time."""
        with self._lock:
            self._apply_arrivals()
            block = self._blocks.find(key)
            return block.slot if block is not None and block.ready else None

    def prefetch(self, keys: Iterable[ExpertKey]) -> int:
        """Start to read what is missing of `keys`, best guess first; protect all until the next pass of their layer.

        Starts nothing beyond the limit in flight and nothing while a stream lacks a slot; evicts nothing that is
        leased, protected or part of a layer's floor. Returns the number of reads started. A failure is not reported:
        the demand read that follows will report its own.
        """
        started = 0
        with self._lock:
            self._apply_arrivals()
            self._check_open()
            guesses = [(key, self._blocks.find(key)) for key in dict.fromkeys(keys)]
            for _, found in guesses:  # first, lest the newcomers evict them
                if found is not None:
                    self._guesses.expect(found)
            for key, found in guesses:
                if found is not None:
                    continue
                if len(self._guesses.in_flight) >= self._prefetch_limit or self._starving:
                    break
                block = self._blocks.add(key, Claim.ORDINARY, self._evicted)
                if block is None:
                    break
                self._guesses.add(block)
                self._loads.start(block, demand=False)
                started += 1
        return started

    def cancel_prefetch(self) -> None:
        """Give up every guess: cancel what has not begun, count what is unused as wasted, protect nothing."""
        with self._lock:
            self._apply_arrivals()
            for block in self._guesses.end_all():
                self._cancel(block)

    def preload(self, keys: Iterable[ExpertKey], progress: Callable[[int, int], None] | None = None) -> int:
        """Read `keys`, in order, into free slots until there are none, and wait. Returns the number of blocks read.

        `progress(done, total)` is called after each block. Raises: StoreError as stream does.
        """
        blocks: list[Block] = []
        with self._lock:
            self._apply_arrivals()
            self._check_open()
            for key in dict.fromkeys(keys):
                if self._blocks.find(key) is None:
                    block = self._blocks.add(key, Claim.FREE, self._evicted)
                    if block is None:
                        break
                    self._loads.start(block, demand=True)
                    blocks.append(block)
        for done, block in enumerate(blocks, start=1):
            self.wait_for(partial(self.settled, block), partial(_read_of, block))
            if progress is not None:
                progress(done, len(blocks))
        return len(blocks)

    @property
    def stats(self) -> CacheStats:
        """A snapshot of the totals."""
        with self._lock:
            self._apply_arrivals()
            return CacheStats(**self._counts)  # type: ignore[arg-type]

    def close(self) -> None:
        """Cancel what has not begun and wait for what has; then the slots may be freed. Idempotent.

        Raises: StoreError when a read does not end in time: the reader may then still write to its slot.
        """
        with self._lock:
            self._closed = True
            self._apply_arrivals()
            for block in list(self._loads.in_flight):
                self._cancel(block)
            self._loads.notify()
        self.wait_for(lambda: not self._loads.in_flight or None, lambda: _read_of(next(iter(self._loads.in_flight))))

    # For ExpertStream. All but wait_for are called with the lock held.

    @property
    def lock(self) -> threading.Lock:
        return self._lock

    def hold(self, layer: int, experts: Collection[int]) -> tuple[list[Block], deque[ExpertKey]]:
        """Lease what is resident of a layer's `experts` and list what is not. Ends the guesses for this layer."""
        if self._loads.arrived:
            self._apply_arrivals()
        self._check_open()
        held, absent = self._blocks.lease_resident(layer, experts)
        self._counts["hits"] += len(held)
        self._counts["misses"] += len(absent)
        if self._guesses.expects(layer):
            for wrong in self._guesses.end(layer, experts):
                self._cancel(wrong)
        return held, deque(ExpertKey(layer, expert) for expert in absent)

    def request(self, key: ExpertKey, last_resort: bool) -> tuple[Block, bool] | None:
        """A lease on the block, and whether somebody else had begun to read it; None while no slot can be had.

        `last_resort`: the caller cannot proceed without it, so protected blocks may go, too.
        """
        self._check_open()
        block = self._blocks.find(key)
        joined = block is not None
        if block is None:
            block = self._make_room(key, Claim.ANY if last_resort else Claim.ORDINARY)
            if block is None:
                return None
            self._loads.start(block, demand=True)
        elif self._guesses.claim(block):
            self._loads.promote(block)
        self._blocks.lease(block)
        return block, joined

    def settled(self, block: Block) -> bool | None:
        """True when a block is resident, None while it is being read. Raises the error of its read."""
        if block.error is not None:
            raise block.error
        return block.ready or None

    def use(self, block: Block) -> None:
        """A requested block that has settled is handed out."""
        self._blocks.use(block)

    def release(self, blocks: Collection[Block]) -> None:
        """Undo one lease of each."""
        self._blocks.release(blocks)
        if self._waiters:
            self._loads.notify()

    def set_starving(self, stream: ExpertStream, starving: bool) -> None:
        """While a stream lacks slots, prefetch takes none."""
        if starving:
            self._starving.add(stream)
        else:
            self._starving.discard(stream)

    def wait_for(self, step: Callable[[], T | None], blocked_on: Callable[[], tuple[str, ExpertKey]]) -> T:
        """Call step(), under the lock, after every change until it gives something; return that.

        `blocked_on()`: "read" or "slot", and the key, that is waited for. Counts the time as stalled.
        Raises: StoreError naming the key when the same thing is waited for too long.
        """
        cause, deadline = None, 0.0
        while True:
            with self._lock:
                self._apply_arrivals()
                result = step()
                if result is not None:
                    return result
                now, last_cause, cause = time.monotonic(), cause, blocked_on()
                if cause != last_cause:
                    deadline = now + self._timeout_sec
                elif now >= deadline:
                    raise _too_late(*cause, self._timeout_sec)
                version = self._loads.version
                self._waiters += 1
            try:
                self._loads.wait(version, deadline - now)
            finally:
                with self._lock:
                    self._waiters -= 1
                    self._counts["stall_seconds"] += time.monotonic() - now

    def _apply_arrivals(self) -> None:
        changed = False
        for block, nbytes in self._loads.results():
            changed = True
            if block.error is None:
                self._blocks.arrive(block, nbytes)
                self._counts["bytes_read"] += nbytes
            else:
                self._blocks.drop(block)
            self._guesses.arrive(block)
        if changed and self._waiters:
            self._loads.notify()

    def _make_room(self, key: ExpertKey, claim: Claim) -> Block | None:
        """A slot for a demand, which outranks a guess whose read has not begun. The last guess is the least certain."""
        block = self._blocks.add(key, claim, self._evicted)
        if block is None and any(self._cancel(guess) for guess in reversed(list(self._guesses.in_flight))):
            block = self._blocks.add(key, Claim.FREE, self._evicted)
        return block

    def _cancel(self, block: Block) -> bool:
        """Whether the read had not begun; its slot is then free."""
        if not self._loads.cancel(block):
            return False
        self._blocks.drop(block)
        self._guesses.arrive(block)
        return True

    def _evicted(self, block: Block) -> None:
        self._counts["evictions"] += 1
        self._guesses.judge(block, useful=False)

    def _check_open(self) -> None:
        if self._closed:
            raise StoreError("the expert cache is closed; load the model again")


def _read_of(block: Block) -> tuple[str, ExpertKey]:
    return "read", block.key


def _too_late(cause: str, key: ExpertKey, timeout_sec: float) -> StoreError:
    if cause == "read":
        what = f"its read has not ended after {timeout_sec:g} s; check the disk and try again"
    else:
        what = f"no slot of the expert cache became free within {timeout_sec:g} s; give a larger --expert-cache"
    return StoreError(f"layer {key.layer} expert {key.expert}: {what}")
