"""Keeps track of a ladder's runs: which are finished, the line printed for each, and the results after it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from mxref.backend import Backend
from mxref_training.interrupt import Interrupted
from mxref_training.lab.arm import ArmRun
from mxref_training.lab.result_file import Record
from mxref_training.lab.results import summary
from mxref_training.lab.runner import Runner, Trainer, Watch, train_arm
from mxref_training.log import TrainResult

_SPARSE = 10
"""Results are written again when a tenth more runs have finished: all runs wait for it, and it grows slower."""


def one_by_one(trainer: Trainer, backend: Backend, progress: Any) -> Runner:
    """Return the runner that trains runs one after another in this process."""

    def train(runs: Sequence[ArmRun], watch: Watch, corpus: Any, then: str = "") -> None:
        asked = ""

        def noting(*arguments: Any, **options: Any) -> TrainResult:
            nonlocal asked
            result = trainer(*arguments, **options)
            asked = asked or result.stopped
            return result

        for run in runs:
            watch.begin(run)
            watch.done(run, train_arm(run, noting, backend, corpus, progress))
            follows = then if run is runs[-1] else "the next run"
            if asked and follows:
                raise Interrupted(
                    f"{asked} in the last step of {run.title}; the same command goes on with {follows}"
                )

    return train


class Tally:
    """Collects the records, prints a line about each run, and writes the results from time to time."""

    def __init__(
        self,
        runs: list[ArmRun],
        wanted: list[ArmRun],
        results: Callable[[dict[str, Record]], Any],
        say: Callable[[str], None],
    ) -> None:
        """`runs` are all whose results count, and `wanted` those to train; `results` writes what the records say."""
        self.records = {run.title: record for run in runs if (record := run.finished())}
        self._results, self._say, self._wanted = results, say, wanted
        self._written = 0  # how many records the last results had
        self._titles = {run.title: f"[{i}/{len(wanted)}] {run.title}" for i, run in enumerate(wanted, 1)}

    def unfinished(self) -> list[ArmRun]:
        """Return the runs that remain to be trained, after printing a line for each finished one."""
        for run in self._wanted:
            if run.title in self.records:
                self.begin(run)
                run.drop_checkpoints()
        return [run for run in self._wanted if run.title not in self.records]

    def begin(self, run: ArmRun) -> None:
        """Prepare a run's directory, and print what will happen."""
        self._say(f"{self._titles[run.title]}: {run.prepare()}")

    def done(self, run: ArmRun, record: Record) -> None:
        """Keep the record of a finished run. Write the results if some more runs have finished since they were."""
        self.records[run.title] = record
        finished = len(self.records)
        if _SPARSE * (finished - self._written) >= finished:
            self._results(self.records)
            self._written = finished
        self._say(f"{self._titles[run.title]}: {summary(record)}")

    def failed(self, run: ArmRun, reason: str) -> None:
        """Print why a run has no result."""
        self._say(f"{self._titles[run.title]}: failed: {reason}")
