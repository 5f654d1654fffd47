"""`find_nonfinite` names the layer and the tensor at which a value stopped being finite."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import mxref_torch
from mxref_torch import find_nonfinite
from mxref_torch.checks.finite import is_finite
from mxref_torch.errors import LayerError
from mxref_torch.layer.linear import MXLinear
from mxref_torch.layer.operands import Operand


class Spoil(torch.autograd.Function):
    """Puts a value into what passes, forward or backward."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, forward: float, backward: float) -> torch.Tensor:
        ctx.backward_value = backward
        return _spoiled(x, forward)

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor) -> Any:
        return _spoiled(dy, ctx.backward_value), None, None


def _spoiled(x: torch.Tensor, value: float) -> torch.Tensor:
    x = x.clone()
    if value:
        x.view(-1)[5] = value
    return x


class Spoiler(nn.Module):
    forward_value = backward_value = 0.0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = Spoil.apply(x, self.forward_value, self.backward_value)  # type: ignore[no-untyped-call]
        return out


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.spoiler, self.second = (
            nn.Linear(32, 64, bias=False),
            Spoiler(),
            nn.Linear(64, 32, bias=False),
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.second(self.spoiler(self.first(x)))
        return out


def net(convert: bool) -> Net:
    torch.manual_seed(0)
    model = Net()
    if convert:
        mxref_torch.convert(model, "mxfp4", backend="reference")
    return model


def search(model: nn.Module, x: torch.Tensor | None = None) -> str | None:
    x = torch.randn(32, 32, generator=torch.Generator().manual_seed(0)) if x is None else x
    with find_nonfinite(model) as found:
        model(x.requires_grad_()).square().mean().backward()
    return found.found


@pytest.mark.parametrize("convert", [False, True])
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_each_tensor_is_named(convert: bool, bad: float) -> None:
    assert search(net(convert)) is None
    x = torch.randn(32, 32, generator=torch.Generator().manual_seed(0))
    x[3, 3] = bad
    assert search(net(convert), x) == "X of first"
    model = net(convert)
    with torch.no_grad():
        model.second.weight[7, 7] = bad
    assert search(model) == "W of second"
    model = net(convert)
    model.spoiler.forward_value = bad
    assert search(model) == "the output of spoiler"
    model = net(convert)
    model.spoiler.backward_value = bad
    assert search(model) == "dY of first"


def test_what_a_layer_itself_makes_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    real = MXLinear.forward

    def spoiled(value: float, back: float) -> Any:
        def forward(self: MXLinear, x: torch.Tensor) -> torch.Tensor:
            if self.out_features == 32:
                return Spoil.apply(real(self, Spoil.apply(x, 0.0, back)), value, 0.0)  # type: ignore[no-any-return, no-untyped-call]
            return real(self, x)

        return forward

    monkeypatch.setattr(MXLinear, "forward", spoiled(math.nan, 0.0))
    assert search(net(True)) == "Y of second"
    monkeypatch.setattr(MXLinear, "forward", spoiled(0.0, math.inf))
    assert search(net(True)) == "dX of second"
    monkeypatch.undo()
    kinds = Operand.__subclasses__()
    assert kinds
    kind = next(each for each in kinds if each.__name__ == "BlockOperand")
    product = kind.product

    def overflow(self: Any, other: Any, gemm: Any, length: int, dtype: torch.dtype) -> torch.Tensor:
        out = product(self, other, gemm, length, dtype)
        return _spoiled(out, math.inf) if gemm.role.value == "wgrad" and out.shape == (64, 32) else out

    monkeypatch.setattr(kind, "product", overflow)
    assert search(net(True)) == "dW of first"


def test_other_parameters_and_modules_are_named() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8))
    x = torch.randn(4, 8)
    with torch.no_grad():
        model[1].weight[2] = math.nan
    assert search(model, x.clone()) == "the weight 1.weight"
    with torch.no_grad():
        model[1].weight[2] = 1.0
        model[0].bias[1] = math.inf
    assert search(model, x.clone()) == "the weight 0.bias"


def test_wrappers_and_checkpointing_keep_the_names_and_nothing_stays_behind() -> None:
    model = net(True)
    model.spoiler.backward_value = math.nan
    wrapped = torch.optim.swa_utils.AveragedModel(model)
    assert search(wrapped) == "dY of first"
    x = torch.randn(32, 32, requires_grad=True)
    with find_nonfinite(model) as found:
        checkpoint(model, x, use_reentrant=False).square().mean().backward()
    assert found.found == "dY of first"
    for module in model.modules():
        assert not module._forward_hooks
        assert not module._forward_pre_hooks
        assert not module._backward_hooks


def test_what_counts_as_finite() -> None:
    for value in (3, None, torch.arange(3), torch.zeros(0), torch.full((3,), 3e38)):
        assert is_finite(value)
    assert not is_finite(torch.tensor([1.0, math.nan]).to(torch.bfloat16))
    with pytest.raises(LayerError, match="expected a model"), find_nonfinite(3):
        pass
