"""What asks for the current GPU, as an event does that is given no stream, means the GPU of the run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

import torch

from mxref_torch.captured.step import CapturedStep, _Pending
from mxref_training.run import loop
from mxref_training.run.device import made_current
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

    class Watched(loop._Run):
        def __init__(self, *arguments: Any) -> None:
            seen.append(current.copy())
            super().__init__(*arguments)

        def go(self, *arguments: Any) -> None:
            seen.append(current.copy())
            super().go(*arguments)

    monkeypatch.setattr(loop, "made_current", entered)
    monkeypatch.setattr(loop, "_Run", Watched)
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
    taker._sent(_Pending(0, (), [], torch.ones(4)))
    assert recorded == ["stream of cuda:1"]
