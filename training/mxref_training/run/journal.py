"""The journal of a run: writes its lines of metrics and timing, and passes them to trackers and the progress report."""

from __future__ import annotations

import math
import time
from collections.abc import Mapping
from typing import Any

from mxref_torch.step_context import RecipeSchedule
from mxref_training.config import TrainConfig
from mxref_training.run.evaluate import Evaluation
from mxref_training.run.folder import RunFolder
from mxref_training.run.metrics_log import Mark, MetricsLog
from mxref_training.run.observe import Observer
from mxref_training.run.progress import ProgressSink
from mxref_training.run.silent import SilentObserver
from mxref_training.run.spikes import Spikes
from mxref_training.run.stepping import Taken


class Journal:
    """Writes the results of each step and each evaluation."""

    def __init__(
        self,
        config: TrainConfig,
        folder: RunFolder,
        schedule: RecipeSchedule,
        sink: ProgressSink,
        marks: Mapping[str, Mark],
    ) -> None:
        """Open the logs, cut to the lengths that a checkpoint recorded.

        Raises:
            CheckpointError: a log is missing or changed, or cannot be written.
        """
        self._run, self._schedule, self._sink = config.run, schedule, sink
        self._metrics = MetricsLog(folder.metrics, marks.get("metrics"))
        self._timing = MetricsLog(folder.timing, marks.get("timing"))
        self._spikes = Spikes(config.run, folder, sink, marks.get("spikes"))
        self._began = time.perf_counter()

    def start_clock(self) -> None:
        """Measure the time of the next step from now on."""
        self._began = time.perf_counter()

    def add_step(self, taken: Taken, observer: Observer | SilentObserver) -> None:
        """Write a step."""
        run, step, problem = self._run, taken.step + 1, taken.problem
        line: dict[str, Any] = {
            "step": step,
            "tokens": step * run.step_tokens,
            "loss": _finite(taken.loss),
            "lr": taken.lr,
            "grad_norm": _finite(taken.norm),
        }
        phase = self._schedule.begins(taken.step)
        if phase:
            line["phase"] = phase
        if taken.widened:
            line["widened"] = True
            self._sink.note(f"step {step} repeated: an operand left the range of the backend's fast GEMM")
        if problem:
            line["skipped"] = problem
            self._sink.note(f"step {step} skipped: {problem}")
        logged = bool(phase or problem or taken.widened) or step % run.log_every == 0 or step == run.steps
        if logged:
            self._metrics.write(line)
            observer.log(line)
        self._spikes.see(line, logged)
        began, self._began = self._began, time.perf_counter()
        seconds = self._began - began
        self._timing.write({"step": step, "seconds": seconds, "tokens_per_second": run.step_tokens / seconds})
        self._sink.step(step, None if problem else taken.loss)

    def add_evaluation(
        self, step: int, found: Evaluation, widened: bool, seconds: float, observer: Observer | SilentObserver
    ) -> None:
        """Write an evaluation after `step` steps."""
        line = {
            "step": step,
            "tokens": step * self._run.step_tokens,
            "val_loss": _finite(found.loss),
            "val_perplexity": _finite(found.perplexity),
        }
        self._metrics.write(line | ({"widened": True} if widened else {}))
        observer.log(line)
        self._timing.write({"step": step, "eval_seconds": seconds})
        self._sink.validation(step, found.loss)
        if not math.isfinite(found.loss):
            self._sink.note(f"validation loss {found.loss} at step {step}")

    def marks(self) -> dict[str, Any]:
        """Return what a checkpoint records of the logs."""
        logs = {"metrics": self._metrics.mark().to_table(), "timing": self._timing.mark().to_table()}
        return logs | self._spikes.marks()

    def close(self) -> None:
        """Close the logs."""
        self._metrics.close()
        self._timing.close()
        self._spikes.close()


def _finite(value: float) -> float | None:
    """Return the value as JSON can hold it."""
    return value if math.isfinite(value) else None
