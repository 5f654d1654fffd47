"""Backends with equal bits give equal training runs: numba's losses are the reference's, bit for bit."""

from dataclasses import replace

import pytest

from mxref import get_backend
from mxref.recipe_files import recipe_from_table
from training_setup import CONFIG, change, metrics, run
from usual import usual

RECIPES = {
    "rne": {"dialect": "amd"},
    "h16 beside fp8": {
        "dialect": "amd",
        "all": {"format": "mxfp4", "hadamard": 16},
        "fprop": {"format": "fp8", "hadamard": 0},
    },
    "sr and redrawn signs": {"all": {"rounding": "sr", "hadamard": 32, "signs": "per_step_layer"}},
    "tseng backward": {"dialect": "tseng", "fprop": {"format": "bf16", "hadamard": 0, "signs": "none"}},
    "a threshold, gains and Fprop's operands": {
        "all": {"scale_rule": ">=1.3"},
        "fprop": {"gain": 1.02},
        "dgrad": {"source": "fprop", "rounding": "sr"},
        "wgrad": {"source": "fprop", "out": "bf16"},
    },
    "tiles": {"dialect": "nvidia", "fprop": {"w": {"block": "32x32"}}, "dgrad": {"w": {"block": "32x32"}}},
}


def recipe_of(name):
    return recipe_from_table({"gemm": "ordered", **RECIPES[name]})


@pytest.mark.clause("gemm.ordered")
@pytest.mark.parametrize(
    "name", usual(RECIPES, "sr and redrawn signs", "a threshold, gains and Fprop's operands")
)
def test_numba_trains_exactly_as_the_reference_does(tmp_path, whole, name):
    run(tmp_path, recipe_of(name), CONFIG, backend=get_backend("numba"))
    expected = metrics(whole(recipe_of(name), CONFIG)[0])  # of the reference
    assert metrics(tmp_path) == expected
    assert expected.count(b"val_loss") == 3


@pytest.mark.clause("linear.source", "linear.tensor_scale", "recipe.layers")
@pytest.mark.parametrize("name", usual(["fprop_tail", "mx64", "qat", "nvfp4"], "fprop_tail", "nvfp4"))
def test_ten_steps_of_a_shipped_recipe_are_the_same(tmp_path, name):
    # The last 15 % of two blocks are one of them.
    config = replace(change(steps=10, eval_every=5), model=replace(CONFIG.model, layers=2))
    for backend in ("reference", "numba"):
        run(tmp_path / backend, name, config, backend=get_backend(backend))
    found = metrics(tmp_path / "numba")
    assert found == metrics(tmp_path / "reference")
    assert found.count(b'"loss"') == 10


def test_another_recipe_trains_otherwise(whole):
    assert metrics(whole(recipe_of("rne"), CONFIG)[0]) != metrics(whole(recipe_of("tiles"), CONFIG)[0])
