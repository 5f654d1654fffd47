"""Runs whose recipe changes with the step: phases in the files of a run, and bits that no interruption changes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

import mxref_torch
from mxref.cli import main
from mxref.errors import RecipeError
from mxref.recipe_files import load_recipe, recipe_from_table
from mxref.tomlio import dumps
from mxref_torch import LayerError
from mxref_training.config_files import load_config
from mxref_training.errors import CheckpointError
from mxref_training.forecast import memory
from mxref_training.log_files import read_lines
from mxref_training.report.runs.page import runs_page
from mxref_training.report.runs.tables import read_runs
from mxref_training.treatment import describe
from training_setup import Saboteur, change, crash, lines, metrics, run, weights

PLAN = recipe_from_table(
    {
        "dialect": "amd",
        "wgrad": {"dy": {"rounding": "sr"}},
        "layers": [{"match": ["*.down_proj"], "recipe": {"all": {"format": "fp8"}}}],
        "schedule": [
            {"until": "30%", "recipe": "fp8"},
            {"start": 4, "until": 5, "recipe": {"all": {"format": "fp8"}}, "name": "healing"},
            {"recipe": "bf16"},
        ],
    }
)
"""Steps 0 and 1 in FP8, 2 and 3 in MXFP4, 4 in FP8 with other layers, 5 in BF16."""


def test_stopping_anywhere_and_going_on_changes_no_bit(tmp_path: Path) -> None:
    run(tmp_path / "whole", PLAN)
    for step in (1, 2, 3, 5):  # inside FP8, at its end, inside MXFP4, at both ends of the healing
        parts = tmp_path / f"parts{step}"
        run(parts, PLAN, stop_after=step)
        run(parts, PLAN)
        assert metrics(parts) == metrics(tmp_path / "whole"), step
        assert weights(parts) == weights(tmp_path / "whole"), step


def test_dying_between_checkpoints_changes_no_bit(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    config = change(checkpoint_every=3)
    run(whole, PLAN, config)
    with pytest.raises(RuntimeError, match="the machine died"):
        run(parts, PLAN, config, progress=Saboteur(5, crash))
    run(parts, PLAN, config)
    assert metrics(parts) == metrics(whole)
    assert weights(parts) == weights(whole)


def test_metrics_notes_and_the_record_name_the_phases(tmp_path: Path) -> None:
    sink = Saboteur(7, crash)
    run(tmp_path, PLAN, change(log_every=6), progress=sink)
    assert [(line["step"], line["phase"]) for line in lines(tmp_path) if "phase" in line] == [
        (1, "fp8"), (3, "main"), (5, "healing"), (6, "bf16")
    ]  # fmt: skip
    assert [line["step"] for line in lines(tmp_path) if "lr" in line] == [1, 3, 5, 6]
    assert [note for note in sink.notes if "phase" in note] == [
        f"step {step} begins the phase {name}"
        for step, name in ((1, "fp8"), (3, "main"), (5, "healing"), (6, "bf16"))
    ]
    identity = json.loads((tmp_path / "run.json").read_text())["identity"]
    assert identity["phases"] == [["fp8", 0], ["main", 2], ["healing", 4], ["bf16", 5]]
    assert load_recipe(tmp_path / "recipe.toml") == PLAN


def test_telemetry_measures_what_a_phase_quantizes_and_the_report_shows_the_phases(tmp_path: Path) -> None:
    run(tmp_path, PLAN, change(telemetry_every=1))
    measured = list(read_lines(tmp_path / "telemetry.jsonl"))
    formats = {
        step: {line["format"] for line in measured if line["step"] == step and "snr" in line}
        for step in range(1, 7)
    }
    assert formats == {1: {"fp8"}, 2: {"fp8"}, 3: {"mxfp4", "fp8"}, 4: {"mxfp4", "fp8"}, 5: {"fp8"}, 6: set()}
    report = runs_page(read_runs([tmp_path])).markdown()
    assert "down_proj; FP8 until 30%; FP8 from step 5 to step 5; BF16 from step 6" in report


def test_a_recipe_without_a_schedule_leaves_the_files_of_a_run_as_they_were(tmp_path: Path) -> None:
    run(tmp_path, "bf16", change(steps=2))
    assert not any("phase" in line for line in lines(tmp_path))
    assert "phases" not in json.loads((tmp_path / "run.json").read_text())["identity"]


def test_shares_hold_a_run_to_its_length(tmp_path: Path) -> None:
    plan = recipe_from_table({"all": {"format": "bf16"}, "schedule": [{"until": "50%", "recipe": "fp8"}]})
    run(tmp_path, plan, stop_after=1)
    with pytest.raises(
        CheckpointError, match=r"phases is \[\['fp8', 0\], \['main', 3\]\] there and .*'main', 4"
    ):
        run(tmp_path, plan, change(steps=8))
    fixed = recipe_from_table({"all": {"format": "bf16"}, "schedule": [{"until": 3, "recipe": "fp8"}]})
    run(tmp_path / "fixed", fixed, stop_after=4)
    run(tmp_path / "fixed", fixed, change(steps=8))
    with pytest.raises(RecipeError, match="ends after 3 steps, and the run has 2 steps"):
        run(tmp_path / "short", fixed, change(steps=2))


def test_the_first_step_of_every_phase_is_held_to_its_recipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A layer that misses the change is found at step 3, and not at the first step of the run."""
    right = mxref_torch.MXLinear.use

    def use(self: mxref_torch.MXLinear, recipe: object) -> None:
        if self.index != 2:
            right(self, recipe)  # type: ignore[arg-type]

    monkeypatch.setattr(mxref_torch.MXLinear, "use", use)
    with pytest.raises(LayerError, match=r"fprop in fp8: 4 ran, 2 expected.*ran other GEMMs: .*v_proj"):
        run(tmp_path, PLAN)
    assert not [line for line in lines(tmp_path) if line["step"] > 2]


