"""What a layer keeps of a weight or of an X is never used for another one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

import mxref_torch
from mxref.recipe_files import recipe_from_table
from mxref_torch import LayerError, StepError


def recipe_of(**table: Any) -> Any:
    return recipe_from_table({"gemm": "ordered", "keep_bf16": [], **table})


def converted(recipe: Any) -> tuple[nn.Sequential, Any]:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    return model, mxref_torch.convert(model, recipe, backend="reference")


X = torch.randn(32, 64, generator=torch.Generator().manual_seed(1))


def losses(fused: bool, **table: Any) -> list[float]:
    """Train for three steps without moving the step on."""
    model, _ = converted(recipe_of(**table))
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


def test_averaged_weights_of_an_evaluation_do_not_train():
    def trained(averaged: bool) -> list[float]:
        model, handle = converted("mxfp4")
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        handle.follow(optimizer)
        found = []
        for _ in range(3):
            loss = model(X).square().mean()
            found.append(loss.item())
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            kept = [p.detach().clone() for p in model.parameters()]
            model.eval()
            with torch.no_grad():
                for p in model.parameters() if averaged else ():
                    p.data.copy_(p * 0.5)
                model(X)
                for p, own in zip(model.parameters(), kept, strict=True):
                    p.data.copy_(own)
            model.train()
        return found

    assert trained(True) == trained(False)


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
    handle = mxref_torch.convert(model, recipe_of(), backend="reference")
    with mxref_torch.recipe(recipe_of(all={"hadamard": 16}), handle):
        loss = checkpoint(model, X.clone().requires_grad_(), use_reentrant=False).square().sum()
    model(X).sum()
    with pytest.raises(LayerError, match="the recipe has changed"):
        loss.backward()


def stepped(optimizer: torch.optim.Optimizer) -> None:
    optimizer.step()
    optimizer.zero_grad()


def test_a_step_within_a_failed_backward_pass_does_not_stop_the_handle():
    model, handle = converted(recipe_of(all={"rounding": "sr"}))
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
