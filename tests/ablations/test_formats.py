"""The registered experiment `formats`: its nine contrasts, and every number that the pages tell of it."""

from __future__ import annotations

import math
from statistics import fmean
from typing import Any

import pytest

from ablations import formats, raw
from ablations.conclusions import signed
from ablations.ladders import results_of
from ablations.test_conclusions import DOCS, README

LADDER = formats.LADDER
PAGE = (DOCS / "explanation" / "what-a-bit-buys.rst").read_text(encoding="utf-8")
SIDES = {
    "eight": ("mxfp8", "fp8"), "integer": ("mxint8", "mxfp8"), "six": ("mxfp6-e2m3", "mxfp8"),
    "mantissa": ("mxfp6-e3m2", "mxfp6-e2m3"), "four": ("nvfp4", "mxfp6-e2m3"), "scale": ("nvfp4", "mxfp4"),
    "recipe": ("nvfp4-recipe", "nvfp4"), "choice": ("nvfp4-4over6", "nvfp4"), "rotated": ("nvfp4", "mxfp4-h16"),
}  # fmt: skip
SHOWN = {"integer": "lower", "four": "higher", "scale": "lower", "rotated": "lower"}
ARMS, SEEDS = 12, 3
T22 = 2.0738730679040147
"""Point of Student's t with 22 degrees of freedom at 95 %, from a table."""


def spread() -> float:
    """Return σ of a pair from what arms and seeds leave of the losses, by plain arithmetic."""
    losses = [[raw.loss(curve[seed]) for seed in range(SEEDS)] for curve in raw.curves(LADDER).values()]
    seeds = [fmean(column) for column in zip(*losses, strict=True)]
    rest = sum(
        (loss - fmean(row) - seeds[j] + fmean(seeds)) ** 2 for row in losses for j, loss in enumerate(row)
    )
    return math.sqrt(2 * rest / ((ARMS - 1) * (SEEDS - 1)))


def contrasts() -> dict[str, dict[str, Any]]:
    return {row["name"]: row for row in results_of(LADDER)["contrasts"]}


def points() -> dict[str, formats.Point]:
    return {point.name: point for point in formats.points(results_of(LADDER))}


def test_every_run_is_there_from_one_wheel_on_one_kind_of_gpu() -> None:
    records = raw.records(LADDER)
    assert {(record["arm"], record["seed"]) for record in records} == {
        (arm, 50 + seed) for arm in points() for seed in range(SEEDS)
    }
    assert len(records) == ARMS * SEEDS
    assert not any(record["diverged"] for record in records)
    assert {record["environment"]["hardware"]["device"] for record in records} == {"NVIDIA H200"}


@pytest.mark.parametrize("name", SIDES)
def test_a_contrast_is_that_of_plain_arithmetic(name: str) -> None:
    row = contrasts()[name]
    loss = row["loss"]
    assert (row["arm"], row["against"]) == SIDES[name]
    assert loss["nats"] == pytest.approx(fmean(raw.pairs(*SIDES[name], LADDER)))
    half = T22 * spread() / math.sqrt(SEEDS)
    assert (loss["low"], loss["high"]) == pytest.approx((loss["nats"] - half, loss["nats"] + half))
    assert row["outcome"] == SHOWN.get(name, "underpowered")
    corrected = raw.holm({other: found["loss"]["p"] for other, found in contrasts().items()})
    assert loss["corrected_p"] == pytest.approx(corrected[name])
    assert (corrected[name] < 0.05) == (name in SHOWN)


def test_bits_and_times_of_the_arms() -> None:
    found = {
        name: (point.bits, point.mi355x, point.b200)
        for name, point in points().items()
        if point.stage != "recipe"
    }
    assert found == {
        "bf16": (16, 1, 1), "fp8": (8, 0.5, 0.5), "mxfp8": (8.25, 0.5, 0.5), "mxint8": (8.25, 1, 1),
        "mxfp6-e2m3": (6.25, 0.25, 0.5), "mxfp6-e3m2": (6.25, 0.25, 0.5), "nvfp4": (4.5, 1, 0.25),
        "mxfp4": (4.25, 0.25, 0.25),
    }  # fmt: skip
    mixed = points()["mx64"]
    assert (mixed.bits, mixed.mi355x, mixed.b200) == pytest.approx(((6.25 + 2 * 4.25) / 3, 0.25, 1 / 3))


def test_the_frontier_falls() -> None:
    found = list(points().values())
    for along in ("bits", "mi355x", "b200"):
        line = formats.frontier(found, along)
        assert line == sorted(line)
        assert sorted((nats for _, nats in line), reverse=True) == [nats for _, nats in line]
        for point in found:
            assert point.nats >= min(nats for at, nats in line if at <= getattr(point, along))


def test_what_the_pages_say() -> None:
    nats = {name: abs(row["loss"]["nats"]) for name, row in contrasts().items()}
    found = points()
    readme = " ".join(README.split())

    def cell(name: str) -> str:
        return f"{signed(found[name].nats)} ± {found[name].half:.3f}"

    for text in (
        f"From 4.25 to 4.5 bits loss falls by {nats['scale']:.3f}.",
        f"NVFP4 without a transform is {nats['rotated']:.3f} below MXFP4 with H16.",
        f"From 4.5 to 6.25 bits it falls by {nats['four']:.3f}.",
        f"MXINT8 is {nats['integer']:.3f} below MXFP8 E4M3.",
        f"it is {found['bf16'].nats - found['mxint8'].nats:.3f} below BF16, within the noise.",
        f"σ of a pair was {spread():.4f} nats",
        f"with 4.92 bits `mx64` is {cell('mx64')} from FP8, where MXFP4 with H16 is {cell('mxfp4-h16')}.",
        f"MXFP4 keeps {found['mxfp4'].in_bf16:.3f} of its {found['mxfp4'].nats:.3f}, "
        f"and NVFP4 {found['nvfp4'].in_bf16:.3f} of its {found['nvfp4'].nats:.3f}.",
    ):
        assert text in PAGE, text
    pairs = {contrasts()[name]["pairs_to_decide"] for name in ("eight", "six", "mantissa")}
    assert pairs == {11}
    assert "that takes eleven seeds" in PAGE
    assert (
        f"MXFP4 ends {found['mxfp4'].nats:.3f} nats above FP8's loss, {found['mxfp4-h16'].nats:.3f} with a Hadamard "
        f"transform of 16 values (H16), and NVFP4 {found['nvfp4'].nats:.3f}. MXINT8 ends {nats['integer']:.3f} below "
        "MXFP8. MXFP8 is not shown to differ from FP8, nor MXFP6 E2M3 from MXFP8."
    ) in readme
    assert f"({cell('mx64').removeprefix('+')} in the figure)" in readme
