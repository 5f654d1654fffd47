"""A loss far above the recent ones is noted with the samples of its batch, and changes nothing."""

from __future__ import annotations

import json
import statistics
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from mxref_training.run.folder import RunFolder
from mxref_training.run.metrics_log import Mark
from mxref_training.run.spikes import FEWEST, WINDOW, Spikes
from training_setup import CONFIG, CORPUS, Saboteur, change, crash, metrics, newest, run, weights

LIMIT = 10.0
CALM = [3.0 + 0.01 * (step % 7) for step in range(200)]


def line(step: int, loss: float | None, **more: Any) -> dict[str, Any]:
    return {"step": step, "tokens": step, "loss": loss, "lr": 1e-3, "grad_norm": 1.5, **more}


class Watched:
    """A run's folder, what is noted, and its log of metrics."""

    def __init__(self, path: Path, limit: float = LIMIT, mark: Mark | None = None) -> None:
        self.folder, self.sink = RunFolder(path, 1), Saboteur(0, crash)
        self.spikes = Spikes(replace(CONFIG.run, spike=limit), self.folder, self.sink, mark)

    def see(self, *lines: dict[str, Any], logged: bool = True) -> list[dict[str, Any]]:
        """Show steps; return all that was noted so far."""
        for found in lines:
            if logged:
                with self.folder.metrics.open("a") as file:
                    file.write(json.dumps(found) + "\n")
            self.spikes.see(found, logged)
        path = self.folder.spikes
        return [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []


def test_losses_of_zero_have_no_spread_and_do_not_stop_the_run(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    assert watched.see(*(line(step, 0.0) for step in range(1, 51)), line(51, 0.25)) == []


def test_a_spike_names_step_loss_norm_and_samples(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    assert watched.see(*(line(step, CALM[step]) for step in range(1, 51))) == []
    (found,) = watched.see(line(51, 5.0))
    last = CALM[1:51]
    median = statistics.median(last)
    spread = 1.4826 * statistics.median(abs(x - median) for x in last)
    assert found == {
        "step": 51, "loss": 5.0, "grad_norm": 1.5, "lr": 1e-3, "median": median,
        "spreads": pytest.approx((5.0 - median) / spread), "samples": [200, 203],
    }  # fmt: skip
    assert watched.sink.notes == [
        f"step 51: loss 5.0000 is {found['spreads']:.1f} spreads above the median {median:.4f} of the last 50; its "
        "batch has the samples 200 to 203 (spikes.jsonl)"
    ]


@pytest.mark.parametrize(
    ("before", "loss", "expected"),
    [
        (CALM[: FEWEST - 1], 9.0, False),
        (CALM[:FEWEST], 9.0, True),
        (CALM, 2.0, False),
        ([9.0] * 120 + CALM[:WINDOW], 5.0, True),
        ([9.0] * 120 + CALM[: WINDOW // 4], 9.4, False),
        ([3.0] * 50, 3.0 * 1.049, False),
        ([3.0] * 50, 3.0 * 1.051, True),
    ],
    ids=["too few", "enough", "below", "old ones are forgotten", "median", "floor", "above the floor"],
)
def test_the_rule(tmp_path: Path, before: list[float], loss: float, expected: bool) -> None:
    watched = Watched(tmp_path)
    watched.see(*(line(step, x) for step, x in enumerate(before, 1)))
    assert bool(watched.see(line(len(before) + 1, loss))) == expected


def test_off(tmp_path: Path) -> None:
    watched = Watched(tmp_path, limit=0.0)
    assert watched.see(*(line(step, x) for step, x in enumerate(CALM, 1)), line(201, 99.0)) == []
    assert watched.sink.notes == []


def test_evaluations_and_skipped_steps_are_no_losses(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    watched.see(*(line(step, x) for step, x in enumerate(CALM[:FEWEST], 1)))
    skipped = line(21, 99.0, skipped="gradient norm inf"), line(22, None, skipped="loss nan")
    assert watched.see(*skipped, {"step": 22, "tokens": 1, "val_loss": 99.0}) == []


def test_a_resumed_run_notes_the_same(tmp_path: Path) -> None:
    """It knows the losses from `metrics.jsonl`, so those that were not logged count for nobody."""
    losses = [*CALM[:50], 6.0, *CALM[:10], 7.0, *CALM[:9], 8.0]
    noted = {}
    for name, ends in (("whole", ()), ("parts", (20, 55, 70))):
        (tmp_path / name).mkdir()
        watched = Watched(tmp_path / name)
        for step, loss in enumerate(losses, 1):
            if step in ends:
                marks = watched.spikes.marks()
                assert bool(marks) == (step > 51)
                watched.see(line(step, 99.0), logged=False)  # lost with the process
                watched.spikes.close()
                watched = Watched(tmp_path / name, mark=Mark(**marks["spikes"]) if marks else None)
            found = watched.see(line(step, loss), logged=step % 2 == 0)
        noted[name] = [x["step"] for x in found]
    assert noted["parts"] == noted["whole"] == [51, 62, 72]
    assert (tmp_path / "whole" / "spikes.jsonl").read_bytes() == (
        tmp_path / "parts" / "spikes.jsonl"
    ).read_bytes()


def test_a_run_notes_the_samples_that_it_was_given_and_the_numbers_stay(tmp_path: Path) -> None:
    """One window of the data has tokens that nothing prepares for."""
    config = replace(
        change(steps=60, checkpoint_every=16, eval_every=60), optim=replace(CONFIG.optim, lr=1e-2, warmup=0)
    )
    ids = np.tile(np.arange(4, dtype=np.uint16), 1000)
    ids[2000:2032] = np.random.default_rng(0).permutation(np.arange(32, 64))
    corpus = replace(CORPUS, train=replace(CORPUS.train, ids=ids, sha256="1" * 64))
    sink = Saboteur(0, crash)
    run(tmp_path / "noted", config=config, corpus=corpus, progress=sink)
    run(tmp_path / "off", config=change(config, spike=0.0), corpus=corpus)
    assert metrics(tmp_path / "noted") == metrics(tmp_path / "off")
    assert weights(tmp_path / "noted") == weights(tmp_path / "off")
    assert not (tmp_path / "off" / "spikes.jsonl").exists()
    found = [json.loads(text) for text in (tmp_path / "noted" / "spikes.jsonl").read_text().splitlines()]
    assert len(found) > 1
    assert len(found) == len(sink.notes)
    first, last = found[0]["samples"]
    inputs, targets = corpus.loader(config.run).take([*range(first, last + 1)])
    assert max(inputs.max(), targets.max()) >= 32

    parts = tmp_path / "parts"
    with pytest.raises(RuntimeError):
        run(parts, config=config, corpus=corpus, progress=Saboteur(54, crash))
    assert newest(parts) == 48
    run(parts, config=config, corpus=corpus)
    assert (parts / "spikes.jsonl").read_bytes() == (tmp_path / "noted" / "spikes.jsonl").read_bytes()
    run(parts, config=config, corpus=corpus, resume=False, stop_after=1)
    assert not (parts / "spikes.jsonl").exists()
