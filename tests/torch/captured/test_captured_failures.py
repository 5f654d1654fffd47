"""A captured step that cannot go on says why, and leaves model and optimizer as they were."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from test_captured_repeats import BATCHES, SIGNS, Ranged, loss_of, made
from torch import Tensor, nn

import mxref_torch
from mxref.errors import UnsupportedError
from mxref_torch.errors import LayerError, StepError


def weights(handle: Any) -> list[Tensor]:
    return [p.detach().clone() for p in handle.model.parameters()]


def test_a_range_that_the_repeated_step_leaves_too_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def leaving(backend: Any, a: Any, b: Any, **how: Any) -> Any:
        if backend.context.step == backend.at:
            backend.word.fill_(1)
        return super(Ranged, backend).scaled_gemm(a, b, **how)

    with monkeypatch.context() as patch:
        patch.setattr(Ranged, "scaled_gemm", leaving)
        handle, _, take = made(1, SIGNS)
        take(BATCHES[0])
        take(BATCHES[1])
        with pytest.raises(UnsupportedError, match="left its range in step 1, and again in its widest range"):
            take(BATCHES[2])
    before = weights(handle)
    assert take.finish() is None
    # The step can be taken again, and then weights change.
    handle.context.backend.at = -1
    take(BATCHES[1])
    outcome = take.finish()
    assert (outcome.step, outcome.updated) == (1, True)
    assert not any(torch.equal(a, b) for a, b in zip(weights(handle), before, strict=True))


@contextmanager
def failing_capture(*_: Any, **__: Any) -> Iterator[None]:
    """A capture that a wait for the device has ended: its own end fails too, as torch's does."""
    try:
        yield
    finally:
        raise RuntimeError("operation failed due to a previous error during capture")


@pytest.mark.parametrize("parts", [1, 2])
def test_a_capture_that_fails_says_why_and_leaves_the_model_usable(
    monkeypatch: pytest.MonkeyPatch, parts: int
) -> None:
    capturing = False
    freed: list[Any] = []

    class Graph:
        def pool(self) -> None:
            return None  # the capture has ended

        def reset(self) -> None:
            freed.append(self)

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        if capturing and loss.calls % parts == parts - 1:  # type: ignore[attr-defined]
            raise ValueError("loss.item() waits for the GPU")
        loss.calls += 1  # type: ignore[attr-defined]
        return loss_of(model, x)

    def outcomes(fails: bool) -> tuple[list[float], list[Tensor]]:
        nonlocal capturing
        loss.calls = 0  # type: ignore[attr-defined]
        handle, optimizer, take = made(parts=parts, loss=loss)
        losses = [take(batch) for batch in BATCHES[:2]]
        if fails:
            monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
            monkeypatch.setattr(torch.cuda, "graph", failing_capture)
            monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
            monkeypatch.setattr(take._runner, "capture", True)
            capturing, before = True, weights(handle)
            with pytest.raises(LayerError, match="captured as a CUDA graph: ValueError: loss.item"):
                take(BATCHES[2])
            capturing = False
            assert len(freed) == 1
            losses.append(take.finish())
            take = mxref_torch.CapturedStep(
                handle.model, handle, loss, optimizer, tokens=64, micro_batches=parts, capture=False
            )
            assert all(torch.equal(a, b) for a, b in zip(weights(handle), before, strict=True))
            assert not handle.context.sole_uses
            assert all(p.grad is None for p in handle.model.parameters())
        losses += [take(batch) for batch in BATCHES[2:]]
        losses.append(take.finish())
        return [outcome.loss for outcome in losses if outcome is not None], weights(handle)

    (found, changed), (want, right) = outcomes(True), outcomes(False)
    assert found == want
    assert all(torch.equal(a, b) for a, b in zip(changed, right, strict=True))


def test_an_optimizer_whose_state_is_loaded_is_captured_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    handle, optimizer, take = made()
    captured = []

    class Graph:
        """Holds the optimizer's state of its capture, as a CUDA graph does."""

        def __init__(self) -> None:
            captured.append(handle.context.step)
            self.state = [id(t) for each in optimizer.state.values() for t in each.values()]

        def replay(self) -> None:
            assert self.state == [id(t) for each in optimizer.state.values() for t in each.values()]
            take._runner._whole()

    monkeypatch.setattr(take._runner, "capture", True)
    monkeypatch.setattr(take._runner, "_captured", Graph)
    for batch in BATCHES[:3]:
        take(batch)
    with pytest.raises(StepError, match="call finish\\(\\) before optimizer.load_state_dict"):
        optimizer.load_state_dict(optimizer.state_dict())
    take.finish()
    state = optimizer.state_dict()
    for group in state["param_groups"]:
        group["capturable"] = False
    optimizer.load_state_dict(state)
    assert all(group["capturable"] for group in optimizer.param_groups)
    for batch in BATCHES[3:]:
        take(batch)
    assert captured == [2, 5]
    take.finish()


def test_a_phase_that_cannot_begin_changes_no_layer() -> None:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 32))
    from mxref.recipe_files import recipe_from_table

    recipe = recipe_from_table(
        {"gemm": "ordered", "keep_bf16": [], "schedule": [{"until": 1, "recipe": "bf16"}]}
    )
    handle = mxref_torch.convert(model, recipe, backend="reference", steps=2)
    before = handle.recipes
    model[1](torch.randn(32, 32)).sum().backward()  # the second layer alone is inside a step
    with pytest.raises(StepError, match="a layer's recipe changed inside the optimizer step 0"):
        handle.step = 1
    assert handle.recipes == before
    assert (handle.step, handle.context.schedule.span.first) == (0, 0)


def test_a_capture_without_memory_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    """`mxref train` then says what takes less memory."""

    class Graph:
        def pool(self) -> None:
            return None

        def reset(self) -> None:
            return None

    capturing = False

    def loss(model: nn.Module, x: Tensor) -> Tensor:
        if capturing:
            raise torch.OutOfMemoryError("CUDA out of memory")
        return loss_of(model, x)

    _, _, take = made(loss=loss)
    for batch in BATCHES[:2]:
        take(batch)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Graph)
    monkeypatch.setattr(torch.cuda, "graph", failing_capture)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: (0, 1))
    monkeypatch.setattr(take._runner, "capture", True)
    capturing = True
    with pytest.raises(torch.OutOfMemoryError):
        take(BATCHES[2])
