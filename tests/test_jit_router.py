"""The router kernel under every rule, against the rule written out in float64."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from jit_util import floats, intact, kernels, run

from colibri_offload.jit.kernels.router import Route, RouterRule

SOFTMAX = RouterRule(
    experts=8, top_k=2, score="softmax", renormalise=True, scaling=1.0, denominator_eps=0.0, choice_bias=False,
    groups=1, top_groups=1, group_score="max",
)  # fmt: skip
RULES = {
    "mixtral": SOFTMAX,
    "qwen3": replace(SOFTMAX, experts=128, top_k=8),
    "olmoe": replace(SOFTMAX, experts=64, top_k=8, renormalise=False),
    "qwen2": replace(SOFTMAX, experts=60, top_k=4, renormalise=False),
    "deepseek_v2": replace(SOFTMAX, experts=160, top_k=6, renormalise=False, scaling=16.0, groups=8, top_groups=3),
    "deepseek_v3": replace(
        SOFTMAX, experts=256, top_k=8, score="sigmoid", scaling=2.5, denominator_eps=1e-20, choice_bias=True, groups=8,
        top_groups=4, group_score="top2_sum",
    ),
    "gpt_oss": replace(SOFTMAX, experts=32, top_k=4, score="softmax_topk", renormalise=False),
    "sigmoid_eps": replace(SOFTMAX, experts=20, top_k=3, score="sigmoid", denominator_eps=0.5, scaling=3.0),
    "one_of_five": replace(SOFTMAX, experts=5, top_k=1),
    "all_of_four": replace(SOFTMAX, experts=4, top_k=4, score="softmax_topk", scaling=2.0),
    "biased_softmax": replace(SOFTMAX, experts=17, top_k=5, choice_bias=True, renormalise=False),
}  # fmt: skip
every_rule = pytest.mark.parametrize("rule", RULES.values(), ids=RULES)


def route(rule: RouterRule, logits: np.ndarray, bias: np.ndarray | None = None) -> tuple[np.ndarray, np.ndarray]:
    """(ids, weights), each [tokens, top_k]. The logits' padding is huge: it must never win."""
    tokens = len(logits)
    padded = floats(tokens, -(-rule.experts // 16) * 16, fill=1e30)
    padded[:, : rule.experts] = logits
    ids, weights = floats(tokens, rule.top_k).view(np.int32), floats(tokens, rule.top_k)
    run(
        kernels().route(rule), Route, tokens, logits=padded, choice_bias=0 if bias is None else bias, ids=ids,
        weights=weights, logits_stride=padded.strides[0],
    )  # fmt: skip
    assert intact(ids) and intact(weights)
    return ids, weights


def exact(rule: RouterRule, logits: np.ndarray, bias: np.ndarray | None) -> tuple[list[int], np.ndarray]:
    """One token by the rule's definition; `best` sorts stably, so ties go to the lower index."""

    def best(values: np.ndarray, n: int) -> np.ndarray:
        return np.argsort(-values, kind="stable")[:n]

    x = logits.astype(np.float64)
    soft = np.exp(x - x.max()) / np.exp(x - x.max()).sum()
    score = {"softmax": soft, "sigmoid": 1 / (1 + np.exp(-x)), "softmax_topk": x}[rule.score]
    choice = score + (0 if bias is None else bias)
    if rule.groups > 1:
        groups = choice.reshape(rule.groups, -1)
        by_size = -np.sort(-groups, axis=1)
        merit = by_size[:, 0] if rule.group_score == "max" else by_size[:, 0] + by_size[:, 1]
        out = np.ones(rule.groups, bool)
        out[best(merit, rule.top_groups)] = False
        groups = np.where(out[:, None], 0.0 if rule.group_score == "max" else -np.inf, groups)
        choice = groups.ravel()
    ids = best(choice, rule.top_k)
    weights = score[ids]
    if rule.score == "softmax_topk":
        weights = np.exp(weights - weights.max()) / np.exp(weights - weights.max()).sum()
    elif rule.renormalise:
        weights = weights / (weights.sum() + rule.denominator_eps)
    return ids.tolist(), weights * rule.scaling


def bias_for(rule: RouterRule) -> np.ndarray | None:
    if not rule.choice_bias:
        return None
    return np.random.default_rng(1).uniform(-0.3, 0.3, rule.experts).astype(np.float32)


@every_rule
@pytest.mark.parametrize("spread", [0.1, 2.0, 20.0])
def test_rules(rule: RouterRule, spread: float) -> None:
    if rule.score == "sigmoid":
        spread = min(spread, 2.0)  # beyond, the sigmoid is 1 in float32 and not in float64
    logits = (np.random.default_rng(0).standard_normal((40, rule.experts)) * spread).astype(np.float32)
    bias = bias_for(rule)
    ids, weights = route(rule, logits, bias)
    for token in range(len(logits)):
        want_ids, want_weights = exact(rule, logits[token], bias)
        assert ids[token].tolist() == want_ids
        assert np.abs(weights[token] - want_weights).max() <= 3e-6 * want_weights.max()


@every_rule
def test_ties_go_to_the_lower_index(rule: RouterRule) -> None:
    """Few distinct logits (and none of the bias that would blur them): most places are ties, of groups too."""
    rng = np.random.default_rng(2)
    logits = rng.integers(-1, 2, (40, rule.experts)).astype(np.float32)
    logits[0] = 0
    bias = np.zeros(rule.experts, np.float32) if rule.choice_bias else None
    ids, _ = route(rule, logits, bias)
    for token in range(len(logits)):
        assert ids[token].tolist() == exact(rule, logits[token], bias)[0]


@every_rule
def test_a_token_is_routed_alike_in_every_company(rule: RouterRule) -> None:
    logits = np.random.default_rng(3).standard_normal((9, rule.experts)).astype(np.float32)
    bias = bias_for(rule)
    ids, weights = route(rule, logits, bias)
    for token in range(9):
        alone = route(rule, logits[token : token + 1], bias)
        assert np.array_equal(alone[0][0], ids[token]) and np.array_equal(alone[1][0], weights[token])


def test_the_bias_chooses_but_does_not_weigh() -> None:
    rule = replace(RULES["biased_softmax"], top_k=1)
    logits = np.zeros((1, 17), np.float32)
    logits[0, 3] = 1
    bias = np.zeros(17, np.float32)
    bias[11] = 10
    ids, weights = route(rule, logits, bias)
    assert ids.tolist() == [[11]]
    assert weights[0, 0] == pytest.approx(1 / (16 + np.e), rel=1e-6)


@every_rule
def test_broken_logits_name_existing_experts(rule: RouterRule) -> None:
    """NaN and infinities are reported elsewhere; here they must not make an index that reads foreign memory."""
    logits = np.random.default_rng(4).standard_normal((4, rule.experts)).astype(np.float32)
    logits[0] = np.nan
    logits[1, ::2] = np.nan
    logits[2, 1] = np.inf
    logits[3] = -np.inf
    ids, _ = route(rule, logits, bias_for(rule))
    assert ids.min() >= 0 and ids.max() < rule.experts
