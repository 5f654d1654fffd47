"""The answers of a ladder: its contrasts, computed from the measures of the finished runs.

The registered analysis is `Answers`. The exploratory one, `explored`, stands beside it: noisier arms have a pool of
their own, contrasts that were declared after runs had been seen are among the others, and the growth of a difference
is measured beside its size. `combined` puts several ladders together. The rules are stated in `verdict.RULES`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Any

from mxref.recipe import Recipe
from mxref.steps.rounding import Rounding
from mxref_training.errors import ConfigError
from mxref_training.lab.contrasts import (
    EQUAL_NATS,
    EQUAL_PERCENT,
    Difference,
    Pool,
    Pools,
    Runs,
    difference,
    equal_power,
    holm,
    pairs_to_decide,
    pool,
    separated,
    smallest_difference,
)
from mxref_training.lab.curves import Crossing, Reach
from mxref_training.lab.ladder import Arm, Contrast, Ladder
from mxref_training.lab.verdict import Divergence, Outcome, judge_prediction, outcome, sentence

Row = dict[str, Any]


@dataclass(frozen=True)
class Measures:
    """The measures of the finished runs, by arm and seed."""

    losses: Runs
    """Loss at equal tokens, in nats per token; diverged runs are left out."""
    crossings: Mapping[str, Mapping[int, Crossing]]
    """Where each run reaches the target; pairs without a target are left out."""
    diverged: Mapping[str, tuple[int, int]]
    """How many runs of each arm diverged, and how many there are."""


class Answers:
    """The contrasts of a ladder."""

    def __init__(self, ladder: Ladder, measures: Measures, seeds: int) -> None:
        self.ladder, self.measures, self._seeds = ladder, measures, seeds
        repeated = [arm.name for arm in ladder.arm if not arm.seed_offset]
        whole = [name for name in repeated if not measures.diverged.get(name, (0, 0))[0]]
        self.losses = pool({name: measures.losses.get(name, {}) for name in whole})
        self._logs = {name: self._logs_of(name) for name in whole}
        self.tokens = pool({name: logs for name, logs in self._logs.items() if logs})
        self._whole = set(whole)

    def spread(self) -> dict[str, Any]:
        """Return the standard deviation of a paired difference: in nats, and in percent of the tokens to target."""
        return {
            "loss": {"nats": self.losses.spread} | _known(self.losses),
            "tokens": {"percent": 100 * self.tokens.spread} | _known(self.tokens),
        }

    def _logs_of(self, name: str) -> dict[int, float]:
        """Return the logarithm of the tokens to target by seed; nothing if a run gives only a bound."""
        found = self.measures.crossings.get(name, {})
        if any(crossing.reach is not Reach.CROSSED for crossing in found.values()):
            return {}
        return {seed: math.log(crossing.tokens) for seed, crossing in found.items()}

    def tokens_half_width(self, arm: str, percent: float) -> float | None:
        """Return the half-width in percent of an arm's overhead over the reference, by the pooled spread.

        Args:
            arm: name of the arm.
            percent: its overhead.
        """
        found = self._difference(self._logs, self.tokens, arm, self.ladder.reference.name)
        if found is None or found.freedom <= 0:
            return None
        return (100 + percent) * found.half_width()

    def _difference(self, runs: Runs, pooled: Pool, arm: str, against: str) -> Difference | None:
        outside = not {arm, against} <= self._whole - set(pooled.outside)
        return difference(runs.get(arm, {}), runs.get(against, {}), pooled, outside)

    def table(self) -> list[dict[str, Any]]:
        """Return every contrast as plain values."""
        contrasts = self.ladder.contrast
        found = [self._difference(self.measures.losses, self.losses, c.arm, c.against) for c in contrasts]
        corrected = holm([None if d is None or math.isnan(d.p) else d.p for d in found])
        return [self._row(*row) for row in zip(contrasts, found, corrected, strict=True)]

    def _row(self, contrast: Contrast, found: Difference | None, corrected: float | None) -> dict[str, Any]:
        counts = [self.measures.diverged.get(name, (0, 0)) for name in (contrast.arm, contrast.against)]
        diverged = Divergence(*counts[0], *counts[1])
        seen = outcome(found, corrected, diverged)
        crossings = self.measures.crossings.get(contrast.arm, {}).values()
        converged = (
            bool(crossings)
            and not diverged.arm
            and all(crossing.reach in (Reach.CROSSED, Reach.FIRST) for crossing in crossings)
        )
        decide = None
        if seen is Outcome.UNDERPOWERED and found is not None and found.freedom > 0:
            spread = found.error * math.sqrt(found.pairs)
            decide = pairs_to_decide(found.estimate, spread, found.freedom, len(self.ladder.contrast))
        return {
            "name": contrast.name,
            "arm": contrast.arm,
            "against": contrast.against,
            "question": contrast.question,
            "outcome": seen.value,
            "answer": sentence(seen, found, diverged, decide),
            "pairs": found.pairs if found else 0,
            "diverged": [list(count) for count in counts],
            "loss": _loss(found, corrected),
            "tokens": self._tokens(contrast),
            "predictions": [
                {
                    "says": prediction.says.value,
                    "source": prediction.source,
                    "verdict": judge_prediction(prediction.says, seen, converged),
                }
                for prediction in contrast.prediction
            ],
            "pairs_to_decide": decide,
        }

    def _tokens(self, contrast: Contrast) -> dict[str, Any] | None:
        """Return the difference in tokens to target in percent, or only a bound if a run of a pair is censored."""
        arm, against = (self.measures.crossings.get(name, {}) for name in (contrast.arm, contrast.against))
        pairs = [(arm[seed], against[seed]) for seed in sorted(arm) if seed in against]
        if not pairs or any(c.reach is Reach.DIVERGED for pair in pairs for c in pair):
            return None
        percent = 100 * math.expm1(fmean(math.log(a.tokens / b.tokens) for a, b in pairs))
        bounds = [{c.reach for c in side} - {Reach.CROSSED} for side in zip(*pairs, strict=True)]
        if bounds[0] or bounds[1]:
            sign = {(1, 0): ">", (0, 1): "<", (2, 0): "<", (0, 2): ">"}.get(tuple(map(_direction, bounds)))  # type: ignore[arg-type]
            return {"percent": percent, "bound": sign} if sign else None
        found = self._difference(self._logs, self.tokens, contrast.arm, contrast.against)
        if found is None:
            return None
        low, high = (100 * math.expm1(end) for end in (found.low, found.high))
        bound = math.log1p(EQUAL_PERCENT / 100)
        return {"percent": percent, "bound": None, "low": low, "high": high, "p": found.p} | {
            "equal_p": found.equal_p(bound)
        }

    def power(self) -> dict[str, Any]:
        """Return what the planned seeds can find: from the ladder's spread, or before that from the reference's own.

        Runs of the reference at different seeds differ by the data's order too, so the root of two times their standard
        deviation is an upper bound of the spread of a pair.
        """
        runs = {
            arm.name: self._planned(arm)
            for arm in self.ladder.arm
            if not arm.seed_offset and self._planned(arm) > 1
        }
        freedom = sum(runs.values()) - len(runs) - max(runs.values(), default=0) + 1 if len(runs) > 1 else 0
        spread, source = self.losses.spread, "ladder"
        own = list(self.measures.losses.get(self.ladder.reference.name, {}).values())
        if self.losses.freedom <= 0:
            spread, source = (math.sqrt(2) * stdev(own), "pilot") if len(own) > 1 else (math.nan, "")
        count = len(self.ladder.contrast)
        planned = {
            c.name: min(self._planned(self.ladder.named(name)) for name in (c.arm, c.against))
            for c in self.ladder.contrast
        }
        return {
            "source": source,
            "spread": spread,
            "runs": len(own) if source == "pilot" else None,
            "freedom": freedom,
            "equal_nats": EQUAL_NATS,
            "smallest_nats": {
                name: smallest_difference(spread, pairs, freedom, count) for name, pairs in planned.items()
            },
            "equal_power": {
                name: equal_power(spread, pairs, freedom) if math.isfinite(spread) else math.nan
                for name, pairs in planned.items()
            },
        }

    def _planned(self, arm: Arm) -> int:
        """Return the repetitions of an arm: its own number, or what the call asked for if the file names none."""
        own = any(other.seeds > 1 for other in self.ladder.arm)
        return min(self.ladder.repetitions(arm), self._seeds) if own else self._seeds


def _known(found: Pool) -> dict[str, Any]:
    return {"freedom": found.freedom, "outside": list(found.outside)}


def _direction(bounds: set[Reach]) -> int:
    """Return 0 for crossings alone, 1 if some runs never cross, 2 if some cross at or before the first, 3 for both."""
    return (Reach.NEVER in bounds) + 2 * (Reach.FIRST in bounds)


def _loss(found: Difference | None, corrected: float | None) -> dict[str, Any] | None:
    if found is None:
        return None
    return found.numbers | {
        "corrected_p": corrected,
        "equal_p": found.equal_p(EQUAL_NATS),
        "own": found.own,
        "own_spread": found.own_spread,
        "noisy": found.is_noisy,
    }


# ---- the exploratory analysis ----


def explored(ladder: Ladder, losses: Runs, slopes: Runs) -> dict[str, Any]:
    """Return the declared and the exploratory contrasts, with a pool of their own for arms that are noisier.

    Args:
        ladder: the arms and contrasts.
        losses: loss at equal tokens of the arms of which no run diverged, in nats per token.
        slopes: slope over the last half of the same runs, in nats per e-fold of tokens.
    """
    noisy = [arm.name for arm in ladder.arm if arm.name in losses and _rounds_fprop(ladder.resolve(arm))]
    pools, slope_pools = separated(losses, noisy), separated(slopes, noisy)
    contrasts = [
        contrast
        for contrast in (*ladder.contrast, *ladder.exploratory)
        if set(losses.get(contrast.arm, ())) & set(losses.get(contrast.against, ()))
    ]
    rows: list[Row] = []
    for contrast in contrasts:
        sides = contrast.arm, contrast.against
        rows.append(
            {
                "name": contrast.name,
                "arm": contrast.arm,
                "against": contrast.against,
                "question": contrast.question,
                "declared": contrast in ladder.contrast,
                "loss": _paired(losses, pools, sides, noisy),
                "slope": _paired(slopes, slope_pools, sides, noisy),
            }
        )
    _correct(rows)
    reference = slopes.get(ladder.reference.name, {})
    return {
        "noisy": noisy,
        "pools": [
            {"nats": pool.spread, "freedom": pool.freedom, "outside": list(pool.outside)}
            for pool in dict.fromkeys((pools.rest, pools.noisy))
        ],
        "noisy_p": pools.p,
        "reference_slope": fmean(reference.values()) if reference else math.nan,
        "contrasts": rows,
    }


def combined(results: Sequence[Mapping[str, Any]]) -> list[Row]:
    """Return the contrasts that all of several ladders have, over the pairs of all of them together.

    The pairs of a contrast count equally, and their own scatter gives the interval, by Student's t: it holds what
    differs between the ladders too. Holm's method corrects for the contrasts that are shared.

    Args:
        results: of each ladder the content of `results.json`.

    Raises:
        ConfigError: results of a version that has no exploratory analysis, or ladders that share no contrast.
    """
    tables: list[dict[str, Row]] = []
    for one in results:
        if "exploratory" not in one:
            raise ConfigError(
                f"{one['title']!r} has results of an earlier version without single pairs; "
                "run 'mxref ablate' again in its folder, finished arms are kept"
            )
        tables.append({row["name"]: row for row in one["exploratory"]["contrasts"]})
    shared = [name for name in tables[0] if all(name in table for table in tables[1:])]
    if not shared:
        raise ConfigError(
            f"the ladders {', '.join(repr(one['title']) for one in results)} have no contrast in common"
        )
    rows: list[Row] = []
    for name in shared:
        found = [table[name] for table in tables]
        row = {key: found[0][key] for key in ("name", "arm", "against", "question")}
        row["declared"] = all(one["declared"] for one in found)
        for measure in ("loss", "slope"):
            pairs = [value for one in found for _, value in one[measure]["pairs"]]
            of_ladders = [one[measure]["nats"] for one in found]
            spread = stdev(pairs) if len(pairs) > 1 else math.nan
            error = spread / math.sqrt(len(pairs)) if len(pairs) > 1 else math.inf
            own = Difference(len(pairs), fmean(pairs), error, len(pairs) - 1, own_spread=spread)
            row[measure] = own.numbers | {
                "pairs": pairs,
                "ladders": of_ladders,
                "same_sign": same_sign(pairs),
            }
        rows.append(row)
    _correct(rows)
    return rows


def same_sign(values: Sequence[float]) -> int:
    """Return how many values have the sign of their mean."""
    return sum(value * fmean(values) > 0 for value in values)


def _rounds_fprop(recipe: Recipe) -> bool:
    """Return whether an operand of Fprop is rounded stochastically: its evaluations are then random too."""
    return any(operand.rounding is Rounding.SR for operand in (recipe.fprop.x, recipe.fprop.w))


def _paired(runs: Runs, pools: Pools, sides: tuple[str, str], noisy: Sequence[str]) -> dict[str, Any]:
    """Return the difference of two arms, and that of each pair."""
    one, other = (runs[side] for side in sides)
    pool = pools.between(sides, noisy)
    found = difference(one, other, pool, outside=bool(set(sides) & set(pool.outside)))
    assert found is not None
    return found.numbers | {
        "pairs": [[seed, one[seed] - other[seed]] for seed in sorted(one.keys() & other.keys())]
    }


def _correct(rows: Sequence[Row]) -> None:
    """Add the p-values of the losses, corrected for the number of rows."""
    ps = [row["loss"]["p"] for row in rows]
    for row, corrected in zip(rows, holm([None if math.isnan(p) else p for p in ps]), strict=True):
        row["loss"]["corrected_p"] = corrected
