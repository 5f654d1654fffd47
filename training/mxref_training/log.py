"""What a run writes into its logs, trackers and progress report, and the result that is read from the logs."""

from __future__ import annotations

import math
import statistics
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mxref.roles import GemmRole
from mxref_torch.step_context import RecipeSchedule
from mxref_training.log_files import LogFile, open_logs, read_lines
from mxref_training.observe import Tracking

if TYPE_CHECKING:
    from mxref_training.evaluate import Evaluation
    from mxref_training.open_run import OpenRun
    from mxref_training.steps import Taken

WINDOW, FEWEST, FLOOR = 100, 20, 0.005
"""Losses that a new one is compared with, at most and at least, and the smallest spread as a part of their median."""


class RunLog:
    """Writes what a run finds, and passes it to trackers and the progress report; the first rank's alone does so."""

    def __init__(self, run: OpenRun, phases: RecipeSchedule, track: str) -> None:
        """Open the logs, cut to the lengths that the run's checkpoint recorded, and start a tracker, if one is named.

        Raises:
            CheckpointError: as of `LogFile`.
            ConfigError: as of `Tracking`.
        """
        self._run, self._phases = run, phases
        self._files = open_logs(run.folder.path, run.logs) if run.ranks.first else {}
        kept = read_lines(run.folder.metrics) if run.ranks.first else ()
        self._recent = deque((line["loss"] for line in kept if _counts(line)), WINDOW)
        self._tracking = Tracking(track if run.ranks.first else "", run)
        quantizes = any(own.kind(role) != "bf16" for own in run.recipe.treatments() for role in GemmRole)
        if run.config.run.telemetry_every and not quantizes:
            run.sink.note("telemetry has no operands to measure: the recipe quantizes none")
        self.start_clock()

    def start_clock(self) -> None:
        """Measure the time of the next step from now on."""
        self._began = time.perf_counter()

    def add_step(self, taken: Taken) -> None:
        """Write a step."""
        run, note, step = self._run.config.run, self._run.sink.note, taken.step + 1
        line: dict[str, Any] = {
            "step": step,
            "tokens": step * run.step_tokens,
            "loss": _finite(taken.loss),
            "lr": taken.lr,
            "grad_norm": _finite(taken.norm),
        }
        if phase := self._phases.begins(taken.step):
            line["phase"] = phase
        if taken.widened:
            line["widened"] = True
            note(f"step {step} repeated: an operand left the range of the backend's fast GEMM")
        if taken.problem:
            line["skipped"] = taken.problem
            note(f"step {step} skipped: {taken.problem}")
        logged = (
            bool(phase or taken.problem or taken.widened) or step % run.log_every == 0 or step == run.steps
        )
        if logged:
            self._write("metrics", line)
            self._tracking.log(line)
        self._see(line, logged)
        rows = [{"step": step, **row} for row in taken.measured]
        for row in rows:
            self._write("telemetry", row)
        self._tracking.log(*rows)
        began, self._began = self._began, time.perf_counter()
        seconds = self._began - began
        self._write(
            "timing", {"step": step, "seconds": seconds, "tokens_per_second": run.step_tokens / seconds}
        )
        self._run.sink.step(step, None if taken.problem else taken.loss)

    def add_evaluation(self, step: int, found: Evaluation, widened: bool) -> None:
        """Write an evaluation after `step` steps, which has taken the time since the clock was started."""
        seconds, sink = time.perf_counter() - self._began, self._run.sink
        line = {
            "step": step,
            "tokens": step * self._run.config.run.step_tokens,
            "val_loss": _finite(found.loss),
            "val_perplexity": _finite(found.perplexity),
        }
        self._write("metrics", line | ({"widened": True} if widened else {}))
        self._tracking.log(line)
        self._write("timing", {"step": step, "eval_seconds": seconds})
        sink.validation(step, found.loss)
        if not math.isfinite(found.loss):
            sink.note(f"validation loss {found.loss} at step {step}")

    def _see(self, line: Mapping[str, Any], logged: bool) -> None:
        """Note a step if its loss is a spike, which changes nothing that is computed.

        A loss is a spike if it is more than `run.spike` spreads above the median of the last losses in
        `metrics.jsonl`. The spread is 1.4826 times the median distance from the median, which is the standard
        deviation of normal noise, and at least `FLOOR` of the median. Only losses in the log are compared with, so
        that a resumed run knows them.
        """
        run, recent = self._run.config.run, self._recent
        if not run.spike or not _counts(line):
            return
        loss, step = line["loss"], line["step"]
        if len(recent) >= FEWEST:
            median = statistics.median(recent)
            distance = statistics.median(abs(loss - median) for loss in recent)
            spread = max(1.4826 * distance, FLOOR * abs(median))
            # Losses that are 0, of text that is known by heart, have no spread to compare with.
            if spread and (spreads := (loss - median) / spread) > run.spike:
                samples = [(step - 1) * run.batch, step * run.batch - 1]
                facts = {"median": median, "spreads": spreads, "samples": samples}
                self._write("spikes", {key: line[key] for key in ("step", "loss", "grad_norm", "lr")} | facts)
                self._run.sink.note(
                    f"step {step}: loss {loss:.4f} is {spreads:.1f} spreads above the median {median:.4f} of the last "
                    f"{len(recent)}; its batch has the samples {samples[0]} to {samples[1]} (spikes.jsonl)"
                )
        if logged:
            recent.append(loss)

    def _write(self, name: str, line: Mapping[str, Any]) -> None:
        """Append a line to a log, which is made if it is missing, on the first rank."""
        if self._run.ranks.first:
            if name not in self._files:
                self._files[name] = LogFile(self._run.folder.path / f"{name}.jsonl")
            self._files[name].write(line)

    def lengths(self) -> dict[str, int]:
        """Flush the logs to the disk, and return their lengths by name, as a checkpoint records them."""
        return {name: file.length() for name, file in self._files.items()}

    def close(self) -> None:
        """Close the logs and the tracker."""
        self._tracking.close()
        for file in self._files.values():
            file.close()


