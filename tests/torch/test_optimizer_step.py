"""A step whose number was not increased is refused under every optimizer, and layers that never ran are named."""

from __future__ import annotations

import copy
import pickle
import warnings
from collections.abc import Callable
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

import mxref_torch
from mxref import get_backend
from mxref.errors import MxrefError
from mxref.recipe_files import recipe_from_table
from mxref_torch import LayerError, StepError, advance, check_census, convert, restart

SR = recipe_from_table({"gemm": "ordered", "keep_bf16": [], "wgrad": {"dy": {"rounding": "sr"}}})
SIGNS = recipe_from_table({"gemm": "ordered", "keep_bf16": [], "all": {"hadamard": 16, "signs": "per_step"}})
FIXED = recipe_from_table({"gemm": "ordered", "keep_bf16": [], "all": {"hadamard": 16, "signs": "fixed"}})

BF16 = recipe_from_table({"keep_bf16": [], "all": {"format": "bf16"}})
FP8 = recipe_from_table({"keep_bf16": [], "all": {"format": "fp8"}})


class Loop:
    """Somebody's own training loop."""

    def __init__(self, recipe: Any = SR) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = nn.Sequential(nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 32))
        self.handle = convert(self.model, recipe, backend=get_backend("reference"), seed=1)
        self.context = self.handle.context
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.run: Callable[[torch.Tensor], torch.Tensor] = self.model
        self.x = torch.randn(32, 32, generator=torch.Generator().manual_seed(1))

    def gradients(self) -> None:
        self.run(self.x).square().mean().backward()

    def update(self) -> None:
        self.optimizer.step()
        self.optimizer.zero_grad()


@pytest.mark.parametrize("recipe", [SR, SIGNS], ids=["SR", "signs"])
def test_a_forgotten_step_is_refused(recipe: Any) -> None:
    loop = Loop(recipe)
    loop.gradients()
    loop.update()
    with pytest.raises(
        StepError,
        match=r"forward pass of step 0, .*: let the handle follow .*call mxref_torch.restart\(model\)$",
    ) as found:
        loop.gradients()
    assert isinstance(found.value, MxrefError)
    advance(loop.model)
    loop.context.step = 1
    loop.gradients()


def test_without_random_bits_the_number_does_not_matter() -> None:
    loop = Loop(FIXED)
    for _ in range(3):
        loop.gradients()
        loop.update()
        advance(loop.model)


def accumulation(loop: Loop) -> None:
    for loop.context.token_origin in (0, 32, 64):
        loop.gradients()
    loop.update()


def evaluation(loop: Loop) -> None:
    loop.gradients()
    loop.update()
    with torch.no_grad():
        loop.model(loop.x)


def recomputation(loop: Loop) -> None:
    loop.run = lambda x: checkpoint(loop.model, x, use_reentrant=False)
    loop.gradients()
    loop.update()


def done_over(loop: Loop) -> None:
    before = copy.deepcopy(loop.model.state_dict())
    loop.gradients()
    loop.update()
    with torch.no_grad():
        for name, parameter in loop.model.named_parameters():
            parameter.copy_(before[name])
    restart(loop.model)
    loop.gradients()
    loop.update()


def done_over_after_it_was_closed(loop: Loop) -> None:
    loop.gradients()
    loop.update()
    advance(loop.model)
    restart(loop.model)
    loop.gradients()
    loop.update()


def skipped(loop: Loop) -> None:
    loop.gradients()
    loop.optimizer.zero_grad()
    loop.gradients()
    loop.update()


def loaded(loop: Loop) -> None:
    before = copy.deepcopy(loop.model.state_dict())
    loop.gradients()
    loop.update()
    advance(loop.model)
    loop.model.load_state_dict(before)
    loop.gradients()
    loop.update()


def replaced(loop: Loop) -> None:
    loop.gradients()
    for layer in (loop.model[0], loop.model[2]):
        layer.weight = nn.Parameter(layer.weight.detach() + 1)
    loop.gradients()


def test_a_skipped_update_is_not_called_a_change_of_weights() -> None:
    loop = Loop()
    loop.gradients()
    advance(loop.model)
    loop.gradients()
    with pytest.raises(
        StepError,
        match=r"^step 0 was already trained, .* skipped.*restart\(model\)",
    ):
        advance(loop.model)
    restart(loop.model)
    loop.gradients()
    loop.update()
    advance(loop.model)


