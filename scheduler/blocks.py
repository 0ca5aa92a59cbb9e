"""Which expert block lies in which slot, who holds it, and which one makes room. No threads, no reads: see cache.py."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from dataclasses import dataclass
from enum import IntEnum
from functools import partial

from colibri_offload.scheduler.floors import layer_floors
from colibri_offload.scheduler.policies import EvictionPolicy
from colibri_offload.scheduler.victims import VictimQueue
from colibri_offload.storage.base import ExpertKey


@dataclass(slots=True, eq=False)
class Block:
    """A block that has a slot: being read until `ready`, then resident. Once `gone`, the slot is another's.

    leases: how many use it or wait for it; a leased block keeps its slot.
    expected: the next pass of its layer probably needs it.
    prefetched: it was read on a guess, and its `nbytes` are not yet counted as used or wasted.
    queued: it waits among the next victims.
    """

    key: ExpertKey
    slot: int
    ready: bool = False
    gone: bool = False
    leases: int = 0
    expected: bool = False
    prefetched: bool = False
    was_useful: bool | None = None
    queued: bool = False
    nbytes: int = 0
    future: Future[int] | None = None
    error: BaseException | None = None


class Claim(IntEnum):
    """How far a newcomer may go to get a slot."""

    FREE = 0  # free slots only
    ORDINARY = 1  # evict, but neither an expected block nor one of another layer's last `floor`
    ANY = 2  # evict whatever is not leased, sparing the above as long as there is something else


class BlockTable:
    """Slots 0 … slots−1 and the blocks in them. The caller holds a lock around every call.

    `experts_per_layer`: layer → number of experts. `floor`: see floors.py.
    """

    def __init__(self, slots: int, experts_per_layer: Mapping[int, int], policy: EvictionPolicy, floor: int) -> None:
        self._slots, self._free = slots, list(reversed(range(slots)))
        self._experts = dict(experts_per_layer)
        self._layers: dict[int, dict[int, Block]] = {layer: {} for layer in experts_per_layer}
        self._policy = policy
        self._floors = layer_floors(slots, experts_per_layer, floor)
        self._ordinary = VictimQueue(self._layers, policy.rank)
        self._expected = VictimQueue(self._layers, policy.rank)

    @property
    def count(self) -> int:
        """Blocks that have a slot, resident or in flight."""
        return self._slots - len(self._free)

    def find(self, key: ExpertKey) -> Block | None:
        return self._layers[key.layer].get(key.expert)

    def add(self, key: ExpertKey, claim: Claim, on_evict: Callable[[Block], None]) -> Block | None:
        """A slot for an absent block, now to be read; None when `claim` finds none. Tells whom that evicted."""
        if not 0 <= key.expert < self._experts[key.layer]:
            raise KeyError(f"layer {key.layer} has experts 0 to {self._experts[key.layer] - 1}, not {key.expert}")
        if not self._free:
            victim = self._victim(key.layer, claim)
            if victim is None:
                return None
            self.drop(victim)
            self._policy.on_evict(victim.key)
            on_evict(victim)
        block = Block(key, self._free.pop())
        self._layers[key.layer][key.expert] = block
        return block

    def arrive(self, block: Block, nbytes: int) -> None:
        """The read is done: the block is resident."""
        block.ready, block.nbytes = True, nbytes
        self._policy.on_insert(block.key)
        self._enqueue(block)

    def drop(self, block: Block) -> None:
        """Free the slot of a block that nobody reads into or computes from."""
        block.gone = True
        del self._layers[block.key.layer][block.key.expert]
        self._free.append(block.slot)

    def lease_resident(self, layer: int, experts: Iterable[int]) -> tuple[list[Block], list[int]]:
        """Lease and use the resident ones of `experts`, and list the others. Flat, because every hit takes this way."""
        blocks, on_hit = self._layers[layer], self._policy.on_hit
        held, absent = [], []
        for expert in experts:
            block = blocks.get(expert)
            if block is not None and block.ready:
                block.leases += 1
                on_hit(block.key)
                held.append(block)
            else:
                absent.append(expert)
        return held, absent

    def lease(self, block: Block) -> None:
        """Pin a block, ready or not, until release."""
        block.leases += 1

    def use(self, block: Block) -> None:
        """Tell the policy that a leased block is handed out."""
        self._policy.on_hit(block.key)

    def release(self, blocks: Iterable[Block]) -> None:
        """Undo one lease of each."""
        for block in blocks:
            block.leases -= 1
            if not block.queued:
                self._enqueue(block)

    def expect(self, block: Block, expected: bool) -> None:
        """Protect a block as one that will be needed soon, or stop protecting it."""
        if block.queued:
            self._queue(block).withdraw(block.key)
            block.queued = False
        block.expected = expected
        self._enqueue(block)

    def _queue(self, block: Block) -> VictimQueue:
        return self._expected if block.expected else self._ordinary

    def _enqueue(self, block: Block) -> None:
        """A leased block may stay in a queue, but does not enter one."""
        if block.ready and not block.leases and not block.gone:
            self._queue(block).offer(block.key)
            block.queued = True

    def _victim(self, layer: int, claim: Claim) -> Block | None:
        """In this order: within the floors the ordinary, the expected; then below the floors the same."""
        if claim is Claim.FREE:
            return None
        spare = partial(self._may_lose, layer)
        victim = self._take(self._ordinary, spare)
        if victim is None and claim is Claim.ANY:
            victim = (
                self._take(self._expected, spare)
                or self._take(self._ordinary, lambda _: True)
                or self._take(self._expected, lambda _: True)
            )
        return victim

    def _may_lose(self, newcomer: int, layer: int) -> bool:
        return layer == newcomer or len(self._layers[layer]) > self._floors[layer]

    def _take(self, queue: VictimQueue, may_lose: Callable[[int], bool]) -> Block | None:
        """The first block in a queue without a lease. Those with one leave it; their release brings them back."""
        while (key := queue.take(may_lose)) is not None:
            block = self._layers[key.layer][key.expert]
            block.queued = False
            if not block.leases:
                return block
        return None
