"""The page of the ablations: its numbers are those of the result files, and each file is of the arm it names."""

from __future__ import annotations

import copy
import json
import math
import re
from functools import cache
from pathlib import Path
from statistics import stdev
from typing import Any

import pytest

from ablations import page
from mxref_training.lab.statistics import late_loss

TEXT = (Path(__file__).parents[2] / "docs" / "explanation" / "ablation-results.rst").read_text(
    encoding="utf-8"
)


@cache
def results(name: str) -> dict[str, Any]:
    return page.results_of(name)


def _runs(found: dict[str, Any], name: str) -> list[dict[str, Any]]:
    return next(list(arm["runs"]) for arm in found["arms"] if arm["name"] == name)


@pytest.mark.parametrize("name", page.ladders())
def test_every_result_file_stands_in_the_tables(name: str) -> None:
    files = [json.loads(path.read_text()) for path in (page.FOLDER / name).rglob("result.json")]
    shown = {
        (arm["name"], run["pair"]): arm["recipe"]["digest"]
        for arm in results(name)["arms"]
        for run in arm["runs"]
    }
    assert len(files) == len(shown) >= 15
    for file in files:
        record = file["record"]
        assert shown[record["arm"], record["pair"]] == file["recipe"]
    text = "\n".join(page._sections(name, results(name)))
    for digest in set(shown.values()):
        assert digest[:12] in text


def test_the_figure_has_the_intervals_of_the_contrasts() -> None:
    """An arm that a contrast holds against FP8 has the same interval there."""
    found = {arm["name"]: (nats, half) for arm, nats, half in page.intervals(results("readings"))}
    checked = 0
    for row in results("readings")["contrasts"]:
        if row["against"] == "fp8" and row["loss"]:
            nats, half = found[row["arm"]]
            assert row["loss"]["nats"] == pytest.approx(nats, abs=1e-12)
            assert row["loss"]["high"] - row["loss"]["nats"] == pytest.approx(half, rel=1e-9)
            checked += 1
    assert checked >= 3


def test_an_arm_outside_the_pool_is_drawn_with_the_spread_of_its_own_pairs() -> None:
    shown = copy.deepcopy(results("readings"))
    before = {arm["name"]: half for arm, _, half in page.intervals(shown)}
    shown["spread"]["loss"]["outside"] = ["all-sr"]
    after = {arm["name"]: half for arm, _, half in page.intervals(shown)}
    own = [
        late_loss(mine["curve"], shown["tokens"]) - late_loss(theirs["curve"], shown["tokens"])
        for mine, theirs in zip(_runs(shown, "all-sr"), _runs(shown, "fp8")[:3], strict=True)
    ]
    assert after["all-sr"] == pytest.approx(4.302653 * stdev(own) / math.sqrt(3), rel=1e-6)
    assert {name for name in after if after[name] != before[name]} == {"all-sr"}


def test_an_arm_with_a_run_that_has_no_partner_yet_is_drawn_with_its_pairs() -> None:
    nats = {arm["name"]: nats for arm, nats, _ in page.intervals(results("readings"))}
    assert {run["pair"] for run in _runs(results("readings"), "bf16")} == {0, 1, 2, 3, 4}
    assert nats["bf16"] == pytest.approx(-0.0095, abs=5e-5)


def test_the_table_says_what_would_decide_a_contrast_and_marks_pairs_that_scatter() -> None:
    text = "\n".join(page._sections("readings", results("readings")))
    rows = [row for row in results("readings")["contrasts"] if row["outcome"] == "underpowered"]
    assert len(rows) == len(re.findall(r"Cannot be told; about \d+ seeds would tell", text)) > 10
    marked = [row["name"] for row in results("readings")["contrasts"] if row["loss"] and row["loss"]["noisy"]]
    assert marked == ["sr-all-prescale"]
    assert len(re.findall("(?m)- Higher; its pairs scatter$", text)) == 1


def test_numbers_in_the_text_are_those_of_the_results() -> None:
    said = {
        "fprop": 0.081,
        "wgrad-alone": 0.013,
        "h16": -0.032,
        "h32": -0.032,
        "h16-left": 0.052,
        "sr-all": 0.13,
    }
    by_name = {row["name"]: row["loss"]["nats"] for row in results("readings")["contrasts"] if row["loss"]}
    for name, number in said.items():
        assert f"{abs(number)}" in TEXT
        assert by_name[name] == pytest.approx(number, abs=0.001)
    untold = {"fprop-rht16", "fprop-dgrad-rht16", "h16-or-h32", "h16-where", "sr-dy-prescale"}
    untold |= {"redrawn", "redrawn-by-layer", "random-signs", "rht16-and-sr-dy", "last-bf16"}
    rows = {row["name"]: row["loss"] for row in results("readings")["contrasts"]}
    for name in rows.keys() - untold:
        nats, low, high = (f"{rows[name][key]:+.3f}".replace("-", "−") for key in ("nats", "low", "high"))
        assert f"{nats} ({low} to {high})" in TEXT, name
    runs = sum(len(arm["runs"]) for arm in results("readings")["arms"])
    assert re.search(rf"\b{runs} of the 116 runs", TEXT)
    assert all(run["diverged"] is False for arm in results("readings")["arms"] for run in arm["runs"])


def test_reruns_have_the_bits_of_the_first_runs() -> None:
    again = sorted((page.RECORDS / "ablation_reruns").rglob("result.json"))
    assert len(again) >= 2
    for path in again:
        rerun, first = (json.loads((root / path.parent.parent.name / path.parent.name / path.name).read_text())
                        for root in (page.RECORDS / "ablation_reruns", page.FOLDER))  # fmt: skip
        assert rerun["record"]["environment"]["started"] != first["record"]["environment"]["started"]
        assert rerun["key"] == first["key"]
        assert rerun["metrics"] == first["metrics"]
        assert rerun["record"]["losses"] == first["record"]["losses"]
