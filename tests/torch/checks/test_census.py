"""The census accepts a faithful model, however its blocks are wrapped, and names a layer of another precision."""

from __future__ import annotations

from typing import Any

import pytest

from usual import usual

torch = pytest.importorskip("torch")

from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

from compiled_gradients import Model
from compiled_gradients import recipe_of as shipped
from layer_setup import IN, OUT, recipe_of, tensors
from mxref import GemmRole, get_backend
from mxref.formats import BF16, FP8
from mxref_torch import check_census, convert, expected_census
from mxref_torch.errors import LayerError
from mxref_torch.layer.operands import Bf16Operand


def chain():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(IN, 64), nn.ReLU(), nn.Linear(64, 64), nn.ReLU(), nn.Linear(64, OUT))


def run_chain(model, micro_batches=2, needs_dx=True):
    x, dy = tensors()
    for _ in range(micro_batches):
        model(x if needs_dx else x.detach()).backward(dy)


def test_census_of_a_faithful_model():
    model, recipe = chain(), recipe_of({"dgrad": {"format": "fp8"}, "keep_bf16": ["4"]})
    context = convert(model, recipe, backend=get_backend("reference"), seed=0).context
    run_chain(model)
    check_census(context, model, recipe, micro_batches=2)
    assert context.census == expected_census(chain(), recipe, 2)
    assert context.census[GemmRole.DGRAD, FP8, FP8] == 4
    assert context.census[GemmRole.WGRAD, BF16, BF16] == 2
    context.reset_census()
    model[2].weight.requires_grad_(False)
    run_chain(model, 1, needs_dx=False)
    check_census(context, model, recipe, without_dgrad=["0"])
    with pytest.raises(LayerError, match="dgrad in fp8: 1 ran, 2 expected"):
        check_census(context, model, recipe)
    with pytest.raises(LayerError, match="no linear layer is named 'one'"):
        expected_census(model, recipe, without_dgrad=["one"])


def test_census_of_a_layer_that_several_depths_share():
    recipe = recipe_of({"keep_bf16": ["4"]})
    model = chain()
    model.insert(3, model[2])  # layer "2" runs twice
    model.insert(4, nn.ReLU())
    recipe = recipe_of({"keep_bf16": ["6"]})
    context = convert(model, recipe, backend=get_backend("reference"), seed=0).context
    assert model[2] is model[3]
    run_chain(model)
    with pytest.raises(LayerError, match=r"fprop in mxfp4: 6 ran, 4 expected.* named in `calls`"):
        check_census(context, model, recipe, micro_batches=2)
    check_census(context, model, recipe, micro_batches=2, calls={"2": 2})
    with pytest.raises(LayerError, match="calls: no linear layer is named '3'"):
        expected_census(model, recipe, calls={"3": 2})


def test_census_catches_a_layer_that_runs_in_another_precision():
    recipe = recipe_of({"keep_bf16": []})

    def plain(model):
        model[2] = nn.Linear(64, 64)

    def secretly_bf16(model):
        for gemm in model[2].gemms.values():
            gemm.kind = Bf16Operand

    def bypassed(model):
        model[2].forward = lambda x: F.linear(x, model[2].weight, model[2].bias)

    def backward_in_bf16(model):
        model[2].gemms[GemmRole.WGRAD].kind = Bf16Operand

    for fault in (plain, secretly_bf16, bypassed, backward_in_bf16):
        model = chain()
        context = convert(model, recipe, backend=get_backend("reference"), seed=0).context
        fault(model)
        run_chain(model)
        with pytest.raises(LayerError, match=r"wgrad in mxfp4: 4 ran, 6 expected"):
            check_census(context, model, recipe, micro_batches=2)


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


@pytest.mark.parametrize(
    "wrap", usual(WRAPS, "checkpoint", "reentrant", "checkpoint_wrapper", "checkpointed compiled")
)
def test_the_gemms_of_a_step_are_counted_once(wrap: str) -> None:
    torch._dynamo.reset()
    recipe = shipped("mxfp4")
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
