"""The power of the contrasts: the difference that a number of seeds can find, before the runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import lru_cache

from mxref_training.lab.comparison import EQUAL_NATS, LEVEL
from mxref_training.lab.distributions import equivalence_power, t_test_power

POWER = 0.8
"""Probability with which a planned contrast should find its difference."""
MAX_PAIRS = 1000


def smallest_difference(spread: float, pairs: int, freedom: float, contrasts: int) -> float:
    """Return the smallest true difference that a contrast finds with a probability of `POWER`.

    Args:
        spread: standard deviation of a difference of two runs at equal seeds.
        pairs: seeds that both arms have.
        freedom: degrees of freedom of the spread once all runs are there.
        contrasts: number of contrasts; the test has the level of Holm's first step.

    Returns:
        In the unit of `spread`; infinite without a degree of freedom.
    """
    if freedom <= 0 or pairs < 1:
        return math.inf
    return _shift_found(freedom, contrasts) * spread / math.sqrt(pairs)


def equal_power(spread: float, pairs: int, freedom: float, bound: float = EQUAL_NATS) -> float:
    """Return the probability that two arms without a true difference are shown to be equal within the bound."""
    if freedom <= 0 or pairs < 1:
        return 0.0
    return equivalence_power(bound * math.sqrt(pairs) / spread, LEVEL, freedom) if spread else 1.0


def pairs_to_decide(estimate: float, spread: float, freedom: float, contrasts: int) -> int | None:
    """Return the seeds with which a contrast is decided with a probability of `POWER`; None above `MAX_PAIRS`.

    It is decided as a difference if the true one is the estimate, or as equality if there is none, whichever takes
    fewer seeds. The spread counts as well known as it is now.
    """
    if freedom <= 0 or not math.isfinite(spread):
        return None
    needed = spread * _shift_equal(freedom) / EQUAL_NATS
    if estimate:
        needed = min(needed, spread * _shift_found(freedom, contrasts) / abs(estimate))
    pairs = max(1, math.ceil(needed**2))
    return pairs if pairs <= MAX_PAIRS else None


@lru_cache(maxsize=256)
def _shift_found(freedom: float, contrasts: int) -> float:
    """Return the difference, in standard errors, that is found with a probability of `POWER`."""
    return _reaching(lambda shift: t_test_power(shift, LEVEL / contrasts, freedom))


@lru_cache(maxsize=256)
def _shift_equal(freedom: float) -> float:
    """Return the bound, in standard errors, within which equal arms are shown equal with that probability."""
    return _reaching(lambda bound: equivalence_power(bound, LEVEL, freedom))


def _reaching(power: Callable[[float], float]) -> float:
    """Return where a rising function reaches `POWER`, by bisection."""
    low, high = 0.0, 1.0
    while power(high) < POWER:
        low, high = high, 2 * high
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (low, middle) if power(middle) >= POWER else (middle, high)
    return high
