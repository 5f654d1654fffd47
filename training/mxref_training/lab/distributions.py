"""Distribution functions that the comparison of arms needs: Student's t, F, and the power of a t test.

SciPy has them too, but five functions do not justify the dependency.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache
from statistics import NormalDist

_TINY = 1e-300
_PANELS = 400
"""Panels of Simpson's rule; an even number."""


def incomplete_beta(a: float, b: float, x: float) -> float:
    """Return the regularized incomplete beta function I_x(a, b), by its continued fraction (DLMF 8.17.22).

    Args:
        a: above 0.
        b: above 0.
        x: from 0 to 1.
    """
    if x <= 0 or x >= 1:
        return 0.0 if x <= 0 else 1.0
    if x > (a + 1) / (a + b + 2):  # the fraction converges fast on the other side
        return 1 - incomplete_beta(b, a, 1 - x)
    front = math.exp(
        math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(x) + b * math.log1p(-x)
    )
    # Lentz's method.
    c, d = 1.0, 1 / _kept(1 - (a + b) * x / (a + 1))
    value = d
    for m in range(1, 500):
        even = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        odd = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        for term in (even, odd):
            d = 1 / _kept(1 + term * d)
            c = _kept(1 + term / c)
            value *= d * c
        if abs(d * c - 1) < 1e-15:
            break
    return front * value / a


def _kept(value: float) -> float:
    """Return a value that can be divided by."""
    return value if abs(value) > _TINY else _TINY


def student_tail(t: float, freedom: float) -> float:
    """Return the probability that Student's t lies outside -|t| .. |t|: the two-sided p-value."""
    if math.isinf(t):
        return 0.0
    return incomplete_beta(freedom / 2, 0.5, freedom / (freedom + t * t))


def student_cdf(t: float, freedom: float) -> float:
    """Return the probability that Student's t is at most `t`."""
    tail = student_tail(t, freedom) / 2
    return tail if t < 0 else 1 - tail


@lru_cache(maxsize=4096)
def student_point(tail: float, freedom: float) -> float:
    """Return the t that is exceeded in absolute value with this two-sided probability; infinity without freedom."""
    if freedom <= 0 or tail <= 0:
        return math.inf
    low, high = 0.0, 1.0
    while student_tail(high, freedom) > tail:
        low, high = high, 2 * high
    for _ in range(200):
        middle = (low + high) / 2
        if middle in (low, high):
            break
        low, high = (middle, high) if student_tail(middle, freedom) > tail else (low, middle)
    return high


def f_tail(ratio: float, above: float, below: float) -> float:
    """Return the probability that F with `above` and `below` degrees of freedom exceeds a ratio of variances."""
    if ratio <= 0:
        return 1.0
    return incomplete_beta(below / 2, above / 2, below / (below + above * ratio))


def t_test_power(shift: float, tail: float, freedom: float) -> float:
    """Return the probability that a two-sided t test finds a difference.

    Args:
        shift: the true difference in units of the standard error of its estimate (the noncentrality).
        tail: two-sided level of the test.
        freedom: degrees of freedom of the estimated standard error.
    """
    point, normal = student_point(tail, freedom), NormalDist()
    if math.isinf(point):
        return 0.0
    return _over_spread(
        lambda s: normal.cdf(shift - point * s) + normal.cdf(-shift - point * s),
        freedom,
    )


def equivalence_power(bound: float, tail: float, freedom: float) -> float:
    """Return the probability that two one-sided t tests find two equal arms equal.

    Args:
        bound: the bound of equivalence in units of the standard error.
        tail: level of each one-sided test.
        freedom: degrees of freedom of the estimated standard error.
    """
    point, normal = student_point(2 * tail, freedom), NormalDist()
    if math.isinf(point):
        return 0.0
    return _over_spread(lambda s: max(0.0, 2 * normal.cdf(bound - point * s) - 1), freedom)


def _over_spread(value: Callable[[float], float], freedom: float) -> float:
    """Return the mean of a function of s, the estimated standard error over the true one: s^2 is chi^2 / freedom."""
    half = freedom / 2
    constant = math.log(2) + half * math.log(half) - math.lgamma(half)
    start, end = max(0.0, 1 - 10 / math.sqrt(freedom)), 1 + 10 / math.sqrt(freedom)
    # With few degrees of freedom the function falls steeply above 0: cubes put most of the points there.
    order = 1 if start else 3

    def density(s: float) -> float:
        if s == 0:
            return math.exp(constant) if freedom == 1 else 0.0
        return math.exp(constant + (freedom - 1) * math.log(s) - half * s * s)

    total = 0.0
    for i in range(_PANELS + 1):
        weight = 1 if i in (0, _PANELS) else 4 if i % 2 else 2
        x = i / _PANELS
        s = start + (end - start) * x**order
        total += weight * density(s) * value(s) * order * x ** (order - 1)
    return min(1.0, total * (end - start) / (3 * _PANELS))
