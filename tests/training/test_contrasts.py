"""Differences of a ladder's arms: the pooled spread, corrected p-values and power, on cases worked out by hand."""

from __future__ import annotations

import math

import numpy as np
import pytest

from mxref_training.lab.contrasts import (
    Pool,
    difference,
    equal_power,
    equivalence_power,
    holm,
    pairs_to_decide,
    pool,
    smallest_difference,
    student_point,
    t_test_power,
)


def test_two_arms_pool_to_the_spread_of_their_own_pairs() -> None:
    a, b = {0: 4.10, 1: 4.35, 2: 4.21}, {0: 4.00, 1: 4.20, 2: 4.19}
    found = pool({"a": a, "b": b})
    spread = float(np.std([a[s] - b[s] for s in a], ddof=1))
    assert (found.spread, found.freedom) == (pytest.approx(spread), 2)
    # The paired t test of 0.10, 0.15, 0.02.
    d = difference(a, b, found, outside=False)
    assert d is not None
    assert (d.estimate, d.pairs, d.freedom) == (pytest.approx(0.09), 3, 2)
    assert d.half_width() == pytest.approx(4.3027 * spread / math.sqrt(3), rel=1e-4)
    t = d.estimate / (spread / math.sqrt(3))
    assert d.p == pytest.approx(1 - t / math.sqrt(2 + t * t))


def test_an_unbalanced_ladder_pools_as_least_squares_does() -> None:
    rng = np.random.default_rng(1)
    runs = {f"a{i}": {s: float(rng.normal()) for s in range(5 if i < 4 else 3)} for i in range(7)}
    rows = [(i, s, y) for i, values in enumerate(runs.values()) for s, y in values.items()]
    design = np.zeros((len(rows), 12))
    for n, (i, s, _) in enumerate(rows):
        design[n, [i, 7 + s]] = 1
    y = np.array([row[2] for row in rows])
    residual = y - design @ np.linalg.lstsq(design, y, rcond=None)[0]
    freedom = len(rows) - 7 - 5 + 1
    found = pool(runs)
    assert (found.freedom, found.outside) == (freedom, ())
    assert found.spread == pytest.approx(math.sqrt(2 * (residual @ residual) / freedom))


def test_arms_that_share_no_seed_are_fitted_apart() -> None:
    runs = {"a": {0: 1.0, 1: 3.0}, "b": {0: 2.0, 1: 4.5}, "c": {7: 1.0, 8: 1.0}, "d": {7: 5.0, 8: 5.2}}
    assert pool(runs).freedom == 2
    assert pool(runs).spread == pytest.approx(math.sqrt((0.5**2 / 2 + 0.2**2 / 2) / 2))


def test_nothing_is_known_of_the_spread_without_repetitions() -> None:
    found = pool({"a": {0: 1.0}, "b": {0: 2.0}})
    assert (found.freedom, math.isnan(found.spread)) == (0, True)
    d = difference({0: 1.5}, {0: 1.0}, found, outside=False)
    assert d is not None
    assert (d.estimate, d.high, math.isnan(d.p), math.isnan(d.equal_p(9))) == (0.5, math.inf, True, True)
    assert difference({0: 1.0}, {1: 1.0}, found, outside=False) is None


def test_a_visibly_noisier_arm_leaves_the_pool_and_uses_its_own_pairs() -> None:
    rng = np.random.default_rng(2)
    runs = {f"a{i}": {s: 4 + float(rng.normal(0, 0.01)) for s in range(5)} for i in range(6)}
    runs["wild"] = {s: 4 + float(rng.normal(0, 0.3)) for s in range(5)}
    found = pool(runs)
    assert found.outside == ("wild",)
    assert found == Pool(pool({k: v for k, v in runs.items() if k != "wild"}).spread, 20, ("wild",))
    d = difference(runs["wild"], runs["a0"], found, outside=True)
    assert d is not None
    assert (d.own, d.freedom, d.pairs) == (True, 4, 5)


