"""Odd moments: signals in evaluations and in the last step, folders that are none."""

from __future__ import annotations

import errno
import math
import os
import signal
from pathlib import Path

import pytest

from mxref_training import checkpoint, interrupt
from mxref_training.checkpoint import CheckpointStore
from mxref_training.errors import CheckpointError
from mxref_training.progress import ProgressSink
from mxref_training.trainer import Interrupted
from training_setup import Saboteur, change, metrics, newest, run, weights


@pytest.fixture
def together(monkeypatch: pytest.MonkeyPatch) -> None:
    """All signals are one request, however slow the machine is."""
    monkeypatch.setattr(interrupt, "TOGETHER", math.inf)


class AtEvaluation(ProgressSink):
    """Sends a signal twice when the evaluation after a step is reported."""

    def __init__(self, step: int) -> None:
        self._step = step

    def validation(self, step: int, loss: float) -> None:
        if step == self._step:
            for _ in range(2):
                os.kill(os.getpid(), signal.SIGTERM)


@pytest.mark.usefixtures("together")
def test_signals_in_an_evaluation_lose_nothing(tmp_path: Path) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run(whole)
    with pytest.raises(Interrupted, match="SIGTERM after step 4 of 6: saved"):
        run(parts, progress=AtEvaluation(4))
    assert newest(parts) == 4
    run(parts)
    assert metrics(parts) == metrics(whole)
    assert weights(parts) == weights(whole)


def test_a_signal_in_the_last_step_is_told_to_the_caller(tmp_path: Path) -> None:
    """A ladder that trains one run after another stops then."""
    sink = Saboteur(6, lambda: os.kill(os.getpid(), signal.SIGINT))
    assert run(tmp_path / "whole", progress=sink).stopped == "SIGINT"
    assert run(tmp_path / "whole").stopped == ""


@pytest.mark.usefixtures("together")
@pytest.mark.parametrize("background", [False, True])
def test_signals_in_the_last_save_lose_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    write = checkpoint.write_boxes

    def signalled(path: Path, parts: object) -> None:
        os.kill(os.getpid(), signal.SIGTERM)
        write(path, parts)  # type: ignore[arg-type]

    monkeypatch.setattr(checkpoint, "write_boxes", signalled)
    config = change(steps=2, eval_every=2, async_checkpoint=background)
    assert run(tmp_path, config=config).stopped == "SIGTERM"
    CheckpointStore(tmp_path / "checkpoints", 2).load(2)


def test_a_folder_that_something_is_in_the_way_of_is_named(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to(tmp_path / "nowhere")
    (tmp_path / "file").write_text("")
    for out in (tmp_path / "link", tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(
            CheckpointError, match=f"cannot write to {out}: File exists; .*choose another --out"
        ):
            run(out)


def test_a_run_goes_on_when_nobody_reads_its_progress(tmp_path: Path) -> None:
    """The terminal was closed, or `tee` was killed."""
    noted: list[int] = []

    class Gone(ProgressSink):
        def step(self, step: int, loss: float | None) -> None:
            noted.append(step)
            raise BrokenPipeError(errno.EPIPE, os.strerror(errno.EPIPE))

        def stop(self) -> None:
            raise OSError(errno.EIO, os.strerror(errno.EIO))

    assert run(tmp_path, progress=Gone(), stop_after=3).tokens == 3 * 128
    assert noted == [1]