@pytest.mark.parametrize("recipe", [SR, FIXED, FP8], ids=["SR", "fixed", "fp8"])
def test_a_loop_that_never_closes_a_step_is_warned_once(recipe: Any) -> None:
    loop = Loop(recipe)
    loop.gradients()
    loop.update()
    loop.context.step = 1
    with pytest.warns(
        UserWarning, match=r"mxref_torch.advance\(model\) was never called: let the handle follow"
    ):
        loop.gradients()
    loop.update()
    loop.context.step = 2
    loop.gradients()  # a second warning would be an error


@pytest.mark.parametrize("recipe", [FIXED, FP8], ids=["fixed", "fp8"])
def test_a_loop_that_neither_closes_nor_numbers_its_steps_is_warned_once(recipe: Any) -> None:
    loop = Loop(recipe)
    loop.gradients()
    loop.update()
    with pytest.warns(UserWarning, match=r"advance\(model\) was never called: let the handle follow"):
        loop.gradients()
    for _ in range(2):
        loop.update()
        loop.gradients()  # a second warning would be an error


def test_weights_that_change_within_a_followed_step_are_no_cause_for_a_warning() -> None:
    loop = Loop(FIXED)
    searching = torch.optim.LBFGS(loop.model.parameters(), max_iter=3)
    loop.handle.follow(searching)

    def closure() -> torch.Tensor:
        searching.zero_grad()
        loss = loop.model(loop.x).square().mean()
        loss.backward()
        return loss

    searching.step(closure)
    assert loop.context.step == 1


def test_without_low_precision_there_is_nothing_to_close() -> None:
    loop = Loop(BF16)
    for loop.context.step in range(3):
        loop.gradients()
        loop.update()


def tried(loop: Loop) -> None:
    """The loop runs once before training, under another number, and no weight changes."""
    number, loop.context.step = loop.context.step, 99
    loop.gradients()
    loop.context.step = number
    loop.gradients()
    loop.update()


def initialised_again(loop: Loop) -> None:
    """Weights change between two forward passes, and nothing was trained."""
    number, loop.context.step = loop.context.step, 99
    loop.model(loop.x)
    with torch.no_grad():
        for parameter in loop.model.parameters():
            parameter.add_(1)
    loop.context.step = number
    loop.gradients()
    loop.update()


LEGAL = [
    tried, initialised_again,
    accumulation, evaluation, recomputation, done_over, done_over_after_it_was_closed, skipped, loaded, replaced,
]  # fmt: skip


@pytest.mark.parametrize("act", LEGAL)
def test_what_is_done_within_a_step_is_not_refused(act: Callable[[Loop], None]) -> None:
    loop = Loop()
    for loop.context.step in range(2):
        loop.context.token_origin, loop.context.global_tokens = 0, 96
        act(loop)
        advance(loop.model)


@pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")  # torch's own tracer
def test_compiled_it_is_refused_when_the_step_is_closed() -> None:
    torch._dynamo.reset()
    loop = Loop()
    loop.run = torch.compile(loop.model, backend="aot_eager", fullgraph=True)
    loop.gradients()
    loop.update()
    advance(loop.model)
    advance(loop.model)  # nothing was trained since
    loop.gradients()
    loop.update()
    with pytest.raises(StepError, match="^step 0 was already trained, and its random bits were drawn again"):
        advance(loop.model)
    loop.context.step = 1
    advance(loop.model)


def test_a_copy_and_a_pickle_start_with_nothing_kept() -> None:
    loop = Loop()
    loop.gradients()
    for again in (copy.deepcopy(loop.model[0]), pickle.loads(pickle.dumps(loop.model[0]))):
        assert again.last_pass is None
        assert torch.equal(again(loop.x), loop.model[0](loop.x))


class Past(nn.Module):
    """Reads a layer's weight past it, and never runs another one."""

    def __init__(self) -> None:
        super().__init__()
        self.good, self.past, self.unused = (nn.Linear(32, 32) for _ in range(3))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(self.good(x), self.past.weight)


def test_layers_that_never_ran_are_named_after_the_first_step() -> None:
    model = Past()
    context = convert(model, SR, backend=get_backend("reference"), seed=0).context
    x = torch.randn(32, 32, requires_grad=True)
    context.reset_census()
    model(x).sum().backward()
    with pytest.raises(
        LayerError, match=r"fprop in mxfp4: 1 ran, 3 expected.*; never ran: past, unused: a layer"
    ):
        check_census(context, model, SR)
    context.reset_census()
    with pytest.warns(UserWarning, match="never ran in the first step: past, unused; a module that reads"):
        advance(model)
    context.step = 1
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        model(x).sum().backward()
        advance(model)


