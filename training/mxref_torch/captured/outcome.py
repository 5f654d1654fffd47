"""What an optimizer step came to."""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class StepOutcome:
    """What a step came to, read after it."""

    step: int
    losses: tuple[float, ...]
    """Of the micro-batches, each divided by their number."""
    norm: float
    """Of all gradients before clipping; NaN where the loss is not finite."""
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
