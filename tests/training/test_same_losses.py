"""Backends with equal bits give equal training runs: numba's losses are the reference's, bit for bit."""

import pytest

from mxref import get_backend
from mxref.recipe_files import recipe_from_table
from training_setup import CONFIG, CORPUS, metrics, run

RECIPES = {
    "rne": {"dialect": "amd"},
    "h16 beside fp8": {
        "dialect": "amd",
        "all": {"format": "mxfp4", "hadamard": 16},
        "fprop": {"format": "fp8", "hadamard": 0},
    },
    "sr and redrawn signs": {"all": {"rounding": "sr", "hadamard": 32, "signs": "per_step_layer"}},
    "tseng backward": {"dialect": "tseng", "fprop": {"format": "bf16", "hadamard": 0, "signs": "none"}},
    "tiles": {"dialect": "nvidia", "fprop": {"w": {"block": "32x32"}}, "dgrad": {"w": {"block": "32x32"}}},
}


@pytest.mark.clause("gemm.ordered")
@pytest.mark.parametrize("name", RECIPES)
def test_numba_trains_exactly_as_the_reference_does(tmp_path, name):
    recipe = recipe_from_table({"gemm": "ordered", **RECIPES[name]})
    logs = []
    for backend in ("reference", "numba"):
        run(tmp_path / backend, recipe, CONFIG, backend=get_backend(backend), corpus=CORPUS)
        logs.append(metrics(tmp_path / backend))
    assert logs[0] == logs[1]
    assert logs[0].count(b"val_loss") == 3


def test_another_recipe_trains_otherwise(tmp_path):
    logs = []
    for name in ("rne", "tiles"):
        run(tmp_path / name, recipe_from_table({"gemm": "ordered", **RECIPES[name]}), CONFIG)
        logs.append(metrics(tmp_path / name))
    assert logs[0] != logs[1]
