"""Training whose steps are read a step late, or compiled: the same metrics, checkpoints and guards."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partialmethod
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from usual import usual

torch = pytest.importorskip("torch")

from torch import nn

from mxref.recipe_files import recipe_from_table
from mxref_training import log
from mxref_training.config import Compile, TrainConfig
from mxref_training.config_files import load_config
from mxref_training.errors import CheckpointError, ConfigError
from mxref_training.steps import CapturedSteps
from training_setup import CONFIG, change, metrics, run

LR = 2.0**-8
"""A power of two: rounding it to float32 changes nothing."""


def configured(**changes: Any) -> TrainConfig:
    return replace(change(CONFIG, **changes), optim=replace(CONFIG.optim, lr=LR))


def trained(folder: Path, recipe: str = "mxfp4_h16", **changes: Any) -> bytes:
    run(folder, recipe, configured(**changes))
    return metrics(folder)


@pytest.mark.parametrize("recipe", ["fp8", "mxfp4_h16", "tseng"])
def test_metrics_are_those_of_steps_that_are_waited_for(
    recipe: str, tmp_path: Path, whole: Callable[..., Any]
) -> None:
    want = metrics(whole(recipe, configured())[0])
    assert trained(tmp_path / "late", recipe, capture=True) == want
    assert want.count(b"grad_norm") == CONFIG.run.steps


def test_a_run_goes_on_from_a_checkpoint_between_two_evaluations(tmp_path: Path) -> None:
    want = trained(tmp_path / "whole", capture=True)
    config = configured(capture=True)
    run(tmp_path / "parts", "mxfp4_h16", config, stop_after=3)
    run(tmp_path / "parts", "mxfp4_h16", config)
    assert metrics(tmp_path / "parts") == want
    with pytest.raises(CheckpointError, match="capture"):
        run(tmp_path / "parts", "mxfp4_h16", configured())


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("how", usual(["block", "model"], "model"))
def test_a_compiled_run_has_the_metrics_of_an_eager_one(
    how: str, tmp_path: Path, whole: Callable[..., Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    plain, _ = whole("mxfp4_h16", configured(steps=3))
    torch._dynamo.reset()
    monkeypatch.setattr(nn.Module, "compile", partialmethod(nn.Module.compile, backend="aot_eager"))
    assert trained(tmp_path / how, compile=Compile(how), steps=3) == metrics(plain)


def test_a_phase_is_captured_anew_under_its_own_recipe(tmp_path: Path) -> None:
    recipe = recipe_from_table(
        {"all": {"format": "mxfp4"}, "schedule": [{"until": 2, "recipe": "fp8", "name": "warm"}]}
    )
    run(tmp_path / "plain", recipe, configured())
    run(tmp_path / "late", recipe, configured(capture=True))
    assert metrics(tmp_path / "late") == metrics(tmp_path / "plain")
    assert b"warm" in metrics(tmp_path / "late")


def test_the_time_of_every_step_is_logged(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first step compiles, and is reported when the second has been started."""
    now = [0.0]
    right = CapturedSteps.take

    def take(self: Any, batch: Any, step: int) -> Any:
        now[0] += 1.0 if step else 10.0
        return right(self, batch, step)

    def clock() -> float:
        now[0] += 2.0**-20
        return now[0]

    monkeypatch.setattr(CapturedSteps, "take", take)
    monkeypatch.setattr(log, "time", SimpleNamespace(perf_counter=clock))
    result = run(tmp_path, "bf16", configured(capture=True))
    assert round(result.seconds, 3) == 10 + CONFIG.run.steps - 1


def test_the_keys_are_checked() -> None:
    with pytest.raises(ConfigError, match="compile"):
        load_config("tiny", ["run.compile=blocks"])
    with pytest.raises(ConfigError, match="capture"):
        load_config("tiny", ["run.capture=1"])
    with pytest.raises(ConfigError, match="set both to 0, or run.capture = false"):
        load_config("tiny", ["run.capture=true", "run.shadow=0.1"])
    assert load_config("tiny", ["run.compile=block", "run.capture=true"]).run.compile == "block"
