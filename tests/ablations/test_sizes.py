"""What the page of results says of 50M, whose runs are not all there, and of 50M beside 20M."""

from __future__ import annotations

import math
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from ablations import front, page, predictions
from ablations.ladders import intervals, missing, planned, results_of
from ablations.sentences import PROSE, arms, contrasts, signed
from mxref_training.lab.distributions import student_point
from mxref_training.lab.statistics import late_loss

LADDER = "paper_50m"
DOCS = Path(__file__).parents[2] / "docs" / "explanation"


def told(*names: str) -> list[str]:
    """Return the estimates of contrasts at 50M, which the text gives without intervals."""
    return [signed(contrasts(LADDER)[name]["loss"]["nats"]) for name in names]


def gaps(ladder: str, *names: str) -> list[str]:
    """Return the losses of arms less that of FP8."""
    return [signed(arms(ladder)[name]["gap_reference"]) for name in names]


def more_tokens(name: str) -> str:
    return f"{arms(LADDER)[name]['overhead']['percent']:.0f} %"


def sentences() -> list[str]:
    """Return the sentences with numbers at 50M."""
    return [
        "At 50M Fprop costs {}, Dgrad on top of it changes the loss by {}, and Wgrad on top of both by {}.".format(
            *told("fprop", "dgrad", "wgrad")
        ),
        "At 50M they change the loss by {} and {}, of the {:.3f} that plain rounding costs.".format(
            *told("h16", "h32"), arms(LADDER)["all"]["gap_reference"]
        ),
        "There remain {} with H16 and {} with H32, or {} and {} more tokens.".format(
            *gaps(LADDER, "all-h16", "all-h32"), more_tokens("all-h16"), more_tokens("all-h32")
        ),
        "At 50M it is {} from plain rounding in Fprop, {} in Fprop and Dgrad, {} in all three.".format(
            *told("fprop-sr", "fprop-dgrad-sr", "sr-all")
        ),
        "In all three, two seeds of it are {} above FP8, where it is {} at 20M.".format(
            *gaps(LADDER, "all-sr"), *gaps("readings", "all-sr")
        ),
        "At 50M it is {} from plain rounding, and {} from SR of every operand.".format(
            *told("sr-dy", "sr-where")
        ),
        "At 50M fixed signs are {} from plain rounding, signs drawn at each step {}, ".format(
            *told("rht16-fixed", "rht16-step")
        )
        + "RHT16 in Fprop and Dgrad {}.".format(*told("fprop-dgrad-rht16")),
        "In Fprop alone RHT16 is {} and {} from plain rounding in the two seeds, where it is {} at 20M".format(
            *map(signed, pairs("fprop-rht16", "fprop")),
            signed(contrasts("readings")["fprop-rht16"]["loss"]["nats"]),
        ),
    ]


def pairs(arm: str, against: str) -> list[float]:
    """Return the differences of two arms at 50M, by seed."""
    losses = [
        {
            run["pair"]: late_loss(run["curve"], results_of(LADDER)["tokens"])
            for run in arms(LADDER)[name]["runs"]
        }
        for name in (arm, against)
    ]
    return [losses[0][seed] - losses[1][seed] for seed in sorted(losses[0].keys() & losses[1].keys())]


def test_numbers_at_50m_are_those_of_the_results() -> None:
    for sentence in sentences():
        assert sentence in PROSE, sentence


def test_which_runs_are_there_is_as_the_text_says() -> None:
    runs = {name: [run["pair"] for run in arm["runs"]] for name, arm in arms(LADDER).items()}
    twice = {"fp8", "bf16", "fprop", "fprop-rht16", "fprop-dgrad-sr", "all-sr"}
    assert runs == {name: [0, 1] if name in twice else [0] for name in planned(LADDER)}
    there, left = sum(map(len, runs.values())), missing(LADDER, results_of(LADDER))
    total = there + left
    assert (total, total - len(runs), len(twice)) == (45, 30, 6)
    assert (
        f"Of `paper_50m` {there} of {total} runs have ended: seed 0 of all {len(runs)} arms, and seed 1 of six"
        in PROSE
    )
    assert f"before the other {left} runs have ended" in PROSE
    assert f"with the code that the first {there} have" in PROSE
    protocol = (DOCS / "ablation-protocol.rst").read_text(encoding="utf-8")
    assert (
        f"{left} of the {total} runs are still missing: nine of seed 1, and all {len(runs)} of seed 2."
        in protocol
    )
    assert f"{there} of {total} runs" in (DOCS / "ladders.rst").read_text(encoding="utf-8")


