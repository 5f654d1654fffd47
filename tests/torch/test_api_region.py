"""Another recipe for a region: its forward passes, and the backward passes of these wherever they run."""

from __future__ import annotations

from typing import Any

import pytest

torch = pytest.importorskip("torch")

from api_setup import FP8, PLAIN, REFERENCE, SR, Model, assert_same, batch, grads, loss_of
from torch.utils.checkpoint import checkpoint

import mxref_torch
from mxref.recipe_files import recipe_from_table
from mxref_torch import Handle, convert
from mxref_torch.errors import LayerError, StepError
from mxref_torch.optimizer_step import fp8_history

RECIPES = {"SR": SR, "fp8": FP8, "mxfp4": PLAIN}


def gradients(recipe: Any) -> dict[str, torch.Tensor]:
    model = Model()
    convert(model, recipe, backend=REFERENCE, seed=3)
    loss_of(model, batch(0)).backward()
    return grads(model)


@pytest.mark.parametrize("outer", RECIPES)
@pytest.mark.parametrize("inner", RECIPES)
def test_forward_and_its_backward_have_the_regions_recipe(inner: str, outer: str) -> None:
    model = Model()
    handle = convert(model, RECIPES[outer], backend=REFERENCE, seed=3)
    with mxref_torch.recipe(RECIPES[inner], handle):
        loss = loss_of(model, batch(0))
        other = loss_of(model, batch(0))
    loss.backward()  # outside
    want = gradients(RECIPES[inner])
    assert_same(grads(model), want)
    model.zero_grad()
    with mxref_torch.recipe(RECIPES[inner], model):
        other.backward()
    assert_same(grads(model), want)
    assert set(handle.recipes.values()) == {RECIPES[outer], handle.recipes["lm_head"]}


def test_a_backward_within_a_region_has_the_recipe_of_its_forward() -> None:
    model = Model()
    handle = convert(model, PLAIN, backend=REFERENCE, seed=3)
    loss = loss_of(model, batch(0))
    with mxref_torch.recipe(FP8, handle):
        loss.backward()
    assert_same(grads(model), gradients(PLAIN))


def test_the_regions_own_globs_say_what_stays_in_bf16() -> None:
    model = Model()
    handle = convert(model, PLAIN, backend=REFERENCE)
    before = handle.recipes
    kept = recipe_from_table({"gemm": "ordered", "keep_bf16": ["blocks.0.*", "lm_head"]})
    with mxref_torch.recipe(kept, handle):
        low = {name for name, layer in handle.recipes.items() if layer is kept}
        assert low == {"blocks.1.up", "blocks.1.down"}
        with mxref_torch.recipe("fp8", handle):
            assert [str(r.fprop.x.format) for r in handle.recipes.values()] == ["fp8"] * 4 + ["bf16"]
        assert {name for name, layer in handle.recipes.items() if layer is kept} == low
    assert handle.recipes == before


def test_the_recipe_comes_back_after_an_error() -> None:
    model = Model()
    handle = convert(model, PLAIN, backend=REFERENCE)
    before = handle.recipes
    with pytest.raises(ZeroDivisionError), mxref_torch.recipe(FP8, handle):
        raise ZeroDivisionError
    assert handle.recipes == before
    wide = recipe_from_table({"gemm": "ordered", "all": {"hadamard": 64}})
    with (
        pytest.raises(LayerError, match="in_features = 32 is not a multiple of 64"),
        mxref_torch.recipe(wide, handle),
    ):
        pass
    with (
        pytest.raises(LayerError, match="no layer of the model is converted"),
        mxref_torch.recipe(FP8, Model()),
    ):
        pass
    assert handle.recipes == before


def test_the_history_of_fp8_lives_between_regions() -> None:
    plain, within = Model(), Model()
    convert(plain, FP8, backend=REFERENCE)
    handle = convert(within, PLAIN, backend=REFERENCE)
    for number in range(3):
        plain.zero_grad()
        within.zero_grad()
        loss_of(plain, batch(number)).backward()
        with mxref_torch.recipe(FP8, handle):
            loss_of(within, batch(number)).backward()
        Handle(plain).advance()
        handle.advance()
        assert_same(grads(within), grads(plain))
    assert_same(fp8_history(within), fp8_history(plain))
    assert len(fp8_history(within)) == 8


