"""The report of runs: one page that stands alone, tables that hold the files' own numbers, and clear refusals."""

from __future__ import annotations

import csv
import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any

import pytest
from click.testing import CliRunner, Result

from html_page import Page
from mxref.cli import main
from mxref.errors import MxrefError
from mxref.recipe_files import recipe_from_table
from mxref.tomlio import dumps
from mxref_training.lab.study import RESULTS
from mxref_training.report.runs.page import runs_page, signs
from mxref_training.report.runs.plots import METRICS, layer_grid
from mxref_training.report.runs.tables import all_tables, read_runs
from training_setup import change, run

CONFIG = change(steps=4, batch=2, micro_batch=1, threads=1, telemetry_every=2)
MIXED = recipe_from_table(
    {"fprop": {"format": "mxfp4"}, "dgrad": {"format": "fp8"}, "wgrad": {"format": "mxfp8_e4m3"}}
)


@pytest.fixture(scope="module")
def mixed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "mixed"
    run(folder, MIXED, CONFIG)
    return folder


@pytest.fixture(scope="module")
def other(mixed: Path) -> Path:
    """A run without telemetry."""
    folder = mixed.parent / "other"
    run(folder, "bf16", change(CONFIG, telemetry_every=0, seed=4))
    return folder


@pytest.fixture
def copied(mixed: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(mixed, tmp_path / "copied"))


@pytest.fixture(scope="module")
def compared(mixed: Path, other: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Result]:
    """The folder of a comparison with its tables in `tables`, and what the command printed."""
    folder = tmp_path_factory.mktemp("compared")
    return folder, called(mixed, other, "--out", folder, "--csv", folder / "tables")


def lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_bytes().splitlines()]


def called(*arguments: object) -> Result:
    return CliRunner().invoke(main, ["report", *map(str, arguments)])


def stands_alone(page: str) -> Page:
    parsed = Page(page)
    assert not {"script", "link", "img", "iframe", "object"} & set(parsed.tags)
    assert "http" not in page
    assert not re.search(r"@import|url\((?!#)|\bsrc=|href=\"(?!#|data:)", page)
    assert len(parsed.ids) == len(set(parsed.ids))
    assert set(re.findall(r'(?:href="#|url\(#)([^")]+)', page)) <= set(parsed.ids)
    return parsed


def test_the_page_of_a_run_stands_alone_and_has_every_figure(mixed: Path, tmp_path: Path) -> None:
    done = called(mixed, "--out", tmp_path / "new" / "pages")
    assert done.exit_code == 0, done.output
    page = (tmp_path / "new" / "pages" / "report.html").read_text(encoding="utf-8")
    assert done.output.strip() == str(tmp_path / "new" / "pages" / "report.html")
    parsed = stands_alone(page)
    assert parsed.tags.count("svg") == 2 + 2 + len(METRICS) + 1  # curves, over the steps, by layer
    for text in (
        "Run mixed", "prefers-color-scheme: dark", "Fprop X", "Wgrad dY", MIXED.digest,
        "MXFP8 E4M3", "hardware.cpus", "versions.torch", "telemetry_every", "Cosine of dW",
    ):  # fmt: skip
        assert text in page, text
    text = (tmp_path / "new" / "pages" / "report.md").read_text(encoding="utf-8")
    assert "| Fprop X | mxfp4 |" in text
    assert not (mixed / "report.html").exists()


def test_reports_are_the_same_each_time(mixed: Path, other: Path, compared: tuple[Path, Result]) -> None:
    runs = read_runs([mixed, other])
    assert runs_page(runs).html() == (compared[0] / "comparison.html").read_text(encoding="utf-8")
    assert runs_page(runs).markdown() == (compared[0] / "comparison.md").read_text(encoding="utf-8")


def test_several_runs_are_compared(mixed: Path, other: Path, tmp_path: Path) -> None:
    done = called(mixed, other, mixed, "--out", tmp_path)
    assert done.exit_code == 0, done.output
    page = (tmp_path / "comparison.html").read_text(encoding="utf-8")
    stands_alone(page)
    differences = page[page.index("<h2>Configuration: differences</h2>") :]
    for text in ("run.seed", "fprop.x.format", "mxfp4", "bf16", "run.telemetry_every"):
        assert text in differences
    assert "model.width" not in differences[: differences.index("<details>")]
    assert "other: every GEMM is in BF16, so there is no quantized operand to measure." in page
    assert "mixed (1)" in page
    assert "mixed (3)" in page
    text = (tmp_path / "comparison.md").read_text(encoding="utf-8")
    assert "| fprop.x.format | mxfp4 | bf16 | mxfp4 |" in text
    assert max(map(len, text.splitlines())) < 400


