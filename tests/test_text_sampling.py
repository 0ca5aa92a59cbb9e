"""Sampling: ranges, determinism, and draws that follow the distribution which the definition gives."""

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from colibri_offload.errors import NumericsError, UsageError
from colibri_offload.text.sampling import Sampler, Sampling

LOGITS = np.array([1.0, 2.5, -1.0, 2.0, 0.3, 2.5, -3.0, 1.2], np.float32)


def expected_probabilities(logits, s, recent=()):
    """The definition, token by token in plain Python: penalty, top-k, top-p, min-p, temperature."""
    logits = [float(x) for x in logits]
    for i in set(recent[-s.repeat_last_n :] if s.repeat_last_n else ()):
        logits[i] = logits[i] / s.repeat_penalty if logits[i] > 0 else logits[i] * s.repeat_penalty
    order = sorted(range(len(logits)), key=lambda i: (-logits[i], i))
    order = order[: s.top_k or None]
    weights = [math.exp(logits[i] - logits[order[0]]) for i in order]
    kept, held = [], 0.0
    for i, w in zip(order, weights, strict=True):
        if held < s.top_p * sum(weights):
            kept.append(i)
        held += w
    kept = [i for i in kept if math.exp(logits[i] - logits[kept[0]]) >= s.min_p * (1 - 1e-9)]
    final = {i: math.exp((logits[i] - logits[kept[0]]) / s.temperature) for i in kept}
    return {i: w / sum(final.values()) for i, w in final.items()}


@pytest.mark.parametrize(
    ("sampling", "recent"),
    [
        (Sampling(1.0, seed=1), ()),
        (Sampling(0.5, seed=2), ()),
        (Sampling(2.0, seed=3), ()),
        (Sampling(1.0, top_k=3, seed=4), ()),
        (Sampling(1.0, top_k=1000, seed=5), ()),
        (Sampling(1.3, top_p=0.7, seed=6), ()),
        (Sampling(1.0, min_p=0.3, seed=7), ()),
        (Sampling(0.8, top_k=6, top_p=0.9, min_p=0.05, seed=8), ()),
        (Sampling(1.0, repeat_penalty=1.5, seed=9), (1, 6, 1)),
        (Sampling(1.0, repeat_penalty=1.5, repeat_last_n=2, seed=10), (1, 6, 3)),
        (Sampling(1.0, repeat_penalty=1.5, repeat_last_n=0, seed=11), (1, 6, 3)),
    ],
)
def test_draws_follow_the_distribution(sampling, recent):
    draws = 8000
    sampler = Sampler(sampling)
    counts = np.bincount([sampler.pick(LOGITS, recent) for _ in range(draws)], minlength=LOGITS.size)
    expected = expected_probabilities(LOGITS, sampling, recent)
    assert set(np.flatnonzero(counts)) <= set(expected)
    chi_square = sum((counts[i] - draws * p) ** 2 / (draws * p) for i, p in expected.items())
    # 99.9 % quantile of χ² with 1…7 degrees of freedom; the seeds are fixed, so this fails always or never.
    assert chi_square < [0.001, 10.83, 13.82, 16.27, 18.47, 20.52, 22.46, 24.33][len(expected) - 1]


@given(
    st.lists(st.floats(-8, 8, width=16), min_size=1, max_size=600),
    st.integers(0, 40),
    st.sampled_from([1.0, 0.99, 0.5, 0.01]),
    st.sampled_from([0.0, 0.1, 1.0]),
    st.integers(0, 2**32),
)
@settings(max_examples=150, deadline=None)
def test_only_tokens_that_the_filters_keep(logits, top_k, top_p, min_p, seed):
    s = Sampling(1.0, top_k=top_k, top_p=top_p, min_p=min_p, seed=seed)
    allowed = expected_probabilities(logits, s)
    sampler = Sampler(s)
    drawn = {sampler.pick(np.array(logits, np.float32)) for _ in range(5)}
    # A sum in another order may place one token on the other side of top-p's edge.
    slack = expected_probabilities(logits, Sampling(1.0, top_k=top_k, top_p=min(1.0, top_p + 1e-9), min_p=min_p))
    assert drawn <= set(allowed) | set(slack)


def test_greedy_takes_the_largest_and_the_lower_id_of_equals():
    assert Sampler(Sampling()).pick(LOGITS) == 1
    assert Sampler(Sampling(0.7, top_k=1)).pick(LOGITS) == 1
    assert Sampler(Sampling()).pick(np.zeros(5, np.float32)) == 0


