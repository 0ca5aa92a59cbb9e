"""Float rows out of a weight matrix in the compute layout: embedding look-up (and, for tests, whole matrices)."""

from __future__ import annotations

import llvmlite.ir as ir

from colibri_offload.jit.emit import Fn, Struct, Val, f32, i32, i64, ptr
from colibri_offload.jit.formats import ROWS, Format
from colibri_offload.jit.formats.base import QuantFormat
from colibri_offload.jit.formats.floats import FloatFormat
from colibri_offload.jit.targets import Target

# w: the matrix; ids: i32 row numbers; out: f32 rows out_stride bytes apart, `columns` columns each.
GatherRows = Struct("GatherRows", w=ptr, ids=ptr, out=ptr, steps=i64, columns=i64, out_stride=i64)


def emit_gather_rows(module: ir.Module, target: Target, fmt: Format) -> None:
    """Task: one row. 16 rows are dequantised to take one of them: a tile is read whole either way."""
    lanes = target.lanes
    with Fn(module, target, "gather_rows", {"args": ptr, "task": i64}) as k:
        a = GatherRows.at(k.args)
        row = (a.ids + k.task * 4).load(i32).sext(i64)
        group = a.w + row // ROWS * (a.steps * fmt.tile_nbytes)
        out, columns = a.out + k.task * a.out_stride, a.columns
        lane = row % ROWS
        values = k.scratch(32 * lanes * 4)

        def emit_block(floats: list[Val], first_column: Val, sub: int) -> None:
            for c, v in enumerate(floats):
                values.store(v, c * lanes * 4)
            with k.range(first_column, (first_column + 32).min(columns)) as c:
                at = ((c - first_column) * lanes + (lane - sub * lanes)) * 4
                (out + c * 4).store((values + at).load(f32))

        with k.range(0, a.steps) as step:
            tile = group + step * fmt.tile_nbytes
            for sub in range(ROWS // lanes):
                with k.when((lane // lanes).eq(sub)):
                    if isinstance(fmt, FloatFormat):
                        emit_block([fmt.column(k, tile, c, sub) for c in range(32)], step * 32, sub)
                    elif isinstance(fmt, QuantFormat):
                        for block in fmt.blocks(k, tile, sub):
                            floats: list[Val] = []
                            for part in block.parts:
                                for quad in block.quads[part.first : part.first + part.count]:
                                    for q in fmt.quad_floats(quad, part.zero):
                                        w = q * part.scale
                                        floats.append(w - part.offset if part.offset is not None else w)
                            emit_block(floats, (k.val(block.index, i64)) * 32 + step * fmt.step, sub)