def _counts(line: Mapping[str, Any]) -> bool:
    """Return whether a line is that of a step whose loss is finite and was not skipped."""
    return "lr" in line and line.get("loss") is not None and "skipped" not in line


def _finite(value: float) -> float | None:
    """Return the value as JSON can hold it."""
    return value if math.isfinite(value) else None


@dataclass(frozen=True)
class TrainResult:
    """The result of a run since step 0, including the parts before it was resumed."""

    losses: list[tuple[int, float]]
    """Validation loss by step, in nats per token; NaN where it was not finite."""
    final_loss: float
    """The last validation loss; NaN before the first evaluation."""
    train_losses: list[float]
    """Training loss of every step that was logged and not skipped."""
    seconds: float
    """Seconds spent in training steps."""
    tokens: int
    diverged: bool
    """Whether the run diverged, by the rule of `has_diverged`."""
    skipped_steps: int
    widened_steps: int
    """Steps that were repeated because an operand left the range of the backend's fast GEMM."""
    stopped: str = ""
    """Signal that asked the run to stop when it was at its last step; empty if there was none."""


def read_result(folder: Path, stopped: str = "") -> TrainResult:
    """Return the result so far of the run in a folder, which a signal may have stopped."""
    lines = list(read_lines(folder / "metrics.jsonl"))
    losses = [
        (x["step"], math.nan if x["val_loss"] is None else x["val_loss"]) for x in lines if "val_loss" in x
    ]
    steps = [line for line in lines if "lr" in line]
    return TrainResult(
        losses=losses,
        final_loss=losses[-1][1] if losses else math.nan,
        train_losses=[line["loss"] for line in steps if "skipped" not in line],
        seconds=sum(line.get("seconds", 0.0) for line in read_lines(folder / "timing.jsonl")),
        tokens=max((line["tokens"] for line in lines), default=0),
        diverged=has_diverged([(float(step), loss) for step, loss in losses]),
        skipped_steps=sum("skipped" in line for line in steps),
        widened_steps=sum("widened" in line for line in steps),
        stopped=stopped,
    )


Point = tuple[float, float]
"""Tokens trained on, and the validation loss in nats per token."""

SPIKE = 0.1
"""Nats by which a loss must have risen before a run can be called diverged."""


def has_diverged(curve: Sequence[Point]) -> bool:
    """Return whether a curve ends in a non-finite loss or has risen again: the rule `divergence` of a report."""
    losses = [loss for _, loss in curve]
    if not all(math.isfinite(loss) for loss in losses):
        return True
    if len(losses) < 2:
        return False
    risen = losses[-1] - min(losses)
    return risen > SPIKE and risen > (losses[0] - min(losses)) / 2
