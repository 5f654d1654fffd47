"""Tokens to a target loss, overheads with their noise, divergence, outcomes, and verdicts on claims and predictions."""

from __future__ import annotations

import math
from typing import Any

import pytest

from mxref_training.errors import ConfigError
from mxref_training.lab.contrasts import Difference
from mxref_training.lab.ladder import Says
from mxref_training.lab.measures import Crossing, Reach, first_crossing, late_loss, loss_at
from mxref_training.lab.verdict import (
    Noise,
    Outcome,
    Overhead,
    Verdict,
    judge,
    judge_prediction,
    outcome,
    overhead,
    seed_noise,
)
from mxref_training.log import has_diverged

CURVE = [(100.0, 5.0), (200.0, 4.0), (300.0, 4.5), (400.0, 3.0)]


@pytest.mark.parametrize(
    ("target", "expected"),
    [
        (4.5, Crossing(Reach.CROSSED, 150.0)),
        (4.75, Crossing(Reach.CROSSED, 125.0)),
        (4.0, Crossing(Reach.CROSSED, 200.0)),  # equal is reached, exactly at the evaluation
        (3.75, Crossing(Reach.CROSSED, 350.0)),  # the rise from 4.0 to 4.5 crosses nothing
        (4.25, Crossing(Reach.CROSSED, 175.0)),  # met three times: the first counts
        (5.0, Crossing(Reach.FIRST, 100.0)),
        (6.0, Crossing(Reach.FIRST, 100.0)),
        (2.9, Crossing(Reach.NEVER, 400.0)),
    ],
)
def test_first_crossing_of_the_piecewise_linear_curve(target: float, expected: Crossing) -> None:
    assert first_crossing(CURVE, target) == expected


def test_a_curve_counts_up_to_its_first_loss_that_is_not_finite() -> None:
    broken = [*CURVE[:2], (300.0, math.nan), (400.0, 1.0)]
    assert first_crossing(broken, 3.5) == Crossing(Reach.NEVER, 200.0)
    assert first_crossing([(100.0, math.nan)], 3.5) == Crossing(Reach.NEVER, 0.0)


def test_loss_at_equal_tokens_is_the_mean_of_the_last_twentieth() -> None:
    curve = [(90.0, 4.0), (95.0, 3.0), (100.0, 2.0)]
    assert late_loss(curve, 100) == 2.5
    assert late_loss(curve[:2], 200) == 3.0


def test_loss_at_interpolates_and_refuses_to_extrapolate() -> None:
    assert loss_at(CURVE, 125) == 4.75
    assert loss_at(CURVE, 400) == 3.0
    with pytest.raises(ConfigError, match=r"no two evaluations enclose 50 tokens.*run\.eval_every"):
        loss_at(CURVE, 50)


@pytest.mark.parametrize(
    ("losses", "diverged"),
    [
        ([5.0, 4.0, 3.0], False),
        ([5.0, 3.0, 3.9], False),  # a spike of less than half of what was gained
        ([5.0, 3.0, 4.1], True),
        ([5.0, 4.99, 5.0], False),  # no rise worth the name
        ([5.0, math.nan], True),
        ([5.0, 4.0, math.inf], True),
        ([5.0], False),
    ],
)
def test_divergence_rule(losses: list[float], diverged: bool) -> None:
    assert has_diverged([(100.0 * i, loss) for i, loss in enumerate(losses, 1)]) is diverged


def crossed(tokens: float) -> Crossing:
    return Crossing(Reach.CROSSED, tokens)


def test_overhead_of_one_pair_has_the_noise_of_the_seeds() -> None:
    found = overhead([(crossed(110), crossed(100))], Noise(4.0, 3))
    assert (found.reach, found.runs, str(found)) == (Reach.CROSSED, 3, "+10.0 %")
    assert (found.low, found.high) == pytest.approx((6, 14))


def test_overhead_over_seeds_is_paired() -> None:
    pairs = [(crossed(110), crossed(100)), (crossed(224), crossed(200)), (crossed(57), crossed(50))]
    found = overhead(pairs, Noise(50.0, 2))
    assert found.percent == pytest.approx((10 + 12 + 14) / 3)
    assert found.half_width == pytest.approx(4.3027 * 2 / math.sqrt(3), rel=1e-4)
    assert found.runs == 3