def test_the_census_is_held_to_each_layer() -> None:
    """One layer runs twice and another not at all: the sums are as they should be."""
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32))
    context = convert(model, SR, backend=get_backend("reference"), seed=0).context
    x = torch.randn(32, 32, requires_grad=True)
    model[0](model[0](model[1](x))).sum().backward()
    with pytest.raises(LayerError, match=r"not the recipe's; never ran: 2; ran other GEMMs: 0: a layer"):
        check_census(context, model, SR)
    model[1] = nn.Linear(32, 32)
    with pytest.raises(LayerError, match="; not converted: 1; never ran: 2;"):
        check_census(context, model, SR)


def ordered(**table: Any) -> Any:
    return recipe_from_table({"gemm": "ordered", "keep_bf16": [], **table})


def converted(recipe: Any) -> tuple[nn.Sequential, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    return model, mxref_torch.convert(model, recipe, backend="reference")


X = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))


def losses(fused: bool, **table: Any) -> list[float]:
    """Train for three steps without moving the step on."""
    model, _ = converted(ordered(**table))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, fused=fused)
    found = []
    for _ in range(3):
        loss = model(X).square().mean()
        found.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return found


@pytest.mark.filterwarnings("ignore:the weights have changed:UserWarning")
def test_the_update_of_a_fused_optimizer_is_seen():
    """Torch's fused optimizers do not raise the version of what they change."""
    found = losses(fused=True)
    assert found[0] > found[1] > found[2]


@pytest.mark.parametrize("fused", [False, True])
def test_bits_drawn_twice_are_refused_under_every_optimizer(fused: bool):
    with pytest.raises(StepError, match="random bits"):
        losses(fused, all={"rounding": "sr"})


class Pair(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q, self.k = nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False)
        self.teaches = False

    def forward(self, x: Tensor) -> Tensor:
        if self.teaches:
            with torch.no_grad():
                target = self.q(x)
            return self.k(x) - target
        return self.q(x) + self.k(x)


@pytest.mark.parametrize("teaches", [False, True])
@pytest.mark.parametrize(
    "table",
    [
        {"all": {"format": "bf16"}},
        {"all": {"format": "fp8"}, "fp8_scaling": "current"},
        {"all": {"format": "bf16"}, "wgrad": {"format": "mxfp4"}},
    ],
    ids=["bf16", "fp8", "mixed"],
)
def test_layers_that_share_x_may_need_it_for_different_gemms(table: dict[str, Any], teaches: bool):
    torch.manual_seed(0)
    model = Pair()
    mxref_torch.convert(
        model, recipe_from_table({"gemm": "ordered", "keep_bf16": ["k"], **table}), backend="reference"
    )
    model.teaches = teaches
    if not teaches:
        model.q.weight.requires_grad_(False)
    x = X.clone().requires_grad_()
    model(x).sum().backward()
    assert model.k.weight.grad.isfinite().all()
    assert model.q.weight.grad is None


def test_a_recomputation_under_another_recipe_is_refused_after_a_second_forward_too():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Tanh(), nn.Linear(64, 64, bias=False))
    handle = mxref_torch.convert(model, ordered(), backend="reference")
    with mxref_torch.recipe(ordered(all={"hadamard": 16}), handle):
        loss = checkpoint(model, X.clone().requires_grad_(), use_reentrant=False).square().sum()
    model(X).sum()
    with pytest.raises(LayerError, match="the recipe has changed"):
        loss.backward()


def stepped(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()


def test_a_step_within_a_failed_backward_pass_does_not_stop_the_handle():
    model, handle = converted(ordered(all={"rounding": "sr"}))
    optimizers = [torch.optim.SGD([p], lr=0.01) for p in model.parameters()]
    handle.follow(*optimizers)
    for p, optimizer in zip(model.parameters(), optimizers, strict=True):
        p.register_post_accumulate_grad_hook(lambda p, own=optimizer: stepped(own))
    steps = []
    for number in range(4):
        x = X.clone().requires_grad_()
        if number == 1:
            x.register_hook(lambda gradient: 1 / 0)
            with pytest.raises(ZeroDivisionError):
                model(x).square().mean().backward()
            handle.restart()
        else:
            model(x).square().mean().backward()
        steps.append(handle.step)
    assert steps == [1, 1, 2, 3]
