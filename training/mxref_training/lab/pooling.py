"""The spread of a difference between two arms, pooled over all arms of a ladder.

A measure of each run is fitted by an effect of its arm plus an effect of its seed. What remains is the noise of a run,
and a difference of two runs at equal seeds has twice its variance. Pooling over the arms gives many degrees of freedom
where a pair of arms alone gives two or four. It assumes that the arms are equally noisy; an arm that is visibly noisier
leaves the pool.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from statistics import fmean, variance

from mxref_training.lab.distributions import f_tail

OUTLIER_LEVEL = 0.01
"""Level of the F test by which an arm leaves the pool, shared among the arms."""

Runs = Mapping[str, Mapping[int, float]]
"""By arm and seed: a measure of the run."""


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
    """Return the pooled spread of the arms that are not visibly noisier than the others.

    Args:
        runs: finite values; an arm with one run adds nothing, and may be there.
    """
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


@dataclass(frozen=True)
class Pools:
    """The noise of a ladder in which some arms may be noisier than the rest."""

    rest: Pool
    noisy: Pool
    """The same pool as `rest` where the arms are not shown to be noisier."""
    p: float
    """p-value of the F test; NaN if one of the two has too few runs."""

    def between(self, sides: Collection[str], noisy: Collection[str]) -> Pool:
        """Return the noise of a difference of two arms, `sides`; `noisy` are the arms of the noisy pool.

        Across the pools the variance is the mean of the two, with the degrees of freedom of Welch and Satterthwaite.
        """
        inside = sum(side in noisy for side in sides)
        if self.rest is self.noisy or not inside:
            return self.rest
        if inside == len(sides):
            return self.noisy
        parts = [(pool.spread**2 / 2, pool.freedom) for pool in (self.rest, self.noisy)]
        variance = sum(part for part, _ in parts)
        freedom = variance**2 / sum(part**2 / own for part, own in parts)
        return Pool(math.sqrt(variance), freedom, (*self.rest.outside, *self.noisy.outside))


def separated(runs: Runs, noisy: Collection[str]) -> Pools:
    """Return a pool for some arms and one for the rest, if an F test at `OUTLIER_LEVEL` shows the former noisier.

    Args:
        runs: finite values.
        noisy: names of the arms that may be noisier, chosen by what they are and not by their results.
    """
    parts = [{arm: of for arm, of in runs.items() if (arm in noisy) is inside} for inside in (False, True)]
    rest, apart = map(pool, parts)
    p = math.nan
    if rest.freedom and apart.freedom and rest.spread:
        p = f_tail((apart.spread / rest.spread) ** 2, apart.freedom, rest.freedom)
    if p < OUTLIER_LEVEL:
        return Pools(rest, apart, p)
    shared = pool(runs)
    return Pools(shared, shared, p)


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
    return f_tail(own * freedom / (squares * (1 + share)), len(shared) - 1, freedom)


def _fit(runs: Runs) -> tuple[dict[int, float], float, int]:
    """Return the seed effects of the least-squares fit, the residual sum of squares, and its degrees of freedom."""
    by_seed: dict[int, list[tuple[str, float]]] = {}
    for arm, values in runs.items():
        for seed, value in values.items():
            by_seed.setdefault(seed, []).append((arm, value))
    seeds = dict.fromkeys(by_seed, 0.0)
    arms = dict.fromkeys(runs, 0.0)
    scale = max((abs(v) for values in runs.values() for v in values.values()), default=0.0)
    # Alternating means converge to the least-squares fit.
    for _ in range(1000):
        arms = {
            arm: sum([v - seeds[seed] for seed, v in values.items()]) / len(values)
            for arm, values in runs.items()
        }
        before = seeds
        seeds = {seed: sum([v - arms[arm] for arm, v in own]) / len(own) for seed, own in by_seed.items()}
        if all(abs(seeds[seed] - before[seed]) <= 1e-13 * scale for seed in seeds):
            break
    squares = math.fsum(
        (v - arms[arm] - seeds[s]) ** 2 for arm, values in runs.items() for s, v in values.items()
    )
    count = sum(map(len, runs.values()))
    return seeds, squares, count - len(arms) - len(seeds) + _components(runs)


def _components(runs: Runs) -> int:
    """Return the number of groups of arms that share no seed with each other."""
    groups: list[set[int]] = []
    for values in runs.values():
        joined = set(values)
        apart = []
        for group in groups:
            if group & joined:
                joined |= group
            else:
                apart.append(group)
        groups = [*apart, joined]
    return len(groups)
