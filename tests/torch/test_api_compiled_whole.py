"""Compiled code of a followed model: each forward pass of training has its backward pass before the next."""

from __future__ import annotations

import copy
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from api_setup import PLAIN, REFERENCE, SR
from torch import nn

from mxref_torch import convert
from mxref_torch.errors import StepError

pytestmark = pytest.mark.filterwarnings("ignore:.*should not be instantiated:DeprecationWarning")

X = torch.randn(32, 32, generator=torch.Generator().manual_seed(0))


def followed(recipe: Any, fullgraph: bool = True) -> tuple[Any, Any, Any]:
    torch._dynamo.reset()
    torch.manual_seed(0)
    model: Any = nn.Sequential(nn.Linear(32, 32))
    handle = convert(model, recipe, backend=REFERENCE, seed=1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    handle.follow(optimizer)
    run = torch.compile(model, backend="aot_eager", fullgraph=fullgraph)
    torch._dynamo.utils.counters.clear()
    return run, handle, optimizer


@pytest.mark.parametrize("fullgraph", [False, True], ids=["graph breaks", "one graph"])
def test_two_forward_passes_before_a_backward_pass_are_refused(fullgraph: bool) -> None:
    run, _, _ = followed(SR, fullgraph)
    run(X)
    with pytest.raises(StepError, match=r"layer 0 ran twice .*step 0, token 0.*compile its blocks alone"):
        run(X)


def test_a_compiled_block_that_is_called_past_the_model_is_refused_its_second_draw() -> None:
    torch._dynamo.reset()
    model: Any = nn.Sequential(nn.Sequential(nn.Linear(32, 32), nn.Tanh()), nn.Linear(32, 32))
    handle = convert(model, SR, backend=REFERENCE, seed=1)
    model[0] = torch.compile(model[0], backend="aot_eager", fullgraph=True)
    handle.follow(torch.optim.SGD(model.parameters(), lr=0.1))
    with torch.no_grad():
        assert torch.equal(model[0](X), model[0](X))
    sum(model(X).sum() for _ in range(2)).backward()
    handle.restart()
    model[0](X)
    with pytest.raises(StepError, match="the layer 0.0 ran twice in compiled code"):
        model[0](X)


def test_steps_of_several_micro_batches_and_evaluations_are_one_graph_each() -> None:
    run, handle, optimizer = followed(SR)
    origins = []
    for _ in range(3):
        for _ in range(2):
            with torch.no_grad():
                run(X)
            loss = run(X).square().mean()
            with torch.no_grad():
                run(X)
            origins.append(handle.context.token_origin)
            loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert (handle.step, origins) == (3, [0, 32] * 3)
    assert torch._dynamo.utils.counters["stats"]["unique_graphs"] == 2
    run(X)
    handle.restart()
    run(X)


def test_passes_that_draw_nothing_or_are_placed_by_hand_and_copies_are_not_refused() -> None:
    run, _, _ = followed(PLAIN)
    assert torch.equal(run(X), run(X))
    run, handle, _ = followed(SR)
    outputs = []
    for handle.context.token_origin in (0, 32):
        handle.context.global_tokens = 64
        outputs.append(run(X))
    assert not torch.equal(*outputs)
    run, handle, _ = followed(SR)
    twin = torch.compile(copy.deepcopy(handle.model), backend="aot_eager", fullgraph=True)
    for _ in range(2):
        twin(X)