def test_ties_at_the_edge_of_top_k_go_to_the_lower_ids():
    sampler = Sampler(Sampling(1.0, top_k=2, seed=0))
    assert {sampler.pick(np.zeros(9, np.float32)) for _ in range(60)} == {0, 1}


def test_greedy_with_penalty():
    sampler = Sampler(Sampling(repeat_penalty=1.3))
    assert sampler.pick(LOGITS, [1]) == 5
    assert sampler.pick(LOGITS, [1, 5]) == 3
    assert sampler.pick(-np.ones(3, np.float32), [0]) == 1  # negative logits get smaller, too


def test_penalty_looks_back_64_tokens():
    sampler = Sampler(Sampling(repeat_penalty=2.0))
    assert sampler.pick(LOGITS, [1] + [0] * 63) == 5
    assert sampler.pick(LOGITS, [1] + [0] * 64) == 1


def test_same_seed_same_tokens_and_neighbours_do_not_matter():
    rng = np.random.default_rng(0)
    steps = [rng.normal(size=500).astype(np.float32) for _ in range(30)]
    alone = Sampler(Sampling(1.0, top_p=0.9, seed=42))
    first = [alone.pick(x) for x in steps]
    again, neighbour = Sampler(Sampling(1.0, top_p=0.9, seed=42)), Sampler(Sampling(1.0, seed=1))
    second = []
    for x in steps:
        neighbour.pick(x)
        second.append(again.pick(x))
    assert first == second
    other = Sampler(Sampling(1.0, top_p=0.9, seed=43))
    assert first != [other.pick(x) for x in steps]


def test_no_seed_differs():
    steps = [np.zeros(1000, np.float32)] * 8
    a, b = Sampler(Sampling(1.0)), Sampler(Sampling(1.0))
    assert [a.pick(x) for x in steps] != [b.pick(x) for x in steps]


@pytest.mark.parametrize(
    "sampling", [Sampling(), Sampling(1.0, seed=0), Sampling(1.0, top_k=5, top_p=0.5, min_p=0.1, seed=0)]
)
def test_minus_infinity_is_a_mask(sampling):
    masked = np.full(50, -np.inf, np.float32)
    masked[[7, 9]] = [0.0, -1.0]
    sampler = Sampler(sampling)
    assert {sampler.pick(masked, [7]) for _ in range(50)} <= {7, 9}


def test_logits_are_not_changed():
    logits = LOGITS.copy()
    Sampler(Sampling(1.0, top_k=3, repeat_penalty=1.5, seed=0)).pick(logits, [0, 1])
    assert np.array_equal(logits, LOGITS)


@pytest.mark.parametrize("sampling", [Sampling(), Sampling(1.0, top_k=2, seed=0)])
@pytest.mark.parametrize(
    ("value", "message"), [(np.nan, "1 of 8 are NaN or .inf, first nan at token 4"), (np.inf, "first inf at token 4")]
)
def test_bad_logits(sampling, value, message):
    logits = LOGITS.copy()
    logits[4] = value
    with pytest.raises(NumericsError, match=message):
        Sampler(sampling).pick(logits)


def test_everything_masked():
    with pytest.raises(NumericsError, match="all 3 are -inf"):
        Sampler(Sampling()).pick(np.full(3, -np.inf, np.float32))


@pytest.mark.parametrize(
    ("keys", "flag"),
    [
        ({"temperature": -0.1}, "--temperature -0.1"),
        ({"temperature": math.nan}, "--temperature nan"),
        ({"temperature": math.inf}, "--temperature inf"),
        ({"temperature": "hot"}, "--temperature hot"),
        ({"temperature": True}, "--temperature True"),
        ({"top_k": -1}, "--top-k -1"),
        ({"top_k": 1.5}, "--top-k 1.5"),
        ({"top_p": 0.0}, "--top-p 0.0"),
        ({"top_p": 1.1}, "--top-p 1.1"),
        ({"min_p": -0.1}, "--min-p -0.1"),
        ({"min_p": 1.5}, "--min-p 1.5"),
        ({"repeat_penalty": 0.0}, "--repeat-penalty 0.0"),
        ({"repeat_last_n": -1}, "--repeat-last-n -1"),
        ({"seed": -1}, "--seed -1"),
        ({"seed": 2**64}, f"--seed {2**64}"),
    ],
)
def test_ranges(keys, flag):
    with pytest.raises(UsageError, match=flag) as e:
        Sampling(**keys)
    assert "must be" in str(e.value)
