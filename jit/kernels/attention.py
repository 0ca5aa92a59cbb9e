"""RoPE, the paged KV cache and attention over it.

A page holds 64 consecutive positions of one sequence; kv_types.py says how. The softmax runs page by page from the
first visible one, so a query's arithmetic depends on its position alone, never on how the prompt was cut into chunks.
"""

from __future__ import annotations

import llvmlite.ir as ir

from colibri_offload.jit.emit import Fn, Struct, Val, f32, i32, i64, ptr, vec
from colibri_offload.jit.kernels.kv_types import KV_TYPES, PAGE, TILE, lanes_for
from colibri_offload.jit.kernels.math import exp
from colibri_offload.jit.targets import Target


def kv_page_nbytes(kv_heads: int, key_dim: int, value_dim: int, kv_type: str) -> int:
    """Bytes of one layer's part of a page."""
    t = KV_TYPES[kv_type]
    return kv_heads * (t.page_nbytes(key_dim) + t.page_nbytes(value_dim))


# src, dst: f32, token rows *_stride bytes apart, heads *_head bytes apart; cos, sin: f32 [tokens][pairs] or null (no
# rotation); weight: f32 [dim], RMSNorm over the head before rotation, or null.
Rope = Struct(
    "Rope", src=ptr, dst=ptr, weight=ptr, cos=ptr, sin=ptr, src_stride=i64, dst_stride=i64, src_head=i64, dst_head=i64,
    heads=i64, eps=f32, pad=f32,
)  # fmt: skip


