"""Student's points against a published table, and the power of the tests against tables, limits and a simulation."""

from __future__ import annotations

import math
from statistics import NormalDist

import numpy as np
import pytest

from mxref_training.lab.contrasts import equivalence_power, student_point, t_test_power

# NIST/SEMATECH e-Handbook of Statistical Methods, 1.3.6.7.2: upper critical values of Student's t at 0.975 and 0.995.
NIST_T = {1: (12.706, 63.657), 2: (4.303, 9.925), 4: (2.776, 4.604), 30: (2.042, 2.750)}


@pytest.mark.parametrize("freedom", NIST_T)
def test_student_points_are_two_sided(freedom: int) -> None:
    found = [student_point(tail, freedom) for tail in (0.05, 0.01)]
    assert found == pytest.approx(NIST_T[freedom], abs=6e-4)


def test_nothing_is_known_without_a_degree_of_freedom() -> None:
    assert student_point(0.05, 0) == math.inf


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


@pytest.mark.parametrize(("bound", "freedom"), [(2.5, 2), (4.0, 2), (3.0, 7)])
def test_two_one_sided_tests_find_equal_arms_equal_as_often_as_in_a_simulation(
    bound: float, freedom: int
) -> None:
    draws = np.random.default_rng(7)
    estimates = draws.standard_normal(200_000)
    errors = np.sqrt(draws.chisquare(freedom, 200_000) / freedom)
    found = np.abs(estimates) + student_point(0.10, freedom) * errors < bound
    assert equivalence_power(bound, 0.05, freedom) == pytest.approx(found.mean(), abs=0.005)
