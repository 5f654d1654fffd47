"""The report of a ladder is complete and one file, and it states what a short run cannot show."""

from __future__ import annotations

import errno
import importlib.util
import io
import re
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

import mxref
from ablation_fakes import FakeCorpus, FakeTrainer, tiny
from html_page import Page
from mxref import terminal
from mxref.cli import main
from mxref_training.cli.ablate import ablate
from mxref_training.cli.report import report
from mxref_training.interrupt import Interrupted
from mxref_training.lab.ladder import load_ladder
from mxref_training.lab.study import load_results, run_ladder
from mxref_training.report.drawing import _spread
from mxref_training.report.ladder.page import headline, markdown, rows, table, write_report

SLOWDOWN = {"plain RNE": 0.09, "SR on dY": 0.2, "RHT16, signs fixed": 0.6}


def make(out: Path, seeds: int = 1, trainer: FakeTrainer | None = None) -> dict[str, Any]:
    return run_ladder(
        load_ladder("paper"),
        tiny(),
        out,
        backend=mxref.get_backend("reference"),
        trainer=trainer or FakeTrainer(SLOWDOWN, diverging=["SR everywhere"]),
        corpus=FakeCorpus,
        seeds=seeds,
        say=lambda line: None,
    )


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ladder")


@pytest.fixture(scope="module")
def results(folder: Path) -> dict[str, Any]:
    return make(folder)


@pytest.fixture(scope="module")
def page(results: dict[str, Any], folder: Path) -> str:
    path, _ = write_report(results, folder)
    return path.read_text(encoding="utf-8")


def test_page_stands_alone(page: str) -> None:
    parsed = Page(page)
    assert not {"script", "link", "img", "iframe", "object"} & set(parsed.tags)
    assert "http" not in page
    assert not re.search(r"@import|url\((?!#)|\bsrc=", page)
    assert parsed.tags.count("svg") == 2


def test_ids_are_unique_and_references_resolve(page: str) -> None:
    ids = Page(page).ids
    assert len(ids) == len(set(ids))
    assert set(re.findall(r'(?:href="#|url\(#)([^")]+)', page)) <= set(ids)


def shown(results: dict[str, Any], width: int) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(table(results, width))
    return console.export_text()


def test_every_arm_is_in_every_form(page: str, results: dict[str, Any]) -> None:
    text = markdown(results)
    terminal = shown(results, 110)
    for arm in load_ladder("paper").arm:
        assert f'id="row-{arm.name}"' in page
        for form in (page, text, terminal):
            assert arm.label in form
        assert load_ladder("paper").resolve(arm).digest in page


@pytest.mark.parametrize("width", [80, 107, 108, 120])
def test_table_fits_the_terminal_and_nothing_is_cut(results: dict[str, Any], width: int) -> None:
    text = shown(results, width)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    assert ("35.84 k" in text) is (width >= 108)
    assert text.count("underpowered") == 10  # nine arms and the headline


def test_one_seed_is_underpowered_whatever_it_measured(results: dict[str, Any], page: str) -> None:
    verdicts = {row.label: row.verdict for row in rows(results) if row.arm["verdict"]}
    assert len(rows(results)) == 14
    assert set(verdicts.values()) == {"underpowered"}
    assert headline(results) == (
        "Of 9 claims: 0 reproduced, 0 not reproduced, 9 underpowered. At most 2 runs stand behind an interval; "
        "a verdict needs 3 (--seeds 3)."
    )
    assert "a short run carries only what that noise allows" in page


def test_three_seeds_can_carry_verdicts(tmp_path: Path) -> None:
    results = make(tmp_path, seeds=3)
    verdicts = {arm["name"]: arm["verdict"]["verdict"] for arm in results["arms"] if arm["verdict"]}
    assert verdicts["all-sr"] == "reproduced"  # all seeds diverge
    assert verdicts["all"] == "not reproduced"  # 9 % measured, 26-27 % claimed
    assert verdicts["all-sr-dy"] == "not reproduced"  # converges
    assert verdicts["all-rht16-fixed"] == "underpowered"  # censored: neither
    page, _ = write_report(results, tmp_path)
    assert "Of 9 claims:" in page.read_text(encoding="utf-8")


def test_report_of_a_ladder_without_a_target(tmp_path: Path) -> None:
    results = make(tmp_path, trainer=FakeTrainer(diverging=["FP8"]))
    page, _ = write_report(results, tmp_path)
    assert "There is no target: the reference diverged" in page.read_text(encoding="utf-8")


HOSTILE = "<script>alert(1)</script>|![x](http://y)`*_&\x1b[2J\nnext"


