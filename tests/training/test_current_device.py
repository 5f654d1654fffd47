"""What asks for the current GPU, as an event does that is given no stream, means the GPU of the run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("torch")

import numpy as np
import torch

from mxref_torch.captured.step import CapturedStep
from mxref_training import device as devices
from mxref_training import trainer
from mxref_training.device import made_current
from mxref_training.evaluate import CapturedEvaluation
from training_setup import change, run


def test_a_gpu_is_made_the_current_one() -> None:
    block = made_current(torch.device("cuda", 1))
    assert isinstance(block, torch.cuda.device)
    assert block.idx == 1
    with made_current(torch.device("cpu")) as nothing:
        assert nothing is None


def test_a_run_is_built_and_trained_on_the_current_device(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    current: list[torch.device] = []
    seen: list[list[torch.device]] = []

    @contextmanager
    def entered(device: torch.device) -> Iterator[None]:
        current.append(device)
        yield
        current.pop()

    class Watched(trainer.TrainingRun):
        def __init__(self, *arguments: Any) -> None:
            seen.append(current.copy())
            super().__init__(*arguments)

        def go(self, *arguments: Any) -> str:
            seen.append(current.copy())
            return super().go(*arguments)

    monkeypatch.setattr(devices, "made_current", entered)
    monkeypatch.setattr(trainer, "TrainingRun", Watched)
    run(tmp_path / "run", config=change(steps=1, eval_every=1))
    assert seen == [[torch.device("cpu")]] * 2
    assert not current


def test_an_outcome_is_waited_for_on_the_stream_that_copies_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else the host reads before the copy, where the model is on another GPU than the current one."""
    recorded: list[Any] = []

    class Event:
        def __init__(self, blocking: bool) -> None:
            assert blocking

        def record(self, stream: Any = None) -> None:
            recorded.append(stream)

    memory = torch.empty
    monkeypatch.setattr(torch, "empty", lambda shape, pin_memory: memory(shape))
    monkeypatch.setattr(torch.cuda, "Event", Event)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device=None: f"stream of {device}")
    taker = object.__new__(CapturedStep)
    taker._device = torch.device("cuda", 1)
    taker._operations = type("Operations", (), {"outcome": torch.ones(4)})()
    taker._sent(0)
    assert recorded == ["stream of cuda:1"]


def test_an_evaluation_is_captured_on_a_stream_of_its_own_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """PyTorch's own stream for captures lies on the GPU that was the first to have one; nothing would be captured."""
    seen: list[Any] = []

    @contextmanager
    def graph(graph: Any, pool: Any = None, stream: Any = None) -> Iterator[None]:
        seen.append(stream)
        yield

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: f"stream of {device}")
    for name, value in (
        ("CUDAGraph", object), ("graph", graph), ("graph_pool_handle", tuple), ("stream", lambda _: nullcontext()),
    ):  # fmt: skip
        monkeypatch.setattr(torch.cuda, name, value)
    context: Any = SimpleNamespace(
        step=0, token_origin=0, global_tokens=0, counted=dict, set_counted=lambda counted: None
    )
    sums: list[int] = []

    def loss_sum(inputs: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        sums.append(targets.numel())
        return targets.sum().float()

    model: Any = torch.nn.Linear(1, 1)
    taker = CapturedEvaluation(
        model, context, np.arange(65), seq_len=16, batch=2, limit=64, loss_sum=loss_sum
    )
    taker._captured()
    assert seen == ["stream of cpu"]
    assert sums == [32, 32]
