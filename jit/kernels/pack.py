"""Bringing data into its compute layout: weights from a file's rows, activations from float rows (with their norm)."""

from __future__ import annotations

from collections.abc import Sequence

import llvmlite.ir as ir

from colibri_offload.jit.emit import Fn, Struct, Val, f32, i32, i64, ptr, vec
from colibri_offload.jit.emit.types import i8, i16
from colibri_offload.jit.formats import ROWS, Format, Move
from colibri_offload.jit.kernels.activations import TILES, Activations
from colibri_offload.jit.targets import Target

WORDS = {1: i8, 2: i16, 4: i32}

# rows: count of rows at `src`, row_stride bytes apart; task t takes the 16 rows from t·row_step on and writes a group
# at dst + t·dst_stride. blocks: blocks in a source row; zeros: block_nbytes of zeros.
PackWeights = Struct(
    "PackWeights", src=ptr, dst=ptr, zeros=ptr, rows=i64, row_stride=i64, row_step=i64, dst_stride=i64, blocks=i64,
    steps=i64,
)  # fmt: skip


def emit_pack_weights(module: ir.Module, target: Target, fmt: Format) -> None:
    """Task: one group of 16 rows of the file's layout → the compute layout. Rows and blocks beyond the end read
    `zeros`."""
    per_step = fmt.step // fmt.block_elements
    quads, others = zip(*(split_moves(fmt.moves(b)) for b in range(per_step)), strict=True)
    with Fn(module, target, "pack_weights", {"args": ptr, "task": i64}) as k:
        a = PackWeights.at(k.args)
        src, zeros, rows, row_stride, blocks = a.src, a.zeros, a.rows, a.row_stride, a.blocks
        steps, dst, first = a.steps, a.dst + k.task * a.dst_stride, k.task * a.row_step

        def move(tile: Val, p: Val, r: Val, moves: Sequence[Move]) -> None:
            for m in moves:
                w = p.load(WORDS[m.width], m.src, 1)
                (tile + r * m.width).store(m.fn(w) if m.fn else w, m.dst, 1)

        with k.range(0, steps) as step:
            tile = dst + step * fmt.tile_nbytes
            whole = (step + 1) * per_step <= blocks
            whole = Val(k, k.b.and_(whole.v, (first + ROWS <= rows).v))
            with k.either(whole) as (yes, no):
                with yes:
                    base = src + (first * row_stride + step * (per_step * fmt.block_nbytes))
                    for b in range(per_step):
                        transpose_quads(k, tile, base + b * fmt.block_nbytes, row_stride, quads[b])
                    with k.range(0, ROWS) as r:
                        for b in range(per_step):
                            move(tile, base + (r * row_stride + b * fmt.block_nbytes), r, others[b])
                with no, k.range(0, ROWS) as r:
                    row = first + r
                    for b in range(per_step):
                        block = step * per_step + b
                        inside = (row < rows).select(block < blocks, k.const(ir.IntType(1), 0))
                        p = inside.select(src + (row * row_stride + block * fmt.block_nbytes), zeros)
                        move(tile, p, r, fmt.moves(b))


def split_moves(moves: list[Move]) -> tuple[list[list[Move]], list[Move]]:
    """Runs of four 4-byte moves from neighbouring source words, and the rest."""
    quads, others, run = [], [], []  # type: ignore[var-annotated]
    for m in moves:
        if m.width == 4 and (not run or m.src == run[-1].src + 4):
            run.append(m)
            if len(run) == 4:
                quads.append(run)
                run = []
        else:
            others += run
            run = []
            others.append(m)
    return quads, others + run


def transpose_quads(k: Fn, tile: Val, block: Val, row_stride: Val, quads: Sequence[list[Move]]) -> None:
    """Four words of 16 rows at a time: 16 bytes of each row, transposed in registers, stored 16 words at once."""
    t = vec(i32, 4)
    starts = [block + row_stride * r if r else block for r in range(ROWS)]
    for quad in quads:
        # part i: rows i, 4+i, 8+i, 12+i; its 128-bit lane l holds the words of row 4l+i
        parts = []
        for i in range(4):
            some = [starts[4 * lane + i].load(t, quad[0].src, 1) for lane in range(4)]
            parts.append(some[0].concat(*some[1:]))
        lanes = range(4)
        low = [p.shuffle([x for n in lanes for x in (4 * n, 16 + 4 * n, 4 * n + 1, 17 + 4 * n)], q)
               for p, q in ((parts[0], parts[1]), (parts[2], parts[3]))]  # fmt: skip
        high = [p.shuffle([x for n in lanes for x in (4 * n + 2, 18 + 4 * n, 4 * n + 3, 19 + 4 * n)], q)
                for p, q in ((parts[0], parts[1]), (parts[2], parts[3]))]  # fmt: skip
        for j, m in enumerate(quad):
            p, q = high if j > 1 else low
            at = 2 * (j % 2)
            order = [x for n in lanes for x in (4 * n + at, 4 * n + at + 1, 16 + 4 * n + at, 17 + 4 * n + at)]
            word = p.shuffle(order, q)
            tile.store(m.fn(word) if m.fn else word, m.dst, 4)


