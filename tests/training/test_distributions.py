"""Distribution functions against published tables, and against each other."""

from __future__ import annotations

import math
from statistics import NormalDist

import pytest

from mxref_training.lab.distributions import (
    equivalence_power,
    f_tail,
    incomplete_beta,
    student_cdf,
    student_point,
    student_tail,
    t_test_power,
)

# NIST/SEMATECH e-Handbook of Statistical Methods, 1.3.6.7.2: upper critical values of Student's t.
# Rows: degrees of freedom; columns: 0.90, 0.95, 0.975, 0.99, 0.995, 0.999.
NIST_T = {
    1: (3.078, 6.314, 12.706, 31.821, 63.657, 318.309),
    2: (1.886, 2.920, 4.303, 6.965, 9.925, 22.327),
    3: (1.638, 2.353, 3.182, 4.541, 5.841, 10.215),
    4: (1.533, 2.132, 2.776, 3.747, 4.604, 7.173),
    10: (1.372, 1.812, 2.228, 2.764, 3.169, 4.144),
    30: (1.310, 1.697, 2.042, 2.457, 2.750, 3.385),
    80: (1.292, 1.664, 1.990, 2.374, 2.639, 3.195),
    100: (1.290, 1.660, 1.984, 2.364, 2.626, 3.174),
}
ONE_SIDED = (0.10, 0.05, 0.025, 0.01, 0.005, 0.001)

# 1.3.6.7.3: upper 5 % and 1 % critical values of F, by (numerator, denominator) degrees of freedom.
NIST_F = {
    (1, 1): (161.448, 4052.19),
    (2, 10): (4.103, 7.559),
    (4, 20): (2.866, 4.431),
    (10, 10): (2.978, 4.849),
}


@pytest.mark.parametrize("freedom", NIST_T)
def test_student_points_are_those_of_the_table(freedom: int) -> None:
    for tail, want in zip(ONE_SIDED, NIST_T[freedom], strict=True):
        assert student_point(2 * tail, freedom) == pytest.approx(want, abs=6e-4)
        assert student_tail(want, freedom) == pytest.approx(2 * tail, rel=2e-3)


@pytest.mark.parametrize("degrees", NIST_F)
def test_f_tails_are_those_of_the_table(degrees: tuple[int, int]) -> None:
    for tail, ratio in zip((0.05, 0.01), NIST_F[degrees], strict=True):
        assert f_tail(ratio, *degrees) == pytest.approx(tail, rel=1e-3)


def test_closed_forms() -> None:
    for t in (0.1, 1.0, 7.5):
        # One degree of freedom is Cauchy's distribution; two have an algebraic form.
        assert student_tail(t, 1) == pytest.approx(1 - 2 * math.atan(t) / math.pi, rel=1e-12)
        assert student_tail(t, 2) == pytest.approx(1 - t / math.sqrt(2 + t * t), rel=1e-12)
        # F with one numerator degree is t squared.
        assert f_tail(t * t, 1, 7) == pytest.approx(student_tail(t, 7), rel=1e-12)
    assert incomplete_beta(1, 3, 0.25) == pytest.approx(1 - 0.75**3, rel=1e-14)
    assert (incomplete_beta(2, 3, 0.0), incomplete_beta(2, 3, 1.0)) == (0.0, 1.0)
    assert student_cdf(-1.5, 5) == pytest.approx(1 - student_cdf(1.5, 5))
    assert student_tail(math.inf, 3) == 0.0
    assert student_point(0.05, 0) == math.inf
    assert f_tail(0.0, 2, 3) == 1.0


@pytest.mark.parametrize("freedom", [1, 2, 4, 9, 84])
def test_power_without_a_difference_is_the_level(freedom: int) -> None:
    assert t_test_power(0.0, 0.05, freedom) == pytest.approx(0.05, rel=1e-3)
    assert t_test_power(0.0, 0.05 / 32, freedom) == pytest.approx(0.05 / 32, rel=5e-3)


def test_power_is_that_of_published_tables() -> None:
    # Cohen, Statistical Power Analysis (1988), table 2.3.5: two-sided 5 %, two samples of n, effect size d.
    for n, d, power in ((10, 1.0, 0.56), (20, 0.5, 0.33), (20, 0.8, 0.69), (50, 0.5, 0.70), (100, 0.4, 0.80)):
        assert t_test_power(d * math.sqrt(n / 2), 0.05, 2 * n - 2) == pytest.approx(power, abs=0.008)


def test_with_a_known_spread_both_powers_are_the_normal_ones() -> None:
    normal = NormalDist()
    assert t_test_power(2.8, 0.05, 100_000) == pytest.approx(normal.cdf(2.8 - 1.96), abs=2e-4)
    assert equivalence_power(3.0, 0.05, 100_000) == pytest.approx(2 * normal.cdf(3 - 1.6449) - 1, abs=2e-4)
    assert equivalence_power(1.0, 0.05, 100_000) == pytest.approx(0.0, abs=1e-9)