def test_recomputation_outside_of_the_region_is_refused() -> None:
    model = Model()
    handle = convert(model, PLAIN, backend=REFERENCE, seed=3)

    def loss() -> torch.Tensor:
        hidden = model.embed(batch(0))
        return model.lm_head(checkpoint(model.blocks, hidden, use_reentrant=False)).square().mean()

    with mxref_torch.recipe(FP8, handle):
        outside = loss()
    with pytest.raises(LayerError, match="computes a forward pass again, and the recipe has changed since"):
        outside.backward()
    model.zero_grad()
    with mxref_torch.recipe(FP8, handle):
        loss().backward()
    got = grads(model)
    plain = Model()
    convert(plain, FP8, backend=REFERENCE, seed=3)
    plain.lm_head(plain.blocks(plain.embed(batch(0)))).square().mean().backward()
    assert_same(got, grads(plain))


def test_a_schedule_begins_no_phase_within_a_region() -> None:
    model = Model()
    plan = recipe_from_table({"gemm": "ordered", "schedule": [{"until": 1, "recipe": "bf16"}]})
    handle = convert(model, plan, backend=REFERENCE, steps=4)
    before = handle.recipes
    with (
        mxref_torch.recipe(FP8, handle),
        pytest.raises(StepError, match="leave the region before the phase changes"),
    ):
        handle.step = 1
    assert handle.recipes == before
    handle.step = 1
    assert handle.recipes != before
    with (
        pytest.raises(LayerError, match="a recipe with a schedule has 2 phases"),
        mxref_torch.recipe(plan, handle),
    ):
        pass


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own tracer
def test_compiled_code_has_the_regions_recipe_too() -> None:
    torch._dynamo.reset()
    model = Model()
    handle = convert(model, PLAIN, backend=REFERENCE, seed=3)
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    for name in ("SR", "fp8", "SR"):
        model.zero_grad()
        with mxref_torch.recipe(RECIPES[name], handle):
            loss = loss_of(run, batch(0))
        loss.backward()
        assert_same(grads(model), gradients(RECIPES[name]))
        handle.restart()


def test_the_history_of_a_region_is_saved_and_a_new_handle_takes_it() -> None:
    def begun() -> tuple[Any, Any]:
        model = Model()
        return model, convert(model, PLAIN, backend=REFERENCE, seed=3)

    def trained(model: Any, handle: Any, step: int) -> None:
        with mxref_torch.recipe(FP8, handle), mxref_torch.recipe(PLAIN, handle):
            pass  # what is left within a region goes back to the recipe of that region
        with mxref_torch.recipe(FP8, handle):
            loss_of(model, batch(step)).backward()
        handle.advance()

    model, handle = begun()
    before = handle.state_dict()
    assert set(before) == {"step", "seed", "fp8"}
    trained(model, handle, 0)
    state = handle.state_dict()
    assert (len(state["regions"]), state["fp8"]) == (8, {})
    resumed, again = begun()
    again.load_state_dict(state)
    assert_same(fp8_history(resumed), fp8_history(model))
    for each in (model, resumed):
        each.zero_grad()
    trained(model, handle, 1)
    trained(resumed, again, 1)
    assert_same(grads(resumed), grads(model))
    # Back to a state from before the region: its history is forgotten.
    handle.load_state_dict(before)
    model.zero_grad()
    trained(model, handle, 1)
    fresh, first = begun()
    trained(fresh, first, 1)
    assert_same(grads(model), grads(fresh))
    with pytest.raises(LayerError, match="names 'nowhere.fp8.scale', so it is of another model or recipe"):
        again.load_state_dict(state | {"regions": {"nowhere.fp8.scale": torch.ones(3)}})
    # By a recipe of its own, a layer's history stays where it was.
    own = convert(Model(), FP8, backend=REFERENCE, seed=3)
    with pytest.raises(LayerError, match="has none for"):
        own.load_state_dict(state)
