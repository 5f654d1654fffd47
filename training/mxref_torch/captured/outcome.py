"""The outcome of an optimizer step."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class StepOutcome:
    """The outcome of a step, read after it."""

    step: int
    losses: tuple[float, ...]
    """The losses of the micro-batches, each divided by their number."""
    norm: float
    """The norm of all gradients before clipping; NaN if the loss is not finite."""
    nonfinite: str = ""
    """The first weight, in the order of the backward pass, whose gradient is not finite; else empty."""
    widened: bool = False
    """Whether the step was repeated, because an operand had left the range of the backend's fast GEMM."""

    @property
    def loss(self) -> float:
        """The loss of the step."""
        total = 0.0
        for loss in self.losses:
            total += loss
        return total

    @property
    def updated(self) -> bool:
        """Whether the weights were updated: loss and norm are finite."""
        return math.isfinite(self.loss) and math.isfinite(self.norm)