def hostile(results: dict[str, Any]) -> dict[str, Any]:
    """Return the results with every text that a file or an environment gives made hostile."""
    arms = [
        arm
        | {"label": f"{arm['label']} {HOSTILE}", "stage": HOSTILE}
        | {
            "recipe": arm["recipe"]
            | {"treatment": [[role, HOSTILE] for role, _ in arm["recipe"]["treatment"]]}
        }
        | {"paper": arm["paper"] and arm["paper"] | {"overhead": HOSTILE, "source": HOSTILE}}
        | {"verdict": arm["verdict"] and arm["verdict"] | {"reason": HOSTILE}}
        | {"runs": [run | {"environment": {"hardware": {HOSTILE: HOSTILE}}} for run in arm["runs"]]}
        for arm in results["arms"]
    ]
    return results | {
        "arms": arms,
        "title": HOSTILE,
        "description": HOSTILE,
        "backend": HOSTILE,
        "rules": dict.fromkeys(results["rules"], HOSTILE),
        "data": {"report": HOSTILE, "hashes": {HOSTILE: HOSTILE}},
        "contrasts": [contrast_of(results, HOSTILE)],
    }


def contrast_of(results: dict[str, Any], text: str) -> dict[str, Any]:
    arm, against = (one["name"] for one in results["arms"][:2])
    return {
        **{"name": "c", "arm": arm, "against": against, "question": text, "answer": text},
        **{"outcome": "lower", "pairs": 3, "tokens": None, "loss": None},
        "predictions": [{"says": "lower", "source": text, "verdict": "reproduced"}],
    }


def test_texts_are_escaped_in_the_page(results: dict[str, Any], tmp_path: Path) -> None:
    path, _ = write_report(hostile(results), tmp_path)
    text = path.read_text(encoding="utf-8")
    assert "<script" not in text
    assert "\x1b" not in text
    assert "&lt;script&gt;" in text
    assert r"\x1b[2J" in text
    assert not {"script", "img"} & set(Page(text).tags)


def test_texts_are_escaped_in_markdown(results: dict[str, Any]) -> None:
    text = markdown(hostile(results))
    assert "<script" not in text
    assert "&lt;script>" in text
    assert "\x1b" not in text
    assert not re.search(r"(?<!\\)[`\]]\(?http", text), "no link and no image"
    same = results | {"contrasts": [contrast_of(results, "t")]}
    plain, changed = markdown(same).splitlines(), text.splitlines()
    cells = [len(re.findall(r"(?<!\\)\|", line)) for line in plain if line.startswith("|")]
    assert [len(re.findall(r"(?<!\\)\|", line)) for line in changed if line.startswith("|")] == cells


