"""A captured step that is repeated, fails, or is resumed: nothing of another step enters it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import mxref_torch
from mxref.recipe_files import recipe_from_table
from ranged import Ranged

SIGNS = {"all": {"hadamard": 16, "signs": "per_step"}}
BATCHES = torch.randn(6, 64, 64, generator=torch.Generator().manual_seed(1))


def loss_of(model: nn.Module, x: Tensor) -> Tensor:
    return model(x).square().mean()


def made(
    at: int = -1, table: dict[str, Any] | None = None, parts: int = 1, loss: Any = loss_of, **more: Any
) -> Any:
    """Return handle, optimizer and step of a model whose backend leaves its range at the step `at`."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 64, bias=False), nn.Linear(64, 64, bias=False))
    backend = Ranged(at)
    recipe = recipe_from_table({"gemm": "ordered", "keep_bf16": [], **(table or {})})
    handle = mxref_torch.convert(model, recipe, backend=backend, **more)
    backend.context = handle.context
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, fused=True)
    take = mxref_torch.CapturedStep(
        model, handle.context, loss, optimizer, tokens=64, micro_batches=parts, capture=False
    )
    return handle, optimizer, take


def test_a_repeated_step_has_its_own_learning_rate():
    def weights(at: int) -> list[Tensor]:
        handle, optimizer, take = made(at)
        for number, batch in enumerate(BATCHES):
            optimizer.param_groups[0]["lr"] = 0.1 / (number + 1)
            take(batch)
        assert take.finish().step == len(BATCHES) - 1
        return [p.detach() for p in handle.model.parameters()]

    for want, got in zip(weights(-1), weights(2), strict=True):
        assert torch.equal(got, want)


def test_a_repeated_step_has_its_own_batch():
    def losses(reused: bool) -> list[float]:
        _, _, take = made(2)
        buffer = torch.empty(64, 64)
        found = [take(buffer.copy_(batch) if reused else batch) for batch in BATCHES]
        return [outcome.loss for outcome in (*found[1:], take.finish())]

    assert losses(True) == losses(False)


def test_a_step_that_fails_leaves_nothing_behind():
    """A weight that was quantized for all micro-batches of a step is not the next step's."""

    def outcomes(fails: bool) -> list[float]:
        calls = 0

        def loss(model: nn.Module, x: Tensor) -> Tensor:
            nonlocal calls
            calls += 1
            if fails and calls == 6:
                raise torch.OutOfMemoryError("planted")
            return loss_of(model, x)

        _, _, take = made(table=SIGNS, parts=2, loss=loss)
        take(BATCHES[0], step=0)
        take(BATCHES[1], step=1)
        if fails:
            with pytest.raises(torch.OutOfMemoryError, match="planted"):
                take(BATCHES[2], step=2)
        take(BATCHES[3], step=3)
        return [take.finish().loss]

    assert outcomes(True) == outcomes(False)


def test_a_resumed_run_takes_the_step_after_the_last():
    handle, _, take = made(table=SIGNS)
    for batch in BATCHES[:3]:
        take(batch)
    assert take.finish().step == 2
    assert handle.state_dict()["step"] == 3
    resumed, _, again = made(table=SIGNS)
    resumed.load_state_dict(handle.state_dict())
    again(BATCHES[3])
    assert again.finish().step == 3


def test_the_last_step_of_a_run_with_phases_is_repeated_too():
    handle, _, take = made(5, {"schedule": [{"until": 4, "recipe": "bf16"}]}, steps=8)
    for batch in BATCHES:
        take(batch)
    outcome = take.finish()
    assert (outcome.step, outcome.widened) == (5, True)
    assert handle.context.step == 5


def test_a_region_is_no_replay_of_a_graph_of_another_recipe(monkeypatch: pytest.MonkeyPatch):
    handle, _, take = made()
    replayed = []

    class Graph:
        def replay(self) -> None:
            replayed.append(handle.context.step)
            take._runner._whole()

    monkeypatch.setattr(take._runner, "capture", True)
    monkeypatch.setattr(take._runner, "_captured", Graph)
    for batch in BATCHES[:3]:
        take(batch)
    with mxref_torch.recipe("bf16", handle):
        take(BATCHES[3])
        take.finish()
    take(BATCHES[4])
    take.finish()
    assert replayed == [2]


@pytest.mark.parametrize(
    "wrong", [{"micro_batches": 0}, {"micro_batches": -1}, {"tokens": 0}, {"clip": -1.0}]
)
def test_numbers_out_of_range_are_refused(wrong: dict[str, Any]):
    handle, optimizer, _ = made()
    (name,) = wrong
    with pytest.raises(mxref_torch.LayerError, match=f"CapturedStep: {name} = "):
        mxref_torch.CapturedStep(
            handle.model, handle.context, loss_of, optimizer, **{"tokens": 64, "capture": False, **wrong}
        )


def test_a_loop_of_ones_own_goes_on_after_the_last_captured_step():
    handle, optimizer, take = made(table={"all": {"rounding": "sr"}})
    for batch in BATCHES[:3]:
        take(batch)
    take.finish()
    handle.follow(optimizer)
    assert handle.step == 3
    loss_of(handle.model, BATCHES[3]).backward()
    optimizer.step()
    assert handle.step == 4