def test_interval_is_never_narrower_than_the_evaluations_resolve() -> None:
    assert overhead([(crossed(110), crossed(100))], Noise(0.1, 2), resolution=5.0).half_width == 5.0


def test_unreached_target_is_censored_and_divergence_is_no_number() -> None:
    never = overhead([(Crossing(Reach.NEVER, 143), crossed(100))], Noise(2.0, 3))
    assert (str(never), never.high) == ("> 43.0 %", math.inf)
    first = overhead([(Crossing(Reach.FIRST, 50), crossed(100))], Noise(2.0, 3))
    assert (str(first), first.low) == ("≤ -50.0 %", -math.inf)
    gone = Crossing(Reach.DIVERGED, math.nan)
    assert str(overhead([(gone, crossed(100))], Noise(2.0, 3))) == "DNC"
    assert str(overhead([(gone, crossed(100)), (crossed(101), crossed(100))], Noise())) == "DNC (1 of 2)"


def test_seed_noise_is_students_interval_of_a_difference() -> None:
    found = seed_noise([crossed(100), crossed(102)])
    # One degree of freedom: the standard deviation times the root of two is the difference itself.
    assert found.half_width == pytest.approx(12.7062 * 2)
    assert found.runs == 2
    assert seed_noise([crossed(100)]) == Noise(math.inf, 1)
    assert seed_noise([crossed(100), Crossing(Reach.NEVER, 140)]) == Noise(math.inf, 2)


def measured(percent: float, half_width: float, reach: Reach = Reach.CROSSED, runs: int = 3) -> Overhead:
    return Overhead(reach, percent, half_width, runs)


@pytest.mark.parametrize(
    ("claim", "found", "verdict"),
    [
        ((8, 9), measured(10, 2), Verdict.REPRODUCED),
        ((8, 9), measured(10, 2, runs=2), Verdict.UNDERPOWERED),
        ((8, 9), measured(10, 5), Verdict.UNDERPOWERED),  # meets the claim, cannot tell it from none
        ((8, 9), measured(30, 5), Verdict.NOT_REPRODUCED),
        ((8, 9), measured(-2, 3), Verdict.NOT_REPRODUCED),
        ((8, 9), measured(43, 2, Reach.NEVER), Verdict.NOT_REPRODUCED),
        ((50, 60), measured(43, 2, Reach.NEVER), Verdict.UNDERPOWERED),
        ((8, 9), measured(math.nan, math.nan, Reach.DIVERGED), Verdict.NOT_REPRODUCED),
        ((8, 9), None, Verdict.UNDERPOWERED),
        (None, measured(20, 5), Verdict.NOT_REPRODUCED),
        (None, measured(40, 5), Verdict.UNDERPOWERED),  # the interval runs past the budget of 43 %
        (None, measured(43, 2, Reach.NEVER), Verdict.UNDERPOWERED),
        (None, Overhead(Reach.DIVERGED, math.nan, math.nan, 3, diverged=3, seeds=3), Verdict.REPRODUCED),
        (None, Overhead(Reach.DIVERGED, math.nan, math.nan, 3, diverged=1, seeds=3), Verdict.UNDERPOWERED),
        (None, Overhead(Reach.DIVERGED, math.nan, math.nan, 1, diverged=1, seeds=1), Verdict.UNDERPOWERED),
    ],
)
def test_verdict_rule(claim: tuple[float, float] | None, found: Overhead | None, verdict: Verdict) -> None:
    assert judge(claim, found, budget=43.0)[0] is verdict


NONE = (0, 3), (0, 3)


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
        (Difference(1, 0.0), math.nan, NONE, Outcome.UNDERPOWERED),
        (None, math.nan, NONE, Outcome.MISSING),
        (None, math.nan, ((3, 3), (0, 3)), Outcome.DIVERGES),
        (of(-0.02), 0.001, ((1, 3), (0, 3)), Outcome.UNDECIDED),
        (None, math.nan, ((3, 3), (1, 3)), Outcome.UNDECIDED),
        (None, math.nan, ((0, 3), (3, 3)), Outcome.UNDECIDED),
        (None, math.nan, ((3, 3), (0, 0)), Outcome.UNDECIDED),
    ],
)
def test_outcome_rule(found: Difference | None, corrected: float, diverged: Any, expected: Outcome) -> None:
    assert outcome(found, corrected, *diverged) is expected


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
