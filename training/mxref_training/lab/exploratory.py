"""A second analysis of a ladder beside the registered one, and of several ladders together.

Noisier arms have a pool of their own, contrasts that were declared after runs had been seen are among the others, and
the growth of a difference is measured beside its size. The rules are stated in `RULES["exploratory"]`.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, stdev
from typing import Any

from mxref.recipe import Recipe
from mxref.steps.rounding import Rounding
from mxref_training.errors import ConfigError
from mxref_training.lab.comparison import Difference, difference, holm
from mxref_training.lab.ladder import Ladder
from mxref_training.lab.pooling import Pools, Runs, separated

Row = dict[str, Any]


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
        seeds = sorted(set(losses[contrast.arm]) & set(losses[contrast.against]))
        rows.append(
            {
                "name": contrast.name,
                "arm": contrast.arm,
                "against": contrast.against,
                "question": contrast.question,
                "declared": contrast in ladder.contrast,
                "loss": _paired(losses, pools, sides, noisy) | {"pairs": _apart(losses, sides, seeds)},
                "slope": _paired(slopes, slope_pools, sides, noisy) | {"pairs": _apart(slopes, sides, seeds)},
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
            row[measure] = _numbers(own) | {
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


def _apart(runs: Runs, sides: tuple[str, str], seeds: Sequence[int]) -> list[list[float]]:
    arm, against = sides
    return [[seed, runs[arm][seed] - runs[against][seed]] for seed in seeds]


def _paired(runs: Runs, pools: Pools, sides: tuple[str, str], noisy: Sequence[str]) -> dict[str, Any]:
    pool = pools.between(sides, noisy)
    found = difference(runs[sides[0]], runs[sides[1]], pool, outside=bool(set(sides) & set(pool.outside)))
    assert found is not None
    return _numbers(found)


def _numbers(found: Difference) -> dict[str, Any]:
    return {
        "nats": found.estimate,
        "low": found.low,
        "high": found.high,
        "p": found.p,
        "freedom": found.freedom,
    }


def _correct(rows: Sequence[Row]) -> None:
    """Add the p-values of the losses, corrected for the number of rows."""
    ps = [row["loss"]["p"] for row in rows]
    for row, corrected in zip(rows, holm([None if math.isnan(p) else p for p in ps]), strict=True):
        row["loss"]["corrected_p"] = corrected
