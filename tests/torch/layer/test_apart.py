"""The layer where nothing coincides: each planted fault, which takes one thing for another, must show."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import numpy as np

import apart
from layer_setup import BACKENDS
from mxref.recipe_files import recipe_from_table
from mxref.roles import GemmRole
from mxref_torch import LayerError, StepContext, check_census, operators
from mxref_torch.checks import census
from mxref_torch.layer import state

Plant = Callable[[pytest.MonkeyPatch], None]


def test_no_two_of_the_twelve_operands_are_treated_alike() -> None:
    _, handle = apart.converted()
    specs = [
        spec for recipe in handle.recipes.values() for role in GemmRole for spec in recipe.operands(role)
    ]
    assert len(specs) == len(set(specs)) == 12
    for recipe in handle.recipes.values():
        six = [spec for role in GemmRole for spec in recipe.operands(role)]
        assert len({(spec.format, spec.scale_rule, spec.rounding) for spec in six}) == 6
        assert len({recipe.operands(role)[0].hadamard for role in GemmRole}) == 3
        assert len({recipe.formats(role) for role in GemmRole}) == 3
        for key in ("prescale", "block"):
            assert len({getattr(spec, key) for spec in six}) == 2


@pytest.mark.clause("linear.formats", "linear.rotation")
@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize(("dtype", "held"), [(torch.float32, False), (torch.bfloat16, True)], ids=str)
def test_each_gemm_is_composed_of_its_own_operands(dtype: Any, held: bool, backend: str) -> None:
    model, handle = apart.converted(backend)
    got, want = apart.trained(model, handle, dtype, held), apart.composed(handle.recipes, dtype)
    assert got.keys() == want.keys()
    for what, array in want.items():
        np.testing.assert_array_equal(got[what], array, err_msg=what)


def exchanged(field: str) -> Plant:
    """Give the operands of each GEMM each other's treatment, or each other's random stream."""

    def plant(patch: pytest.MonkeyPatch) -> None:
        right = state.layer_gemms

        def planted(*given: Any) -> Any:
            gemms = right(*given)
            for gemm in gemms.values():
                getattr(gemm, field).reverse()
            return gemms

        patch.setattr(state, "layer_gemms", planted)

    return plant


def one_place(patch: pytest.MonkeyPatch) -> None:
    """Draw the bits of the step's first micro-batch in every one."""
    right = operators.batch_place
    patch.setattr(operators, "batch_place", lambda step, origin=0, total=None: right(step, 0, total))


def one_layer(patch: pytest.MonkeyPatch) -> None:
    """Draw the bits of the first layer in every one."""
    right = StepContext.stream
    patch.setattr(StepContext, "stream", lambda self, index, *rest: right(self, 0, *rest))


def one_step(patch: pytest.MonkeyPatch) -> None:
    """Draw the bits of one step in every one."""
    right = operators.batch_place
    patch.setattr(operators, "batch_place", lambda step, *rest: right(apart.STEPS[0], *rest))


FAULTS = {
    "treatments exchanged": exchanged("texts"),
    "streams exchanged": exchanged("streams"),
    "one place": one_place,
    "one layer": one_layer,
    "one step": one_step,
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_planted_fault_is_seen(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    FAULTS[name](monkeypatch)
    with pytest.raises(AssertionError, match=r"[56] \d+ Y|[56] \d+ dX|weight"):
        test_each_gemm_is_composed_of_its_own_operands(torch.float32, held=False, backend="reference")


def two_recipes_exchanged() -> None:
    """Check the census of layers that have each other's recipe: as many GEMMs of each kind run as should."""
    model, handle = apart.converted()
    first, second = handle.recipes.values()
    model.first.switch(second)
    model.second.switch(first)
    handle.context.reset_census()
    (_, x, dy), *_ = apart.batches(0, torch.float32)
    model(x).backward(dy)
    with pytest.raises(LayerError, match=r"not the recipe's; ran other GEMMs: first, second: "):
        check_census(handle, model, recipe_from_table(apart.TABLE))


def test_the_census_is_held_to_the_recipe_layer_by_layer() -> None:
    model, handle = apart.converted()
    (_, x, dy), *_ = apart.batches(0, torch.float32)
    model(x).backward(dy)
    check_census(handle, model, recipe_from_table(apart.TABLE))
    two_recipes_exchanged()


def test_a_census_of_the_model_alone_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(census, "_differing_layers", lambda model, expected: "")
    with pytest.raises(pytest.fail.Exception, match="DID NOT RAISE"):
        two_recipes_exchanged()
