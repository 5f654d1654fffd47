"""Checkpoints in the background: those of their own step, complete or absent, and no change of any number."""

from __future__ import annotations

import errno
import json
import os
import signal
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch

from mxref_training import checkpoint
from mxref_training.checkpoint import CheckpointStore, Saver, Snapshot
from mxref_training.durable import remove
from mxref_training.errors import CheckpointError
from mxref_training.trainer import Interrupted
from rank_threads import ThreadRanks, on_ranks
from training_setup import Saboteur, change, crash, lines, metrics, newest, run, weights

EVERY_SECOND = change(checkpoint_every=2, async_checkpoint=True)


def digests(out: Path, step: int) -> dict[str, Any]:
    """What the manifest of a checkpoint says of its tensors."""
    manifest = json.loads((out / "checkpoints" / f"step-{step}" / "manifest.json").read_text())
    return {name: facts for name, facts in manifest.items() if name != "state.json"}


@contextmanager
def held_back(patch: pytest.MonkeyPatch, step: int) -> Iterator[threading.Event]:
    """Have the writer of a step's checkpoint wait for an event."""
    write, released = checkpoint.write_boxes, threading.Event()

    def late(path: Path, parts: Any) -> None:
        if path.parent.name == f".step-{step}.tmp":
            assert released.wait(60)
        write(path, parts)

    with patch.context() as patched:
        patched.setattr(checkpoint, "write_boxes", late)
        try:
            yield released
        finally:
            released.set()


def full(path: Path, parts: Any) -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def join_writer() -> None:
    for thread in threading.enumerate():
        if thread.name.startswith("checkpoint"):
            thread.join()


def test_the_same_checkpoints_and_numbers_as_without(tmp_path: Path) -> None:
    run(tmp_path / "at once", "fp8", change(checkpoint_every=2))
    run(tmp_path / "beside", "fp8", EVERY_SECOND)
    assert metrics(tmp_path / "beside") == metrics(tmp_path / "at once")
    for step in (4, 6):
        assert digests(tmp_path / "beside", step) == digests(tmp_path / "at once", step)
    assert (tmp_path / "beside" / "checkpoints" / "latest").read_text() == "step-6\n"