def test_layers_and_phases_are_compared_in_words(other: Path, copied: Path, tmp_path: Path) -> None:
    (copied / "telemetry.jsonl").unlink()  # whose figures take most of the time
    plan = recipe_from_table(
        {
            "layers": [{"match": ["*.down_proj"], "recipe": {"all": {"rounding": "sr"}}}],
            "schedule": [
                {"until": "10%", "recipe": "fp8"},
                {"start": "90%", "name": "tail", "recipe": "bf16"},
            ],
        }
    )
    (copied / "recipe.toml").write_text(dumps(plan))
    done = called(other, copied, "--out", tmp_path / "page", "--csv", tmp_path / "csv")
    assert done.exit_code == 0, done.output
    text = (tmp_path / "page" / "comparison.md").read_text(encoding="utf-8")
    for row in (
        '| layers\\[0\\].match | – | \\["\\*.down_proj"\\] |',
        "| layers\\[0\\].wgrad | – | MXFP4, FLOOR, SR |",
        "| schedule\\[0\\].name | – | fp8 |",
        "| schedule\\[0\\].until | – | 10% |",
        "| schedule\\[0\\].fprop | – | FP8 |",
        "| schedule\\[1\\].start | – | 90% |",
        "| schedule\\[1\\].digest | – | ",
    ):
        assert row in text, row
    assert max(map(len, text.splitlines())) < 400
    rows = (tmp_path / "csv" / "recipe.csv").read_text(encoding="utf-8").splitlines()
    assert "schedule[1].wgrad,,BF16" in rows


def test_tables_hold_the_numbers_of_the_files(
    mixed: Path, other: Path, compared: tuple[Path, Result]
) -> None:
    folder, done = compared
    assert done.exit_code == 0, done.output
    found = {}
    for path in (folder / "tables").iterdir():
        with path.open(encoding="utf-8", newline="") as file:
            found[path.stem] = list(csv.DictReader(file))
    assert set(found) == {table.name for table in all_tables(read_runs([mixed, other]))}
    assert done.output.splitlines()[-1] == f"{len(found)} tables in {folder / 'tables'}"
    logged = lines(mixed / "telemetry.jsonl")
    for name, key in (("telemetry", "snr"), ("gradients", "cosine")):
        wanted = [line for line in logged if key in line]
        assert len(found[name]) == len(wanted)
        for row, line in zip(found[name], wanted, strict=True):
            assert row == {"run": "mixed"} | {k: "" if v is None else str(v) for k, v in line.items()}
    metrics = lines(mixed / "metrics.jsonl")
    first, second = found["runs"]
    losses = [line["val_loss"] for line in metrics if "val_loss" in line]
    theirs = [line["val_loss"] for line in lines(other / "metrics.jsonl") if "val_loss" in line]
    assert float(first["val_loss"]) == losses[-1]
    assert float(first["best_val_loss"]) == min(losses)
    assert float(second["val_difference"]) == theirs[-1] - losses[-1]
    rates = [line["tokens_per_second"] for line in lines(mixed / "timing.jsonl") if "seconds" in line]
    assert float(first["tokens_per_second"]) == median(rates)
    assert (first["steps"], first["tokens"], first["telemetry_steps"]) == ("4", "256", "2")
    assert [row["val_loss"] for row in found["validation"]] == [str(v) for v in losses + theirs]
    assert len(found["training"]) == 8
    weights = [x for x in logged if x["step"] == 4 and (x.get("role"), x.get("operand")) == ("fprop", "w")]
    row = next(row for row in found["telemetry_summary"] if row["operand"] == "Fprop W")
    assert float(row["snr_median"]) == median(x["snr"] for x in weights)
    worst = min(weights, key=lambda x: x["snr"])
    assert (float(row["snr_worst"]), row["snr_layer"]) == (worst["snr"], worst["layer"])
    assert float(row["bias_worst"]) == 100 * max((x["bias"] for x in weights), key=abs)


def test_a_run_without_telemetry_says_how_to_switch_it_on(copied: Path) -> None:
    (copied / "telemetry.jsonl").unlink()
    assert called(copied).exit_code == 0
    for name in ("report.html", "report.md"):
        text = (copied / name).read_text(encoding="utf-8")
        quoted = "<code>{}</code>" if name.endswith("html") else r"\`{}\`"
        command = quoted.format("mxref train … --set run.telemetry_every=50")
        assert f"copied is without telemetry. Switch it on with {command}" in text
    assert "Telemetry by layer" not in (copied / "report.html").read_text(encoding="utf-8")


def test_a_run_that_has_just_begun_or_is_writing_has_a_page(copied: Path) -> None:
    for name in ("telemetry", "metrics", "timing"):
        path = copied / f"{name}.jsonl"
        path.write_bytes(path.read_bytes() + b'{"step": 5, "lo')
    (begun,) = read_runs([copied])
    assert begun.steps[-1]["step"] == 4
    for name in ("telemetry", "metrics", "timing"):
        (copied / f"{name}.jsonl").unlink()
    runs = read_runs([copied, copied])
    stands_alone(runs_page(runs[:1]).html())
    stands_alone(runs_page(runs).html())
    assert "| – |" in runs_page(runs).markdown()


