"""Which tokens go to which expert: the tables that gather their inputs and place their outputs."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from colibri_offload.graph.context import Context
from colibri_offload.graph.ops import Builder, x_blocks
from colibri_offload.jit.kernels.activations import Activations, padded_tokens, tile_counts
from colibri_offload.jit.kernels.pack import PackTokens


class PairTables:
    """(token, rank) pairs grouped by expert. Positions count packed tokens; each expert starts at its own.

    One decoded token needs no gathering: every expert reads the same packed token.
    """

    def __init__(self, c: Context, hidden: int, act: Activations, capacity: int):
        self._index = c.workspace.array("pair_index", (capacity,), np.int32)
        self._rows = c.workspace.array("pair_rows", (capacity,), np.int32)
        self._tiles = c.workspace.array("pair_tiles", (capacity, 2), np.int32)
        self.rows_address = c.workspace["pair_rows"]
        self._x, self._token_nbytes = c.workspace["pair_x"], x_blocks(hidden) * act.token_nbytes
        self._act, self._hidden = act, hidden
        self.tile_count = 0

    def add_gather(self, c: Context, b: Builder) -> None:
        """Pack the gathered tokens out of the normed rows."""
        args = b.add(
            c.kernels.pack_tokens(self._act), PackTokens, lambda n: self.tile_count,
            src=c.step.normed.address, index=c.workspace["pair_index"], tiles=c.workspace["pair_tiles"], out=self._x,
            src_stride=c.step.normed.stride, columns=self._hidden, x_blocks=x_blocks(self._hidden),
        )  # fmt: skip
        args["tokens"], args["tiles_per_batch"] = 1 << 40, 1 << 40  # the tables bound the work

    def begin(self, ids: np.ndarray) -> list[int]:
        """Take the routing of a step, int [n, K]; returns the distinct experts."""
        self._n, self._k = ids.shape
        self.tile_count = 0
        if self._n == 1:
            experts = ids[0].tolist()
            self._rank = {e: r for r, e in enumerate(experts)}
            return experts
        flat = ids.reshape(-1)
        self._order = np.argsort(flat, kind="stable").astype(np.int32)
        experts, starts, counts = np.unique(flat[self._order], return_index=True, return_counts=True)
        self._span = {int(e): (int(s), int(c)) for e, s, c in zip(experts, starts, counts, strict=True)}
        return list(self._span)

    def select(self, experts: Sequence[int], whole: int) -> tuple[int | list[int], list[int], list[int]]:
        """Lay out a batch: packed inputs, first positions, token counts. `whole`: address of the packed step."""
        if self._n == 1:
            self._rows[: len(experts)] = [self._rank[e] for e in experts]
            return whole, list(range(len(experts))), [1] * len(experts)
        first, counts, at = [], [], 0
        tiles: list[tuple[int, int]] = []
        for e in experts:
            start, count = self._span[e]
            pairs, size = self._order[start : start + count], padded_tokens(count)
            self._index[at : at + count], self._index[at + count : at + size] = pairs // self._k, -1
            self._rows[at : at + count], self._rows[at + count : at + size] = pairs, self._n * self._k
            full, tail = tile_counts(count)
            tiles += [(at + 8 * i, 8) for i in range(full)]
            if tail:
                tiles.append((at + 8 * full, tail))
            first.append(at)
            counts.append(count)
            at += size
        self.tile_count = len(tiles)
        self._tiles[: len(tiles)] = tiles
        return [self._x + f * self._token_nbytes for f in first], first, counts
