"""The registered experiment `shrinkage`: its rule and every number that the pages tell of it."""

from __future__ import annotations

import math
from statistics import fmean, stdev

import pytest

from ablations import raw
from ablations.conclusions import signed
from ablations.ladders import arm_of, pooled, results_of
from ablations.test_conclusions import PAGE
from mxref_training.lab.contrasts import Difference

SIDES = {"grid": ("e1m2", "e2m1"), "grid-h16": ("e1m2-h16", "e2m1-h16"), "gain": ("e2m1-gain", "e2m1")}
"""The deciding contrasts."""
ARMS = 7
SEEDS = 5
T24 = {95: 2.0638985616280205, 90: 1.7108820799094275}
"""Points of Student's t with 24 degrees of freedom, from a table."""


def spread() -> float:
    """Return σ of a pair from what arms and seeds leave of the losses, by plain arithmetic."""
    losses = [[raw.loss(curve[seed]) for seed in range(SEEDS)] for curve in raw.curves("shrinkage").values()]
    arms = [fmean(row) for row in losses]
    seeds = [fmean(column) for column in zip(*losses, strict=True)]
    rest = sum(
        (loss - arms[i] - seeds[j] + fmean(arms)) ** 2
        for i, row in enumerate(losses)
        for j, loss in enumerate(row)
    )
    return math.sqrt(2 * rest / ((ARMS - 1) * (SEEDS - 1)))


def contrast(name: str) -> Difference:
    found = results_of("shrinkage")
    one, other = (arm_of(found, arm) for arm in SIDES[name])
    difference = pooled(found, one, other)
    assert difference is not None
    return difference


def test_every_run_is_there() -> None:
    records = raw.records("shrinkage")
    assert len(records) == ARMS * SEEDS
    assert not any(record["diverged"] for record in records)
    deciding = {arm for sides in SIDES.values() for arm in sides}
    kinds = {
        (record["seed"], record["environment"]["hardware"]["device"])
        for record in records
        if record["arm"] in deciding
    }
    assert len(kinds) == SEEDS


@pytest.mark.parametrize("name", SIDES)
def test_the_common_spread_is_that_of_plain_arithmetic(name: str) -> None:
    values = raw.pairs(*SIDES[name], "shrinkage")
    found = contrast(name)
    assert found.estimate == pytest.approx(fmean(values))
    assert found.half_width() == pytest.approx(T24[95] * spread() / math.sqrt(SEEDS))
    assert stdev(values) < 1.5 * spread()


def test_in_bf16() -> None:
    found = [signed(raw.in_bf16(*sides, "shrinkage")) for sides in SIDES.values()]
    assert "(BF16: {}, {}, {}).".format(*found) in PAGE


def test_the_rule_gives_neither() -> None:
    grid, under_h16, gain = (contrast(name) for name in SIDES)
    corrected = raw.holm({name: contrast(name).p for name in SIDES})
    # Shrinkage: a grid shown to be negative, or a gain shown at -0.012 or less.
    assert grid.estimate > 0
    assert corrected["grid"] < 0.05
    assert under_h16.estimate > 0
    assert gain.estimate > 0
    # Noise: both grids shown to be positive, and the 90 % interval of the gain within 0.015.
    assert corrected["grid-h16"] > 0.05
    assert gain.estimate + T24[90] * gain.error > 0.015
    said = [f"{signed(one.estimate)} ± {one.half_width():.3f}" for one in (grid, under_h16, gain)]
    assert "is {} above E2M1, {} under H16; E2M1 scaled back {} (BF16: ".format(*said) in PAGE
    assert (
        f"and scaling back within ±0.015 at 90 % (it reaches {signed(gain.estimate + T24[90] * gain.error)})"
        in PAGE
    )
