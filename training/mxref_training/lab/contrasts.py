"""Paired differences of a ladder's arms: their pooled spread, intervals, p-values, equivalence and power.

A measure of each run is fitted by an effect of its arm plus an effect of its seed. What remains is the noise of a run,
and a difference of two runs at equal seeds has twice its variance. Pooling over the arms gives many degrees of freedom
where a pair of arms alone gives two or four. It assumes that the arms are equally noisy; an arm that is visibly noisier
leaves the pool. The rules are those of docs/explanation/ablation-protocol, which was written before the runs.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from statistics import fmean, stdev, variance
from typing import Any

import numpy as np
from scipy import special
from scipy.integrate import quad
from scipy.optimize import brentq

LEVEL = 0.05
"""Family-wise level of the contrasts, and the level of each one-sided test of equivalence."""
OUTLIER_LEVEL = 0.01
"""Level of the F test by which an arm leaves the pool, shared among the arms."""
EQUAL_NATS = 0.010
"""Losses that differ by less are called equal."""
EQUAL_PERCENT = 3.0
"""Tokens to target that differ by less are called equal."""
NOISY = 2.0
"""Pairs that scatter by more than this factor times the pooled spread are marked."""
POWER = 0.8
"""Probability with which a planned contrast should find its difference."""
MAX_PAIRS = 1000

Runs = Mapping[str, Mapping[int, float]]
"""By arm and seed: a measure of the run."""


def student_point(tail: float, freedom: float) -> float:
    """Return the t that is exceeded in absolute value with this two-sided probability; infinity without freedom."""
    return float(-special.stdtrit(freedom, tail / 2)) if freedom > 0 else math.inf


# ---- the spread of a difference ----


@dataclass(frozen=True)
class Pool:
    """The noise of the runs of a ladder."""

    spread: float = math.nan
    """Standard deviation of a difference of two runs at equal seeds."""
    freedom: float = 0
    """Degrees of freedom of `spread`; 0 if nothing is known of it."""
    outside: tuple[str, ...] = ()
    """Arms that are visibly noisier than the others, and so are not in the pool."""


def pool(runs: Runs) -> Pool:
    """Return the pooled spread of the arms that are not visibly noisier than the others, from finite values."""
    inside = {arm: dict(values) for arm, values in runs.items() if len(values) > 1}
    outside: list[str] = []
    level = OUTLIER_LEVEL / max(1, len(inside))
    while len(inside) > 2:
        tails = {arm: _tail(arm, inside) for arm in inside}
        worst = min(tails, key=lambda arm: tails[arm])
        if tails[worst] >= level:
            break
        outside.append(worst)
        del inside[worst]
    _, squares, freedom = _fit(inside)
    if freedom <= 0:
        return Pool(outside=tuple(outside))
    return Pool(math.sqrt(2 * squares / freedom), freedom, tuple(outside))


def separated(runs: Runs, noisy: Collection[str]) -> tuple[Pool, Pool, float]:
    """Return the noise of most arms, that of some that may be noisier, and the p-value of the F test between the two.

    Both are one pool of all arms unless the test shows a difference at `OUTLIER_LEVEL`. The arms that may be `noisy`
    are chosen by what they are and not by their results.
    """
    rest, own = (
        pool({arm: of for arm, of in runs.items() if (arm in noisy) is one}) for one in (False, True)
    )
    p = math.nan
    if rest.freedom and own.freedom and rest.spread:
        p = float(special.fdtrc(own.freedom, rest.freedom, (own.spread / rest.spread) ** 2))
    if p < OUTLIER_LEVEL:
        return rest, own, p
    shared = pool(runs)
    return shared, shared, p


def between(one: Pool, other: Pool) -> Pool:
    """Return the noise of a difference of two arms by their pools: of two pools by Welch and Satterthwaite."""
    if one is other:
        return one
    parts = [(each.spread**2 / 2, each.freedom) for each in (one, other)]
    both = sum(part for part, _ in parts)
    freedom = both**2 / sum(part**2 / own for part, own in parts)
    return Pool(math.sqrt(both), freedom, (*one.outside, *other.outside))


def _tail(arm: str, runs: Runs) -> float:
    """Return the p-value of an arm being noisier than the others: its variance about their seed effects, by F."""
    others = {name: values for name, values in runs.items() if name != arm}
    seeds, squares, freedom = _fit(others)
    shared = [(value - seeds[seed], seed) for seed, value in runs[arm].items() if seed in seeds]
    if freedom <= 0 or len(shared) < 2:
        return 1.0
    own = variance(value for value, _ in shared)
    rounding = (1e-12 * max(abs(value) for value in runs[arm].values())) ** 2
    if squares <= rounding * freedom:
        return 1.0 if own <= rounding else 0.0
    # An effect of a seed is itself the mean over the arms that have it.
    share = fmean(1 / sum(seed in values for values in others.values()) for _, seed in shared)
    return float(special.fdtrc(len(shared) - 1, freedom, own * freedom / (squares * (1 + share))))


def _fit(runs: Runs) -> tuple[dict[int, float], float, int]:
    """Return the seed effects of the least-squares fit, the residual sum of squares, and its degrees of freedom."""
    cells = [(arm, seed, value) for arm, values in runs.items() for seed, value in values.items()]
    arms = {arm: i for i, arm in enumerate(runs)}
    seeds = {seed: i for i, seed in enumerate(dict.fromkeys(seed for _, seed, _ in cells), len(arms))}
    design = np.zeros((len(cells), len(arms) + len(seeds)))
    for row, (arm, seed, _) in enumerate(cells):
        design[row, [arms[arm], seeds[seed]]] = 1
    values = np.array([value for _, _, value in cells])
    effects, _, rank, _ = np.linalg.lstsq(design, values)
    squares = float(np.sum((values - design @ effects) ** 2))
    return {seed: float(effects[i]) for seed, i in seeds.items()}, squares, len(cells) - int(rank)


# ---- a difference ----


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

    def half_width(self) -> float:
        """Return the half-width of the 95 % interval."""
        return student_point(LEVEL, self.freedom) * self.error

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
        if self.error == 0:
            return 1.0 if self.estimate == 0 else 0.0
        return float(2 * special.stdtr(self.freedom, -abs(self.estimate / self.error)))

    @property
    def numbers(self) -> dict[str, float]:
        """Estimate, 95 % interval, p-value and degrees of freedom, as the results have them."""
        return {
            "nats": self.estimate, "low": self.low, "high": self.high, "p": self.p, "freedom": self.freedom,
        }  # fmt: skip

    def equal_p(self, bound: float) -> float:
        """Return the p-value of the two one-sided tests that the difference lies within -bound .. bound."""
        if self.error == 0:
            return 0.0 if abs(self.estimate) < bound else 1.0
        return float(special.stdtr(self.freedom, (abs(self.estimate) - bound) / self.error))


def paired(arm: Mapping[int, Any], against: Mapping[int, Any]) -> list[tuple[Any, Any]]:
    """Return what two arms have at the seeds of both, by seed."""
    return [(arm[seed], against[seed]) for seed in sorted(arm.keys() & against.keys())]


def difference(
    arm: Mapping[int, float], against: Mapping[int, float], pooled: Pool, outside: bool
) -> Difference | None:
    """Return the mean difference over the seeds that both arms have; None if there is no such seed.

    With `outside` one of the two arms is not in the pool, and the pairs' own spread counts.
    """
    values = [one - other for one, other in paired(arm, against)]
    if not values or outside:
        return scatter(values) if values else None
    error = pooled.spread / math.sqrt(len(values)) if pooled.freedom > 0 else math.inf
    return replace(scatter(values), error=error, freedom=pooled.freedom, own=False)


def scatter(values: Sequence[float]) -> Difference:
    """Return the mean of the differences of some pairs, whose own scatter gives the interval."""
    count, spread = len(values), stdev(values) if len(values) > 1 else math.nan
    error = spread / math.sqrt(count) if count > 1 else math.inf
    return Difference(count, fmean(values), error, count - 1, True, spread)


def holm(ps: Sequence[float]) -> list[float]:
    """Return p-values corrected by Holm's step-down method; one that is not known, NaN, counts in their number as 1.

    The corrected value is the smallest family-wise level at which the hypothesis is rejected.
    """
    order = np.argsort(ps)  # NaN is last
    steps = np.array(ps)[order] * np.arange(len(ps), 0, -1)
    corrected = np.empty(len(ps))
    corrected[order] = np.maximum.accumulate(np.minimum(steps, 1))
    return [float(p) for p in corrected]


# ---- power: the difference that a number of seeds can find, before the runs ----


def t_test_power(shift: float, tail: float, freedom: float) -> float:
    """Return the probability that a t test at the two-sided level `tail` finds a difference.

    It is `shift` standard errors of its estimate (the noncentrality). `freedom` is that of the estimated error.
    """
    # The square of a noncentral t is a noncentral F.
    return float(1 - special.ncfdtr(1, freedom, shift**2, student_point(tail, freedom) ** 2))


def equivalence_power(bound: float, tail: float, freedom: float) -> float:
    """Return the probability that two one-sided t tests, each at the level `tail`, find two equal arms equal.

    The bound of equivalence is in units of the standard error. `freedom` is that of the estimated error.
    """
    point = student_point(2 * tail, freedom)

    def found(share: float) -> float:
        """Return the power where the estimated standard error, over the true one, is at its quantile."""
        error = math.sqrt(special.chdtri(freedom, 1 - share) / freedom)
        return float(2 * special.ndtr(bound - point * error) - 1)

    # Above this quantile the interval of the two tests is wider than the bounds.
    end = special.chdtr(freedom, freedom * (bound / point) ** 2)
    return float(quad(found, 0.0, end, epsabs=1e-10, epsrel=1e-9, limit=200)[0])


def smallest_difference(spread: float, pairs: int, freedom: float, contrasts: int) -> float:
    """Return the smallest true difference that a contrast finds with a probability of `POWER`.

    Args:
        spread: standard deviation of a difference of two runs at equal seeds; the result has its unit.
        pairs: seeds that both arms have.
        freedom: degrees of freedom of the spread once all runs are there; without one the result is infinite.
        contrasts: number of contrasts; the test has the level of Holm's first step.
    """
    return _shift_found(freedom, contrasts) * spread / math.sqrt(pairs) if freedom > 0 else math.inf


def equal_power(spread: float, pairs: int, freedom: float, bound: float = EQUAL_NATS) -> float:
    """Return the probability that two arms without a true difference are shown to be equal within the bound."""
    if freedom <= 0:
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


@cache
def _shift_found(freedom: float, contrasts: int) -> float:
    """Return the difference, in standard errors, that is found with a probability of `POWER`."""
    return _reaching(lambda shift: t_test_power(shift, LEVEL / contrasts, freedom))


@cache
def _shift_equal(freedom: float) -> float:
    """Return the bound, in standard errors, within which equal arms are shown equal with that probability."""
    return _reaching(lambda bound: equivalence_power(bound, LEVEL, freedom))


def _reaching(power: Callable[[float], float]) -> float:
    """Return where a rising function reaches `POWER`."""
    high = 1.0
    while power(high) < POWER:
        high *= 2
    return float(brentq(lambda x: power(x) - POWER, 0.0, high, xtol=1e-14))
