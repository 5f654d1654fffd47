"""What the page of results says of 50M, and of 50M beside 20M."""

from __future__ import annotations

from collections import Counter

import pytest

from ablations import front, ladders, page, predictions
from ablations.ladders import results_of
from ablations.sentences import PROSE, arms
from mxref_training.lab.ladder import load_ladder

pytestmark = pytest.mark.study

LADDER = "paper_50m"


def test_every_planned_run_is_there() -> None:
    """The page gives verdicts, which wait until all runs of a ladder have ended."""
    for name in ladders.LADDERS:
        runs = {arm["name"]: [run["pair"] for run in arm["runs"]] for arm in results_of(name)["arms"]}
        assert runs == {arm.name: list(range(arm.seeds)) for arm in load_ladder(name).arm}
        assert f"`{name}` ({sum(map(len, runs.values()))} runs" in PROSE


def test_what_the_text_calls_shown_at_50m_is_shown() -> None:
    outcomes = {row["name"]: row["outcome"] for row in results_of(LADDER)["contrasts"]}
    decided = {name: outcome for name, outcome in outcomes.items() if outcome != "underpowered"}
    assert decided == {
        "fprop": "higher", "fprop-sr": "higher", "fprop-dgrad-sr": "higher", "sr-all": "higher",
        "h16-left": "higher", "h16": "lower", "sr-where": "lower",
    }  # fmt: skip
    rest = [row for row in results_of(LADDER)["contrasts"] if row["name"] not in decided]
    seeds = [row["pairs_to_decide"] for row in rest]
    assert (
        f"In `paper_50m` {len(rest)} of {len(outcomes)} are underpowered; {min(seeds)} to {max(seeds)} seeds would "
        "decide each."
    ) in PROSE
    (smallest,) = set(results_of(LADDER)["power"]["smallest_nats"].values())
    assert f"Its three seeds find differences of {smallest:.3f} nats." in PROSE


def test_predictions_and_cells_at_50m_are_counted_as_the_text_says() -> None:
    found = predictions.counts(results_of(LADDER))
    assert (
        f"At 50M {found['reproduced']} of {found.total()} predictions are reproduced, {found['not reproduced']} are "
        f"not, and {found['underpowered']} are underpowered."
    ) in PROSE
    cells = Counter(
        line.sizes[LADDER].verdict
        for line in front.lines({name: results_of(name) for name in front.SIZES})
        if LADDER in line.sizes
    )
    assert (
        f"None of the {cells.total()} readings is reproduced there: {cells['not reproduced']} are not, and "
        f"{cells['underpowered']} are underpowered."
    ) in PROSE
    assert cells["reproduced"] == 0


def test_the_cell_whose_interval_nearly_meets_the_claim_is_named() -> None:
    near = {}
    for name in front.SIZES:
        for arm in results_of(name)["arms"]:
            if arm["paper"] and arm["paper"]["range"]:
                low = arm["overhead"]["percent"] - arm["overhead"]["half_width"]
                near[name, arm["name"]] = low - arm["paper"]["range"][1]
    (cell,) = (key for key, beyond in near.items() if 0 < beyond < 1)
    assert cell == (LADDER, "fprop-rht16")
    assert f"That of RHT16 in Fprop at 50M begins at {9 + near[cell]:.2f} %, so it misses" in PROSE


def test_tokens_of_arms_and_of_contrasts_differ_by_what_the_text_says() -> None:
    apart = [
        abs(arms(name)[row["arm"]]["overhead"]["percent"] - row["tokens"]["percent"])
        for name in ladders.LADDERS
        for row in results_of(name)["contrasts"]
        if row["against"] == ladders.reference_of(results_of(name))["name"] and row["tokens"]["bound"] is None
    ]
    assert f"by up to {max(apart):.1f} percentage points between them" in PROSE


def test_both_sizes_have_their_verdicts_in_the_tables() -> None:
    found = {name: results_of(name) for name in front.SIZES}
    text = "\n".join(page._sections(LADDER, found[LADDER]))
    assert text.count("Underpowered; ") == 10


def test_gaps_at_50m_beside_those_at_20m() -> None:
    larger, smaller = (
        {name: arm["gap_reference"] for name, arm in arms(ladder).items()} for ladder in (LADDER, "readings")
    )
    ratios = [larger[name] / smaller[name] for name in larger.keys() - {"fp8", "bf16"}]
    assert f"{min(ratios):.1f} to {max(ratios):.1f} of those at 20M" in PROSE
    assert max(ratios) < 1


def test_who_reached_the_target_at_50m() -> None:
    runs = {name: arm["runs"] for name, arm in arms(LADDER).items()}
    assert not any(run["diverged"] for of in runs.values() for run in of)
    missed = Counter(name for name, of in runs.items() for run in of if run["crossing"]["reach"] != "crossed")
    assert missed == {"fprop-sr": 2, "fprop-dgrad-sr": 1, "all-sr": 3}
    there = sum(map(len, runs.values()))
    assert f"At 50M {there - missed.total()} of {there} runs reached it, and the other six have SR" in PROSE
