"""The routing predictor on made-up routing whose best predictor is known, its ridge regression and its switch."""

from __future__ import annotations

import numpy as np
import pytest

from colibri_offload.scheduler.predictor import RoutingPredictor
from colibri_offload.scheduler.ridge import OnlineRidge
from colibri_offload.scheduler.worth import PrefetchWorth

E, K = 16, 4


def top(scores, count=K):
    return np.argsort(-scores, axis=-1, kind="stable")[..., :count]


def routing(rng, tokens, mixing):
    """Guess logits, and the true top-k of a linear map of them."""
    logits = rng.standard_normal((tokens, E)).astype(np.float32)
    return logits, top(logits @ mixing)


def test_before_anything_is_known_the_raw_logits_decide():
    predictor = RoutingPredictor({3: E}, K)
    logits = np.random.default_rng(0).standard_normal(E).astype(np.float32)
    guess = predictor.predict(3, logits)
    assert guess == top(logits, K + 2).tolist()
    assert all(type(expert) is int for expert in guess)
    assert predictor.recall() == 0 and predictor.observations == 0


def test_guesses_are_bounded_by_the_number_of_experts():
    assert sorted(RoutingPredictor({0: 5}, 4, extra=3).predict(0, np.zeros(5, np.float32))) == [0, 1, 2, 3, 4]


def test_several_tokens_give_their_guesses_by_votes():
    predictor = RoutingPredictor({0: 6}, 1, extra=1)
    rows = np.zeros((3, 6), np.float32)
    rows[0, [1, 4]] = 9, 8
    rows[1, [4, 2]] = 9, 8
    rows[2, [5, 4]] = 9, 8
    assert predictor.predict(0, rows) == [4, 1, 5, 2]


def test_the_correction_learns_a_linear_map_that_the_raw_logits_miss():
    rng = np.random.default_rng(1)
    mixing = np.roll(np.eye(E), 5, axis=1) + 0.3 * rng.standard_normal((E, E))  # the true experts are other ones
    predictor = RoutingPredictor({0: E, 1: E}, K, extra=2)
    for _ in range(40):
        for layer in (0, 1):
            predictor.observe(layer, *routing(rng, 16, mixing if layer == 0 else np.eye(E)))
    logits, truth = routing(rng, 200, mixing)
    pairs = list(zip(logits, truth.tolist(), strict=True))
    found = np.mean([len(set(predictor.predict(0, x)) & set(t)) / K for x, t in pairs])
    raw = np.mean([len(set(top(x, K + 2)) & set(t)) / K for x, t in pairs])
    assert raw < 0.5 and found > 0.85
    assert predictor.recall(0) == pytest.approx(found, abs=0.1)
    assert predictor.recall(1) == 1, "where the raw logits are right they stay in use"
    assert predictor.observations == 2 * 40 * 16


def test_one_token_at_a_time_learns_too():
    rng = np.random.default_rng(2)
    mixing = np.roll(np.eye(E), 5, axis=1)
    predictor = RoutingPredictor({0: E}, K)
    for _ in range(400):
        logits, truth = routing(rng, 1, mixing)
        predictor.observe(0, logits[0], truth[0])
    assert predictor.recall() > 0.9


def test_nan_logits_are_not_learned():
    predictor = RoutingPredictor({0: E}, K)
    predictor.observe(0, np.full(E, np.nan, np.float32), np.arange(K))
    rows = np.zeros((100, E), np.float32)
    rows[::2] = np.inf
    predictor.observe(0, rows, np.tile(np.arange(K), (100, 1)))
    assert predictor.observations == 50
    assert len(set(predictor.predict(0, np.full(E, np.nan, np.float32)))) == K + 2


def test_a_long_prompt_costs_a_bounded_number_of_rows():
    predictor = RoutingPredictor({0: E}, K)
    predictor.observe(0, *routing(np.random.default_rng(0), 5000, np.eye(E)))
    assert 64 <= predictor.observations <= 128


def test_ridge_solves_the_normal_equations():
    rng = np.random.default_rng(4)
    x, y = rng.standard_normal((150, 7)), rng.standard_normal((150, 3))
    ridge = OnlineRidge(7, 3, penalty=0.01)
    for part in np.array_split(np.arange(150), 11):
        ridge.add(x[part], y[part])
    # The penalty as extra rows of a least-squares problem.
    extra = np.sqrt(0.01 * (x**2).sum() / 7) * np.eye(7)
    expected = np.linalg.lstsq(np.vstack([x, extra]), np.vstack([y, np.zeros((7, 3))]), rcond=None)[0]
    np.testing.assert_allclose(ridge.solve(), expected, rtol=1e-4, atol=1e-6)


def test_ridge_without_rows_is_zero_and_follows_a_change():
    assert not OnlineRidge(3, 2).solve().any()
    rng, ridge = np.random.default_rng(5), OnlineRidge(4, 1, penalty=1e-6, window=200)
    for slope in (1.0, -1.0):
        for _ in range(60):
            x = rng.standard_normal((64, 4))
            ridge.add(x, slope * x[:, :1])
    assert ridge.solve()[0, 0] < -0.9


def test_switch_goes_off_when_bytes_are_wasted_and_comes_back_ever_later():
    worth = PrefetchWorth(min_useful=0.3, pause=10)
    pauses = []
    for _ in range(6):
        while worth.enabled:
            worth.account(10, 90)
        pause = 0
        while not worth.enabled:
            worth.account(0, 0)
            pause += 1
        pauses.append(pause)
    assert pauses == [10, 20, 40, 80, 160, 160]
    for _ in range(100):
        worth.account(50, 50)
    assert worth.enabled
    while worth.enabled:
        worth.account(0, 100)
    assert worth._paused == 10, "a success makes the next pause short again"


def test_switch_needs_evidence():
    worth = PrefetchWorth()
    for _ in range(1000):
        worth.account(0, 0)
    assert worth.enabled
    for _ in range(5):
        worth.account(0, 100)
    assert worth.enabled


def test_predictor_uses_the_switch():
    predictor = RoutingPredictor({0: E}, K)
    for _ in range(40):
        predictor.account(0, 1000)
    assert not predictor.enabled


def test_ranks_that_do_not_come_true_are_not_worth_reading() -> None:
    """Extra guesses that are never right would waste their reads for good."""
    predictor = RoutingPredictor({0: 16, 1: 16}, top_k=2, extra=2)
    assert predictor.worthwhile(0) == 4, "a rank is tried before it is judged"
    rng = np.random.default_rng(0)
    for _ in range(80):
        logits = rng.standard_normal(16).astype(np.float32)
        predictor.observe(0, logits, top(logits, 2))
    assert predictor.worthwhile(0) == 2 and predictor.worthwhile(1) == 4
    for _ in range(80):
        logits = rng.standard_normal(16).astype(np.float32)
        predictor.observe(0, logits, top(logits, 4))
    assert predictor.worthwhile(0) == 4, "and judged again"
