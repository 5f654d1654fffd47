"""The page of the ablations: its numbers are those of the result files, and each file is of the arm it names."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path
from typing import Any

import pytest

from ablations import page

TEXT = (Path(__file__).parents[2] / "docs" / "explanation" / "ablation-results.rst").read_text(
    encoding="utf-8"
)


@cache
def results(name: str) -> dict[str, Any]:
    return page.results_of(name)


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
        if row["against"] == "fp8" and row["loss"] and not row["loss"]["own"]:
            nats, half = found[row["arm"]]
            assert row["loss"]["nats"] == pytest.approx(nats, abs=1e-12)
            assert row["loss"]["high"] - row["loss"]["nats"] == pytest.approx(half, rel=1e-9)
            checked += 1
    assert checked >= 3


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
    runs = sum(len(arm["runs"]) for arm in results("readings")["arms"])
    assert re.search(rf"\b{runs} of the 116 runs", TEXT)
    assert all(run["diverged"] is False for arm in results("readings")["arms"] for run in arm["runs"])
