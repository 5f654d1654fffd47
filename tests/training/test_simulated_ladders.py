"""Ladders simulated with a known truth: intervals cover it, families of nulls rarely fail, and power is as computed."""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import pytest

from mxref_training.lab.contrasts import (
    LEVEL,
    Difference,
    difference,
    equal_power,
    holm,
    pool,
    smallest_difference,
)

pytestmark = pytest.mark.study

LADDERS = 400
SEEDS = (5, 5, 5, 5, 3, 3, 3)
"""Repetitions of the arms."""
NOISE = 0.01
"""Standard deviation of a run; a difference has the root of two times it."""
SPREAD = math.sqrt(2) * NOISE
CONTRASTS = [(i, 0) for i in range(1, 7)] + [(2, 1), (6, 5)]
FREEDOM = sum(SEEDS) - 7 - 5 + 1


def simulate(effects: list[float], noise: list[float], number: int) -> list[list[Difference]]:
    """Return the contrasts of a number of ladders whose arms have these true effects and noise."""
    rng = np.random.default_rng(3)
    ladders = []
    for _ in range(number):
        seeds = rng.normal(4, 0.05, 5)
        draw = rng.normal(size=(7, 5))
        runs = {
            str(i): {s: float(seeds[s] + effects[i] + noise[i] * draw[i, s]) for s in range(count)}
            for i, count in enumerate(SEEDS)
        }
        found = pool(runs)
        ladders.append(
            [
                difference(runs[str(a)], runs[str(b)], found, bool({str(a), str(b)} & set(found.outside)))
                for a, b in CONTRASTS
            ]
        )
    return ladders  # type: ignore[return-value]  # every contrast has pairs


@pytest.fixture(scope="module")
def null() -> list[list[Difference]]:
    return simulate([0.0] * 7, [NOISE] * 7, LADDERS)


def share(ladders: list[list[Difference]], true: Callable[[list[Difference]], bool]) -> float:
    return sum(map(true, ladders)) / len(ladders)


def test_intervals_cover_the_truth(null: list[list[Difference]]) -> None:
    for i in range(len(CONTRASTS)):
        covered = share(null, lambda found, i=i: found[i].low <= 0 <= found[i].high)
        assert covered == pytest.approx(0.95, abs=0.033)  # 3 standard errors of 400 ladders


def test_a_family_of_nulls_fails_at_most_at_its_level(null: list[list[Difference]]) -> None:
    wrong = share(null, lambda found: min(holm([d.p for d in found])) < LEVEL)  # type: ignore[type-var]
    assert 0.01 < wrong <= LEVEL + 0.033


def test_the_family_holds_its_level_where_other_contrasts_differ() -> None:
    # Arms 1 to 3 are far from the rest; contrast (6, 5) and those of arms 4 to 6 with arm 0 are null.
    ladders = simulate([0.0, 0.1, 0.2, 0.3, 0.0, 0.0, 0.0], [NOISE] * 7, LADDERS)
    nulls = [i for i, (a, b) in enumerate(CONTRASTS) if a >= 4 and b in (0, 5)]
    assert len(nulls) == 4

    def fails(found: list[Difference]) -> bool:
        corrected = holm([d.p for d in found])
        assert all(corrected[i] < LEVEL for i in (0, 1, 2))  # type: ignore[operator]
        return any(corrected[i] < LEVEL for i in nulls)  # type: ignore[operator]

    assert share(ladders, fails) <= LEVEL + 0.033


def test_power_is_as_computed() -> None:
    for arm in (1, 6):
        effect = smallest_difference(SPREAD, SEEDS[arm], FREEDOM, len(CONTRASTS))
        effects = [effect if i == arm else 0.0 for i in range(7)]
        ladders = simulate(effects, [NOISE] * 7, LADDERS)
        contrast = CONTRASTS.index((arm, 0))
        found = share(ladders, lambda found, at=contrast: found[at].p < LEVEL / len(CONTRASTS))
        assert found == pytest.approx(0.8, abs=0.06)


def test_equivalence_is_claimed_as_often_as_computed_and_rarely_at_the_bound(
    null: list[list[Difference]],
) -> None:
    bound = 0.02
    claimed = share(null, lambda found: found[0].equal_p(bound) < LEVEL)
    assert claimed == pytest.approx(equal_power(SPREAD, 5, FREEDOM, bound), abs=0.07)
    at_bound = simulate([0.0, bound, 0, 0, 0, 0, 0], [NOISE] * 7, LADDERS)
    assert share(at_bound, lambda found: found[0].equal_p(bound) < LEVEL) <= LEVEL + 0.033


def test_one_noisy_arm_does_not_blur_the_others() -> None:
    ladders = simulate([0.0] * 7, [NOISE] * 3 + [8 * NOISE] + [NOISE] * 3, LADDERS)
    for i in (0, 1, 6):
        covered = share(ladders, lambda found, i=i: found[i].low <= 0 <= found[i].high)
        assert covered == pytest.approx(0.95, abs=0.033)
    # Its own contrast is judged by its own pairs, wherever the noise shows.
    assert share(ladders, lambda found: found[2].own) > 0.9
    covered = share(ladders, lambda found: found[2].low <= 0 <= found[2].high)
    assert covered == pytest.approx(0.95, abs=0.035)
