"""The census of a model whose blocks are compiled, checkpointed, or wrapped and so renamed."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import checkpoint

from compiled_gradients import Model, recipe_of
from mxref import get_backend
from mxref_torch import check_census, convert
from mxref_torch.errors import LayerError

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning"),
    pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning"),
]


class Checkpointed(torch.nn.Module):
    def __init__(self, block: torch.nn.Module, reentrant: bool) -> None:
        super().__init__()
        self._checkpoint_wrapped_module, self.reentrant = block, reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = checkpoint(self._checkpoint_wrapped_module, x, use_reentrant=self.reentrant)
        return y


def compiled(block: Any) -> Any:
    return torch.compile(block, backend="aot_eager")


WRAPS = {
    "checkpoint": lambda block: Checkpointed(block, reentrant=False),
    "reentrant": lambda block: Checkpointed(block, reentrant=True),
    "checkpoint_wrapper": checkpoint_wrapper,
    "compiled": compiled,
    "compiled checkpoint": lambda block: compiled(checkpoint_wrapper(block)),
    "checkpointed compiled": lambda block: checkpoint_wrapper(compiled(block)),
}


@pytest.mark.parametrize("wrap", WRAPS)
def test_the_gemms_of_a_step_are_counted_once(wrap: str) -> None:
    torch._dynamo.reset()
    recipe = recipe_of("mxfp4")
    model: Any = Model(64)
    context = convert(model, recipe, backend=get_backend("numba"), seed=1).context
    for number, block in enumerate(model.blocks):
        model.blocks[number] = WRAPS[wrap](block)
    for _ in range(2):
        context.reset_census()
        for number in range(2):
            model(torch.full((1, 32), number)).square().mean().backward()
        check_census(context, model, recipe, 2)
    with pytest.raises(LayerError, match="24 ran, 36 expected|28 ran, 42 expected|14 ran, 21 expected"):
        check_census(context, model, recipe, 3)


def test_a_copy_counts_for_itself() -> None:
    recipe = recipe_of("mxfp4")
    model: Any = Model(64)
    context = convert(model, recipe, backend=get_backend("numba"), seed=1).context
    other = copy.deepcopy(model)
    own = other.blocks[0].up.context
    other(torch.zeros(1, 32, dtype=torch.int64)).square().mean().backward()
    check_census(own, other, recipe)
    assert not context.census
    model(torch.zeros(1, 32, dtype=torch.int64)).square().mean().backward()
    check_census(context, model, recipe)
    check_census(own, other, recipe)
