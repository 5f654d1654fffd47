"""The rule that decides whether a run has diverged."""

from __future__ import annotations

import math
from collections.abc import Sequence

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