# src: f32 rows src_stride bytes apart, of `columns` columns; index: i32 row numbers (−1: no token, zeros) or null;
# weight: f32 [columns] or null. tiles: (first token, T) per task as i32 pairs, or null: full_tiles of 8, then the tail.
# The packed tokens go to `out` (null: none), x_blocks blocks each; float rows of the normed values to `rows_out`
# (null: none). batches: like Matmul's, tiles_per_batch tasks each.
PackTokens = Struct(
    "PackTokens",
    src=ptr,
    index=ptr,
    tiles=ptr,
    weight=ptr,
    out=ptr,
    rows_out=ptr,
    src_stride=i64,
    rows_out_stride=i64,
    columns=i64,
    x_blocks=i64,
    tokens=i64,
    full_tiles=i64,
    tail_tile=i64,
    tiles_per_batch=i64,
    src_batch=i64,
    out_batch=i64,
    eps=f32,
)


def load_block(k: Fn, row: Val, block: Val, columns: Val) -> list[Val]:
    """Columns 32·block … of a float row as vectors of `lanes`; columns beyond the end are 0."""
    lanes = k.target.lanes
    t = vec(f32, lanes)
    buffer = k.scratch(128)
    whole = block * 32 + 32 <= columns
    with k.either(whole) as (yes, no):
        with yes:
            for j in range(32 // lanes):
                buffer.store((row + block * 128).load(t, 4 * lanes * j, 4), 4 * lanes * j)
        with no:
            for j in range(32 // lanes):
                buffer.store(k.zero(t), 4 * lanes * j)
            with k.range(block * 32, columns) as c:
                (buffer + (c - block * 32) * 4).store((row + c * 4).load(f32))
    return [buffer.load(t, 4 * lanes * j) for j in range(32 // lanes)]


def emit_pack_tokens(module: ir.Module, target: Target, act: Activations) -> None:
    """Task: one tile. x → x / sqrt(mean(x²) + eps) · weight (when there is a weight), then the activation layout.

    Source: Zhang & Sennrich 2019, arXiv:1910.07467. Each token's sums run over its own columns only, in column order.
    """
    lanes = target.lanes
    t_vec = vec(f32, lanes)
    with Fn(module, target, "pack_tokens", {"args": ptr, "task": i64}) as k:
        a = PackTokens.at(k.args)
        batch, tile = k.task // a.tiles_per_batch, k.task % a.tiles_per_batch
        src, index, weight, columns = a.src + batch * a.src_batch, a.index, a.weight, a.columns
        out, rows_out, x_blocks, tokens, full = (
            a.out + batch * a.out_batch,
            a.rows_out,
            a.x_blocks,
            a.tokens,
            a.full_tiles,
        )
        has_out, has_rows, has_weight = k.not_null(a.out), k.not_null(rows_out), k.not_null(weight)
        used = (columns + 31) // 32

        def row_of(token: Val) -> Val:
            """The token's row number, −1 for padding."""
            number = k.var((token < tokens).select(token, k.const(i64, -1)))
            with k.when(k.not_null(index)), k.when(number() >= 0):
                number.set((index + token * 4).load(i32).sext(i64))
            return number()

        def one_token(size: int, token: Val, row_number: Val, t: Val, packed: Val) -> None:
            row = src + row_number * a.src_stride
            inverse = k.var(k.const(f32, 1.0))
            with k.when(has_weight):
                squares = [k.var(k.zero(t_vec)) for _ in range(32 // lanes)]
                with k.range(0, used) as b:
                    for s, v in zip(squares, load_block(k, row, b, columns), strict=True):
                        s.set(v.fma(v, s()))
                total = squares[0]()
                for s in squares[1:]:
                    total = total + s()
                mean = total.sum() / Val(k, k.b.sitofp(columns.v, f32))
                inverse.set(1.0 / (mean + a.eps).sqrt())
            with k.range(0, used) as b:
                x = load_block(k, row, b, columns)
                normed = [k.var(v) for v in x]
                with k.when(has_weight):
                    for n, v, w in zip(normed, x, load_block(k, weight, b, columns), strict=True):
                        n.set(v * inverse().splat(lanes) * w)
                values = [n() for n in normed]
                with k.when(has_rows):
                    at = rows_out + (token * a.rows_out_stride + b * 128)
                    with k.either(b * 32 + 32 <= columns) as (yes, no):
                        with yes:
                            for j, v in enumerate(values):
                                at.store(v, 4 * lanes * j, 4)
                        with no:
                            tail = k.scratch(128)
                            for j, v in enumerate(values):
                                tail.store(v, 4 * lanes * j)
                            with k.range(0, columns - b * 32) as c:
                                (at + c * 4).store((tail + c * 4).load(f32))
                with k.when(has_out):
                    act.pack(k, values, packed + b * act.block_nbytes(size), size, t)
            with k.when(has_out):
                zero_blocks(size, t, packed, used)

        def zero_blocks(size: int, t: Val, packed: Val, start: Val) -> None:
            with k.range(start, x_blocks) as b:
                act.pack(k, [k.zero(t_vec)] * (32 // lanes), packed + b * act.block_nbytes(size), size, t)

        def one_tile(size: int, first: Val) -> None:
            packed = out + first * (x_blocks * act.token_nbytes)
            with k.range(0, size) as t:
                token = first + t
                row_number = row_of(token)
                with k.either(row_number >= 0) as (yes, no):
                    with yes:
                        one_token(size, token, row_number, t, packed)
                    with no, k.when(has_out):
                        zero_blocks(size, t, packed, k.const(i64, 0))

        first, size = k.var(full * 8), k.var(a.tail_tile)
        with k.when(tile < full):
            first.set(tile * 8)
            size.set(k.const(i64, 8))
        with k.when(k.not_null(a.tiles)):
            entry = a.tiles + tile * 8
            first.set(entry.load(i32).sext(i64))
            size.set(entry.load(i32, 4).sext(i64))
        for n in TILES:
            with k.when(size().eq(n)):
                one_tile(n, first())
