"""The contrasts of a ladder, from the table of its runs.

`Answers.table` is the registered analysis. `Answers.explored` stands beside it: noisier arms have a pool of their own,
contrasts that were declared after runs had been seen are among the others, and the growth of a difference is measured
beside its size. `combined` puts several ladders together. The rules are stated in `verdict.RULES`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from mxref.recipe import Recipe
from mxref.steps.rounding import Rounding
from mxref_training.errors import ConfigError
from mxref_training.lab.contrasts import (
    EQUAL_NATS,
    EQUAL_PERCENT,
    LEVEL,
    Difference,
    Pool,
    between,
    difference,
    equal_power,
    holm,
    paired,
    pairs_to_decide,
    pool,
    scatter,
    separated,
    smallest_difference,
    student_point,
)
from mxref_training.lab.ladder import Arm, Contrast, Ladder
from mxref_training.lab.measures import Measures, Reach, Runs
from mxref_training.lab.verdict import Outcome, judge_prediction, outcome, sentence

Row = dict[str, Any]
_OF_A_CONTRAST = ("name", "arm", "against", "question")


class Answers:
    """The contrasts of a ladder, whose call asked for some repetitions of each arm."""

    def __init__(self, ladder: Ladder, measures: Measures, seeds: int) -> None:
        self.ladder, self.measures, self._seeds = ladder, measures, seeds
        self._whole = [
            arm.name for arm in ladder.arm if not arm.seed_offset and not self._diverged(arm.name)[0]
        ]
        self.losses = pool(self._of_whole(measures.losses))
        # The logarithm of the tokens to target of the arms of which every run crosses it.
        self._logs = {
            arm: {seed: math.log(crossing.tokens) for seed, crossing in of.items()}
            for arm, of in self._of_whole(measures.crossings).items()
            if all(crossing.reach is Reach.CROSSED for crossing in of.values())
        }
        self.tokens = pool(self._logs)

    def _diverged(self, arm: str) -> tuple[int, int]:
        runs = self.measures.diverged.get(arm, {})
        return sum(runs.values()), len(runs)

    def _of_whole(self, runs: Mapping[str, Mapping[int, Any]]) -> dict[str, Mapping[int, Any]]:
        """Return the runs of the arms of which none diverged."""
        return {name: runs[name] for name in self._whole if runs.get(name)}

    def spread(self) -> Row:
        """Return the standard deviation of a paired difference: in nats, and in percent of the tokens to target."""
        return {
            "loss": {"nats": self.losses.spread} | _known(self.losses),
            "tokens": {"percent": 100 * self.tokens.spread} | _known(self.tokens),
        }

    def tokens_half_width(self, arm: str, percent: float) -> float | None:
        """Return the half-width in percent of an arm's overhead over the reference, by the pooled spread."""
        found = self._difference(self._logs, self.tokens, arm, self.ladder.reference.name)
        return (100 + percent) * found.half_width() if found and found.freedom > 0 else None

    def noise(self) -> float:
        """Return the 95 % half-width of one pair by the pooled spread, in percent of the tokens; infinite if unknown.

        Where runs give only bounds of their tokens, the spread of the losses stands for it, by the reference's slope.
        """
        slope = -self._reference_slope()
        if self.tokens.freedom > 0:
            found, unit = self.tokens, 1.0
        elif self.losses.freedom > 0 and slope > 0:
            found, unit = self.losses, slope
        else:
            return math.inf
        return 100 * student_point(LEVEL, found.freedom) * found.spread / unit

    def _reference_slope(self) -> float:
        slopes = self._of_whole(self.measures.slopes).get(self.ladder.reference.name)
        return fmean(slopes.values()) if slopes else math.nan

    def _difference(self, runs: Runs, pooled: Pool, arm: str, against: str) -> Difference | None:
        """Return the difference of two arms, by their own pairs if one of them left the pool or diverged in a run."""
        outside = not {arm, against} <= set(self._whole) - set(pooled.outside)
        return difference(runs.get(arm, {}), runs.get(against, {}), pooled, outside)

    # ---- the registered analysis ----

    def table(self) -> list[Row]:
        """Return every contrast as plain values."""
        contrasts = self.ladder.contrast
        found = [self._difference(self.measures.losses, self.losses, c.arm, c.against) for c in contrasts]
        corrected = holm([math.nan if each is None else each.p for each in found])
        return [self._row(*row) for row in zip(contrasts, found, corrected, strict=True)]

    def _row(self, contrast: Contrast, found: Difference | None, corrected: float) -> Row:
        diverged = self._diverged(contrast.arm), self._diverged(contrast.against)
        seen = outcome(found, corrected, *diverged)
        reaches = {crossing.reach for crossing in self.measures.crossings.get(contrast.arm, {}).values()}
        converged = bool(reaches) and not diverged[0][0] and reaches <= {Reach.CROSSED, Reach.FIRST}
        decide, loss = None, None
        if found is not None:
            if seen is Outcome.UNDERPOWERED:
                spread = found.error * math.sqrt(found.pairs)
                number = len(self.ladder.contrast)
                decide = pairs_to_decide(found.estimate, spread, found.freedom, number)
            loss = found.numbers | {
                "corrected_p": corrected,
                "equal_p": found.equal_p(EQUAL_NATS),
                "own": found.own,
                "own_spread": found.own_spread,
                "noisy": found.is_noisy,
            }
        return _head(contrast) | {
            "outcome": seen.value,
            "answer": sentence(seen, found, *diverged, decide),
            "pairs": found.pairs if found else 0,
            "diverged": [list(counts) for counts in diverged],
            "loss": loss,
            "tokens": self._tokens(contrast),
            "predictions": [
                {
                    "says": said.says.value,
                    "source": said.source,
                    "verdict": judge_prediction(said.says, seen, converged).value,
                }
                for said in contrast.prediction
            ],
            "pairs_to_decide": decide,
        }

    def _tokens(self, contrast: Contrast) -> Row | None:
        """Return the difference in tokens to target in percent, or only a bound if a run of a pair is censored."""
        pairs = paired(*(self.measures.crossings.get(name, {}) for name in (contrast.arm, contrast.against)))
        kinds = {(side, one.reach) for pair in pairs for side, one in enumerate(pair)}
        if not pairs or any(reach is Reach.DIVERGED for _, reach in kinds):
            return None
        percent = 100 * math.expm1(fmean(math.log(a.tokens / b.tokens) for a, b in pairs))
        if bounds := [kind for kind in kinds if kind[1] is not Reach.CROSSED]:
            above = bounds[0] in ((0, Reach.NEVER), (1, Reach.FIRST))
            return {"percent": percent, "bound": ">" if above else "<"} if len(bounds) == 1 else None
        found = self._difference(self._logs, self.tokens, contrast.arm, contrast.against)
        if found is None:
            return None
        low, high = (100 * math.expm1(end) for end in (found.low, found.high))
        equal_p = found.equal_p(math.log1p(EQUAL_PERCENT / 100))
        return {"percent": percent, "bound": None, "low": low, "high": high, "p": found.p, "equal_p": equal_p}

    def power(self) -> Row:
        """Return what the planned seeds can find: from the ladder's spread, or before that from the reference's own.

        Runs of the reference at different seeds differ by the data's order too, so the root of two times their standard
        deviation is an upper bound of the spread of a pair.
        """
        runs = [n for arm in self.ladder.arm if not arm.seed_offset and (n := self._planned(arm)) > 1]
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

    def explored(self) -> Row:
        """Return the declared and the exploratory contrasts of the arms of which no run diverged.

        Arms that round an operand of Fprop stochastically have a pool of their own if they are shown to be noisier.
        """
        losses, slopes = self._of_whole(self.measures.losses), self._of_whole(self.measures.slopes)
        noisy = [name for name in losses if _is_random(self.ladder.resolve(self.ladder.named(name)))]
        *pools, p = separated(losses, noisy)
        slope_pools = separated(slopes, noisy)[:2]

        def compared(runs: Runs, pools: Sequence[Pool], contrast: Contrast) -> Row:
            sides = contrast.arm, contrast.against
            spread = between(*(pools[side in noisy] for side in sides))
            found = self._difference(runs, spread, *sides)
            assert found is not None
            one, other = (runs[side] for side in sides)
            pairs = [[seed, one[seed] - other[seed]] for seed in sorted(one.keys() & other.keys())]
            return found.numbers | {"pairs": pairs}

        rows = [
            _head(contrast)
            | {
                "declared": contrast in self.ladder.contrast,
                "loss": compared(losses, pools, contrast),
                "slope": compared(slopes, slope_pools, contrast),
            }
            for contrast in (*self.ladder.contrast, *self.ladder.exploratory)
            if set(losses.get(contrast.arm, ())) & set(losses.get(contrast.against, ()))
        ]
        return {
            "noisy": noisy,
            "pools": [{"nats": each.spread} | _known(each) for each in dict.fromkeys(pools)],
            "noisy_p": p,
            "reference_slope": self._reference_slope(),
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
    for one in results:
        if "exploratory" not in one:
            raise ConfigError(
                f"{one['title']!r} has results of an earlier version without single pairs; "
                "run 'mxref ablate' again in its folder, finished arms are kept"
            )
    tables = [{row["name"]: row for row in one["exploratory"]["contrasts"]} for one in results]
    shared = [name for name in tables[0] if all(name in table for table in tables[1:])]
    if not shared:
        raise ConfigError(
            f"the ladders {', '.join(repr(one['title']) for one in results)} have no contrast in common"
        )
    rows: list[Row] = []
    for found in ([table[name] for table in tables] for name in shared):
        row = {key: found[0][key] for key in _OF_A_CONTRAST}
        row["declared"] = all(one["declared"] for one in found)
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