def test_the_dry_run_and_texts_show_layers_and_phases(tmp_path: Path) -> None:
    (tmp_path / "plan.toml").write_text(dumps(PLAN))
    command = [
        "train",
        "tiny",
        "--recipe",
        str(tmp_path / "plan.toml"),
        "--dry-run",
        "--backend",
        "reference",
    ]
    found = CliRunner().invoke(main, [*command, "--set", "run.steps=10"], catch_exceptions=False)
    text = " ".join(found.stdout.split())
    for part in ("fp8 steps 1 to 3", "main steps 4 to 4", "healing steps 5 to 5", "bf16 steps 6 to 10"):
        assert f"GEMMs per step, {part}" in text
    assert "main steps 4 to 4 Fprop 2 in bf16, 4 in fp8, 24 in mxfp4" in text
    assert dict(describe(PLAN))["Fprop"] == (
        "MXFP4, EVEN; FP8 in *.down_proj; FP8 until 30%; FP8 from step 5 to step 5; BF16 from step 6"
    )
    found = CliRunner().invoke(main, command, catch_exceptions=False)  # of 20 steps 30 % are more than 4
    assert found.exit_code == 2
    assert (
        "schedule[1] (healing) begins after 4 steps, and the phase before it ends later, after 6 steps (30% of 20)"
        in found.stderr
    )


def test_layers_are_named_only_where_their_treatment_differs() -> None:
    layers = [
        {"match": ["*.down_proj"], "recipe": {"dgrad": {"dy": {"rounding": "sr"}}}},
        {"blocks": "-1:", "recipe": "bf16"},
    ]
    found = dict(describe(recipe_from_table({"dialect": "amd", "layers": layers})))
    assert found == {
        "Fprop": "MXFP4, EVEN; BF16 in blocks -1:",
        "Dgrad": "MXFP4, EVEN; MXFP4, EVEN, SR on dY in *.down_proj; BF16 in blocks -1:",
        "Wgrad": "MXFP4, EVEN; BF16 in blocks -1:",
    }


def test_the_memory_of_a_run_is_that_of_its_largest_phase() -> None:
    plain, tail = (recipe_from_table({"dialect": "amd", **keys}) for keys in ({}, {"schedule": [TAIL]}))
    bf16, config = load_recipe("bf16"), load_config("tiny")
    assert memory(config, tail) == memory(config, bf16)
    assert memory(config, plain).activations < memory(config, bf16).activations
    half = recipe_from_table({"dialect": "amd", "layers": [{"blocks": "-1", "recipe": "bf16"}]})
    sides = [memory(config, recipe).activations for recipe in (plain, half, bf16)]
    assert sides[1] - sides[0] == sides[2] - sides[1] > 0


TAIL = {"start": "90%", "recipe": "bf16"}
