"""What a layer returns depends on its arguments, its weight as it is now, and the step that was opened."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn

import mxref_torch
from layer_setup import recorder
from mxref.recipe_files import recipe_from_table

RECIPES = {
    "mxfp4": {"gemm": "ordered"},
    "fp8": {"all": {"format": "fp8"}},
    "mixed": {"gemm": "ordered", "dgrad": {"format": "fp8"}},
    "from Fprop": {
        "gemm": "ordered",
        "dgrad": {"source": "fprop"},
        "wgrad": {"source": "fprop", "format": "bf16"},
    },
}
X = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))


def converted(table: dict[str, Any], backend: Any = "reference") -> tuple[nn.Sequential, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 32, bias=False), nn.Tanh(), nn.Linear(32, 64, bias=False))
    recipe = recipe_from_table({"keep_bf16": [], **table})
    return model, mxref_torch.convert(model, recipe, backend=backend)


def answer(model: nn.Module) -> tuple[Tensor, ...]:
    """Return Y without a gradient, Y with one, dX and the dWs."""
    with torch.no_grad():
        evaluated = model(X)
    x = X.clone().requires_grad_()
    y = model(x)
    weights = [p for p in model.parameters() if p.requires_grad]
    return evaluated, y, *torch.autograd.grad(y.square().sum(), [x, *weights])


def assert_as_new(model: nn.Sequential, table: dict[str, Any]) -> None:
    """Compare with a model that was converted with the weights of now, and has not run."""
    new, _ = converted(table)
    with torch.no_grad():
        for own, weight in zip(new.parameters(), model.parameters(), strict=True):
            own.copy_(weight).requires_grad_(weight.requires_grad)
    for got, want in zip(answer(model), answer(new), strict=True):
        assert torch.equal(got, want)


def through_numpy(weight: nn.Parameter) -> None:
    weight.detach().numpy()[...] *= -2


def at_the_same_address(weight: nn.Parameter) -> None:
    """Free the memory, and take it again for other values."""
    memory = weight.detach().numpy()
    weight.data = torch.empty(0)
    memory *= -2
    weight.data = torch.from_numpy(memory)


WRITES: dict[str, Callable[[nn.Parameter], Any]] = {
    "data.mul_": lambda w: w.data.mul_(-2),
    "data.copy_": lambda w: w.data.copy_(w.detach().flip(0)),
    "data.add_": lambda w: w.data.add_(1),
    "a NumPy view": through_numpy,
    "the same address": at_the_same_address,
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("table", RECIPES.values(), ids=RECIPES)
def test_a_written_weight_is_used(table: dict[str, Any], write: Callable[[nn.Parameter], Any]) -> None:
    model, _ = converted(table)
    answer(model)
    for layer in (model[0], model[2]):
        write(layer.weight)
    assert_as_new(model, table)


class Bypassing(torch.optim.Optimizer):
    """Writes through the address alone, as the kernels of bitsandbytes do."""

    def __init__(self, parameters: Any) -> None:
        super().__init__(parameters, {"lr": 0.5})

    def step(self, closure: Any = None) -> None:
        for p in self.param_groups[0]["params"]:
            p.detach().numpy()[...] -= 0.5 * p.grad.numpy()


@pytest.mark.filterwarnings("ignore:the weights have changed since a backward pass:UserWarning")
@pytest.mark.parametrize("follows", [False, True])
def test_an_optimizer_that_bypasses_versions(follows: bool) -> None:
    model, handle = converted(RECIPES["mxfp4"])
    optimizer = Bypassing(model.parameters())
    if follows:
        handle.follow(optimizer)
    for _ in range(2):
        model(X).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
        assert_as_new(model, RECIPES["mxfp4"])


def test_an_optimizer_that_bypasses_versions_does_not_draw_bits_twice() -> None:
    model, _ = converted({"gemm": "ordered", "all": {"rounding": "sr"}})
    optimizer = Bypassing(model.parameters())
    model(X).square().mean().backward()
    optimizer.step()
    with pytest.raises(mxref_torch.StepError, match="its random bits would be drawn again"):
        model(X)


class Adapted(nn.Module):
    """A layer with a low-rank adapter, which is merged into its weight as PEFT does."""

    def __init__(self, base: nn.Module) -> None:
        super().__init__()
        self.base_layer = base.requires_grad_(False)
        self.a, self.b = nn.Linear(64, 8, bias=False), nn.Linear(8, 32, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.base_layer(x)
        return y + self.b(self.a(x))

    def merge(self, sign: int = 1) -> None:
        self.base_layer.weight.data += sign * (self.b.weight @ self.a.weight).detach()


def test_adapters_on_a_converted_model_are_merged_and_unmerged() -> None:
    model, _ = converted(RECIPES["mxfp4"])
    model[0] = adapted = Adapted(model[0])
    before = answer(model)
    assert not isinstance(adapted.a, mxref_torch.MXLinear)
    adapted.merge()
    model[0] = adapted.base_layer
    assert_as_new(model, RECIPES["mxfp4"])
    adapted.merge(-1)
    model[0] = adapted
    for got, want in zip(answer(model), before, strict=True):
        torch.testing.assert_close(got, want)


@contextmanager
def swapped(model: nn.Module, average: dict[str, Tensor]) -> Iterator[None]:
    """Put averaged weights in place, as libraries for moving averages do, and the own ones back."""
    own = {name: p.detach().clone() for name, p in model.named_parameters()}
    for name, p in model.named_parameters():
        p.data.copy_(average[name])
    yield
    for name, p in model.named_parameters():
        p.data.copy_(own[name])


def test_averaged_weights_are_swapped_in_for_an_evaluation() -> None:
    results = []
    for evaluates in (True, False):
        model, handle = converted(RECIPES["mxfp4"])
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        handle.follow(optimizer)
        average = {name: p.detach() * 0.5 for name, p in model.named_parameters()}
        for _ in range(2):
            for _ in range(2):  # micro-batches, with an evaluation between them
                model(X).square().mean().backward()
                if evaluates:
                    with swapped(model, average):
                        assert_as_new(model, RECIPES["mxfp4"])
            optimizer.step()
            optimizer.zero_grad()
        results.append(answer(model))
    assert all(map(torch.equal, *results))


def test_an_x_that_changes_between_two_layers_is_read_anew() -> None:
    model, _ = converted(RECIPES["mxfp4"])
    other, _ = converted(RECIPES["mxfp4"])
    x = X.clone()
    with torch.no_grad():
        model[0](x)
        x.data.mul_(-2)
        other[0].context = model[0].context
        assert torch.equal(other[0](x), model[0](-2 * X))


# ---- A step that was opened ----


@pytest.mark.parametrize("table", RECIPES.values(), ids=RECIPES)
def test_an_opened_step_quantizes_each_weight_once_and_changes_no_bit(table: dict[str, Any]) -> None:
    found, reads = [], []
    for opened in (False, True):
        backend = recorder("reference")
        model, handle = converted(table, backend)
        with mxref_torch.weights_held(handle) if opened else nullcontext():
            for _ in range(2):
                loss = model(X).square().sum()
                loss.backward()
        found.append([loss, *(p.grad for p in model.parameters())])
        reads.append([each for each in backend.reads if {1, 3} & set(each)])
    assert all(map(torch.equal, *found))
    of_a_layer = {"fp8": 0, "from Fprop": 2}  # where Dgrad's is made of Fprop's, one for each
    name = next(name for name, each in RECIPES.items() if each is table)
    assert len(reads[1]) == 2 * of_a_layer.get(name, 1)


def test_an_opened_step_has_the_weight_of_its_beginning_in_training_alone() -> None:
    table = RECIPES["mxfp4"]
    model, handle = converted(table)
    evaluated, *trained = answer(model)
    with mxref_torch.weights_held(model):
        for layer in (model[0], model[2]):
            layer.weight.data.mul_(-2)
        now, *held = answer(model)
        assert all(map(torch.equal, held, trained))
        assert not torch.equal(now, evaluated)
        twin = copy.deepcopy(model)
    for each in (model, twin):
        assert_as_new(each, table)
    for ends in (handle.advance, handle.restart, lambda: model.load_state_dict(model.state_dict())):
        with mxref_torch.weights_held(model):
            for layer in (model[0], model[2]):
                layer.weight.data.mul_(-2)
            ends()
            assert_as_new(model, table)
