"""y[t] = W·x[t] (+ bias) (+ y[t]): matrix–vector and matrix–matrix products in one kernel."""

from __future__ import annotations

import llvmlite.ir as ir

from colibri_offload.jit.emit import Fn, Struct, Val, f32, i64, ptr, vec
from colibri_offload.jit.formats import ROWS, Format
from colibri_offload.jit.kernels.activations import Activations
from colibri_offload.jit.kernels.dot import emit_dot, for_each_tile
from colibri_offload.jit.targets import Target

# w: groups of 16 rows; x: packed tokens, x_blocks blocks of 32 columns each; y: f32 rows of y_stride bytes, 16·groups
# wide. bias: f32 [16·groups] or null. batches repeat the product with other pointers (one per attention head, say):
# task = batch · tasks_per_batch + chunk, a chunk is `chunk` groups.
Matmul = Struct(
    "Matmul", w=ptr, x=ptr, y=ptr, bias=ptr, groups=i64, steps=i64, x_blocks=i64, full_tiles=i64, tail_tile=i64,
    y_stride=i64, accumulate=i64, chunk=i64, tasks_per_batch=i64, w_batch=i64, x_batch=i64, y_batch=i64,
)  # fmt: skip


def emit_matmul(module: ir.Module, target: Target, fmt: Format, act: Activations) -> None:
    """Task: one chunk of row groups against all tokens. Work is never split over columns: every sum has one order."""
    dots = emit_dot(module, target, fmt, act)
    lanes = target.lanes
    with Fn(module, target, "matmul", {"args": ptr, "task": i64}) as k:
        a = Matmul.at(k.args)
        batch, chunk = k.task // a.tasks_per_batch, k.task % a.tasks_per_batch
        w0, x0, y0 = a.w + batch * a.w_batch, a.x + batch * a.x_batch, a.y + batch * a.y_batch
        bias, groups, steps, y_stride = a.bias, a.groups, a.steps, a.y_stride
        full, tail, accumulate, x_blocks = a.full_tiles, a.tail_tile, a.accumulate, a.x_blocks
        group_nbytes = steps * fmt.tile_nbytes
        out = k.scratch(8 * 64)
        first = chunk * a.chunk
        with k.range(first, (first + a.chunk).min(groups)) as g:
            w = w0 + g * group_nbytes

            def one_tile(tokens: int, token: Val, w: Val = w, g: Val = g) -> None:
                # tiles of 8 lie one after another, the tail behind them: a token takes the same room everywhere
                dots.call(k, tokens, w, x0 + token * (x_blocks * act.token_nbytes), steps, out)
                for t in range(tokens):
                    y = y0 + ((token + t) * y_stride + g * 64)
                    for s in range(ROWS // lanes):
                        at = 4 * lanes * s
                        v = k.var(out.load(vec(f32, lanes), 64 * t + at, 4))
                        with k.when(k.not_null(bias)):
                            v.set(v() + (bias + (g * 64 + at)).load(vec(f32, lanes), 0, 4))
                        with k.when(accumulate.ne(0)):
                            v.set(v() + y.load(vec(f32, lanes), at, 4))
                        y.store(v(), at, 4)

            for_each_tile(k, full, tail, one_tile)
