"""Phases of a run and recipes of layers, in a converted model: every step is computed as its phase says."""

import copy

import pytest
import torch
from torch import nn

from mxref import GemmRole, get_backend, load_recipe
from mxref.errors import RecipeError
from mxref.recipe_files import recipe_from_table
from mxref_torch import LayerError, StepError, advance, check_census, convert

PLAN = {
    "gemm": "ordered",
    "dialect": "amd",
    "wgrad": {"dy": {"rounding": "sr"}},
    "keep_bf16": ["4"],
    "layers": [{"match": ["1"], "recipe": {"all": {"format": "fp8"}}}],
    "schedule": [
        {"until": 2, "recipe": "fp8"},
        {"start": 4, "until": 6, "recipe": {"fprop": {"format": "bf16"}}},
        {"start": 6, "name": "tail", "recipe": "bf16"},
    ],
}
STEPS = 8


def built(recipe, steps=STEPS):
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(32, 32, bias=False) for _ in range(5)))
    return model, convert(model, recipe, backend=get_backend("reference"), seed=7, steps=steps)


def step(model, handle, number, close=advance):
    """Run forward and backward of a step, change the weights, and return everything that was computed."""
    torch.manual_seed(100 + number)
    x = torch.randn(32, 32, requires_grad=True)
    handle.step = number
    handle.context.reset_census()
    model.zero_grad()
    y = model(x)
    y.square().mean().backward()
    with torch.no_grad():
        for p in model.parameters():
            p.sub_(p.grad)
    close(model)
    return [y.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]


def same(mine, theirs):
    return all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


def test_every_step_is_that_of_a_model_converted_to_the_recipe_of_its_phase():
    plan = recipe_from_table(PLAN)
    model, handle = built(plan)
    for span in plan.spans(STEPS):
        other = copy.deepcopy(model)
        other_handle = convert(other, span.recipe, backend=get_backend("reference"), seed=7)
        if span.first == 4:  # the only layer that goes on with an equal recipe
            other[1].fp8.scale.copy_(model[1].fp8.scale)
        for number in range(span.first, span.end):
            assert same(step(model, handle, number), step(other, other_handle, number))
            check_census(handle, model, span.recipe)
            assert handle.context.schedule.span == span
    assert all(p.dtype is torch.float32 for p in model.parameters())


def test_the_formats_of_each_layer_and_phase():
    model, handle = built(recipe_from_table(PLAN))
    seen = []
    for number in range(STEPS):
        handle.step = number
        seen.append(" ".join(f"{m.recipe.fprop.x.format}/{m.recipe.wgrad.x.format}" for m in model))
    fp8 = " ".join(["fp8/fp8"] * 5)  # the shipped recipe keeps lm_head alone in BF16
    main = "mxfp4/mxfp4 fp8/fp8 mxfp4/mxfp4 mxfp4/mxfp4 bf16/bf16"
    half = "bf16/mxfp4 fp8/fp8 bf16/mxfp4 bf16/mxfp4 bf16/bf16"
    tail = " ".join(["bf16/bf16"] * 5)
    assert seen == [fp8, fp8, main, main, half, half, tail, tail]


@pytest.mark.parametrize("at", [1, 2, 5, 6])
@pytest.mark.parametrize("closed", ["by hand", "by the handle"])
def test_a_model_goes_on_from_the_state_of_any_step(at, closed):
    """A saved state is that of the next step, and perhaps of the next phase, whoever closed the last one."""
    close = advance if closed == "by hand" else lambda model: handle.advance()
    whole, handle = built(recipe_from_table(PLAN))
    for number in range(at):
        step(whole, handle, number, close)
    state, place = copy.deepcopy(whole.state_dict()), handle.state_dict()
    assert place["step"] == at
    last = [step(whole, handle, number) for number in range(at, STEPS)]

    resumed, other = built(recipe_from_table(PLAN))
    resumed.load_state_dict(state)
    other.load_state_dict(place)
    found = [step(resumed, other, number) for number in range(at, STEPS)]
    assert all(same(*both) for both in zip(found, last, strict=True))
    assert same(whole.state_dict().values(), resumed.state_dict().values())


