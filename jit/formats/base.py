"""What a weight format is: ggml's row-major blocks on one side, the compute layout on the other.

**R16, the compute layout.** Rows are taken in groups of 16, columns in steps. A tile (16 rows × one step) holds the
16 rows' scales side by side, then their quants with 4 consecutive columns of one row per 32-bit lane ("quads"). One
512-bit load then feeds one dot instruction for 16 rows, and a narrower machine takes the same bytes in pieces. The
size is that of the file (plus padding to 64 bytes, stated by each format). A matrix is its groups one after another,
each a stream of tiles.

Every quantised format is affine: w = scale · (q − zero) − offset, q an unsigned byte.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, ClassVar

import numpy as np

from colibri_offload.jit.emit import Fn, Val, i8, i32, vec

ROWS = 16
COLUMNS = 32  # an activation block


@dataclass(frozen=True)
class Move:
    """Bytes src … src+width of a row's block go to tile byte dst + row·width; `fn` may change the word on its way.

    `fn` is written with operators, so the same lambda serves NumPy arrays and emitted values.
    """

    src: int
    dst: int
    width: int
    fn: Callable[[Any], Any] | None = None


@dataclass(frozen=True)
class Part:
    """Quads first:first+count of a block share one scale. scale, offset: f32 [lanes]; zero: what q means by 0."""

    first: int
    count: int
    scale: Val
    zero: int = 0
    offset: Val | None = None


@dataclass(frozen=True)
class Block:
    """32 columns of `lanes` rows. index: number of the block in its step; quads: 8 × u8 [4·lanes]."""

    index: int | Val
    quads: list[Val]
    parts: list[Part]


class Format(ABC):
    """One format: geometry, the moves from a file's block into a tile, and how kernels load a tile."""

    name: ClassVar[str]
    block_elements: ClassVar[int]
    block_nbytes: ClassVar[int]
    step: ClassVar[int]
    tile_nbytes: ClassVar[int]
    is_float: ClassVar[bool] = False
    wide: ClassVar[bool] = False  # q may exceed 127
    integer: ClassVar[bool] = True  # has an integer dot; otherwise it meets float32 activations, as float formats do

    @abstractmethod
    def moves(self, block: int) -> list[Move]:
        """How block number `block` of a step is placed in the tile."""

    def row_nbytes(self, cols: int) -> int:
        """Bytes of one row in the file's layout."""
        return -(-cols // self.block_elements) * self.block_nbytes

    def group_nbytes(self, cols: int) -> int:
        """Bytes of one group of 16 rows in the compute layout."""
        return -(-cols // self.step) * self.tile_nbytes

    def matrix_nbytes(self, rows: int, cols: int) -> int:
        return -(-rows // ROWS) * self.group_nbytes(cols)

    def pack(self, rows: np.ndarray, cols: int) -> np.ndarray:
        """NumPy twin of the pack kernel: uint8 [rows, row_nbytes] → uint8 [matrix_nbytes]. Padding is zero."""
        n, per_step = len(rows), self.step // self.block_elements
        groups, steps = -(-n // ROWS), -(-cols // self.step)
        padded = np.zeros((groups * ROWS, steps * per_step * self.block_nbytes), np.uint8)
        padded[:n, : rows.shape[1]] = rows
        src = padded.reshape(groups, ROWS, steps, per_step, self.block_nbytes)
        out = np.zeros((groups, steps, self.tile_nbytes), np.uint8)
        for b in range(per_step):
            for m in self.moves(b):
                word = np.ascontiguousarray(src[:, :, :, b, m.src : m.src + m.width]).view(f"<u{m.width}")[..., 0]
                word = m.fn(word).astype(word.dtype) if m.fn else word
                placed = np.ascontiguousarray(word.transpose(0, 2, 1)).view(np.uint8)
                out[:, :, m.dst : m.dst + ROWS * m.width] = placed
        # a row or block of padding must weigh nothing, whatever fn makes of zero bytes: its scale is zero
        return out.reshape(-1)

    def quantize(self, x: np.ndarray) -> np.ndarray:
        """float32 [rows, cols] → uint8 [rows, row_nbytes] in the file's layout."""
        raise NotImplementedError(f"{self.name} has no quantiser")

    @property
    def can_quantize(self) -> bool:
        return type(self).quantize is not Format.quantize


class QuantFormat(Format):
    """A quantised format: yields integer blocks."""

    @abstractmethod
    def blocks(self, k: Fn, tile: Val, sub: int) -> Iterator[Block]:
        """The blocks of rows sub·lanes … of a tile. May open loops: use each block before asking for the next."""

    def quad_floats(self, quad: Val, zero: int) -> list[Val]:
        """The four columns of a quad as f32 [lanes], before the scale: q − zero, exact."""
        w = words(quad)
        return [((w >> 8 * b & 0xFF) - zero).f32() for b in range(4)]

    # ---- loads shared by the formats
    def quad(self, k: Fn, p: Val, offset: int, sub: int) -> Val:
        """u8 [4·lanes]: the words of this sub's rows among the 16 at `offset`."""
        n = 4 * k.target.lanes
        return p.load(vec(i8, n), offset + n * sub, n)

    def per_row(self, k: Fn, p: Val, t: Any, width: int, offset: int, sub: int) -> Val:
        """[lanes] values of `width` bytes, one per row."""
        n = width * k.target.lanes
        return p.load(vec(t, k.target.lanes), offset + n * sub, n)


def low_nibbles(x: Val) -> Val:
    return x & 0x0F


def high_nibbles(x: Val) -> Val:
    return (words(x) >> 4 & 0x0F0F0F0F).bits(x.t)


def words(x: Val) -> Val:
    """The same bytes as 32-bit words."""
    return x.bits(vec(i32, x.lanes // 4))