def test_skipped_steps_phases_and_losses_that_are_not_finite_have_a_page(copied: Path) -> None:
    with (copied / "metrics.jsonl").open("a") as file:
        line = {"step": 5, "tokens": 320, "loss": None, "lr": 0.1, "grad_norm": None, "skipped": "loss inf"}
        file.write(json.dumps(line | {"phase": "tail <1>"}) + "\n")
        file.write('{"step": 5, "tokens": 320, "val_loss": null, "val_perplexity": null}\n')
    runs = read_runs([copied])
    page = runs_page(runs).html()
    stands_alone(page)
    assert "tail &lt;1&gt;" in page
    (overview, *_) = all_tables(runs)
    row = dict(zip((column.key for column in overview.columns), overview.rows[0], strict=True))
    assert (row["val_loss"], row["skipped"]) == (None, 1)


def damaged(change_files: Callable[[Path], Any], message: str) -> Any:
    return pytest.param(change_files, message, id=message[:28])


def edit(name: str, old: str, new: str) -> Callable[[Path], None]:
    def act(folder: Path) -> None:
        text = (folder / name).read_text()
        assert old in text
        (folder / name).write_text(text.replace(old, new, 1))

    return act


@pytest.mark.parametrize(
    ("spoil", "message"),
    [
        damaged(shutil.rmtree, "is not a folder; name the --out of"),
        damaged(
            lambda f: (f / "run.json").unlink(),
            "is no run: it has no run.json, nor the results.json of a ladder",
        ),
        damaged(
            edit("run.json", "mxref.run.2", "mxref.run.1"),
            "another version of mxref: its format is mxref.run.1, and this version reads mxref.run.2",
        ),
        damaged(lambda f: (f / "run.json").write_text("{"), r"run.json is damaged \("),
        damaged(lambda f: (f / "recipe.toml").unlink(), "config.toml and recipe.toml are not both readable"),
        damaged(edit("metrics.jsonl", "\n", "\n{]\n"), "metrics.jsonl, line 2 is not JSON"),
        damaged(edit("timing.jsonl", '{"step": 1', '[{"step": 1'), "timing.jsonl, line 1 is not JSON"),
    ],
)
def test_what_is_no_run_is_refused_with_the_way_out(copied: Path, spoil: Any, message: str) -> None:
    spoil(copied)
    with pytest.raises(MxrefError, match=message):
        read_runs([copied])
    refused = called(copied)
    assert refused.exit_code == 2
    assert str(copied) in refused.output.replace("\n", "")
    assert not (copied / "report.html").exists()


def test_a_ladder_is_not_compared_with_a_run(mixed: Path, tmp_path: Path) -> None:
    (tmp_path / RESULTS).write_text("{}")
    refused = called(mixed, tmp_path)
    assert refused.exit_code == 2
    assert "is a ladder, which has a report of its own" in refused.output.replace("\n", " ")


def test_signs_name_what_is_beyond_the_limits(copied: Path) -> None:
    assert signs(read_runs([copied])) == []
    path = copied / "telemetry.jsonl"
    held = lines(path)
    for line in held:
        if line["step"] == 4 and line.get("layer", "").endswith("q_proj"):
            if line["operand"] == "x" and line["role"] == "fprop":
                line |= {"clipped": 7.5, "bias": -0.08, "nonfinite": 3.0, "zeroed": 60.0}
            if line["operand"] == "dw":
                line["cosine"] = 0.91
    path.write_text("".join(json.dumps(line) + "\n" for line in held))
    found = signs(read_runs([copied]))
    where = "Fprop X of model.layers.0.self_attn.q_proj"
    assert found == [
        f"3 % of the scales are NaN in {where}.",
        f"7.5 % are clipped in {where}.",
        f"60 % are zeroed in {where}.",
        f"the bias is -8.0% in {where}.",
        "the cosine is 0.910 in Wgrad dW of model.layers.0.self_attn.q_proj.",
    ]


def test_layers_stand_on_a_grid_of_depth_and_kind() -> None:
    names = [f"model.layers.{d}.{k}" for d in (0, 1, 10) for k in ("attn.q_proj", "mlp.up_proj")]
    depths, kinds, places = layer_grid([*names, "head"])
    assert depths == ["0", "1", "10", "–"]
    assert kinds == ["q", "up", "head"]
    assert places["model.layers.10.mlp.up_proj"] == (2, 1)
    assert layer_grid(["a.0.x.fc", "a.0.y.fc"])[1] == ["a.x.fc", "a.y.fc"]


def test_names_of_runs_tell_them_apart(mixed: Path, tmp_path: Path) -> None:
    again = Path(shutil.copytree(mixed, tmp_path / "second" / "mixed"))
    names = [run.name for run in read_runs([mixed, again])]
    assert names == [f"{mixed.parent.name}/mixed", "second/mixed"]
