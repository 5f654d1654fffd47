"""Runs that stop and resume: bit for bit in the same folder, or they are refused."""

from __future__ import annotations

import json
import os
import signal
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from layer_setup import NVFP4
from mxref.recipe import Recipe
from mxref.recipe_files import load_recipe, recipe_from_table
from mxref_training.config import Schedule
from mxref_training.errors import CheckpointError, ConfigError
from mxref_training.trainer import Interrupted
from training_setup import (
    CONFIG,
    CORPUS,
    SR,
    Saboteur,
    change,
    crash,
    files,
    lines,
    metrics,
    newest,
    run,
    text,
    weights,
)


@pytest.mark.parametrize("recipe", ["fp8", SR, recipe_from_table(NVFP4)], ids=["fp8", "sr", "nvfp4"])
def test_stopping_and_going_on_changes_no_bit(
    tmp_path: Path, whole: Callable[..., Any], recipe: Recipe | str
) -> None:
    (unbroken, expected), parts = whole(recipe, CONFIG), tmp_path / "parts"
    first = run(parts, recipe, stop_after=3)
    assert first.tokens == 3 * 128
    second = run(parts, recipe)
    assert metrics(parts) == metrics(unbroken)
    assert weights(parts) == weights(unbroken)
    assert second.losses == expected.losses
    assert second.train_losses == expected.train_losses


@pytest.mark.parametrize("recipe", ["fp8", SR], ids=["fp8", "sr"])
def test_dying_between_checkpoints_changes_no_bit(tmp_path: Path, recipe: Recipe | str) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    config = change(checkpoint_every=2)
    run(whole, recipe, config)
    with pytest.raises(RuntimeError, match="the machine died"):
        run(parts, recipe, config, progress=Saboteur(5, crash))
    assert [line["step"] for line in lines(parts) if "lr" in line] == [1, 2, 3, 4, 5]
    with (parts / "metrics.jsonl").open("ab") as file:
        file.write(b'{"step": 6, "los')  # and a line that was cut short
    run(parts, recipe, config)
    assert metrics(parts) == metrics(whole)
    assert weights(parts) == weights(whole)


def test_dying_before_the_first_checkpoint_starts_over(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run(whole)
    with pytest.raises(RuntimeError):
        run(parts, progress=Saboteur(2, crash))
    run(parts)
    assert metrics(parts) == metrics(whole)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_stops_after_the_step_with_a_checkpoint(tmp_path: Path, number: signal.Signals) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run(whole)
    before = signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)
    sink = Saboteur(3, lambda: os.kill(os.getpid(), number))
    with pytest.raises(
        Interrupted, match=f"{number.name} after step 3 of 6: saved in .*the same command goes on"
    ):
        run(parts, progress=sink)
    assert (signal.getsignal(signal.SIGINT), signal.getsignal(signal.SIGTERM)) == before
    assert newest(parts) == 3
    run(parts)
    assert metrics(parts) == metrics(whole)


def test_a_signal_in_the_last_step_does_not_spoil_the_end(tmp_path: Path) -> None:
    result = run(tmp_path, progress=Saboteur(6, lambda: os.kill(os.getpid(), signal.SIGTERM)))
    assert result.tokens == 6 * 128


def test_a_finished_run_is_read_and_not_repeated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = run(tmp_path)
    before = files(tmp_path)
    monkeypatch.setattr("mxref_training.build.Llama", crash)
    assert run(tmp_path) == first
    assert files(tmp_path) == before


def test_a_finished_run_can_be_made_longer(tmp_path: Path) -> None:
    run(tmp_path / "parts")
    longer = run(tmp_path / "parts", config=change(steps=8))
    assert longer.losses == run(tmp_path / "whole", config=change(steps=8)).losses
    with pytest.raises(CheckpointError, match=r"at step 8 already, beyond run.steps = 6"):
        run(tmp_path / "parts")


