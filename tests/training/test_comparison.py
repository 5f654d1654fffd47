"""Contrasts of a ladder: the pooled spread, corrected p-values and outcomes, on cases worked out by hand."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mxref_training.lab.answers import sentence
from mxref_training.lab.contrasts import (
    Difference,
    Pool,
    difference,
    equal_power,
    holm,
    pairs_to_decide,
    pool,
    smallest_difference,
)
from mxref_training.lab.ladder import Says
from mxref_training.lab.verdict import Divergence, Outcome, judge_prediction, outcome

NONE = Divergence(0, 3, 0, 3)


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
        assert ("scatter" in sentence(Outcome.HIGHER, found, NONE, None)) is noisy


def test_equal_runs_have_no_spread_and_no_outlier() -> None:
    found = pool({name: {s: 4.0 + s / 3 for s in range(3)} for name in "abcd"})
    assert (found.outside, found.spread) == ((), pytest.approx(0, abs=1e-12))


def test_holm_of_a_worked_example() -> None:
    # 0.01 x 4, 0.02 x 3, then 0.03 x 2 and 0.04 x 1, which may not fall below the one before.
    assert holm([0.04, 0.01, 0.03, 0.02]) == pytest.approx([0.06, 0.04, 0.06, 0.06])
    assert holm([0.5, 0.9]) == pytest.approx([1.0, 1.0])
    assert holm([0.01, None, 0.02]) == [pytest.approx(0.03), None, pytest.approx(0.04)]
    assert holm([]) == []


@given(st.lists(st.floats(0, 1) | st.none(), max_size=12))
def test_holm_keeps_the_order_and_is_never_smaller(ps: list[float | None]) -> None:
    corrected = holm(ps)
    known = sorted((p, c) for p, c in zip(ps, corrected, strict=True) if p is not None and c is not None)
    assert all(p <= c <= 1 for p, c in known)
    assert all(a[1] <= b[1] for a, b in pairwise(known))
    assert [c is None for c in corrected] == [p is None for p in ps]


def of(estimate: float, error: float = 0.002, freedom: int = 80) -> Difference:
    return Difference(5, estimate, error, freedom)


@pytest.mark.parametrize(
    ("found", "corrected", "diverged", "expected"),
    [
        (of(-0.02), 0.001, NONE, Outcome.LOWER),
        (of(0.02), 0.001, NONE, Outcome.HIGHER),
        (of(0.005), 0.04, NONE, Outcome.HIGHER),  # a difference below the bound is still one
        (of(0.002), 0.9, NONE, Outcome.EQUAL),
        (of(0.009), 0.9, NONE, Outcome.UNDERPOWERED),
        (of(0.002, 0.02), 0.9, NONE, Outcome.UNDERPOWERED),
        (Difference(1, 0.0), None, NONE, Outcome.UNDERPOWERED),
        (None, None, NONE, Outcome.MISSING),
        (None, None, Divergence(3, 3, 0, 3), Outcome.DIVERGES),
        (of(-0.02), 0.001, Divergence(1, 3, 0, 3), Outcome.UNDECIDED),
        (None, None, Divergence(3, 3, 1, 3), Outcome.UNDECIDED),
        (None, None, Divergence(0, 3, 3, 3), Outcome.UNDECIDED),
        (None, None, Divergence(3, 3, 0, 0), Outcome.UNDECIDED),
    ],
)
def test_outcome_rule(
    found: Difference | None, corrected: float | None, diverged: Divergence, expected: Outcome
) -> None:
    assert outcome(found, corrected, diverged) is expected


@pytest.mark.parametrize(
    ("says", "seen", "converged", "verdict"),
    [
        (Says.LOWER, Outcome.LOWER, True, "reproduced"),
        (Says.LOWER, Outcome.HIGHER, True, "not reproduced"),
        (Says.LOWER, Outcome.EQUAL, True, "not reproduced"),
        (Says.HIGHER, Outcome.DIVERGES, False, "not reproduced"),
        (Says.LOWER, Outcome.UNDERPOWERED, True, "underpowered"),
        (Says.EQUAL, Outcome.UNDECIDED, False, "underpowered"),
        (Says.DIVERGES, Outcome.DIVERGES, False, "reproduced"),
        (Says.DIVERGES, Outcome.LOWER, True, "not reproduced"),
        (Says.DIVERGES, Outcome.HIGHER, False, "underpowered"),
        (Says.DIVERGES, Outcome.MISSING, False, "underpowered"),
    ],
)
def test_prediction_rule(says: Says, seen: Outcome, converged: bool, verdict: str) -> None:
    assert judge_prediction(says, seen, converged) == verdict


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