def test_verdicts_wait_for_the_runs_that_are_missing() -> None:
    """A part of a ladder has estimates and intervals, but nothing on the page calls them an outcome."""
    found = {name: results_of(name) for name in front.SIZES}
    assert {name: missing(name, of) == 0 for name, of in found.items()} == {"readings": True, LADDER: False}
    assert next(predictions.table(found))[3:] == ("20M",)
    assert next(front.table(found))[3:] == (
        "20M: tokens", "20M: loss less FP8's, nats", "20M: verdict", "50M: tokens", "50M: loss less FP8's, nats",
    )  # fmt: skip
    text = "\n".join(page._sections(LADDER, found[LADDER]))
    assert text.startswith("Unfinished: 21 of 45 runs.")
    said = Counter(line.strip(" -") for line in text.splitlines())
    assert (said["2 of 3 pairs"], said["1 of 3 pairs"]) == (2, 15)
    assert (said["2 of 3 runs"], said["1 of 3 runs"]) == (4, 9)
    for word in ("underpowered", "reproduced", "Higher", "Lower", "Cannot be told"):
        assert word not in text
    assert text.count(" ± ") == 0


def test_the_spread_at_50m_is_that_of_the_text() -> None:
    spread, power = results_of(LADDER)["spread"]["loss"], results_of(LADDER)["power"]
    assert (spread["freedom"], spread["outside"]) == (5, [])
    one = student_point(0.05, spread["freedom"]) * spread["nats"]
    assert f"its 95 % interval is ± {one / math.sqrt(2):.3f} with two seeds and ± {one:.3f} with one" in PROSE
    smaller = results_of("readings")["spread"]["loss"]
    assert (
        f"that of one pair at 20M is ± {student_point(0.05, smaller['freedom']) * smaller['nats']:.3f}"
        in PROSE
    )
    halves = {arm["name"]: half for arm, _, half in intervals(results_of(LADDER))}
    assert halves["all-h16"] == pytest.approx(one)
    assert halves["all-sr"] == pytest.approx(one / math.sqrt(2))
    (smallest,) = set(power["smallest_nats"].values())
    assert f"By the spread of these runs, three seeds find differences of {smallest:.3f} nats" in PROSE


def test_gaps_at_50m_beside_those_at_20m() -> None:
    larger, smaller = (
        {name: arm["gap_reference"] for name, arm in arms(ladder).items()} for ladder in (LADDER, "readings")
    )
    ratios = [larger[name] / smaller[name] for name in larger.keys() - {"fp8", "bf16"}]
    assert f"{min(ratios):.1f} to {max(ratios):.1f} of those at 20M" in PROSE
    harms = [contrasts(ladder)["sr-all"]["loss"]["nats"] for ladder in (LADDER, "readings")]
    assert "in all three GEMMs it is {:.2f} above plain rounding, {:.2f} at 20M".format(
        *harms
    ) in PROSE  # fmt: skip
    share = [-contrasts("readings")[name]["loss"]["nats"] / smaller["all"] for name in ("h16", "h32")]
    assert [round(100 * one, -1) for one in share] == [40, 40]
    # "Fprop is the largest part of the cost", of the seed that both arms have.
    (whole,), (fprop, _) = pairs("all", "fp8"), pairs("fprop", "fp8")
    assert fprop > whole / 2
    assert all(gap < larger["all"] for name, gap in larger.items() if name in ("all-h16", "all-h32"))


def test_who_reached_the_target_at_50m() -> None:
    runs = {name: arm["runs"] for name, arm in arms(LADDER).items()}
    assert not any(run["diverged"] for of in runs.values() for run in of)
    missed = Counter(name for name, of in runs.items() for run in of if run["crossing"]["reach"] != "crossed")
    assert missed == {"fprop-sr": 1, "all-sr": 2}
    there = sum(map(len, runs.values()))
    assert f"At 50M {there - missed.total()} of {there} runs reached it" in PROSE
    assert f"reached it, with {more_tokens('fprop-dgrad-sr')} more tokens than FP8" in PROSE


def test_the_times_of_the_runs_are_those_of_their_records() -> None:
    seconds: dict[Any, list[float]] = {}
    for arm in arms(LADDER).values():
        for run in arm["runs"]:
            seconds.setdefault(run["environment"]["hardware"]["cpus"], []).append(run["seconds"])
    assert {cpus: len(of) for cpus, of in seconds.items()} == {64: 13, 32: 8}
    assert f"one of `paper_50m` {min(seconds[64]):.0f} to {max(seconds[64]):.0f} s." in PROSE
    assert f"a run {min(seconds[32]):.0f} to {max(seconds[32]):.0f} s in its steps" in PROSE
