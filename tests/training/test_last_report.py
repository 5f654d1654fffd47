"""The report shows what the last checkpoints lose on other text and under other recipes."""

from __future__ import annotations

import errno
import os
from pathlib import Path
from typing import Any

import pytest

from ablation_fakes import FakeCorpus, FakeTrainer, ladder, tiny
from mxref import get_backend
from mxref.errors import FileFormatError
from mxref_training import durable
from mxref_training.lab.study import run_ladder
from mxref_training.report.ladder.last import last_tables
from mxref_training.report.ladder.page import markdown, write_report


def evaluated(tmp_path: Path) -> dict[str, Any]:
    """A ladder of three seeds whose last checkpoints were evaluated, except those of the arm `bad`."""
    results = run_ladder(
        ladder(), tiny(), tmp_path,
        backend=get_backend("reference"), trainer=FakeTrainer(), corpus=FakeCorpus, seeds=3, say=lambda _: None,
    )  # fmt: skip
    for i, arm in enumerate(arm for arm in results["arms"] if arm["name"] != "bad"):
        for run in arm["runs"]:
            own = {"validation": 4 + i / 10, "<b>": 5.0 + run["pair"] * i / 10}
            run["last"] = {
                "losses": {"own": own, "bf16": own | {"validation": 4.0}},
                "texts": {key: {} for key in own},
            }
    return results


def test_the_tables_have_differences_at_equal_seeds(tmp_path: Path) -> None:
    by_recipe, by_text = last_tables(evaluated(tmp_path))
    # The repetition of the reference is no arm, and `bad` was not evaluated.
    assert by_recipe.rows == [("", "H16", "+0.200 (+0.200 to +0.200)", "+0.000 (+0.000 to +0.000)")]
    assert by_text.rows == [
        ("", "FP8, its loss", "4.000", "5.000"),
        ("", "H16", "+0.200 (+0.200 to +0.200)", "+0.200 (+0.000 to +0.400)"),
    ]


def test_a_loss_that_was_not_finite_makes_no_difference(tmp_path: Path) -> None:
    results = evaluated(tmp_path)
    h16 = next(arm for arm in results["arms"] if arm["name"] == "h16")
    h16["runs"][2]["last"]["losses"]["own"]["<b>"] = None
    for run in h16["runs"]:
        run["last"]["losses"]["bf16"] = {"validation": None, "<b>": None}
    by_recipe, by_text = last_tables(results)
    assert by_recipe.rows[0][3] == "–"
    assert by_text.rows[1][3] == "+0.100 (+0.000 to +0.200)"


def test_the_pages_show_them_and_escape_the_names_of_texts(tmp_path: Path) -> None:
    results = evaluated(tmp_path)
    html, _ = write_report(results, tmp_path)
    page = html.read_text(encoding="utf-8")
    assert "Last checkpoints, evaluated on more" in page
    assert "&lt;b&gt;" in page
    assert "<b></th>" not in page
    assert "| H16 | +0.200 (+0.200 to +0.200) | +0.200 (+0.000 to +0.400) |" in markdown(results)
    for arm in results["arms"]:
        for run in arm["runs"]:
            run.pop("last", None)
    assert last_tables(results) == []
    assert "evaluated on more" not in write_report(results, tmp_path)[0].read_text(encoding="utf-8")


def test_a_folder_that_cannot_be_written_is_named_with_a_way_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results = evaluated(tmp_path)

    def full(path: Path) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(durable, "sync", full)
    with pytest.raises(FileFormatError, match=r"^cannot write to .*'mxref report .*' makes the report again"):
        write_report(results, tmp_path)
