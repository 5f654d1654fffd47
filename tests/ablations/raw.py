"""The losses of the ladders, read and compared by plain arithmetic that shares nothing with the product."""

from __future__ import annotations

import json
import math
from functools import cache
from pathlib import Path
from statistics import fmean, linear_regression, stdev
from typing import Any

FOLDER = Path(__file__).parents[2] / "docs" / "records"
STEP = 16_384
"""Tokens of a step, in all runs."""
SIZES = "readings", "paper_50m"

Curve = list[tuple[int, float]]
"""Steps and validation losses."""


@cache
def records(archive: str) -> list[dict[str, Any]]:
    """Return the records of an archive, a run a line."""
    text = (FOLDER / f"{archive}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line)["record"] for line in text.splitlines()]


@cache
def curves(ladder: str) -> dict[str, dict[int, Curve]]:
    """Return the validation curves by arm and seed."""
    found: dict[str, dict[int, Curve]] = {}
    for record in records(ladder):
        found.setdefault(record["arm"], {})[record["pair"]] = [tuple(point) for point in record["losses"]]
    return found


def loss(curve: Curve) -> float:
    """Return the mean loss of the last 5 % of the steps."""
    return fmean(value for step, value in curve if 20 * step >= 19 * curve[-1][0])


def slope(curve: Curve) -> float:
    """Return the slope over the logarithm of the tokens in the last half."""
    late = [(math.log(step * STEP), value) for step, value in curve if 2 * step >= curve[-1][0]]
    return linear_regression(*zip(*late, strict=True)).slope


def pairs(arm: str, against: str, *ladders: str, measure: object = loss) -> list[float]:
    """Return the differences of two arms at equal seeds, over the ladders that have both."""
    assert callable(measure)
    return [
        measure(curves(name)[arm][seed]) - measure(curves(name)[against][seed])
        for name in ladders or SIZES
        for seed in sorted(curves(name)[arm].keys() & curves(name)[against].keys())
    ]


def in_bf16(arm: str, against: str, ladder: str) -> float:
    """Return the mean difference of the last checkpoints of two arms, both evaluated in BF16."""

    def last(name: str) -> dict[int, float]:
        return {
            record["pair"]: record["last"]["losses"]["bf16"]["validation"]
            for record in records(ladder)
            if record["arm"] == name
        }

    one, other = last(arm), last(against)
    return fmean(one[seed] - other[seed] for seed in one.keys() & other.keys())


def two_sided(values: list[float]) -> float:
    """Return the p-value of Student's t test that the mean is nothing, by Simpson's rule over the density."""
    freedom = len(values) - 1
    t = abs(fmean(values)) / (stdev(values) / math.sqrt(len(values)))
    scale = math.exp(math.lgamma((freedom + 1) / 2) - math.lgamma(freedom / 2)) / math.sqrt(math.pi * freedom)
    count = 20_000
    width = t / count
    heights = [
        scale
        * (1 + (i * width) ** 2 / freedom) ** (-(freedom + 1) / 2)
        * (1 if i in (0, count) else 4 if i % 2 else 2)
        for i in range(count + 1)
    ]
    return 1 - 2 * sum(heights) * width / 3


def holm(found: dict[str, float]) -> dict[str, float]:
    """Return p-values corrected for their number by Holm's method."""
    corrected, largest = {}, 0.0
    for rank, name in enumerate(sorted(found, key=lambda name: found[name])):
        largest = max(largest, min(1.0, found[name] * (len(found) - rank)))
        corrected[name] = largest
    return corrected
