"""The answers of a ladder: its contrasts, computed from the measures of the finished runs.

`Answers.table` is the registered analysis. `Answers.explored` stands beside it: noisier arms have a pool of their own,
contrasts that were declared after runs had been seen are among the others, and the growth of a difference is measured
beside its size. `combined` puts several ladders together. The rules are stated in `verdict.RULES`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
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
    Runs,
    between,
    difference,
    equal_power,
    holm,
    pairs_to_decide,
    pool,
    scatter,
    separated,
    smallest_difference,
)
from mxref_training.lab.curves import Crossing, Reach
from mxref_training.lab.ladder import Arm, Contrast, Ladder
from mxref_training.lab.verdict import Outcome, judge_prediction, outcome, sentence

Row = dict[str, Any]
_OF_A_CONTRAST = ("name", "arm", "against", "question")


@dataclass(frozen=True)
class Measures:
    """The measures of the finished runs, by arm and seed."""

    losses: Runs
    """Loss at equal tokens, in nats per token; diverged runs are left out."""
    crossings: Mapping[str, Mapping[int, Crossing]]
    """Where each run reaches the target; pairs without a target are left out."""
    diverged: Mapping[str, tuple[int, int]]
    """How many runs of each arm diverged, and how many there are."""
    slopes: Runs = field(default_factory=dict)
    """Slope over the last half of the tokens, in nats per e-fold, of the arms of which no run diverged."""


class Answers:
    """The contrasts of a ladder."""

    def __init__(self, ladder: Ladder, measures: Measures, seeds: int) -> None:
        self.ladder, self.measures, self._seeds = ladder, measures, seeds
        repeated = [arm.name for arm in ladder.arm if not arm.seed_offset]
        self._whole = [name for name in repeated if not self._diverged(name)[0]]
        self.losses = pool(self._of_whole(measures.losses))
        logs = {name: self._logs_of(name) for name in self._whole}
        self._logs = {name: of for name, of in logs.items() if of}
        self.tokens = pool(self._logs)

    def _diverged(self, arm: str) -> tuple[int, int]:
        return self.measures.diverged.get(arm, (0, 0))

    def _of_whole(self, runs: Runs) -> dict[str, Mapping[int, float]]:
        """Return the runs of the arms of which none diverged."""
        return {name: runs[name] for name in self._whole if runs.get(name)}

    def _logs_of(self, name: str) -> dict[int, float]:
        """Return the logarithm of the tokens to target by seed; nothing if a run gives only a bound."""
        found = self.measures.crossings.get(name, {})
        if any(crossing.reach is not Reach.CROSSED for crossing in found.values()):
            return {}
        return {seed: math.log(crossing.tokens) for seed, crossing in found.items()}

    def spread(self) -> dict[str, Any]:
        """Return the standard deviation of a paired difference: in nats, and in percent of the tokens to target."""
        return {
            "loss": {"nats": self.losses.spread} | _known(self.losses),
            "tokens": {"percent": 100 * self.tokens.spread} | _known(self.tokens),
        }

    def tokens_half_width(self, arm: str, percent: float) -> float | None:
        """Return the half-width in percent of an arm's overhead over the reference, by the pooled spread.

        Args:
            arm: name of the arm.
            percent: its overhead.
        """
        found = self._difference(self._logs, self.tokens, arm, self.ladder.reference.name)
        return (100 + percent) * found.half_width() if found and found.freedom > 0 else None

    def _difference(self, runs: Runs, pooled: Pool, arm: str, against: str) -> Difference | None:
        """Return the difference of two arms, by their own pairs if one of them left the pool or diverged in a run."""
        outside = not {arm, against} <= set(self._whole) - set(pooled.outside)
        return difference(runs.get(arm, {}), runs.get(against, {}), pooled, outside)

    # ---- the registered analysis ----

    def table(self) -> list[Row]:
        """Return every contrast as plain values."""
        contrasts = self.ladder.contrast
        found = [self._difference(self.measures.losses, self.losses, c.arm, c.against) for c in contrasts]
        corrected = holm([None if each is None else each.p for each in found])
        return [self._row(*row) for row in zip(contrasts, found, corrected, strict=True)]

    def _row(self, contrast: Contrast, found: Difference | None, corrected: float | None) -> Row:
        diverged = self._diverged(contrast.arm), self._diverged(contrast.against)
        seen = outcome(found, corrected, *diverged)
        reaches = {crossing.reach for crossing in self.measures.crossings.get(contrast.arm, {}).values()}
        converged = bool(reaches) and not diverged[0][0] and reaches <= {Reach.CROSSED, Reach.FIRST}
        decide = None
        if seen is Outcome.UNDERPOWERED and found is not None and found.freedom > 0:
            spread = found.error * math.sqrt(found.pairs)
            decide = pairs_to_decide(found.estimate, spread, found.freedom, len(self.ladder.contrast))
        return _head(contrast) | {
            "outcome": seen.value,
            "answer": sentence(seen, found, *diverged, decide),
            "pairs": found.pairs if found else 0,
            "diverged": [list(counts) for counts in diverged],
            "loss": found
            and found.numbers
            | {
                "corrected_p": corrected,
                "equal_p": found.equal_p(EQUAL_NATS),
                "own": found.own,
                "own_spread": found.own_spread,
                "noisy": found.is_noisy,
            },
            "tokens": self._tokens(contrast),
            "predictions": [
                {
                    "says": prediction.says.value,
                    "source": prediction.source,
                    "verdict": judge_prediction(prediction.says, seen, converged).value,
                }
                for prediction in contrast.prediction
            ],
            "pairs_to_decide": decide,
        }

    def _tokens(self, contrast: Contrast) -> Row | None:
        """Return the difference in tokens to target in percent, or only a bound if a run of a pair is censored."""
        arm, against = (self.measures.crossings.get(name, {}) for name in (contrast.arm, contrast.against))
        pairs = [(arm[seed], against[seed]) for seed in sorted(arm) if seed in against]
        if not pairs or any(c.reach is Reach.DIVERGED for pair in pairs for c in pair):
            return None
        percent = 100 * math.expm1(fmean(math.log(a.tokens / b.tokens) for a, b in pairs))
        if kinds := {
            (i, c.reach) for pair in pairs for i, c in enumerate(pair) if c.reach is not Reach.CROSSED
        }:
            (side, reach), *others = kinds
            bound = ">" if (side, reach) in ((0, Reach.NEVER), (1, Reach.FIRST)) else "<"
            return None if others else {"percent": percent, "bound": bound}
        found = self._difference(self._logs, self.tokens, contrast.arm, contrast.against)
        if found is None:
            return None
        low, high = (100 * math.expm1(end) for end in (found.low, found.high))
        equal_p = found.equal_p(math.log1p(EQUAL_PERCENT / 100))
        return {"percent": percent, "bound": None, "low": low, "high": high, "p": found.p, "equal_p": equal_p}

    def power(self) -> dict[str, Any]:
        """Return what the planned seeds can find: from the ladder's spread, or before that from the reference's own.

        Runs of the reference at different seeds differ by the data's order too, so the root of two times their standard
        deviation is an upper bound of the spread of a pair.
        """
        planned = [self._planned(arm) for arm in self.ladder.arm if not arm.seed_offset]
        runs = [count for count in planned if count > 1]
        freedom = sum(runs) - len(runs) - max(runs) + 1 if len(runs) > 1 else 0
        spread, source = self.losses.spread, "ladder"
        own = list(self.measures.losses.get(self.ladder.reference.name, {}).values())
        if self.losses.freedom <= 0:
            spread, source = (math.sqrt(2) * stdev(own), "pilot") if len(own) > 1 else (math.nan, "")
        contrasts = self.ladder.contrast

        def each(found: Callable[[int], float]) -> dict[str, float]:
            """Return a number of each contrast by its planned pairs."""
            sides = {c.name: [self.ladder.named(name) for name in (c.arm, c.against)] for c in contrasts}
            return {name: found(min(map(self._planned, of))) for name, of in sides.items()}

        return {
            "source": source,
            "spread": spread,
            "runs": len(own) if source == "pilot" else None,
            "freedom": freedom,
            "equal_nats": EQUAL_NATS,
            "smallest_nats": each(lambda n: smallest_difference(spread, n, freedom, len(contrasts))),
            "equal_power": each(lambda n: equal_power(spread, n, freedom) if source else math.nan),
        }

    def _planned(self, arm: Arm) -> int:
        """Return the repetitions of an arm: its own number, or what the call asked for if the file names none."""
        own = any(other.seeds > 1 for other in self.ladder.arm)
        return min(self.ladder.repetitions(arm), self._seeds) if own else self._seeds

    # ---- the exploratory analysis ----

    def explored(self) -> dict[str, Any]:
        """Return the declared and the exploratory contrasts of the arms of which no run diverged.

        Arms that round an operand of Fprop stochastically have a pool of their own if they are shown to be noisier.
        """
        losses, slopes = self._of_whole(self.measures.losses), self._of_whole(self.measures.slopes)
        noisy = [
            arm.name for arm in self.ladder.arm if arm.name in losses and _is_random(self.ladder.resolve(arm))
        ]
        rest, own, p = separated(losses, noisy)
        apart, slope_apart = (rest, own), separated(slopes, noisy)[:2]

        def paired(runs: Runs, pools: tuple[Pool, Pool], contrast: Contrast) -> Row:
            sides = contrast.arm, contrast.against
            found = self._difference(runs, between(*(pools[side in noisy] for side in sides)), *sides)
            assert found is not None
            one, other = (runs[side] for side in sides)
            return found.numbers | {
                "pairs": [[seed, one[seed] - other[seed]] for seed in sorted(one.keys() & other.keys())]
            }

        rows = [
            _head(contrast)
            | {
                "declared": contrast in self.ladder.contrast,
                "loss": paired(losses, apart, contrast),
                "slope": paired(slopes, slope_apart, contrast),
            }
            for contrast in (*self.ladder.contrast, *self.ladder.exploratory)
            if set(losses.get(contrast.arm, ())) & set(losses.get(contrast.against, ()))
        ]
        reference = slopes.get(self.ladder.reference.name, {})
        return {
            "noisy": noisy,
            "pools": [{"nats": each.spread} | _known(each) for each in dict.fromkeys(apart)],
            "noisy_p": p,
            "reference_slope": fmean(reference.values()) if reference else math.nan,
            "contrasts": _corrected(rows),
        }


def _head(contrast: Contrast) -> Row:
    return {key: getattr(contrast, key) for key in _OF_A_CONTRAST}


def _known(found: Pool) -> Row:
    return {"freedom": found.freedom, "outside": list(found.outside)}


def _is_random(recipe: Recipe) -> bool:
    """Return whether an operand of Fprop is rounded stochastically: its evaluations are then random too."""
    return any(operand.rounding is Rounding.SR for operand in (recipe.fprop.x, recipe.fprop.w))


def _corrected(rows: list[Row]) -> list[Row]:
    """Return the rows with the p-values of their losses, corrected for the number of rows."""
    for row, p in zip(rows, holm([row["loss"]["p"] for row in rows]), strict=True):
        row["loss"]["corrected_p"] = p
    return rows


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
        row = {key: found[0][key] for key in _OF_A_CONTRAST} | {
            "declared": all(one["declared"] for one in found)
        }
        for measure in ("loss", "slope"):
            pairs = [value for one in found for _, value in one[measure]["pairs"]]
            own = scatter(pairs)
            row[measure] = own.numbers | {
                "pairs": pairs,
                "ladders": [one[measure]["nats"] for one in found],
                "same_sign": sum(value * own.estimate > 0 for value in pairs),
            }
        rows.append(row)
    return _corrected(rows)