def test_a_state_that_does_not_fit_leaves_the_step_where_it_is():
    model, handle = built(recipe_from_table(PLAN))
    step(model, handle, 0)
    place = handle.state_dict()
    with pytest.raises(LayerError, match="the saved FP8 history names"):
        handle.load_state_dict({**place, "step": 7})
    assert handle.step == 1
    assert model[0].recipe.kind(GemmRole.FPROP) == "fp8"


def test_fp8_scales_start_anew_where_the_recipe_of_a_layer_changes_and_go_on_where_it_does_not():
    table = {**PLAN, "schedule": [{"until": 2, "recipe": {"all": {"format": "fp8"}, "gemm": "exact"}}]}
    table["layers"] = [{"match": ["1"], "recipe": {"all": {"format": "fp8"}, "gemm": "exact"}}]
    model, handle = built(recipe_from_table(table))
    step(model, handle, 0)
    step(model, handle, 1)
    held = model[1].fp8.scale.clone()
    handle.step = 2
    assert held.all()
    assert torch.equal(model[1].fp8.scale, held)
    assert not hasattr(model[0], "fp8")
    handle.step = 1
    assert not model[0].fp8.scale.any()


def test_a_copy_follows_the_schedule_by_itself():
    model, _ = built(recipe_from_table(PLAN))
    other = copy.deepcopy(model)
    other[0].context.step = 7
    assert other[0].recipe.kind(GemmRole.FPROP) == "bf16"
    assert model[0].recipe.kind(GemmRole.FPROP) == "fp8"


@pytest.mark.parametrize("recipe", [PLAN, {**PLAN, "schedule": [{"until": 2, "recipe": "bf16"}]}])
def test_a_step_that_does_not_move_on_is_refused(recipe):
    model, handle = built(recipe_from_table(recipe))
    step(model, handle, 0)
    with pytest.raises(
        StepError, match="the recipe's schedule uses the number of the step, and step 0 was already trained"
    ):
        step(model, handle, 0)
    model, handle = built(recipe_from_table(recipe))
    model(torch.randn(32, 32)).sum().backward()
    with pytest.raises(StepError, match=r"after mxref_torch.advance"):
        handle.step = 2
    assert handle.step == 0


def test_what_does_not_fit_is_refused_before_the_first_step():
    def refused(error, match, steps=STEPS, **keys):
        with pytest.raises(error, match=match):
            built(recipe_from_table(PLAN | keys), steps)

    refused(RecipeError, r"schedule\[2\] \(tail\) begins after 6 steps, and the run has 6 steps", steps=6)
    shares = [{"until": "10%", "recipe": "fp8"}]
    refused(RecipeError, "10% of the run, whose length is not known", steps=None, schedule=shares)
    wide = [{"until": 2, "recipe": {"all": {"hadamard": 128}}}]
    refused(LayerError, "in_features = 32 is not a multiple of 128", schedule=wide)
    lost = [{"until": 2, "recipe": {"layers": [{"match": ["7"], "recipe": "fp8"}]}}]
    refused(LayerError, r"layers\[0\].match: '7' matches no linear layer; the nearest names", schedule=lost)
    refused(LayerError, "keep_bf16: 'lm' matches no linear layer; the nearest", keep_bf16=["lm"])


def test_the_census_asks_for_a_step():
    model, handle = built(recipe_from_table(PLAN))
    step(model, handle, 0)
    with pytest.raises(LayerError, match="has a schedule: choose the step"):
        check_census(handle, model, recipe_from_table(PLAN))
    check_census(handle, model, load_recipe("fp8"))
    with pytest.raises(LayerError, match="ran other GEMMs: 0, 1, 2, 3, 4"):
        check_census(handle, model, load_recipe("bf16"))
