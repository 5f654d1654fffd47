"""The registered experiment `annealed`: its rule and every number that the pages tell of it, from the raw records."""

from __future__ import annotations

import math
from statistics import fmean, linear_regression, stdev
from typing import Any

import pytest

from ablations import raw
from ablations.conclusions import signed
from ablations.test_conclusions import PAGE, README, RECIPES

T5 = {95: 2.5705818356363146, 90: 2.015048372669157}
"""Points of Student's t with 5 degrees of freedom, from a table."""
TRUNKS = 6
FIRST, LAST, BRANCH = 1_600, 2_400, 800
"""Steps between which the trunk's slope is taken, the last of them the branches' first, and those of a branch."""

STEPS = {
    "F less FP8": ("fprop", "fp8", 0.085),
    "F+D less F": ("fprop-dgrad", "fprop", 0.018),
    "F+D+W less F+D": ("all", "fprop-dgrad", 0.145),
    "H16 less plain": ("all-h16", "all", -0.142),
}
"""Both arms, and what the paper's table 1 gives in tokens."""


def runs(branches: bool) -> list[dict[str, Any]]:
    return [record for record in raw.records("annealed") if ("last" in record) == branches]


def pairs(arm: str, against: str, recipe: str = "bf16") -> list[float]:
    """Return the differences of the last checkpoints at equal trunks, evaluated with a recipe or their own."""
    found: dict[str, dict[int, float]] = {arm: {}, against: {}}
    for record in runs(branches=True):
        if record["arm"] in found:
            found[record["arm"]][record["pair"]] = record["last"]["losses"][recipe]["validation"]
    assert all(sorted(values) == list(range(TRUNKS)) for values in found.values())
    return [found[arm][trunk] - found[against][trunk] for trunk in range(TRUNKS)]


def whole(arm: str, against: str, ladder: str, recipe: str) -> list[float]:
    """Return the same of whole runs, at equal seeds."""
    one, other = (
        {
            record["pair"]: record["last"]["losses"][recipe]["validation"]
            for record in raw.records(ladder)
            if record["arm"] == name
        }
        for name in (arm, against)
    )
    return [one[seed] - other[seed] for seed in sorted(one.keys() & other.keys())]


def half(values: list[float], level: int = 95) -> float:
    return T5[level] * stdev(values) / math.sqrt(TRUNKS)


def size(percent: float) -> float:
    """Return the paper's size in nats, at the trunks' mean slope."""

    def slope(record: dict[str, Any]) -> float:
        late = [(math.log(step), loss) for step, loss in record["losses"] if FIRST <= step <= LAST]
        assert len(late) == 5
        return linear_regression(*zip(*late, strict=True)).slope

    return -fmean(map(slope, runs(branches=False))) * math.log1p(percent * BRANCH / LAST)


def answer(values: list[float], paper: float) -> str:
    mean = fmean(values)
    if abs(mean) > half(values) and mean * paper > 0 and abs(mean) >= abs(paper):
        return "as in the paper"
    return "none" if abs(mean) + half(values, 90) <= abs(paper) / 2 else "undecided"


def shown(values: list[float]) -> str:
    return f"{fmean(values):+.4f} ± {half(values):.4f}".replace("-", "−")


def test_every_run_is_there() -> None:
    trunks, branches = runs(branches=False), runs(branches=True)
    assert sorted(record["seed"] for record in trunks) == list(range(60, 60 + TRUNKS))
    assert len(branches) == 8 * TRUNKS
    assert f"{len(branches)} annealed branches and 35 runs with another grid followed." in PAGE
    assert not any(record["diverged"] for record in trunks + branches)
    assert {record["environment"]["hardware"]["device"] for record in trunks + branches} == {"NVIDIA H200"}


@pytest.mark.parametrize("label", STEPS)
def test_the_rule_gives_the_answer_of_the_table(label: str) -> None:
    arm, against, percent = STEPS[label]
    values, paper = pairs(arm, against), size(percent)
    row = label, shown(values), f"{paper:+.4f}".replace("-", "−"), answer(values, paper)
    assert "   * - {}\n     - {}\n     - {}\n     - {}\n".format(*row) in PAGE


def test_rht16_and_sr() -> None:
    values = pairs("all-rht16-step", "all")
    assert fmean(values) + half(values) < 0
    assert f"   * - RHT16 less plain\n     - {shown(values)}\n     - DNC\n     - lower\n" in PAGE
    of_dy, backward = (pairs(arm, "all") for arm in ("all-sr-dy", "all-sr-backward"))
    assert min(fmean(values) - half(values) for values in (of_dy, backward)) > 0
    assert (
        f"SR of dY adds {shown(of_dy)} to plain, SR of D's and W's operands {shown(backward)}: higher."
    ) in PAGE


def test_what_is_exploratory() -> None:
    def mean(arm: str, against: str, recipe: str) -> str:
        return f"{fmean(pairs(arm, against, recipe)):+.4f}".replace("-", "−")

    larger, smaller = (
        whole(*sides, "bf16")
        for sides in (("all", "fprop-dgrad", "paper_50m"), ("dgrad-wgrad", "fp8", "mx64"))
    )
    assert len(larger) == len(smaller) == 3
    assert min(larger) > 0
    assert (
        f"Whole runs show more, in BF16 too (exploratory): W {signed(fmean(larger))} at 50M in 3 of 3 pairs, D+W "
        f"under FP8's F {signed(fmean(smaller))} at 20M."
    ) in PAGE
    assert signed(fmean(raw.pairs("dgrad-wgrad", "fp8", "mx64"))) == signed(fmean(smaller))
    assert f"in the backward pass too ({fmean(smaller):.3f} at 20M, exploratory)." in " ".join(README.split())
    rht16 = [
        signed(fmean(whole("all-rht16-step", "all-h16", "paper_50m", recipe))) for recipe in ("own", "bf16")
    ]
    assert f"in BF16; 50M whole runs have {rht16[0]} and {rht16[1]}." in PAGE
    assert (
        f"in the arm's own arithmetic F costs {mean('fprop', 'fp8', 'own')}, and H16 takes "
        f"{mean('all-h16', 'all', 'own')}. RHT16 less H16 is {mean('all-rht16-step', 'all-h16', 'own')} in it, "
        f"{mean('all-rht16-step', 'all-h16', 'bf16')} in BF16"
    ) in PAGE
    assert f"Annealed, MXFP4's {signed(fmean(pairs('all', 'fp8')))} is Fprop's alone." in RECIPES