def test_a_checkpoint_that_is_late_is_that_of_its_own_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Weights, moments and logs go on while it is written."""
    config = change(checkpoint_every=2, keep=9)
    run(tmp_path / "whole", "fp8", config)
    beside = change(config, async_checkpoint=True)
    found: list[int | None] = []
    with held_back(monkeypatch, 2) as released:

        def look() -> None:
            found.append(CheckpointStore(tmp_path / "late" / "checkpoints", 9).latest())
            released.set()

        run(tmp_path / "late", "fp8", beside, progress=Saboteur(4, look), stop_after=5)
    assert found == [None], "four steps were taken before it was written"
    store = CheckpointStore(tmp_path / "late" / "checkpoints", 9)
    assert store.steps() == [2, 4, 5]
    assert digests(tmp_path / "late", 2) == digests(tmp_path / "whole", 2)
    for step in (5, 4):
        remove(store.path(step))
    run(tmp_path / "late", "fp8", beside)
    assert metrics(tmp_path / "late") == metrics(tmp_path / "whole")
    assert weights(tmp_path / "late") == weights(tmp_path / "whole")


def test_a_run_that_is_killed_meanwhile_keeps_the_one_before(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole, parts = tmp_path / "whole", tmp_path / "parts"
    run(whole, config=change(checkpoint_every=2))
    with held_back(monkeypatch, 4):

        def killed() -> None:
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            run(parts, config=EVERY_SECOND, progress=Saboteur(5, killed))
        assert newest(parts) == 2
        assert (parts / "checkpoints" / ".step-4.tmp").is_dir()
    join_writer()
    run(parts, config=EVERY_SECOND)
    assert metrics(parts) == metrics(whole)
    assert weights(parts) == weights(whole)
    assert not list((parts / "checkpoints").glob(".*"))


def test_an_error_of_the_run_does_not_lose_what_is_being_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with held_back(monkeypatch, 4) as released:

        def fail() -> None:
            threading.Timer(0.2, released.set).start()
            crash()

        with pytest.raises(RuntimeError, match="the machine died"):
            run(tmp_path, config=EVERY_SECOND, progress=Saboteur(5, fail))
    assert newest(tmp_path) == 4


def test_an_error_of_the_writer_stops_the_run_at_its_next_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    run(tmp_path, config=EVERY_SECOND, stop_after=2)
    with monkeypatch.context() as patch:
        patch.setattr(checkpoint, "write_boxes", full)
        message = r"cannot write the checkpoint .*step-4: No space left on device; free some space.*step-2"
        with pytest.raises(CheckpointError, match=message):
            run(tmp_path, config=EVERY_SECOND, progress=Saboteur(5, join_writer))
    assert lines(tmp_path)[-1]["step"] == 5
    assert sorted(p.name for p in (tmp_path / "checkpoints").iterdir()) == ["latest", "step-2"]
    whole = tmp_path / "whole"
    run(whole, config=EVERY_SECOND)
    run(tmp_path, config=EVERY_SECOND)
    assert metrics(tmp_path) == metrics(whole)
    assert weights(tmp_path) == weights(whole)


def test_a_signal_waits_for_what_is_being_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with held_back(monkeypatch, 2) as released:

        def ask() -> None:
            threading.Timer(0.2, released.set).start()
            os.kill(os.getpid(), signal.SIGTERM)

        with pytest.raises(Interrupted, match="SIGTERM after step 3 of 6: saved"):
            run(tmp_path, config=change(EVERY_SECOND, keep=9), progress=Saboteur(3, ask))
    assert CheckpointStore(tmp_path / "checkpoints", 9).steps() == [2, 3]


# --- several ranks -------------------------------------------------------------------------------------


def snapshot(ranks: ThreadRanks, step: int) -> Snapshot:
    own = {f"rank-{ranks.rank}/torch": torch.zeros(4, dtype=torch.uint8)}
    return Snapshot(step, {"model": {"w": torch.full((3,), float(step))}, "optimizer": {}, "rng": own}, {})


def test_the_first_rank_names_a_checkpoint_when_all_have_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write, released = checkpoint.write_boxes, threading.Event()

    def late(path: Path, parts: Any) -> None:
        if "-2-of-2" in path.name:
            assert released.wait(60)
        write(path, parts)

    monkeypatch.setattr(checkpoint, "write_boxes", late)

    def train(ranks: ThreadRanks) -> list[int | None]:
        store = CheckpointStore(tmp_path, 2, ranks)
        found = []
        with Saver(store, background=True) as saver:
            saver.save(snapshot(ranks, 1))
            saver.poll()
            found.append(store.latest())
            ranks.gather(None)
            released.set()
        found.append(store.latest())
        return found

    assert on_ranks(2, train) == [[None, 1]] * 2
    assert torch.equal(CheckpointStore(tmp_path, 2).load(1).tensors["model"]["w"], torch.ones(3))


@pytest.mark.parametrize("background", [False, True])
def test_a_tensor_that_one_rank_gets_later_is_saved_from_then_on(tmp_path: Path, background: bool) -> None:
    def train(ranks: ThreadRanks) -> None:
        with Saver(CheckpointStore(tmp_path, 9, ranks), background) as saver:
            for step in (1, 2, 3, 4):
                made = snapshot(ranks, step)
                if ranks.rank == 1 and step > 2:
                    made.tensors["model"]["more"] = torch.tensor(float(step))
                saver.save(made)

    assert on_ranks(2, train) == [None, None]
    for step in (1, 2, 3, 4):
        found = CheckpointStore(tmp_path, 9).load(step).tensors["model"]
        assert torch.equal(found["w"], torch.full((3,), float(step)))
        assert ("more" in found) == (step > 2)
        assert step < 3 or found["more"] == step


@pytest.mark.parametrize("rank", [0, 1])
def test_an_error_of_one_writer_stops_all_ranks_at_the_same_step(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rank: int
) -> None:
    write = checkpoint.write_boxes

    def spoiled(path: Path, parts: Any) -> None:
        if path.name == f"optimizer-{rank + 1}-of-2.safetensors" and ".step-2" in path.parent.name:
            full(path, parts)
        write(path, parts)

    monkeypatch.setattr(checkpoint, "write_boxes", spoiled)
    reached = [0, 0]

    def train(ranks: ThreadRanks) -> None:
        with Saver(CheckpointStore(tmp_path, 2, ranks), background=True) as saver:
            for step in range(1, 2000):
                reached[ranks.rank] = step
                if step <= 2:
                    saver.save(snapshot(ranks, step))
                saver.poll()

    found = on_ranks(2, train)
    with pytest.raises(CheckpointError, match=r"step-2: No space left on device; .*step-1"):
        raise found[rank]
    assert isinstance(found[1 - rank], threading.BrokenBarrierError)
    assert reached[0] == reached[1] < 1999
    assert sorted(p.name for p in tmp_path.iterdir()) == ["latest", "step-1"]