def test_texts_are_escaped_in_the_terminal(results: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    screen = terminal.console()
    screen.file, screen.width = io.StringIO(), 200
    screen.print(table(hostile(results), 200))
    assert "\x1b" not in screen.file.getvalue()
    assert r"\x1b[2J" in screen.file.getvalue()


def test_labels_are_text_and_no_formula(results: dict[str, Any], tmp_path: Path) -> None:
    labels = ["$\\foo$", "50 $ and 60 $", "$x_1$", "a_b^{c", "日本語", "\\frac{1}{0}"]
    arms = [{**arm, "label": label} for arm, label in zip(results["arms"], labels, strict=False)]
    page, _ = write_report({**results, "arms": arms}, tmp_path)
    overheads, curves = re.findall(r"<svg.*?</svg>", page.read_text(encoding="utf-8"), re.DOTALL)
    for arm in arms:
        # The reference has no bar; the title of the curves names it.
        assert arm["label"] in (curves if arm["role"] == "reference" else overheads)


def no_space(path: Path, text: str) -> None:
    raise OSError(errno.ENOSPC, "No space left on device", str(path))


def test_a_report_that_cannot_be_written(
    folder: Path, page: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "results.json").write_bytes((folder / "results.json").read_bytes())
    (tmp_path / "report.md").write_text("old")
    (tmp_path / "report.html" / "in the way").mkdir(parents=True)
    found = CliRunner().invoke(main, ["report", str(tmp_path)])
    assert found.exit_code == 2
    assert "underpowered" in found.stdout, "the table is shown all the same"
    (line,) = found.stderr.splitlines()
    assert line.startswith(f"error: cannot write {tmp_path / 'report.html'}: ")
    assert line.endswith(f"'mxref report {tmp_path}' makes the report again")
    assert (tmp_path / "report.md").read_text() == "old"
    assert sorted(path.name for path in tmp_path.iterdir()) == ["report.html", "report.md", "results.json"]

    monkeypatch.setattr("mxref_training.report.ladder.page.replace_text", no_space)
    found = CliRunner().invoke(main, ["report", str(folder)])
    assert found.exit_code == 2
    assert "report.html: No space left on device; the numbers are in results.json" in found.stderr
    assert (folder / "report.html").read_text(encoding="utf-8") == page


def test_report_is_repeatable(page: str, results: dict[str, Any], tmp_path: Path) -> None:
    again, _ = write_report(results, tmp_path)
    assert again.read_text(encoding="utf-8") == page


def test_curve_labels_move_apart_and_no_further() -> None:
    assert _spread([0.0, 10.0], 1.0) == [0.0, 10.0]
    assert _spread([0.0, 0.0, 10.0], 1.0) == [-0.5, 0.5, 10.0]
    placed = _spread([0.0, 0.1, 0.2, 1.0], 1.0)
    assert all(b - a == pytest.approx(1.0) for a, b in pairwise(placed))


def test_report_command_rewrites_the_page(folder: Path, page: str) -> None:
    (folder / "report.html").unlink()
    found = CliRunner().invoke(report, [str(folder)])
    assert found.exit_code == 0, found.output
    assert "underpowered" in found.output
    assert (folder / "report.html").read_text(encoding="utf-8") == page


def test_list_shows_the_arms_and_trains_nothing() -> None:
    found = CliRunner().invoke(ablate, ["paper", "--list"])
    assert found.exit_code == 0, found.output
    assert all(arm.name in found.output for arm in load_ladder("paper").arm)


def test_list_shows_the_arms_that_the_command_would_train() -> None:
    found = CliRunner().invoke(main, ["ablate", "tseng", "--without", "rht64-sr", "--list"])
    assert found.exit_code == 0, found.output
    assert "rht64 " in found.output
    assert "rht64-sr" not in found.output
    found = CliRunner().invoke(main, ["ablate", "tseng", "--arms", "nope", "--list"])
    assert (found.exit_code, "'nope'" in found.output) == (2, True)


def test_an_arm_that_does_not_fit_the_model_is_named(tmp_path: Path) -> None:
    ladder = tmp_path / "two.toml"
    ladder.write_text(
        'title = "t"\ntrain = { preset = "tiny", optim.schedule = "constant" }\nrecipe.all.format = "fp8"\n'
        'target = { reference = "fp8", high_precision = "" }\n[[arm]]\nname = "fp8"\nlabel = "FP8"\n'
        '[[arm]]\nname = "wrong"\nlabel = "W"\nrecipe.layers = [{ match = ["*.dwn_proj"], recipe = "bf16" }]\n'
    )
    found = CliRunner().invoke(main, ["ablate", str(ladder), "--out", str(tmp_path / "out")])
    assert found.exit_code == 2
    assert "error: arm wrong: layers[0].match: '*.dwn_proj' matches no linear layer" in found.output


def test_bad_input_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    found = CliRunner().invoke(main, ["report", str(tmp_path)])
    assert found.exit_code == 2
    assert found.output.count("\n") == 1
    assert "error:" in found.output


def test_missing_packages_are_named(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    known = importlib.util.find_spec
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "jinja2" else known(name))
    for arguments in (["report", str(folder)], ["ablate", "paper"]):
        found = CliRunner().invoke(main, arguments)
        assert found.exit_code == 2
        assert "needs jinja2, which is not installed: pip install 'mxref[training]'" in found.output


def command(monkeypatch: pytest.MonkeyPatch, trainer: FakeTrainer, out: Path, *arguments: str) -> Result:
    monkeypatch.setattr("mxref_training.lab.fresh.train", trainer)
    monkeypatch.setattr("mxref_training.data.corpus.prepare_corpus", lambda config: FakeCorpus())
    fixed = ["--set", "run.eval_every=10", "--backend", "reference", "--out", str(out)]
    return CliRunner().invoke(main, ["ablate", "paper", *fixed, *arguments])


def test_ablate_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    trainer = FakeTrainer(SLOWDOWN)
    found = command(
        monkeypatch, trainer, tmp_path, "--steps", "50", "--arms", "fprop, all-h16", "--data", "x.jsonl"
    )
    assert found.exit_code == 0, found.output
    assert [label for label, _ in trainer.calls] == ["FP8", "plain RNE", "H16"]
    written = load_results(tmp_path)
    assert written["config"]["run"]["steps"] == 50
    assert written["config"]["data"]["train"] == "x.jsonl"
    assert written["config"]["optim"]["schedule"] == "constant"
    assert {"report.html", "report.md", "results.json"} < {path.name for path in tmp_path.iterdir()}
    assert "Not run yet: fp8-seed2, bf16, wgrad," in " ".join(found.output.split())


def test_ablate_interrupted_is_one_line_and_exit_code_130(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def stop(label: str) -> None:
        raise Interrupted("SIGINT after step 3 of 50: saved; the same command goes on from there")

    found = command(monkeypatch, FakeTrainer(interrupt=stop), tmp_path, "--steps", "50")
    assert found.exit_code == 130
    began, *lines = found.output.splitlines()
    assert began.startswith("ladder paper, backend reference (asked for by name), writing to ")
    assert lines == [
        "[1/14] fp8: starts",
        "interrupted: SIGINT after step 3 of 50: saved; the same command goes on from there",
    ]
