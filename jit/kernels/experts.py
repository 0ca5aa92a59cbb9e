"""The expert feed-forward: gate and up, activation, down, and the weighted sum in rank order.

Each (token, rank) pair has its own output row, so experts may run in any order and the result is the same to the bit.
"""

from __future__ import annotations

from dataclasses import dataclass

import llvmlite.ir as ir

from colibri_offload.jit.emit import Fn, Struct, Val, Var, f32, i32, i64, ptr, vec
from colibri_offload.jit.formats import ROWS, Format
from colibri_offload.jit.kernels.activations import Activations
from colibri_offload.jit.kernels.dot import emit_dot, for_each_tile
from colibri_offload.jit.kernels.math import sigmoid, silu
from colibri_offload.jit.targets import Target

# One expert and its tokens. record: the expert block; x: packed inputs; h: room for the packed hidden units;
# rows: i32, output row of each token (padding tokens point to a row that nobody reads).
Segment = Struct("Segment", record=ptr, x=ptr, h=ptr, rows=ptr, full_tiles=i64, tail_tile=i64)
# Offsets of the sections in a record, geometry, and where outputs go. bias_at < 0: no biases.
Experts = Struct(
    "Experts", segments=ptr, y=ptr, y_stride=i64, x_blocks=i64, h_blocks=i64, hidden_blocks=i64, gate_steps=i64,
    up_steps=i64,
    down_steps=i64, down_at=i64, bias_at=i64, groups=i64, up_chunk=i64, up_tasks=i64, down_chunk=i64, down_tasks=i64,
)  # fmt: skip


@dataclass(frozen=True)
class ExpertActivation:
    """kind "silu": silu(g)·u; "swiglu_oai": g ≤ limit, |u| ≤ limit, (u + 1)·g·sigmoid(alpha·g)."""

    kind: str
    alpha: float = 1.0
    limit: float = 0.0

    def emit(self, k: Fn, gate: Val, up: Val) -> Val:
        if self.kind == "silu":
            return silu(k, gate) * up
        gate, up = gate.min(self.limit), up.min(self.limit).max(-self.limit)
        return (up + 1.0) * (gate * sigmoid(k, gate * self.alpha))


