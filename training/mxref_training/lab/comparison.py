"""The contrasts of a ladder: paired differences, corrected p-values, equivalence, and outcomes.

The rules are those of docs/explanation/ablation-protocol, which was written before the runs.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean, stdev

from mxref_training.lab.contrasts import Says
from mxref_training.lab.distributions import student_cdf, student_point, student_tail
from mxref_training.lab.pooling import Pool

LEVEL = 0.05
"""Family-wise level of the contrasts, and the level of each one-sided test of equivalence."""
EQUAL_NATS = 0.010
"""Losses that differ by less are called equal."""
NOISY = 2.0
"""Pairs that scatter by more than this factor times the pooled spread are marked."""
EQUAL_PERCENT = 3.0
"""Tokens to target that differ by less are called equal."""


class Outcome(StrEnum):
    """The outcome of a contrast."""

    DIVERGES = "diverges"
    """Every run of the arm diverged, and none of the arm that it is held against."""
    UNDECIDED = "undecided"
    """Some runs diverged, in another way."""
    LOWER = "lower"
    HIGHER = "higher"
    EQUAL = "equal"
    """Not shown to differ, and shown to lie within the bound."""
    UNDERPOWERED = "underpowered"
    MISSING = "missing"
    """No pair of runs has finished."""


@dataclass(frozen=True)
class Difference:
    """A paired difference of two arms: its estimate, and how sure it is."""

    pairs: int
    estimate: float
    error: float = math.inf
    """Standard error; infinite if no spread is known."""
    freedom: float = 0
    own: bool = False
    """Whether the spread is that of these pairs alone, because an arm is visibly noisier than the others."""
    own_spread: float = math.nan
    """Standard deviation of these pairs' differences; NaN of one pair."""

    def half_width(self, level: float = LEVEL) -> float:
        """Return the half-width of the interval of confidence 1 - level."""
        return student_point(level, self.freedom) * self.error if self.freedom > 0 else math.inf

    @property
    def is_noisy(self) -> bool:
        """Whether the pairs scatter more than twice as much as the spread that the interval stands on."""
        return self.freedom > 0 and self.own_spread > NOISY * self.error * math.sqrt(self.pairs)

    @property
    def low(self) -> float:
        """Lower end of the 95 % interval."""
        return self.estimate - self.half_width()

    @property
    def high(self) -> float:
        """Upper end of the 95 % interval."""
        return self.estimate + self.half_width()

    @property
    def p(self) -> float:
        """Two-sided p-value, not corrected; NaN if no spread is known."""
        if self.freedom <= 0:
            return math.nan
        if self.error == 0:
            return 1.0 if self.estimate == 0 else 0.0
        return student_tail(self.estimate / self.error, self.freedom)

    def equal_p(self, bound: float) -> float:
        """Return the p-value of the two one-sided tests that the difference lies within -bound .. bound."""
        if self.freedom <= 0:
            return math.nan
        if self.error == 0:
            return 0.0 if abs(self.estimate) < bound else 1.0
        return 1 - student_cdf((bound - abs(self.estimate)) / self.error, self.freedom)


def difference(
    arm: Mapping[int, float], against: Mapping[int, float], pooled: Pool, outside: bool
) -> Difference | None:
    """Return the mean difference over the seeds that both arms have; None if there is no such seed.

    Args:
        arm: by seed, the measure of the arm's runs.
        against: the same of the arm that it is held against.
        pooled: the spread over the ladder.
        outside: whether one of the two is not in the pool, so that the pairs' own spread counts.
    """
    values = [arm[seed] - against[seed] for seed in sorted(arm) if seed in against]
    if not values:
        return None
    estimate, count = fmean(values), len(values)
    spread = stdev(values) if count > 1 else math.nan
    if outside:
        error = spread / math.sqrt(count) if count > 1 else math.inf
        return Difference(count, estimate, error, count - 1, own=True, own_spread=spread)
    if pooled.freedom <= 0:
        return Difference(count, estimate, own_spread=spread)
    return Difference(count, estimate, pooled.spread / math.sqrt(count), pooled.freedom, own_spread=spread)


def holm(ps: Sequence[float | None]) -> list[float | None]:
    """Return p-values corrected by Holm's step-down method; None stays, and counts in their number as 1.

    The corrected value is the smallest family-wise level at which the hypothesis is rejected.
    """
    corrected: list[float | None] = [None] * len(ps)
    known = sorted((p, i) for i, p in enumerate(ps) if p is not None)
    largest = 0.0
    for rank, (p, i) in enumerate(known):
        largest = max(largest, min(1.0, p * (len(ps) - rank)))
        corrected[i] = largest
    return corrected


@dataclass(frozen=True)
class Divergence:
    """How many runs of the two arms of a contrast diverged."""

    arm: int
    arm_runs: int
    against: int
    against_runs: int


def outcome(found: Difference | None, corrected: float | None, diverged: Divergence) -> Outcome:
    """Return the outcome of a contrast of losses.

    Args:
        found: the difference in nats, over pairs that did not diverge.
        corrected: its p-value, corrected for the number of contrasts.
        diverged: how many runs diverged.
    """
    if diverged.arm or diverged.against:
        every = diverged.arm == diverged.arm_runs and diverged.against_runs and not diverged.against
        return Outcome.DIVERGES if every else Outcome.UNDECIDED
    if found is None:
        return Outcome.MISSING
    if corrected is not None and corrected < LEVEL:
        return Outcome.LOWER if found.estimate < 0 else Outcome.HIGHER
    return Outcome.EQUAL if found.equal_p(EQUAL_NATS) < LEVEL else Outcome.UNDERPOWERED


def judge_prediction(says: Says, seen: Outcome, converged: bool) -> str:
    """Return whether a prediction is `reproduced`, `not reproduced` or `underpowered`.

    Args:
        says: the prediction.
        seen: the outcome of its contrast.
        converged: whether no run of the arm diverged and all of them reached the target.
    """
    if seen.value == says.value:
        return "reproduced"
    if says is Says.DIVERGES:
        return "not reproduced" if converged else "underpowered"
    decided = (Outcome.LOWER, Outcome.HIGHER, Outcome.EQUAL, Outcome.DIVERGES)
    return "not reproduced" if seen in decided else "underpowered"