def test_a_cosine_cannot_be_made_longer(tmp_path: Path) -> None:
    cosine = replace(CONFIG, optim=replace(CONFIG.optim, schedule=Schedule.COSINE))
    run(tmp_path, config=cosine, stop_after=2)
    with pytest.raises(CheckpointError, match="run.steps is 6 there and 8 here"):
        run(tmp_path, config=change(cosine, steps=8))


OTHERS: dict[str, tuple[dict[str, Any], str]] = {
    "recipe": ({"recipe": "fp8"}, r"recipe.fprop.x.format is bf16 there and fp8 here and \d+ more"),
    "model": (
        {"config": replace(CONFIG, model=replace(CONFIG.model, ffn=96))},
        "model.ffn is 64 there and 96 here",
    ),
    "seed": ({"config": change(seed=4)}, "run.seed is 3 there and 4 here"),
    "lr": (
        {"config": replace(CONFIG, optim=replace(CONFIG.optim, lr=1.0))},
        "optim.lr is 0.005 there and 1.0 here",
    ),
    "data": ({"corpus": replace(CORPUS, train=text(4000, 7))}, "data.train is [0-9a-f]+ there and"),
}


@pytest.mark.parametrize("what", OTHERS)
@pytest.mark.parametrize("stop_after", [2, None])
def test_another_run_is_refused_and_left_alone(tmp_path: Path, what: str, stop_after: int | None) -> None:
    run(tmp_path, stop_after=stop_after)
    before = files(tmp_path)
    options, message = OTHERS[what]
    with pytest.raises(CheckpointError, match=f"holds another run: {message}.*--no-resume") as caught:
        run(tmp_path, **options)
    assert "\n" not in str(caught.value)
    assert files(tmp_path) == before


def test_no_resume_starts_over_and_keeps_strangers(tmp_path: Path) -> None:
    run(tmp_path)
    (tmp_path / "notes.txt").write_text("mine")
    result = run(tmp_path, "fp8", resume=False, stop_after=1)
    assert result.tokens == 128
    assert (tmp_path / "notes.txt").read_text() == "mine"
    assert load_recipe(tmp_path / "recipe.toml") == load_recipe("fp8")


@pytest.mark.parametrize("resume", [True, False])
def test_a_folder_that_is_not_a_run_is_left_alone(tmp_path: Path, resume: bool) -> None:
    (tmp_path / "config.toml").write_text("mine")
    with pytest.raises(ConfigError, match=r"config.toml exists.*not the folder of a run"):
        run(tmp_path, resume=resume)
    assert files(tmp_path) == {"config.toml": b"mine"}


def test_lost_metrics_are_noticed(tmp_path: Path) -> None:
    run(tmp_path, stop_after=3)
    (tmp_path / "metrics.jsonl").write_bytes(metrics(tmp_path)[:-30])
    with pytest.raises(
        CheckpointError, match=r"metrics.jsonl has \d+ bytes, but the checkpoint was taken at \d+"
    ):
        run(tmp_path)


def test_an_old_machine_is_mentioned(tmp_path: Path) -> None:
    run(tmp_path, stop_after=3)
    path = tmp_path / "run.json"
    record = json.loads(path.read_text())
    now, record["versions"]["torch"] = record["versions"]["torch"], "1.0"
    path.write_text(json.dumps(record))
    sink = Saboteur(0, crash)
    run(tmp_path, progress=sink)
    assert f"torch 1.0 -> {now}" in sink.notes[0]
    assert sink.notes[1] == "resumed at step 3 of 6"


def test_a_folder_that_cannot_be_made_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointError, match=r"cannot write to .*file/run: .*choose another --out"):
        run(tmp_path / "file" / "run")


def test_tied_embeddings_survive_a_resume(tmp_path: Path) -> None:
    tied = replace(CONFIG, model=replace(CONFIG.model, tie_embeddings=True))
    run(tmp_path / "whole", config=tied)
    run(tmp_path / "parts", config=tied, stop_after=3)
    run(tmp_path / "parts", config=tied)
    assert metrics(tmp_path / "parts") == metrics(tmp_path / "whole")
