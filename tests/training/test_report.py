"""The report of a ladder begins with what decides, is complete and one file, and says what a short run cannot show."""

from __future__ import annotations

import errno
import importlib.util
import io
import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from rich.console import Console

import mxref
from ablation_fakes import FakeCorpus, FakeTrainer, in_process, ladder, run_ladder, tiny
from html_page import Page
from mxref import terminal
from mxref.cli import main
from mxref_training.cli.ablate import ablate
from mxref_training.cli.report import report
from mxref_training.interrupt import Interrupted
from mxref_training.lab.ladder import Contrast, Ladder, load_ladder
from mxref_training.lab.study import load_results
from mxref_training.report.ladder.page import headline, ladder_page, noise, noise_line, screen, write_report
from mxref_training.report.ladder.plots import differences
from mxref_training.report.ladder.tables import (
    answers_table,
    half_width,
    ladder_tables,
    last_table,
    results_table,
)

SLOWDOWN = {"plain RNE": 0.09, "SR on dY": 0.2, "RHT16, signs fixed": 0.6}
PAPER = load_ladder("paper")


def made(out: Path, of: Ladder = PAPER, seeds: int = 1, trainer: FakeTrainer | None = None) -> dict[str, Any]:
    return run_ladder(
        of,
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
    """A ladder of one seed, whose reference is repeated with another one."""
    return made(folder)


@pytest.fixture(scope="module")
def page(results: dict[str, Any], folder: Path) -> str:
    path, _ = write_report(results, folder)
    return path.read_text(encoding="utf-8")


KEPT = ("fp8", "bf16", "fprop", "fprop-dgrad", "all", "all-h16", "all-h32", "all-sr-dy", "all-sr")


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """A ladder of three seeds with contrasts; its base is in MXFP8, which the reference backend computes in order."""
    readings = load_ladder("readings")
    asked = replace(
        readings,
        arm=tuple(replace(arm, seeds=3) for arm in readings.arm if arm.name in KEPT),
        contrast=tuple(c for c in readings.contrast if {c.arm, c.against} <= set(KEPT)),
        exploratory=(Contrast("late", "all-h16", "fprop", "Declared after the runs?"),),
        recipe=readings.recipe | {"gemm": "ordered"},
    )
    slowdown = {"plain RNE": 0.1, "H16": 0.02, "H32": 0.02, "SR on dY": 0.6}
    trainer = FakeTrainer(slowdown, diverging=["SR everywhere"])
    return made(tmp_path_factory.mktemp("readings"), asked, 3, trainer)


def shown(results: dict[str, Any], width: int) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(screen(results, width))
    return console.export_text()


def test_the_page_stands_alone_and_every_arm_is_in_every_form(
    page: str, results: dict[str, Any], folder: Path
) -> None:
    parsed = Page(page)
    assert not {"script", "link", "img", "iframe", "object"} & set(parsed.tags)
    assert "http" not in page
    assert not re.search(r"@import|url\((?!#)|\bsrc=", page)
    assert parsed.tags.count("svg") == 2
    assert len(parsed.ids) == len(set(parsed.ids))
    assert set(re.findall(r'(?:href="#|url\(#)([^")]+)', page)) <= set(parsed.ids)
    forms = page, (folder / "report.md").read_text(encoding="utf-8"), shown(results, 110)
    for arm in PAPER.arm:
        assert all(arm.label in form for form in forms)
        assert PAPER.resolve(arm).digest in page
    assert forms[2].index(noise_line(results)[:20]) < forms[2].index("No claim is judged")


def test_too_few_seeds_judge_no_claim_whatever_they_measured(results: dict[str, Any]) -> None:
    assert {arm["verdict"]["verdict"] for arm in results["arms"] if arm["verdict"]} == {"underpowered"}
    assert "verdict" not in [column.key for column in results_table(results).columns]
    assert headline(results).startswith(
        "No claim is judged: a verdict needs 3 runs of an arm (--seeds 3), and there are at most 2."
    )


@pytest.mark.parametrize("width", [80, 108])
def test_the_table_fits_the_terminal_and_nothing_is_cut(results: dict[str, Any], width: int) -> None:
    text = shown(results, width)
    assert "…" not in text
    assert max(map(len, text.splitlines())) <= width
    assert ("35.84 k" in text) is (width >= 108)
    assert "underpowered" not in text


def overheads(*ends: tuple[float | None, float | None], noise: float | None = None) -> Any:
    arms: list[dict[str, Any]] = [{"name": "ref", "overhead": None, "paper": {"range": [8, 9]}}]
    for i, (low, high) in enumerate(ends):
        half = None if low is None or high is None else (high - low) / 2
        arms.append({"name": str(i), "overhead": {"half_width": half, "reach": "crossed"}, "paper": None})
    return {"arms": arms, "noise": {"half_width": noise}, "spread": {"tokens": {"outside": ["1"]}}}


@pytest.mark.parametrize(
    ("found", "begins"),
    [
        # The reference's own repetitions say nothing, and the arms' pooled spread says how much: one number, not two.
        (overheads((-10.0, 22.0), (-16.0, 17.6)), "Noise ± 16.0 % in tokens to the target"),
        (overheads((-1.0, 31.0), (-90.0, 70.0)), "Noise ± 16.0 %"),  # 1 left the pool
        (overheads((None, None), noise=9.0), "Noise ± 9.0 %"),
        (overheads((None, None)), "Noise unknown"),
    ],
)  # fmt: skip
def test_a_ladder_says_once_how_large_its_noise_is(found: dict[str, Any], begins: str) -> None:
    line = noise_line(found)
    assert line.startswith(begins)
    assert ("such as the least that is claimed, 8 %" in line) is ("±" in begins)


def test_the_noise_is_that_of_the_intervals_in_the_table(tmp_path: Path) -> None:
    """Two seeds of every arm, a reference without repetitions: its own noise was unknown beside intervals of ± x."""
    arms = ladder().arm
    pair = replace(ladder(), arm=tuple(arm for arm in arms if not arm.seed_offset))
    results = made(tmp_path, pair, 2, FakeTrainer({"H16": 0.001, "bad": -0.001}))
    width = noise(results)
    assert width is not None
    text = ladder_page(results).markdown()
    assert "unknown" not in text
    assert f"{width:.1f}" == max(filter(None, map(half_width, results["arms"])), key=float)


def test_losses_are_held_against_the_reference_of_the_same_seed(tmp_path: Path) -> None:
    """Another seed's reference lies elsewhere, and an arm may lack the first seed."""
    results = made(tmp_path, ladder(), 3, FakeTrainer({"H16": 0.1}))
    arms = {arm["name"]: arm for arm in results["arms"]}
    for pair, run in enumerate(arms["fp8"]["runs"]):
        run["curve"] = [[tokens, 5.0 + pair] for tokens, _ in run["curve"]]
    for run in arms["h16"]["runs"]:
        run["curve"] = [[tokens, 5.25 + run["pair"]] for tokens, _ in run["curve"]]
    for kept in (arms["h16"]["runs"], arms["h16"]["runs"][1:], arms["h16"]["runs"][::-1]):
        found = differences(results, arms["h16"] | {"runs": kept})
        assert {round(gap, 6) for run in found for _, gap in run} == {0.25}
        assert len(found) == len(kept)


def test_three_seeds_can_carry_verdicts(tmp_path: Path) -> None:
    results = made(tmp_path, seeds=3)
    verdicts = {arm["name"]: arm["verdict"]["verdict"] for arm in results["arms"] if arm["verdict"]}
    assert verdicts["all-sr"] == "reproduced"  # all seeds diverge
    assert verdicts["all"] == "not reproduced"  # 9 % measured, 26-27 % claimed
    assert verdicts["all-sr-dy"] == "not reproduced"  # converges
    assert verdicts["all-rht16-fixed"] == "underpowered"  # censored: neither


def test_a_ladder_without_a_target(tmp_path: Path) -> None:
    results = made(tmp_path, trainer=FakeTrainer(diverging=["FP8"]))
    page, _ = write_report(results, tmp_path)
    assert "There is no target: the reference diverged" in page.read_text(encoding="utf-8")


def test_every_contrast_is_answered_in_every_form(answered: dict[str, Any]) -> None:
    found = answers_table(answered).rows
    page = ladder_page(answered)
    html, text = page.html(), page.markdown()
    for (arms, *_), row in zip(found, answered["contrasts"], strict=True):
        for form in (html, text):
            assert f"{row['question']} {row['answer']}" in form.replace("&#39;", "'")
            assert arms in form.replace("&gt;", ">")
    by_name = {row["name"]: row for row in answered["contrasts"]}
    outcomes = {name: by_name[name]["outcome"] for name in ("h16", "sr-all", "dgrad")}
    assert outcomes == {"h16": "lower", "sr-all": "diverges", "dgrad": "equal"}
    tables = {one.name: one.rows for one in ladder_tables(answered)}
    assert [row[0] for row in tables["contrasts"]] == list(by_name)
    # The second analysis stands beside them; the arm that diverged has no loss to compare.
    compared = [row for row in by_name.values() if row["outcome"] not in ("diverges", "undecided")]
    assert [row[1] for row in tables["exploratory"]] == ["before the runs"] * len(compared) + ["after"]
    assert f"| {tables['exploratory'][-1][0]} |" in text


def evaluated(tmp_path: Path) -> dict[str, Any]:
    """A ladder of three seeds whose last checkpoints were evaluated, except those of the arm `bad`."""
    results = made(tmp_path, ladder(), 3, FakeTrainer())
    for i, arm in enumerate(arm for arm in results["arms"] if arm["name"] != "bad"):
        for run in arm["runs"]:
            own = {"validation": 4 + run["pair"] + i / 10, "<b>": 5.0 + run["pair"] * i / 10}
            run["last"] = {
                "losses": {"own": own, "bf16": own | {"validation": 4.0}},
                "texts": {key: {} for key in own},
            }
    return results


def test_last_checkpoints_have_differences_at_equal_seeds(tmp_path: Path) -> None:
    results = evaluated(tmp_path)
    table = last_table(results)
    assert table is not None
    # The repetition of the reference is no arm, and `bad` was not evaluated.
    every = ("H16", "+0.200 (+0.200 to +0.200)", "+0.200 (+0.000 to +0.400)", "+0.000 (+0.000 to +0.000)")
    assert table.rows == [every]
    page = ladder_page(results)
    assert "&lt;b&gt;" in page.html()
    assert f"| {' | '.join(every)} |" in page.markdown()
    h16 = next(arm for arm in results["arms"] if arm["name"] == "h16")
    h16["runs"][2]["last"]["losses"]["own"]["<b>"] = None
    again = last_table(results)
    assert again is not None
    assert again.rows[0][2] == "+0.100 (+0.000 to +0.200)", "a loss that was not finite"
    h16["runs"] = h16["runs"][1:]
    fewer = last_table(results)
    assert fewer is not None
    assert fewer.rows[0][1] == every[1], "the first seed is missing"


HOSTILE = "<script>alert(1)</script>|![x](http://y)`*_&\x1b[2J\nnext"


def hostile(results: dict[str, Any]) -> dict[str, Any]:
    """Return the results with every text that a file or an environment gives made hostile."""
    arms = [
        arm
        | {"label": f"{arm['label']} {HOSTILE}", "stage": HOSTILE}
        | {"recipe": arm["recipe"] | {"treatment": [[r, HOSTILE] for r, _ in arm["recipe"]["treatment"]]}}
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


def test_texts_are_escaped_in_every_form(results: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    page = ladder_page(hostile(results))
    html, text = page.html(), page.markdown()
    assert not {"script", "img"} & set(Page(html).tags)
    assert "&lt;script&gt;" in html
    assert "&lt;script>" in text
    for form in (html, text):
        assert "<script" not in form
        assert "\x1b" not in form
        assert r"\x1b[2J" in form.replace("\\\\", "\\").replace("\\[", "[")
    assert not re.search(r"(?<!\\)[`\]]\(?http", text), "no link and no image"

    def cells(lines: Sequence[str]) -> list[int]:
        return [len(re.findall(r"(?<!\\)\|", line)) for line in lines if line.startswith("|")]

    same = ladder_page(results | {"contrasts": [contrast_of(results, "t")]}).markdown()
    assert cells(text.splitlines()) == cells(same.splitlines())
    console = terminal.console()
    console.file, console.width = io.StringIO(), 200
    console.print(screen(hostile(results), 200))
    assert "\x1b" not in console.file.getvalue()
    assert r"\x1b[2J" in console.file.getvalue()


def test_labels_are_text_and_no_formula(results: dict[str, Any], tmp_path: Path) -> None:
    labels = ["$\\foo$", "50 $ and 60 $", "$x_1$", "a_b^{c", "日本語", "\\frac{1}{0}"]
    arms = [{**arm, "label": label} for arm, label in zip(results["arms"], labels, strict=False)]
    page = ladder_page({**results, "arms": arms}).html()
    overheads, curves = re.findall(r"<svg.*?</svg>", page, re.DOTALL)
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
    assert "No claim is judged" in found.stdout, "the table is shown all the same"
    (line,) = found.stderr.splitlines()
    assert line.startswith(f"error: cannot write {tmp_path / 'report.html'}: ")
    assert line.endswith(f"'mxref report {tmp_path}' makes the report again")
    assert (tmp_path / "report.md").read_text() == "old"
    monkeypatch.setattr("mxref_training.report.page.replace_text", no_space)
    found = CliRunner().invoke(main, ["report", str(folder)])
    assert found.exit_code == 2
    assert "report.html: No space left on device; the numbers are in results.json" in found.stderr
    assert (folder / "report.html").read_text(encoding="utf-8") == page


def test_the_command_makes_the_same_page_again(folder: Path, page: str) -> None:
    (folder / "report.html").unlink()
    found = CliRunner().invoke(report, [str(folder)])
    assert found.exit_code == 0, found.output
    assert "No claim is judged" in found.output
    assert (folder / "report.html").read_text(encoding="utf-8") == page


def test_list_shows_the_arms_that_the_command_would_train() -> None:
    found = CliRunner().invoke(ablate, ["paper", "--list"])
    assert found.exit_code == 0, found.output
    assert all(arm.name in found.output for arm in PAPER.arm)
    found = CliRunner().invoke(main, ["ablate", "tseng", "--arms=-rht64-sr", "--list"])
    assert found.exit_code == 0, found.output
    assert "rht64 " in found.output
    assert "rht64-sr" not in found.output
    found = CliRunner().invoke(main, ["ablate", "tseng", "--arms", "nope", "--list"])
    assert (found.exit_code, "'nope'" in found.output) == (2, True)


def test_an_arm_that_does_not_fit_the_model_is_named(tmp_path: Path) -> None:
    two = tmp_path / "two.toml"
    two.write_text(
        'title = "t"\ntrain = { preset = "tiny", optim.schedule = "constant" }\nrecipe.all.format = "fp8"\n'
        'target = { reference = "fp8", high_precision = "" }\n[[arm]]\nname = "fp8"\nlabel = "FP8"\n'
        '[[arm]]\nname = "wrong"\nlabel = "W"\nrecipe.layers = [{ match = ["*.dwn_proj"], recipe = "bf16" }]\n'
    )
    found = CliRunner().invoke(main, ["ablate", str(two), "--out", str(tmp_path / "out")])
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
    train = in_process(trainer, mxref.get_backend("reference"))
    monkeypatch.setattr(
        "mxref_training.lab.queue.Queue.__call__", lambda queue, *given, **more: train(*given, **more)
    )
    monkeypatch.setattr("mxref_training.data.corpus.prepare_corpus", lambda config: FakeCorpus())
    fixed = ["--set", "run.eval_every=10", "--backend", "reference", "--out", str(out)]
    return CliRunner().invoke(main, ["ablate", "paper", *fixed, *arguments])


def test_ablate_command(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    trainer = FakeTrainer(SLOWDOWN)
    found = command(
        monkeypatch,
        trainer,
        tmp_path,
        "--set",
        "run.steps=50",
        "--arms",
        "fprop, all-h16",
        "--set",
        "data.train=x.jsonl",
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

    found = command(monkeypatch, FakeTrainer(interrupt=stop), tmp_path, "--set", "run.steps=50")
    assert found.exit_code == 130
    began, *lines = found.output.splitlines()
    assert began.startswith("ladder paper, backend reference (asked for by name), writing to ")
    assert lines == [
        "[1/14] fp8: starts",
        "interrupted: SIGINT after step 3 of 50: saved; the same command goes on from there",
    ]
