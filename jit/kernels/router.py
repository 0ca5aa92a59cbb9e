"""Router logits → the top-k experts and their weights, one token per task."""

from __future__ import annotations

from dataclasses import dataclass

import llvmlite.ir as ir

from colibri_offload.jit.emit import Fn, Struct, Val, Var, f32, i32, i64, ptr, vec
from colibri_offload.jit.kernels.math import exp, sigmoid
from colibri_offload.jit.targets import Target

# logits: f32, token rows logits_stride bytes apart, padded to 16; choice_bias: f32 [experts] or null;
# ids: i32 [tokens][top_k], weights: f32 [tokens][top_k], best first.
Route = Struct("Route", logits=ptr, choice_bias=ptr, ids=ptr, weights=ptr, logits_stride=i64)
LOWEST = -3.0e38


@dataclass(frozen=True)
class RouterRule:
    """How weights come from logits; the fields are those of the families' Router, plus experts and top_k."""

    experts: int
    top_k: int
    score: str
    renormalise: bool
    scaling: float
    denominator_eps: float
    choice_bias: bool
    groups: int
    top_groups: int
    group_score: str


def emit_route(module: ir.Module, target: Target, rule: RouterRule) -> None:
    """Ties go to the lower index. Sources: Mixtral arXiv:2401.04088; DeepSeek-V3 arXiv:2412.19437 section 2.1.2."""
    experts, top_k = rule.experts, rule.top_k
    padded = -(-experts // 16) * 16
    lanes = target.lanes
    t_vec = vec(f32, lanes)
    with Fn(module, target, "route", {"args": ptr, "task": i64}) as k:
        a = Route.at(k.args)
        logits, ids, weights = (
            a.logits + k.task * a.logits_stride, a.ids + k.task * (4 * top_k), a.weights + k.task * (4 * top_k)
        )  # fmt: skip
        score, choice = k.scratch(4 * padded), k.scratch(4 * padded)

        def lane_loop(n: int = padded):  # type: ignore[no-untyped-def]
            return k.range(0, n * 4, 4 * lanes)

        # the padding never wins and weighs nothing
        with lane_loop() as at:
            inside = (at.trunc(i32).splat(lanes) + k.iota(vec(i32, lanes)) * 4) < 4 * experts
            (score + at).store(inside.select((logits + at).load(t_vec, 0, 4), k.const(t_vec, LOWEST)), 0, 4)
        if rule.score == "softmax":
            best = k.var(k.const(t_vec, LOWEST))
            with lane_loop() as at:
                best.set(best().max((score + at).load(t_vec, 0, 4)))
            top, total = best().hmax(), k.var(k.zero(t_vec))
            with lane_loop() as at:
                s = (score + at).load(t_vec, 0, 4)
                e = (s > LOWEST).select(exp(k, s - top.splat(lanes)), k.zero(t_vec))
                (score + at).store(e, 0, 4)
                total.set(total() + e)
            inverse = 1.0 / total().sum()
            with lane_loop() as at:
                (score + at).store((score + at).load(t_vec, 0, 4) * inverse.splat(lanes), 0, 4)
        elif rule.score == "sigmoid":
            with lane_loop() as at:
                (score + at).store(sigmoid(k, (score + at).load(t_vec, 0, 4)), 0, 4)
        with k.range(0, experts) as e:
            s = (score + e * 4).load(f32)
            if rule.choice_bias:
                s = s + (a.choice_bias + e * 4).load(f32)
            (choice + e * 4).store(s)
        if rule.groups > 1:
            _keep_best_groups(k, rule, choice)

        total_weight = k.var(k.zero(f32))
        with k.range(0, top_k) as r:
            winner = _argmax(k, choice, experts)
            (choice + winner() * 4).store(k.const(f32, LOWEST))
            (ids + r * 4).store(winner().trunc(i32))
            w = (score + winner() * 4).load(f32)
            (weights + r * 4).store(w)
            total_weight.set(total_weight() + w)
        if rule.score == "softmax_topk":
            top = weights.load(f32)
            total_weight.set(k.zero(f32))
            with k.range(0, top_k) as r:
                e = exp(k, ((weights + r * 4).load(f32) - top).splat(lanes)).lane(0)
                (weights + r * 4).store(e)
                total_weight.set(total_weight() + e)
        factor: Val = k.const(f32, rule.scaling)
        if rule.renormalise or rule.score == "softmax_topk":
            factor = rule.scaling / (total_weight() + rule.denominator_eps)
        with k.range(0, top_k) as r:
            (weights + r * 4).store((weights + r * 4).load(f32) * factor)


def _argmax(k: Fn, values: Val, count: int) -> Var:
    """Index (i64) of the largest of `count` floats, the first among equals."""
    best, winner = k.var(k.const(f32, -3.4e38)), k.var(k.const(i64, 0))
    with k.range(0, count) as i:
        v = (values + i * 4).load(f32)
        better = v > best()
        best.set(better.select(v, best()))
        winner.set(better.select(i, winner()))
    return winner


def _keep_best_groups(k: Fn, rule: RouterRule, choice: Val) -> None:
    """Experts outside the best groups lose: their score becomes 0 (group_score "max") or the lowest number."""
    size = rule.experts // rule.groups
    group, kept = k.scratch(4 * rule.groups), k.scratch(4 * rule.groups)
    with k.range(0, rule.groups) as g:
        first, second = k.var(k.const(f32, LOWEST)), k.var(k.const(f32, LOWEST))
        with k.range(0, size) as i:
            v = (choice + (g * size + i) * 4).load(f32)
            second.set(second().max(first().min(v)))
            first.set(first().max(v))
        (group + g * 4).store(first() if rule.group_score == "max" else first() + second())
        (kept + g * 4).store(k.zero(i32))
    with k.range(0, rule.top_groups):
        winner = _argmax(k, group, rule.groups)
        (group + winner() * 4).store(k.const(f32, -3.4e38))
        (kept + winner() * 4).store(k.const(i32, 1))
    loser = 0.0 if rule.group_score == "max" else LOWEST
    with k.range(0, rule.groups) as g:
        with k.when((kept + g * 4).load(i32).eq(0)), k.range(0, size) as i:
            (choice + (g * size + i) * 4).store(k.const(f32, loser))
