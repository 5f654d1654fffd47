"""A step whose operands leave the range of the fast GEMM is repeated with the wide one, counted and reported."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from mxref.recipe_files import recipe_from_table
from mxref_training.errors import ConfigError
from mxref_training.run.device import choose_device
from narrow_backend import Narrow
from training_setup import change, lines, run, weights

MIXED = recipe_from_table(
    {"dialect": "ocp", "all": {}, "fprop": {"w": {"format": "fp8"}, "x": {"format": "fp8"}}}
)


GEMMS_OF_A_STEP = 2 * 7 * 3  # micro-batches, linear layers, roles


@pytest.mark.parametrize("recipe", ["mxfp4_h16", MIXED], ids=["mxfp4", "fp8 forward"])
@pytest.mark.parametrize("call", [1, 4, 27], ids=["first", "early", "second micro-batch"])
def test_a_step_out_of_range_is_done_over(tmp_path: Path, recipe: Any, call: int) -> None:
    config = change(steps=2, eval_every=2)
    plain = run(tmp_path / "plain", recipe, config, backend=Narrow(set()))
    again = run(tmp_path / "again", recipe, config, backend=Narrow({call}))
    assert (plain.widened_steps, again.widened_steps) == (0, 1)
    assert weights(tmp_path / "plain") == weights(tmp_path / "again")
    flagged = [line for line in lines(tmp_path / "again") if line.pop("widened", False)]
    assert flagged[0]["step"] == 1
    assert [*flagged, *lines(tmp_path / "plain")[1:]] == lines(tmp_path / "plain")


def test_an_evaluation_out_of_range_is_done_over(tmp_path: Path) -> None:
    config = change(steps=2, eval_every=2)
    plain = run(tmp_path / "plain", "mxfp4_h16", config, backend=Narrow(set()))
    again = run(tmp_path / "again", "mxfp4_h16", config, backend=Narrow({2 * GEMMS_OF_A_STEP + 3}))
    assert plain.losses == again.losses
    assert again.widened_steps == 0
    last = lines(tmp_path / "again")[-1]
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
