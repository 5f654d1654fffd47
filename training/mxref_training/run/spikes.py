"""Losses far above the recent ones, noted with the samples of their batch. Nothing that is computed depends on them.

A loss is a spike if it is more than `run.spike` spreads above the median of the last losses. These are the losses of
up to `WINDOW` lines of `metrics.jsonl` before it, and at least `FEWEST`. The spread is 1.4826 times the median distance
from the median, which is the standard deviation of normal noise, and at least `FLOOR` of the median.
"""

from __future__ import annotations

import statistics
from collections import deque
from collections.abc import Mapping
from typing import Any

from mxref_training.config import RunConfig
from mxref_training.durable import remove
from mxref_training.run.folder import RunFolder
from mxref_training.run.metrics_log import Mark, MetricsLog, read_lines
from mxref_training.run.progress import ProgressSink

WINDOW = 100
FEWEST = 20
FLOOR = 0.005


class Spikes:
    """Writes `spikes.jsonl`; a run without spikes has no such file."""

    def __init__(self, run: RunConfig, folder: RunFolder, sink: ProgressSink, mark: Mark | None) -> None:
        """Go on from the lines of `metrics.jsonl`, and with the part of `spikes.jsonl` that a checkpoint recorded.

        Raises:
            CheckpointError: that part is missing or changed.
        """
        self._run, self._path, self._sink = run, folder.spikes, sink
        self._log: MetricsLog | None = None
        if mark is not None:
            self._log = MetricsLog(self._path, mark)
        elif self._path.exists():
            remove(self._path)  # of steps that are repeated
        logged = (line["loss"] for line in read_lines(folder.metrics) if _counts(line)) if run.spike else ()
        self._losses = deque(logged, WINDOW)

    def see(self, line: Mapping[str, Any], logged: bool) -> None:
        """Note a step if its loss is a spike.

        Args:
            line: the step as in `metrics.jsonl`.
            logged: whether it is written there. Only such losses are compared with, so that a resumed run knows them.
        """
        if not self._run.spike or not _counts(line):
            return
        if len(self._losses) >= FEWEST:
            self._compare(line)
        if logged:
            self._losses.append(line["loss"])

    def _compare(self, line: Mapping[str, Any]) -> None:
        median = statistics.median(self._losses)
        distance = statistics.median(abs(loss - median) for loss in self._losses)
        spread = max(1.4826 * distance, FLOOR * abs(median))
        # Losses that are 0, of text that is known by heart, have no spread to compare with.
        if not spread or (spreads := (line["loss"] - median) / spread) <= self._run.spike:
            return
        last = line["step"] * self._run.batch - 1
        first = last - self._run.batch + 1
        if self._log is None:
            self._log = MetricsLog(self._path)
        keys = ("step", "loss", "grad_norm", "lr")
        self._log.write(
            {key: line[key] for key in keys}
            | {"median": median, "spreads": spreads, "samples": [first, last]}
        )
        self._sink.note(
            f"step {line['step']}: loss {line['loss']:.4f} is {spreads:.1f} spreads above the median {median:.4f} "
            f"of the last {len(self._losses)}; its batch has the samples {first} to {last} ({self._path.name})"
        )

    def marks(self) -> dict[str, Any]:
        """Return what a checkpoint records of the log; nothing if there was no spike."""
        return {} if self._log is None else {"spikes": self._log.mark().to_table()}

    def close(self) -> None:
        """Close the log."""
        if self._log is not None:
            self._log.close()


def _counts(line: Mapping[str, Any]) -> bool:
    """Return whether a line is that of a step whose loss is finite and was not skipped."""
    return "lr" in line and line.get("loss") is not None and "skipped" not in line
