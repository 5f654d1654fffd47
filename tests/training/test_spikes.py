"""A loss far above the recent ones is noted with the samples of its batch, and changes nothing."""

from __future__ import annotations

import json
import math
import statistics
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from mxref_training.distributed.ranks import SOLE
from mxref_training.log import FEWEST, WINDOW, RunLog
from mxref_training.run_folder import RunFolder
from mxref_training.steps import Taken
from training_setup import CONFIG, CORPUS, SR, Saboteur, change, crash, metrics, newest, run, weights

LIMIT = 10.0
CALM = [3.0 + 0.01 * (step % 7) for step in range(200)]


class Watched:
    """The log of a run of which only its losses are given."""

    def __init__(
        self, path: Path, limit: float = LIMIT, kept: dict[str, int] | None = None, log_every: int = 1
    ) -> None:
        self.path, self.sink = path, Saboteur(0, crash)
        path.mkdir(exist_ok=True)
        config = replace(CONFIG, run=replace(CONFIG.run, spike=limit, steps=10_000, log_every=log_every))
        run = SimpleNamespace(
            folder=RunFolder(path, 1),
            config=config,
            recipe=SR,
            sink=self.sink,
            step=0,
            ranks=SOLE,
            logs=kept or {},
        )
        schedule = SimpleNamespace(begins=lambda step: "")
        self.log = RunLog(run, schedule, "")  # type: ignore[arg-type]

    def see(self, *losses: float, first: int = 1, problem: str = "") -> list[dict[str, Any]]:
        """Show steps; return all that was noted so far."""
        for step, loss in enumerate(losses, first):
            self.log.add_step(Taken(step - 1, 1e-3, loss, 1.5, problem, widened=False))
        path = self.path / "spikes.jsonl"
        return [json.loads(text) for text in path.read_text().splitlines()] if path.exists() else []


def test_losses_of_zero_have_no_spread_and_do_not_stop_the_run(tmp_path: Path) -> None:
    assert Watched(tmp_path).see(*[0.0] * 50, 0.25) == []


def test_a_spike_names_step_loss_norm_and_samples(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    assert watched.see(*CALM[:50]) == []
    (found,) = watched.see(5.0, first=51)
    median = statistics.median(CALM[:50])
    spread = 1.4826 * statistics.median(abs(x - median) for x in CALM[:50])
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
    watched.see(*before)
    assert bool(watched.see(loss, first=len(before) + 1)) == expected


def test_off(tmp_path: Path) -> None:
    watched = Watched(tmp_path, limit=0.0)
    assert watched.see(*CALM, 99.0) == []
    assert watched.sink.notes == []


def test_skipped_steps_are_no_losses(tmp_path: Path) -> None:
    watched = Watched(tmp_path)
    watched.see(*CALM[:FEWEST])
    assert watched.see(99.0, math.nan, first=FEWEST + 1, problem="gradient norm inf") == []


def test_losses_that_are_not_in_the_log_count_neither_before_nor_after_a_resume(tmp_path: Path) -> None:
    watched = Watched(tmp_path, log_every=2)
    watched.see(*CALM[: 2 * FEWEST - 2])
    watched.see(3.0, first=2 * FEWEST - 1, problem="gradient norm inf")
    assert watched.see(9.0, first=2 * FEWEST + 1) == []
    kept = watched.log.lengths()
    watched.log.close()
    assert Watched(tmp_path, kept=kept, log_every=2).see(9.0, first=2 * FEWEST + 1) == []


@pytest.mark.parametrize("noted_before", [False, True], ids=["the first spike", "one spike before"])
def test_a_resume_takes_back_the_spikes_beyond_its_checkpoint(tmp_path: Path, noted_before: bool) -> None:
    """A run that stops after a spike and resumes before it notes the spike once, and not those of its lost steps."""
    watched = Watched(tmp_path)
    watched.see(*CALM[:50], *[5.0] * noted_before)
    kept, first = watched.log.lengths(), 51 + noted_before
    assert len(watched.see(6.0, 7.0, first=first)) == 2 + noted_before
    watched.log.close()
    resumed = Watched(tmp_path, kept=kept)
    assert [line["step"] for line in resumed.see(3.0, first=first)] == [51] * noted_before
    assert [line["step"] for line in resumed.see(7.0, first=first + 1)] == [51] * noted_before + [first + 1]


def test_a_resumed_run_compares_with_the_newest_losses(tmp_path: Path) -> None:
    """Of the 220 losses before the checkpoint the first 120 are high: the window has none of them."""
    before = [9.0] * 120 + CALM[:WINDOW]
    (whole,) = Watched(tmp_path / "whole").see(*before, 5.0)
    stopped = Watched(tmp_path / "resumed")
    stopped.see(*before)
    kept = stopped.log.lengths()
    stopped.log.close()
    assert Watched(tmp_path / "resumed", kept=kept).see(5.0, first=len(before) + 1) == [whole]
    assert whole["median"] == statistics.median(CALM[:WINDOW])


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
