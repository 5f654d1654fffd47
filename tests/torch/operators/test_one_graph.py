"""A compiled model has one graph for all its blocks and all steps: what differs between them are tensors."""

from __future__ import annotations

from typing import Any

import pytest

from usual import usual

torch = pytest.importorskip("torch")

from torch._dynamo.utils import counters

from compiled_gradients import Model, recipe_of
from mxref import get_backend
from mxref_torch import advance, check_census, convert

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


RECIPES = ("fp8", "mxfp4_h16", "tseng", "nvfp4_style", "nvfp4 with mxfp4")
BLOCKS, TOKENS = 4, 64


def train(model: Any, run: Any, context: Any, recipe: Any, steps: range, micro_batches: int = 2) -> None:
    """Train so many steps, whose micro-batches lie at other tokens each, and count the GEMMs of each step."""
    for context.step in steps:
        context.reset_census()
        context.global_tokens = micro_batches * TOKENS
        for number in range(micro_batches):
            context.token_origin = number * TOKENS
            generator = torch.Generator().manual_seed(context.step * micro_batches + number)
            run(torch.randint(64, (2, TOKENS // 2), generator=generator)).square().mean().backward()
        check_census(context, run, recipe, micro_batches)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter -= 0.01 * parameter.grad
                parameter.grad = None
        advance(model)


@pytest.mark.parametrize("name", usual(RECIPES, "mxfp4_h16", "nvfp4 with mxfp4"))
def test_the_first_block_is_compiled_and_no_other(name: str) -> None:
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    recipe = recipe_of(name)
    model: Any = Model(64, BLOCKS)
    context = convert(model, recipe, backend=get_backend("numba"), seed=7).context
    for number, block in enumerate(model.blocks):
        model.blocks[number] = torch.compile(block, backend="aot_eager", fullgraph=True)
    train(model, model, context, recipe, range(2))
    assert counters["stats"]["unique_graphs"] == 1
    with torch._dynamo.config.patch(error_on_recompile=True):
        train(model, model, context, recipe, range(2, 4))
    assert counters["stats"]["unique_graphs"] == 1
    assert counters["aot_autograd"]["total"] == 1


@pytest.mark.parametrize("name", usual(["mxfp4_h16", "tseng"], "tseng"))
def test_a_whole_model_is_compiled_once(name: str) -> None:
    torch._dynamo.reset()
    counters.clear()
    torch.manual_seed(0)
    recipe = recipe_of(name)
    model: Any = Model(64)
    context = convert(model, recipe, backend=get_backend("numba"), seed=7).context
    run = torch.compile(model, backend="aot_eager", fullgraph=True)
    train(model, run, context, recipe, range(3))
    assert counters["stats"]["unique_graphs"] == 1
    # Another seed and other layers are another model under the same graph.
    other: Any = Model(64)
    context = convert(other, recipe, backend=get_backend("numba"), seed=8).context
    with torch._dynamo.config.patch(error_on_recompile=True):
        train(other, torch.compile(other, backend="aot_eager", fullgraph=True), context, recipe, range(1))
