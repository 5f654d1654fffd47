"""Names of layers behind wrappers, and the layers that convert cannot replace."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

torch = pytest.importorskip("torch")

import torch.distributed as dist
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.nn.utils import parametrizations, prune

from mxref import get_backend
from mxref.recipe_files import recipe_from_table
from mxref_torch import MXLinear, check_census, convert, expected_census
from mxref_torch.errors import LayerError
from mxref_torch.names import named_linears, named_modules, named_parameters
from mxref_training.finite import first_nonfinite_gradient, first_nonfinite_output

RECIPE = recipe_from_table({"gemm": "ordered", "all": {"rounding": "sr"}, "keep_bf16": ["lm_head", "*.1"]})
NAMES = ["blocks.0", "blocks.1", "module.inner", "lm_head"]


class Model(nn.Module):
    """One of its own attributes is named as a wrapper's is."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
        self.module = nn.ModuleDict({"inner": nn.Linear(32, 32)})
        self.lm_head = nn.Linear(32, 32, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.lm_head(self.module["inner"](self.blocks(x)))


@pytest.fixture
def group() -> Iterator[None]:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def per_part(model: nn.Module) -> nn.Module:
    model.blocks = torch.compile(checkpoint_wrapper(model.blocks), backend="eager")
    return model


WRAPPERS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "none": lambda model: model,
    "compiled": lambda model: torch.compile(model, backend="eager"),
    "checkpointed": checkpoint_wrapper,
    "parts compiled and checkpointed": per_part,
    "data parallel": nn.parallel.DistributedDataParallel,
    "data parallel, compiled": lambda model: torch.compile(
        nn.parallel.DistributedDataParallel(model), backend="eager"
    ),
    "averaged": torch.optim.swa_utils.AveragedModel,
}


def step(model: nn.Module, context: Any) -> dict[str, torch.Tensor]:
    context.reset_census()
    x = torch.randn(32, 32, generator=torch.Generator().manual_seed(1), requires_grad=True)
    model(x).square().sum().backward()
    return {name: p.grad for name, p in named_parameters(model)}


@pytest.mark.usefixtures("group")
@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own tracer
@pytest.mark.parametrize("name", WRAPPERS)
def test_a_wrapped_model_is_treated_as_the_model_inside(name: str) -> None:
    torch._dynamo.reset()
    plain = Model()
    want = step(plain, convert(plain, RECIPE, backend=get_backend("reference"), seed=1).context)
    models = []
    if name != "averaged":  # which copies the model: a model is copied before it is converted
        model = Model()
        context = convert(model, RECIPE, backend=get_backend("reference"), seed=1).context
        models.append((WRAPPERS[name](model), context))
    behind = WRAPPERS[name](Model())
    models.append((behind, convert(behind, RECIPE, backend=get_backend("reference"), seed=1).context))
    for wrapped, used in models:
        assert list(named_linears(wrapped)) == NAMES
        got = step(wrapped, used)
        assert got.keys() == want.keys()
        assert all(torch.equal(got[key], want[key]) for key in want)
        if "checkpoint" not in name:  # where Fprop runs twice
            check_census(used, wrapped, RECIPE)
        assert expected_census(wrapped, RECIPE) == expected_census(Model(), RECIPE)
        for layer, linear in named_linears(wrapped).items():
            kept = layer in ("lm_head", "blocks.1")
            assert isinstance(linear, MXLinear)
            assert (linear.recipe is RECIPE) != kept
            assert linear.index == NAMES.index(layer)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")
def test_names_in_messages_are_those_inside() -> None:
    model = torch.compile(Model(), backend="eager")
    wrong = recipe_from_table({"keep_bf16": ["_orig_mod.lm_head"]})
    with pytest.raises(
        LayerError, match="'_orig_mod.lm_head' matches no linear layer; the nearest names are 'lm_head', "
    ):
        convert(model, wrong, backend=get_backend("reference"), seed=0)
    with pytest.raises(LayerError, match="^blocks.0.weight is torch.bfloat16"):
        convert(
            torch.compile(Model().bfloat16(), backend="eager"),
            RECIPE,
            backend=get_backend("reference"),
            seed=0,
        )
    context = convert(model, RECIPE, backend=get_backend("reference"), seed=0).context
    with torch.no_grad():
        model.lm_head.weight[0, 0] = torch.inf
    x = torch.ones(32, 32)
    assert first_nonfinite_output(model, context, x) == "the weight lm_head.weight"
    model.lm_head.weight.grad = model.lm_head.weight.detach().clone()
    assert first_nonfinite_gradient(model) == "lm_head.weight"


def test_every_module_is_named_once_and_in_torchs_order() -> None:
    model = Model()
    model.twin = model.blocks
    model.nothing = None
    assert list(named_modules(model)) == list(model.named_modules())
    assert [(n, id(p)) for n, p in named_parameters(model)] == [
        (n, id(p)) for n, p in model.named_parameters()
    ]


class Scaled(nn.Linear):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return 2 * super().forward(x)


class Sharded(nn.Parameter):
    """Has of a DTensor what tells it."""

    def to_local(self) -> torch.Tensor:
        return self.data


def sharded(linear: nn.Linear) -> nn.Linear:
    linear.weight = Sharded(linear.weight.detach())
    return linear


def overridden(linear: nn.Linear) -> nn.Linear:
    linear.forward = lambda x: x
    return linear


@pytest.mark.parametrize(
    ("part", "message"),
    [
        (lambda: nn.MultiheadAttention(32, 2), "^part is an nn.MultiheadAttention.* never run; build"),
        (lambda: nn.TransformerEncoderLayer(32, 2, 64), "^part.self_attn is an nn.MultiheadAttention"),
        (lambda: Scaled(32, 32), "^part is a Scaled with a forward of its own"),
        (lambda: overridden(nn.Linear(32, 32)), "^part is a Linear with a forward of its own"),
        (lambda: parametrizations.orthogonal(nn.Linear(32, 32)), "^part: its weight is computed"),
        (lambda: prune.l1_unstructured(nn.Linear(32, 32), "weight", 0.5), "^part: its weight is computed"),
        (lambda: sharded(nn.Linear(32, 32)), "^part: its weight is sharded already.*convert first"),
        (
            lambda: torch.compile(nn.Linear(32, 32), backend="eager"),
            "^part is a linear layer that was compiled by itself",
        ),
        (lambda: nn.LazyLinear(32), "^part is a lazy layer"),
    ],
)
@pytest.mark.filterwarnings("ignore:Lazy modules are a new feature:UserWarning")
def test_a_layer_that_would_not_run_as_converted_is_refused(
    part: Callable[[], nn.Module], message: str
) -> None:
    model = nn.ModuleDict({"first": nn.Linear(32, 32), "part": part()})
    before = list(model.modules())
    with pytest.raises(LayerError, match=message):
        convert(model, RECIPE_ALL, backend=get_backend("reference"), seed=0)
    assert list(model.modules()) == before


RECIPE_ALL = recipe_from_table({"keep_bf16": []})
