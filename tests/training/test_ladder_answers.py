"""The report of a ladder says in plain words what it can show, and answers each contrast."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import mxref
from ablation_fakes import FakeCorpus, FakeTrainer, tiny
from mxref_training.lab.contrasts import Contrast
from mxref_training.lab.ladder import Ladder, load_ladder
from mxref_training.lab.study import run_ladder
from mxref_training.report.ladder.answers import answers, counts_line, reach_line
from mxref_training.report.ladder.page import markdown, table, write_report
from mxref_training.report.ladder.plots import _limits, overheads_svg, short_names
from mxref_training.report.ladder.tables import ladder_tables

READINGS = load_ladder("readings")
KEPT = ("fp8", "bf16", "fprop", "fprop-dgrad", "all", "all-h16", "all-h32", "all-sr-dy", "all-sr")


def make(out: Path, ladder: Ladder, seeds: int, slowdown: dict[str, float], **options: Any) -> dict[str, Any]:
    return run_ladder(
        ladder,
        tiny(),
        out,
        backend=mxref.get_backend("reference"),
        trainer=FakeTrainer(slowdown, **options),
        corpus=FakeCorpus,
        seeds=seeds,
        say=lambda line: None,
    )


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A ladder of three seeds: its base in MXFP8, which the reference backend computes in `ordered`."""
    arms = tuple(replace(arm, seeds=3) for arm in READINGS.arm if arm.name in KEPT)
    contrasts = tuple(c for c in READINGS.contrast if {c.arm, c.against} <= set(KEPT))
    late = Contrast("late", "all-h16", "fprop", "Declared after the runs?")
    recipe = READINGS.recipe | {"gemm": "ordered"}
    ladder = replace(READINGS, arm=arms, contrast=contrasts, exploratory=(late,), recipe=recipe)
    slowdown = {"plain RNE": 0.1, "H16": 0.02, "H32": 0.02, "SR on dY": 0.6}
    folder = tmp_path_factory.mktemp("readings")
    return make(folder, ladder, 3, slowdown, diverging=["SR everywhere"])


def test_the_first_line_of_a_short_ladder_says_what_it_cannot_show(tmp_path: Path) -> None:
    found = make(tmp_path, load_ladder("paper"), 1, {"plain RNE": 0.09})
    line = reach_line(found)
    assert line.startswith(
        "A ladder of 51,200 tokens an arm can show that every recipe trains, and differences above "
    )
    assert line.endswith("which begin at 8 %, nor a divergence that comes later than its runs end.")
    assert markdown(found).splitlines()[2] == line
    caption = str(table(found, 120).caption)
    assert caption.splitlines()[0] == line
    page = write_report(found, tmp_path)[0].read_text(encoding="utf-8")
    assert page.index(f'<p class="reach">{line}</p>') < page.index('<p class="lead">')


def test_the_first_line_of_one_seed_alone(tmp_path: Path) -> None:
    paper = load_ladder("paper")
    alone = replace(paper, arm=tuple(arm for arm in paper.arm if not arm.seed_offset))
    line = reach_line(make(tmp_path, alone, 1, {}))
    assert line.endswith("It cannot show which is better: what another seed alone does is unknown.")


def test_the_first_line_of_a_ladder_that_resolves_the_claims(results: dict[str, Any]) -> None:
    arms = [
        arm | {"overhead": arm["overhead"] and arm["overhead"] | {"half_width": 1.0}}
        for arm in results["arms"]
    ]
    line = reach_line(results | {"arms": arms})
    assert line.endswith("differences above 1.0 % in tokens to the target.")


def test_every_contrast_is_answered_in_every_form(results: dict[str, Any], tmp_path: Path) -> None:
    names = short_names(results["arms"])
    found = answers(results, names)
    assert [one.question for one in found] == [row["question"] for row in results["contrasts"]]
    page = write_report(results, tmp_path)[0].read_text(encoding="utf-8")
    text = markdown(results)
    for one in found:
        for form in (page, text):
            assert one.question in form
            assert one.arms in form.replace("&gt;", ">")
        assert f"{one.question} **{one.answer}**" in text
    by_name = {row["name"]: row for row in results["contrasts"]}
    assert by_name["h16"]["outcome"] == "lower"
    assert by_name["sr-all"]["outcome"] == "diverges"
    assert by_name["dgrad"]["outcome"] == "equal"
    assert f"Of {len(found)} contrasts: " in counts_line(results)
    assert counts_line(results | {"contrasts": results["contrasts"][:1]}).startswith("Of 1 contrast: ")
    (rows,) = [one.rows for one in ladder_tables(results) if one.name == "contrasts"]
    assert [row[0] for row in rows] == list(by_name)


def test_the_second_analysis_stands_beside_the_contrasts(results: dict[str, Any], tmp_path: Path) -> None:
    page = write_report(results, tmp_path)[0].read_text(encoding="utf-8")
    text = markdown(results)
    (again,) = [one for one in ladder_tables(results) if one.name == "exploratory"]
    # The arm that diverged has no loss to compare.
    compared = [row for row in results["contrasts"] if row["outcome"] not in ("diverges", "undecided")]
    assert [row[1] for row in again.rows] == ["before the runs"] * len(compared) + ["after"]
    late = again.rows[-1]
    assert late[0] == "H16 less Fprop: plain RNE"
    assert "<h2>Exploratory</h2>" in page
    assert f"| {late[0]} |" in text
    flagged = results | {
        "flagged": [{"arm": "fp8", "pair": 0, "reason": "it ends at 61.00", "reference": True}]
    }
    assert "The reference itself is flagged" in markdown(flagged)


def test_results_without_contrasts_are_read_as_before(results: dict[str, Any], tmp_path: Path) -> None:
    old = {
        key: value
        for key, value in results.items()
        if key not in ("contrasts", "spread", "power", "exploratory", "flagged")
    }
    page = write_report(old, tmp_path)[0].read_text(encoding="utf-8")
    assert "<h2>Questions</h2>" not in page
    assert "## Questions" not in markdown(old)
    assert "Exploratory</h2>" not in page
    assert counts_line(old) == ""
    assert [one.rows for one in ladder_tables(old) if one.name == "contrasts"] == [[]]


def widths(svg: str) -> int:
    """Return how many lines of an interval's width and ends a chart has."""
    return len(re.findall(r"stroke-width: 1.1", svg))


def test_only_intervals_that_fit_are_drawn(results: dict[str, Any]) -> None:
    def with_interval(low: float, high: float) -> dict[str, Any]:
        arms = [
            arm | {"overhead": None if arm["name"] != "all" else arm["overhead"] | {"low": low, "high": high}}
            for arm in results["arms"]
        ]
        return results | {"arms": arms, "noise": results["noise"] | {"half_width": 500.0}}

    narrow, wide = with_interval(8.0, 13.0), with_interval(-80.0, 100.0)
    assert widths(overheads_svg(narrow)) == 3  # the line and both ends
    assert widths(overheads_svg(wide)) == 0
    # A wide interval does not stretch the axis.
    assert _limits(wide["arms"])[1] < 50
    # The noise of a pair, far beyond the axis, is not drawn as a band that fills it.
    assert "var(--soft)" not in overheads_svg(narrow)
