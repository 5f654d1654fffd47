"""The result of a run, read from its logs."""

from __future__ import annotations

import math
from dataclasses import dataclass

from mxref_training.config import TrainConfig
from mxref_training.run.divergence import has_diverged
from mxref_training.run.folder import RunFolder
from mxref_training.run.metrics_log import read_lines


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
    """Whether the run diverged, by the rule of `mxref_training.run.divergence.has_diverged`."""
    skipped_steps: int
    widened_steps: int
    """Steps that were repeated because an operand left the range of the backend's fast GEMM."""
    stopped: str = ""
    """Signal that asked the run to stop when it was at its last step; empty if there was none."""


def outcome(folder: RunFolder, config: TrainConfig) -> TrainResult:
    """Return the result so far of the run in a folder."""
    lines = list(read_lines(folder.metrics))
    losses = [
        (x["step"], math.nan if x["val_loss"] is None else x["val_loss"]) for x in lines if "val_loss" in x
    ]
    steps = [line for line in lines if "lr" in line]
    seconds = sum(line.get("seconds", 0.0) for line in read_lines(folder.timing))
    tokens = max((line["tokens"] for line in lines), default=0)
    return TrainResult(
        losses=losses,
        final_loss=losses[-1][1] if losses else math.nan,
        train_losses=[line["loss"] for line in steps if "skipped" not in line],
        seconds=seconds,
        tokens=tokens,
        diverged=has_diverged([(float(step), loss) for step, loss in losses]),
        skipped_steps=sum("skipped" in line for line in steps),
        widened_steps=sum("widened" in line for line in steps),
    )