def test_pairs_that_scatter_more_than_the_pool_says_are_marked() -> None:
    against = {0: 4.0, 1: 4.1, 2: 4.2}
    for scatter, noisy in ((0.015, False), (0.025, True)):
        arm = {seed: loss + 0.05 + scatter * (seed - 1) for seed, loss in against.items()}
        found = difference(arm, against, Pool(0.01, 80), outside=False)
        assert found is not None
        assert (found.own_spread, found.is_noisy) == (pytest.approx(scatter), noisy)


def test_equal_runs_have_no_spread_and_no_outlier() -> None:
    found = pool({name: {s: 4.0 + s / 3 for s in range(3)} for name in "abcd"})
    assert (found.outside, found.spread) == ((), pytest.approx(0, abs=1e-12))


def test_holm_of_a_worked_example() -> None:
    # 0.01 x 4, 0.02 x 3, then 0.03 x 2 and 0.04 x 1, which may not fall below the one before.
    assert holm([0.04, 0.01, 0.03, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.5, 0.9]) == pytest.approx([1.0, 1.0])
    assert holm([0.01, math.nan, 0.02]) == pytest.approx([0.03, math.nan, 0.04], nan_ok=True)
    assert holm([]) == []


# ---- power ----


@pytest.mark.parametrize("freedom", [1, 2, 4, 9, 84])
def test_power_without_a_difference_is_the_level(freedom: int) -> None:
    assert t_test_power(0.0, 0.05, freedom) == pytest.approx(0.05, rel=1e-3)
    assert t_test_power(0.0, 0.05 / 32, freedom) == pytest.approx(0.05 / 32, rel=5e-3)


def test_power_is_that_of_published_tables() -> None:
    # Cohen, Statistical Power Analysis (1988), table 2.3.5: two-sided 5 %, two samples of n, effect size d.
    for n, d, power in ((10, 1.0, 0.56), (20, 0.5, 0.33), (20, 0.8, 0.69), (50, 0.5, 0.70), (100, 0.4, 0.80)):
        assert t_test_power(d * math.sqrt(n / 2), 0.05, 2 * n - 2) == pytest.approx(power, abs=0.008)


@pytest.mark.parametrize(("bound", "freedom"), [(2.5, 2), (4.0, 2), (3.0, 7)])
def test_two_one_sided_tests_find_equal_arms_equal_as_often_as_in_a_simulation(
    bound: float, freedom: int
) -> None:
    draws = np.random.default_rng(7)
    estimates = draws.standard_normal(200_000)
    errors = np.sqrt(draws.chisquare(freedom, 200_000) / freedom)
    found = np.abs(estimates) + student_point(0.10, freedom) * errors < bound
    assert equivalence_power(bound, 0.05, freedom) == pytest.approx(found.mean(), abs=0.005)


def test_more_seeds_find_smaller_differences() -> None:
    found = [smallest_difference(0.01, pairs, 84, 32) for pairs in (3, 5, 20)]
    assert found == sorted(found, reverse=True)
    assert found[0] / found[2] == pytest.approx(math.sqrt(20 / 3))
    assert smallest_difference(0.02, 5, 84, 32) == pytest.approx(2 * found[1])
    assert smallest_difference(0.01, 5, 0, 32) == math.inf


def test_seeds_that_decide_are_the_smaller_of_the_two_ways() -> None:
    # The rules of the power itself: one seed fewer does not do.
    pairs = pairs_to_decide(0.02, 0.015, 84, 32)
    assert pairs is not None
    assert smallest_difference(0.015, pairs, 84, 32) <= 0.02 < smallest_difference(0.015, pairs - 1, 84, 32)
    # Far too small to be found as a difference, and equality takes fewer.
    pairs = pairs_to_decide(0.0001, 0.015, 84, 32)
    assert pairs is not None
    assert equal_power(0.015, pairs, 84) >= 0.8 > equal_power(0.015, pairs - 1, 84)
    assert pairs_to_decide(0.0, 10.0, 84, 32) is None
    assert pairs_to_decide(0.1, math.nan, 0, 32) is None