def emit_experts_up(
    module: ir.Module,
    target: Target,
    gate: Format,
    up: Format,
    x_act: Activations,
    h_act: Activations,
    f: ExpertActivation,
) -> None:
    """Task: `up_chunk` blocks of 32 hidden units of one expert, all its tokens. Gate and up are interleaved per
    32 rows."""
    gate_dot = emit_dot(module, target, gate, x_act)
    up_dot = gate_dot if up is gate else emit_dot(module, target, up, x_act)
    lanes = target.lanes
    t_vec = vec(f32, lanes)
    with Fn(module, target, "experts_up", {"args": ptr, "task": i64}) as k:
        a = Experts.at(k.args)
        s = Segment.at(a.segments + (k.task // a.up_tasks) * Segment.nbytes)
        record, x, h, full, tail = s.record, s.x, s.h, s.full_tiles, s.tail_tile
        x_blocks, h_blocks, blocks, bias_at = a.x_blocks, a.h_blocks, a.hidden_blocks, a.bias_at
        gate_steps, up_steps = a.gate_steps, a.up_steps
        gate_group, up_group = gate_steps * gate.tile_nbytes, up_steps * up.tile_nbytes
        first = k.task % a.up_tasks * a.up_chunk
        out = k.scratch(4 * 8 * 64)
        with k.range(first, (first + a.up_chunk).min(blocks)) as block:
            w = record + block * (gate_group + up_group) * 2
            bias = record + bias_at + block * 128

            def one_tile(tokens: int, token: Val, w: Val = w, bias: Val = bias, block: Val = block) -> None:
                xt = x + token * (x_blocks * x_act.token_nbytes)
                for i in range(2):  # in the order of memory: decode is one stream for the prefetchers
                    gate_dot.call(k, tokens, w + gate_group * i, xt, gate_steps, out + 512 * i)
                for i in range(2):
                    up_dot.call(k, tokens, w + gate_group * 2 + up_group * i, xt, up_steps, out + 512 * (2 + i))
                packed = h + (token * h_blocks * h_act.token_nbytes + block * h_act.block_nbytes(tokens))
                with k.range(0, tokens) as t:
                    units = []
                    for part in range(32 // lanes):
                        i, at = part * lanes // ROWS, part * lanes % ROWS * 4
                        g, u = (k.var((out + t * 64).load(t_vec, 512 * (m + i) + at, 4)) for m in (0, 2))
                        with k.when(bias_at >= 0):
                            for v, section in ((g, k.const(i64, 0)), (u, blocks * 128)):
                                v.set(v() + (bias + section).load(t_vec, 4 * lanes * part, 4))
                        units.append(f.emit(k, g(), u()))
                    h_act.pack(k, units, packed, tokens, t)
                # the down product reads whole steps: blocks behind the last hidden unit are zero
                with k.when((block + 1).eq(blocks)), k.range(blocks, h_blocks) as rest, k.range(0, tokens) as t:
                    at_rest = h + (token * h_blocks * h_act.token_nbytes + rest * h_act.block_nbytes(tokens))
                    h_act.pack(k, [k.zero(t_vec)] * (32 // lanes), at_rest, tokens, t)

            for_each_tile(k, full, tail, one_tile)


def emit_experts_down(module: ir.Module, target: Target, fmt: Format, h_act: Activations) -> None:
    """Task: `down_chunk` row groups of one expert, all its tokens, into the pairs' own rows of y."""
    dots = emit_dot(module, target, fmt, h_act)
    lanes = target.lanes
    with Fn(module, target, "experts_down", {"args": ptr, "task": i64}) as k:
        a = Experts.at(k.args)
        s = Segment.at(a.segments + (k.task // a.down_tasks) * Segment.nbytes)
        h, rows, full, tail = s.h, s.rows, s.full_tiles, s.tail_tile
        steps, h_blocks, groups, y0, y_stride, bias_at = a.down_steps, a.h_blocks, a.groups, a.y, a.y_stride, a.bias_at
        down, bias = s.record + a.down_at, s.record + bias_at + a.hidden_blocks * 256
        first = k.task % a.down_tasks * a.down_chunk
        out = k.scratch(8 * 64)
        with k.range(first, (first + a.down_chunk).min(groups)) as g:
            w = down + g * (steps * fmt.tile_nbytes)

            def one_tile(tokens: int, token: Val, w: Val = w, g: Val = g) -> None:
                dots.call(k, tokens, w, h + token * (h_blocks * h_act.token_nbytes), steps, out)
                with k.range(0, tokens) as t:
                    row = (rows + (token + t) * 4).load(i32).sext(i64)
                    y = y0 + (row * y_stride + g * 64)
                    for part in range(ROWS // lanes):
                        at = 4 * lanes * part
                        v = k.var((out + t * 64).load(vec(f32, lanes), at, 4))
                        with k.when(bias_at >= 0):
                            v.set(v() + (bias + g * 64).load(vec(f32, lanes), at, 4))
                        y.store(v(), at, 4)

            for_each_tile(k, full, tail, one_tile)


# ids: i32 [count]; table: ptr per expert of the layer. Writes the records of segments 0 … count−1.
Resolve = Struct("Resolve", ids=ptr, table=ptr, segments=ptr, count=i64)


def emit_resolve(module: ir.Module, target: Target) -> None:
    """One task: the chosen experts' record addresses, looked up natively, so that a whole token can run in one call."""
    with Fn(module, target, "resolve", {"args": ptr, "task": i64}) as k:
        a = Resolve.at(k.args)
        ids, table, segments = a.ids, a.table, a.segments
        with k.range(0, a.count) as i:
            expert = (ids + i * 4).load(i32).sext(i64)
            (segments + i * Segment.nbytes).store((table + expert * 8).load(ptr))


# x[t] += Σ_r weights[t][r] · y[t·ranks + r] + gate(t) · shared[t], in that order. Strides in bytes; columns multiple
# of 16 (rows are padded). shared null: none; shared_gate: f32 logits, gate_stride bytes apart, through a sigmoid
# (null: 1).
Combine = Struct(
    "Combine", x=ptr, y=ptr, weights=ptr, shared=ptr, shared_gate=ptr, x_stride=i64, y_stride=i64, weights_stride=i64,
    gate_stride=i64, ranks=i64, columns=i64, chunk=i64, tasks_per_token=i64,
)  # fmt: skip


def emit_combine(module: ir.Module, target: Target) -> None:
    """Task: `chunk` columns of one token."""
    lanes = target.lanes
    t_vec = vec(f32, lanes)
    with Fn(module, target, "combine", {"args": ptr, "task": i64}) as k:
        a = Combine.at(k.args)
        token, first = k.task // a.tasks_per_token, k.task % a.tasks_per_token * a.chunk
        x, weights, ranks, y_stride = (
            a.x + token * a.x_stride,
            a.weights + token * a.weights_stride,
            a.ranks,
            a.y_stride,
        )
        y, shared = a.y + token * ranks * y_stride, a.shared
        has_shared = k.not_null(shared)
        factor = k.var(k.const(f32, 1.0))
        with k.when(k.not_null(a.shared_gate)):
            factor.set(sigmoid(k, (a.shared_gate + token * a.gate_stride).load(f32)))
        with k.range(first, (first + a.chunk).min(a.columns), lanes) as c:
            at = c * 4
            total: Var = k.var(k.zero(t_vec))
            with k.range(0, ranks) as r:
                w = (weights + r * 4).load(f32).splat(lanes)
                total.set(w.fma((y + (r * y_stride + at)).load(t_vec, 0, 4), total()))
            with k.when(has_shared):
                total.set(factor().splat(lanes).fma((shared + (token * y_stride + at)).load(t_vec, 0, 4), total()))
            (x + at).store((x + at).load(t_vec, 0, 4) + total(), 0, 4)