def emit_rope(module: ir.Module, target: Target, dim: int, pairs: int, interleaved: bool) -> None:
    """Task: one head of one token: norm (if any), rotate the first 2·pairs elements, copy the rest.

    Source: Su et al. 2021, arXiv:2104.09864.
    """
    with Fn(module, target, "rope", {"args": ptr, "task": i64}) as k:
        a = Rope.at(k.args)
        token, head = k.task // a.heads, k.task % a.heads
        src = a.src + (token * a.src_stride + head * a.src_head)
        dst = a.dst + (token * a.dst_stride + head * a.dst_head)
        weight = a.weight
        n = lanes_for(target, dim)
        x = k.scratch(4 * dim)
        inverse = k.var(k.const(f32, 1.0))
        normed = k.not_null(weight)
        with k.when(normed):
            squares = k.var(k.zero(vec(f32, n)))
            with k.range(0, 4 * dim, 4 * n) as at:
                v = (src + at).load(vec(f32, n), 0, 4)
                squares.set(v.fma(v, squares()))
            inverse.set(1.0 / (squares().sum() * (1.0 / dim) + a.eps).sqrt())
        with k.range(0, 4 * dim, 4 * n) as at:
            value = k.var((src + at).load(vec(f32, n), 0, 4))
            with k.when(normed):
                value.set(value() * inverse().splat(n) * (weight + at).load(vec(f32, n), 0, 4))
            (x + at).store(value(), 0, 4)
        if pairs:
            n = lanes_for(target, pairs)
            t = vec(f32, n)
            cos, sin = a.cos + token * (4 * pairs), a.sin + token * (4 * pairs)
            with k.range(0, 4 * pairs, 4 * n) as at:
                c, s = (cos + at).load(t, 0, 4), (sin + at).load(t, 0, 4)
                if interleaved:
                    both = (x + at * 2).load(vec(f32, 2 * n), 0, 4)
                    p, q = both.shuffle(range(0, 2 * n, 2)), both.shuffle(range(1, 2 * n, 2))
                else:
                    p, q = (x + at).load(t, 0, 4), (x + at).load(t, 4 * pairs, 4)
                rotated_p, rotated_q = p * c - q * s, q * c + p * s
                if interleaved:
                    order = [i // 2 + n * (i % 2) for i in range(2 * n)]
                    (x + at * 2).store(rotated_p.shuffle(order, rotated_q), 0, 4)
                else:
                    (x + at).store(rotated_p, 0, 4)
                    (x + at).store(rotated_q, 4 * pairs, 4)
        n = lanes_for(target, dim)
        with k.range(0, 4 * dim, 4 * n) as at:
            (dst + at).store((x + at).load(vec(f32, n), 0, 4), 0, 4)


# key, value: f32, token rows *_stride bytes apart, heads packed; pages: ptr per token to its page; position: i32 per
# token.
StoreKv = Struct(
    "StoreKv",
    key=ptr,
    value=ptr,
    pages=ptr,
    positions=ptr,
    key_stride=i64,
    value_stride=i64,
    layer_at=i64,
    kv_heads=i64,
)


def emit_store_kv(module: ir.Module, target: Target, key_dim: int, value_dim: int, kv_type: str) -> None:
    """Task: one kv head of one token → its place in the page."""
    kv = KV_TYPES[kv_type]
    with Fn(module, target, "store_kv", {"args": ptr, "task": i64}) as k:
        a = StoreKv.at(k.args)
        token, head = k.task // a.kv_heads, k.task % a.kv_heads
        at = (a.positions + token * 4).load(i32).sext(i64) % PAGE
        page = (a.pages + token * 8).load(ptr) + a.layer_at
        keys = page + head * (kv.page_nbytes(key_dim) + kv.page_nbytes(value_dim))
        kv.store_key(k, keys, at, a.key + (token * a.key_stride + head * (4 * key_dim)), key_dim)
        value = a.value + (token * a.value_stride + head * (4 * value_dim))
        kv.store_value(k, keys + kv.page_nbytes(key_dim), at, value, value_dim)


# q, out: f32, token rows *_stride bytes apart, heads packed. tables: ptr per token to its sequence's array of page
# pointers; positions: i32 per token; window 0: none; sinks: f32 per head or null. chunks: query heads per kv head ÷ R.
Attend = Struct(
    "Attend", q=ptr, out=ptr, tables=ptr, positions=ptr, sinks=ptr, q_stride=i64, out_stride=i64, layer_at=i64,
    kv_heads=i64, chunks=i64, window=i64, scale=f32, pad=f32,
)  # fmt: skip
NEGATIVE = -1.0e30


def emit_attend(module: ir.Module, target: Target, key_dim: int, value_dim: int, queries: int, kv_type: str) -> None:
    """Task: `queries` heads that share a kv head, one token, all its visible positions.

    Source: Dao et al. 2022 (the running softmax), arXiv:2205.14135; Xiao et al. 2023 (sinks), arXiv:2309.17453.
    """
    lanes, kv = target.lanes, KV_TYPES[kv_type]
    subs = TILE // lanes
    n_value = lanes_for(target, value_dim)
    t_vec = vec(f32, lanes)
    rows = range(queries)
    with Fn(module, target, "attend", {"args": ptr, "task": i64}) as k:
        a = Attend.at(k.args)
        per_token = a.kv_heads * a.chunks
        token, unit = k.task // per_token, k.task % per_token
        head, first_head = unit // a.chunks, unit * queries
        q = a.q + (token * a.q_stride + first_head * (4 * key_dim))
        out = a.out + (token * a.out_stride + first_head * (4 * value_dim))
        table = (a.tables + token * 8).load(ptr)
        position = (a.positions + token * 4).load(i32).sext(i64)
        lowest = a.window.eq(0).select(k.const(i64, 0), (position - a.window + 1).max(k.const(i64, 0)))
        head_at, scale = a.layer_at + head * (kv.page_nbytes(key_dim) + kv.page_nbytes(value_dim)), a.scale
        prepared = kv.prepare(k, q, queries, key_dim)
        scores, sums = k.scratch(queries * PAGE * 4), k.scratch(queries * value_dim * 4)
        largest, total = [k.var(k.const(f32, NEGATIVE)) for _ in rows], [k.var(k.zero(f32)) for _ in rows]
        with k.when(k.not_null(a.sinks)):
            for r in rows:
                largest[r].set((a.sinks + first_head * 4).load(f32, 4 * r))
                total[r].set(k.const(f32, 1.0))
        with k.range(0, queries * value_dim) as i:
            (sums + i * 4).store(k.zero(f32))
        with k.range(lowest // PAGE, position // PAGE + 1) as number:
            page = (table + number * 8).load(ptr) + head_at
            start = number * PAGE
            # scores of 64 positions; the invisible ones get a score that no visible one can have
            with k.range(0, PAGE // TILE) as tile:
                for sub in range(subs):
                    products = kv.scores(k, page, tile, sub, prepared, queries, key_dim)
                    at = start + tile * TILE + sub * lanes
                    where = at.trunc(i32).splat(lanes) + k.iota(vec(i32, lanes))
                    visible = where.zext(i64) <= position.splat(lanes)
                    visible = Val(k, k.b.and_(visible.v, (where.zext(i64) >= lowest.splat(lanes)).v))
                    for r in rows:
                        s = visible.select(products[r] * scale, k.const(t_vec, NEGATIVE))
                        (scores + (tile * TILE + sub * lanes) * 4).store(s, 4 * PAGE * r)
            for r in rows:
                best = scores.load(t_vec, 4 * PAGE * r)
                for i in range(1, PAGE // lanes):
                    best = best.max(scores.load(t_vec, 4 * PAGE * r + 4 * lanes * i))
                new = largest[r]().max(best.hmax())
                shrink = exp(k, (largest[r]() - new).splat(lanes)).lane(0)
                part = k.var(k.zero(t_vec))
                for i in range(PAGE // lanes):
                    s = scores.load(t_vec, 4 * PAGE * r + 4 * lanes * i)
                    p = (s > NEGATIVE).select(exp(k, s - new.splat(lanes)), k.zero(t_vec))
                    scores.store(p, 4 * PAGE * r + 4 * lanes * i)
                    part.set(part() + p)
                total[r].set(total[r]().fma(shrink, part().sum()))
                largest[r].set(new)
                with k.range(0, value_dim, n_value) as d:
                    at = sums + d * 4
                    at.store(at.load(vec(f32, n_value), 4 * value_dim * r, 4) * shrink, 4 * value_dim * r, 4)
            values = page + kv.page_nbytes(key_dim)
            # positions after the query's own have weight zero; their rows may never have been written, so stop before
            # them
            count = (position - start + 1).min(k.const(i64, PAGE))
            with k.range(0, value_dim, n_value) as d:
                at = sums + d * 4
                acc = [k.var(at.load(vec(f32, n_value), 4 * value_dim * r, 4)) for r in rows]
                value_at = kv.value(k, values, d, value_dim)
                with k.range(0, count) as i:
                    v = value_at(i)
                    for r in rows:
                        p = (scores + i * 4).load(f32, 4 * PAGE * r).splat(n_value)
                        acc[r].set(v.fma(p, acc[r]()))
                for r in rows:
                    at.store(acc[r](), 4 * value_dim * r, 4)
        for r in rows:
            inverse = 1.0 / total[r]()
            with k.range(0, value_dim, n_value) as d:
                v = (sums + d * 4).load(vec(f32, n_value), 4 * value_dim * r, 4)
                (out + d * 4).store(v * inverse.splat(n_value), 4 * value_dim * r, 4)
