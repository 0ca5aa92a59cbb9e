"""Prefetched and protected blocks: what is expected of them, and whether their bytes were used or wasted."""

from __future__ import annotations

from collections.abc import Collection, Iterable, MutableMapping

from colibri_offload.scheduler.blocks import Block, BlockTable


class Guesses:
    """Blocks that the next pass of their layer probably needs. The caller holds the lock; `counts` takes the bytes."""

    def __init__(self, blocks: BlockTable, layers: Iterable[int], counts: MutableMapping[str, float]) -> None:
        self._blocks, self._counts = blocks, counts
        self._expected: dict[int, list[Block]] = {layer: [] for layer in layers}
        self.in_flight: dict[Block, None] = {}  # a dict as an ordered set

    def expect(self, block: Block) -> None:
        """Protect a block until its layer's pass."""
        if not block.expected:
            self._blocks.expect(block, True)
            self._expected[block.key.layer].append(block)

    def add(self, block: Block) -> None:
        """A block whose prefetch has been started."""
        block.prefetched = True
        self.in_flight[block] = None
        self._counts["prefetch_issued"] += 1
        self.expect(block)

    def arrive(self, block: Block) -> None:
        """A read has ended, of whatever kind."""
        self.in_flight.pop(block, None)
        if block.prefetched:
            self._counts["prefetch_bytes_read"] += block.nbytes
            self._attribute(block)

    def claim(self, block: Block) -> bool:
        """A block is asked for. True when it is a prefetch in flight, which from now on is a demand."""
        self.judge(block, useful=True)
        if block not in self.in_flight:
            return False
        del self.in_flight[block]
        return True

    def judge(self, block: Block, useful: bool) -> None:
        """Whether a prefetch was right; the first verdict stands. No effect on other blocks."""
        if block.prefetched and block.was_useful is None:
            block.was_useful = useful
            self._attribute(block)

    def end(self, layer: int, wanted: Collection[int]) -> list[Block]:
        """The layer's pass asks for `wanted`: protect nothing any more. Returns the wrong guesses still in flight."""
        expected, self._expected[layer] = self._expected[layer], []
        for block in expected:
            self.judge(block, block.key.expert in wanted)
            self._blocks.expect(block, False)
        return [block for block in expected if block in self.in_flight and block.key.expert not in wanted]

    def end_all(self) -> list[Block]:
        """Every guess is given up. Returns those that are in flight."""
        return [block for layer in self._expected for block in self.end(layer, ())]

    def expects(self, layer: int) -> bool:
        return bool(self._expected[layer])

    def _attribute(self, block: Block) -> None:
        """Count a prefetch once its bytes and its use are known."""
        if block.ready and block.was_useful is not None:
            self._counts["prefetch_bytes_used" if block.was_useful else "prefetch_bytes_wasted"] += block.nbytes
            block.prefetched = False
