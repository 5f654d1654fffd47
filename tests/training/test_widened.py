"""A step whose operands leave the range of the fast GEMM is repeated with the wide one, counted and reported."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mxref.recipe_files import recipe_from_table
from mxref_training.device import choose_device
from mxref_training.errors import ConfigError
from mxref_training.log import TrainResult
from narrow_backend import Narrow
from training_setup import change, lines, run, weights

MIXED = recipe_from_table(
    {"dialect": "ocp", "all": {}, "fprop": {"w": {"format": "fp8"}, "x": {"format": "fp8"}}}
)


GEMMS_OF_A_STEP = 2 * 7 * 3  # micro-batches, linear layers, roles
CONFIG = change(steps=2, eval_every=2)
RECIPES = {"mxfp4": "mxfp4_h16", "fp8 forward": MIXED}
Plain = Callable[[str], tuple[Path, TrainResult]]


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Plain:
    """Give the run of a recipe in which nothing leaves the range."""

    @cache
    def trained(recipe: str) -> tuple[Path, TrainResult]:
        folder = tmp_path_factory.mktemp("plain")
        return folder, run(folder, RECIPES[recipe], CONFIG, backend=Narrow(set()))

    return trained


@pytest.mark.parametrize(
    ("recipe", "call"),
    [("mxfp4", 1), ("fp8 forward", 4), ("mxfp4", 27)],
    ids=["first", "early", "second micro-batch"],
)
def test_a_step_out_of_range_is_done_over(tmp_path: Path, plain: Plain, recipe: str, call: int) -> None:
    folder, unwidened = plain(recipe)
    again = run(tmp_path, RECIPES[recipe], CONFIG, backend=Narrow({call}))
    assert (unwidened.widened_steps, again.widened_steps) == (0, 1)
    assert weights(folder) == weights(tmp_path)
    flagged = [line for line in lines(tmp_path) if line.pop("widened", False)]
    assert flagged[0]["step"] == 1
    assert [*flagged, *lines(folder)[1:]] == lines(folder)


def test_an_evaluation_out_of_range_is_done_over(tmp_path: Path, plain: Plain) -> None:
    _, unwidened = plain("mxfp4")
    again = run(tmp_path, RECIPES["mxfp4"], CONFIG, backend=Narrow({2 * GEMMS_OF_A_STEP + 3}))
    assert unwidened.losses == again.losses
    assert again.widened_steps == 0
    last = lines(tmp_path)[-1]
    assert last["widened"] is True
    assert "val_loss" in last


@pytest.mark.parametrize(
    ("wanted", "devices", "words"),
    [
        ("gpu", {"cpu"}, "run.device = 'gpu' is no device"),
        ("cuda", {"cpu"}, "computes on cpu"),
        ("cuda:99", {"cuda"}, "PyTorch sees"),
        ("cpu", {"cuda"}, "computes on cuda"),
    ],
)
def test_a_device_that_does_not_fit_is_refused(wanted: str, devices: set[str], words: str) -> None:
    backend: Any = SimpleNamespace(name="b", capabilities=SimpleNamespace(devices=devices))
    with pytest.raises(ConfigError, match=words):
        choose_device(wanted, backend)


def test_the_device_follows_the_backend() -> None:
    backend: Any = SimpleNamespace(name="b", capabilities=SimpleNamespace(devices={"cpu"}))
    assert choose_device("auto", backend) == choose_device("cpu", backend) == torch.device("cpu")
