"""Ranks that hold the whole model add gradients in the order of the parameters, whichever is ready first."""

from __future__ import annotations

import itertools

import pytest

torch = pytest.importorskip("torch")

from mxref_training.distributed import share


@pytest.mark.parametrize("order", list(itertools.permutations(range(4))))
def test_the_order_does_not_depend_on_which_gradient_is_ready_first(
    order: tuple[int, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    parameters = [torch.nn.Parameter(torch.full((size,), 1.0)) for size in (4, 3, 2, 1)]
    added: list[int] = []
    ready: list[int] = []

    def add(gradient: torch.Tensor) -> None:
        added.append(gradient.numel())
        assert len(added) <= len(ready)  # none before it is there

    monkeypatch.setattr(share, "BUCKET", 8)
    monkeypatch.setattr(share.dist, "all_reduce", add)
    summing = share.Replicas(parameters)
    with summing.adding(last=False):
        parameters[0].sum().backward()
    assert not added
    with summing.adding(last=True):
        for number in order:
            ready.append(number)
            parameters[number].sum().backward()
    assert added == [1, 2, 3, 4]


def test_a_parameter_without_a_gradient_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = [torch.nn.Parameter(torch.full((size,), 1.0)) for size in (3, 2, 1)]
    added: list[int] = []
    monkeypatch.setattr(share.dist, "all_reduce", lambda gradient: added.append(gradient.numel()))
    with share.Replicas(parameters).adding(last=True):
        (parameters[0].sum() + parameters[2].sum()).backward()
    assert added == [1, 3]
