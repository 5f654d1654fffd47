"""A layer that changes its recipe between optimizer steps computes like one that had the new recipe all along."""

import copy

import pytest
import torch
from torch import nn

from mxref import get_backend
from mxref.recipe_files import recipe_from_table
from mxref_torch import StepError, advance, check_census, convert

RECIPES = {
    "bf16": {"all": {"format": "bf16"}},
    "fp8": {"all": {"format": "fp8"}},
    "mxfp4": {"dialect": "amd", "all": {"hadamard": 16, "rounding": "sr"}},
    "mixed": {"fprop": {"format": "fp8"}, "dgrad": {"format": "bf16"}},
}


def recipe(name):
    return recipe_from_table({"gemm": "ordered", "keep_bf16": [], **RECIPES[name]})


def fresh(name):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32, bias=False))
    return model, convert(model, recipe(name), backend=get_backend("reference"), seed=7).context


def step(model, context, number):
    """Run forward and backward of a step, close it, and return everything that it computed."""
    torch.manual_seed(100 + number)
    context.step = number
    x = torch.randn(32, 32, requires_grad=True)
    model.zero_grad()
    y = model(x)
    y.square().sum().backward()
    advance(model)
    return [y.detach(), x.grad, *(p.grad.clone() for p in model.parameters())]


def use(model, name):
    for layer in model:
        layer.use(recipe(name))


@pytest.mark.parametrize("before", RECIPES)
@pytest.mark.parametrize("after", RECIPES)
def test_a_layer_computes_by_the_recipe_that_it_was_given_last(before, after):
    model, context = fresh(before)
    step(model, context, 0)
    use(model, after)
    other, other_context = fresh(after)
    if before == after:
        step(other, other_context, 0)
    for number in (1, 2):
        context.reset_census()
        for mine, theirs in zip(
            step(model, context, number), step(other, other_context, number), strict=True
        ):
            assert torch.equal(mine, theirs)
        check_census(context, model, recipe(after))
    assert model.state_dict().keys() == other.state_dict().keys()
    for mine, theirs in zip(model.state_dict().values(), other.state_dict().values(), strict=True):
        assert torch.equal(mine, theirs)


def test_the_history_of_fp8_goes_on_under_an_equal_recipe_and_starts_anew_under_another():
    model, context = fresh("fp8")
    step(model, context, 0)
    held = copy.deepcopy(model[0].fp8.scale)
    use(model, "fp8")
    assert held.all()
    assert torch.equal(model[0].fp8.scale, held)
    use(model, "mixed")
    assert not model[0].fp8.scale.any()


def test_a_backward_pass_has_the_recipe_of_its_forward_pass():
    (model, _), (other, _) = fresh("mxfp4"), fresh("mxfp4")
    for layers, change in ((model, True), (other, False)):
        torch.manual_seed(5)
        loss = layers(torch.randn(32, 32)).square().sum()
        if change:
            use(layers, "fp8")
        loss.backward()
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine.grad, theirs.grad)


def test_a_recipe_does_not_change_after_a_backward_pass():
    model, _ = fresh("mxfp4")
    model(torch.randn(32, 32)).sum().backward()
    with pytest.raises(StepError, match=r"inside the optimizer step 0.*advance"):
        use(model, "fp8")
    advance(model)
    use(model, "fp8")


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own tracer
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
def test_a_compiled_layer_computes_by_the_recipe_that_it_was_given_last():
    model, context = fresh("bf16")
    compiled = torch.compile(model, backend="aot_eager")
    step(compiled, context, 0)
    use(model, "mixed")
    eager, eager_context = fresh("mixed")
    for mine, theirs in zip(step(compiled, context, 1), step(eager, eager_context, 1), strict=True):
        assert torch.equal(mine, theirs)
