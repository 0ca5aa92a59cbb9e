"""The inner product that every weight kernel calls: one group of 16 rows against a tile of T tokens.

There are no software prefetches: a weight stream that is read in the order of memory is left to the hardware, which was
faster on every format (with prefetches 4–8 KiB ahead, Q5_K fell from 26 to 13 GB/s of a ceiling of 28).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import llvmlite.ir as ir

from colibri_offload.jit.emit import Fn, Val, f32, i64, ptr, vec
from colibri_offload.jit.formats import ROWS, Format
from colibri_offload.jit.kernels.activations import TILES, Activations
from colibri_offload.jit.targets import Target


@dataclass(frozen=True)
class DotKernels:
    """dot[T](w, x, steps, out): out[t][row] (f32, rows of 64 bytes) = Σ over `steps` steps of w's 16 rows · token t."""

    fmt: Format
    act: Activations
    by_tile: dict[int, Fn]

    def call(self, k: Fn, tokens: int, w: Val, x: Val, steps: Val, out: Val) -> None:
        k.call(self.by_tile[tokens], w, x, steps, out)


def emit_dot(module: ir.Module, target: Target, fmt: Format, act: Activations) -> DotKernels:
    """Functions for every tile size. The order of summation over columns is the same in all of them."""
    return DotKernels(fmt, act, {t: _emit(module, target, fmt, act, t) for t in TILES})


def _emit(module: ir.Module, target: Target, fmt: Format, act: Activations, tokens: int) -> Fn:
    lanes = target.lanes
    subs = range(ROWS // lanes)
    x_step = fmt.step // 32 * act.block_nbytes(tokens)
    name = f"dot_{fmt.name}_{act.name}_{tokens}"
    with Fn(module, target, name, {"w": ptr, "x": ptr, "steps": i64, "out": ptr}, inline=False) as k:
        # decode streams each tile once for all its rows; prefill keeps the accumulators of one sub in registers
        for together in [list(subs)] if tokens == 1 else [[s] for s in subs]:
            acc = {s: [k.var(k.zero(vec(f32, lanes))) for _ in range(tokens)] for s in together}
            w, x = k.var(k.w), k.var(k.x)
            with k.range(0, k.steps):
                for s in together:
                    act.dot(k, fmt, w(), x(), tokens, s, acc[s])
                w.set(w() + fmt.tile_nbytes)
                x.set(x() + x_step)
            for s in together:
                for t in range(tokens):
                    k.out.store(acc[s][t](), 64 * t + 4 * lanes * s, 4)
    return k


def for_each_tile(k: Fn, full: Val, tail: Val, body: Callable[[int, Val], None]) -> None:
    """body(T, first token) for `full` tiles of 8, then for the tail of 4, 2 or 1."""
    with k.range(0, full) as n:
        body(8, n * 8)
    for size in (4, 2, 1):
        with k.when(tail.eq(size)):
            body(size, full * 8)
