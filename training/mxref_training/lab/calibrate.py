"""Times a few steps of each cost class, as many runs at a time as the ladder's, so that the whole can be estimated."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from statistics import median
from typing import Any

from mxref_training.durable import remove
from mxref_training.lab.arm import ArmRun
from mxref_training.lab.costs import Costs, Rate, cost_class
from mxref_training.lab.fingerprint import DESIGN
from mxref_training.lab.result_file import Record
from mxref_training.lab.runner import Runner
from mxref_training.log_files import read_lines

STEPS = 16
"""Optimizer steps of a calibration. The second half is timed: the first one compiles and captures."""
_FOLDER = "calibration"


def calibrate(runs: Sequence[ArmRun], places: int, out: Path, train: Runner, corpus: Any, say: Any) -> Costs:
    """Return the rate of each cost class among runs of a ladder, measured by short runs whose files are deleted.

    Args:
        runs: the runs of the ladder.
        places: how many train at a time; no fewer calibrations do, so that they share devices as the runs will.
        out: directory of the ladder.
        train: trains runs.
        corpus: the tokens.
        say: prints one line.
    """
    by_class: dict[str, ArmRun] = {}
    for run in runs:
        if run.config.run.steps > STEPS:  # training a shorter run takes no longer than calibrating it
            by_class.setdefault(cost_class(run.recipe), run)
    copies = -(-places // max(1, len(by_class)))
    folder = out / _FOLDER
    watch = _Stopwatch(say)
    try:
        short = [_short(run, folder, copy) for copy in range(copies) for run in by_class.values()]
        train(short, watch, corpus, then="the ladder")
    finally:
        if folder.exists():
            remove(folder)
    costs = Costs()
    for name, found in watch.rates.items():
        costs.rates[name] = Rate(
            max(rate.start for rate in found),
            max(rate.step for rate in found),
            max(rate.evaluation for rate in found),
        )
    return costs


def _short(run: ArmRun, out: Path, copy: int) -> ArmRun:
    short = replace(run.config.run, eval_every=STEPS, checkpoint_every=0, log_every=1, telemetry_every=0)
    key = run.key | {"run": run.key["run"] | {"eval_every": STEPS, "log_every": 1}, DESIGN: f"{STEPS} steps"}
    config = replace(run.config, run=short)
    arm = replace(run.arm, label=f"calibration of {run.arm.label}")
    return replace(
        run,
        arm=arm,
        out=out,
        seed=copy,
        config=config,
        key=key,
        start=None,
        stops=(STEPS,),
        keep_checkpoints=False,
    )


@dataclass
class _Stopwatch:
    """Reads the time of each calibration; a `Watch`."""

    say: Any
    rates: dict[str, list[Rate]] = field(default_factory=dict)
    _began: dict[str, float] = field(default_factory=dict)

    def begin(self, run: ArmRun) -> None:
        """Prepare a run's directory."""
        self.say(f"{run.title}: {run.prepare()}")
        self._began[run.name] = time.monotonic()

    def done(self, run: ArmRun, record: Record) -> None:
        """Read the times of a run."""
        whole = time.monotonic() - self._began[run.name]
        lines = list(read_lines(run.folder / "timing.jsonl"))
        steps = [line["seconds"] for line in lines if "seconds" in line]
        evaluations = [line["eval_seconds"] for line in lines if "eval_seconds" in line]
        if len(steps) < STEPS or not evaluations:
            self.say(f"{run.title}: not timed, because it ended early: {record['reason']}")
            return
        step, evaluation = median(steps[STEPS // 2 :]), median(evaluations)
        start = max(0.0, whole - step * STEPS - evaluation)
        self.rates.setdefault(cost_class(run.recipe), []).append(Rate(start, step, evaluation))
        self.say(f"{run.title}: {1000 * step:.1f} ms a step, {start:.0f} s to start")

    def failed(self, run: ArmRun, reason: str) -> None:
        """Print why a run was not timed."""
        self.say(f"{run.title}: failed: {reason}")
