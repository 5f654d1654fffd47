"""Numbers of one validation curve: where it meets the target, its late loss, its slope, and what looks wrong."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from statistics import fmean, linear_regression

from mxref_training.errors import ConfigError
from mxref_training.log import Point

LATE = 0.95
"""Evaluations after this share of the tokens make up the loss at equal tokens."""
RISE = 0.3
"""Nats above its own minimum with which a run may end before it is flagged."""


class Reach(StrEnum):
    """Whether and when an arm reaches the target."""

    CROSSED = "crossed"
    FIRST = "first"
    """Reached at the first evaluation: the crossing is there or earlier."""
    NEVER = "never"
    """Not reached within the budget: the crossing is censored."""
    DIVERGED = "diverged"


@dataclass(frozen=True)
class Crossing:
    """Where a curve meets the target; a bound unless `reach` is `crossed`."""

    reach: Reach
    tokens: float


def finite_part(curve: Sequence[Point]) -> list[Point]:
    """Return the curve up to its first loss that is not finite."""
    bad = (i for i, (_, loss) in enumerate(curve) if not math.isfinite(loss))
    return list(curve[: next(bad, len(curve))])


def loss_at(curve: Sequence[Point], tokens: float) -> float:
    """Return the loss at a number of tokens, interpolated; ConfigError outside the evaluated range."""
    for (t0, l0), (t1, l1) in pairwise(curve):
        if t0 <= tokens <= t1:
            return l0 + (l1 - l0) * (tokens - t0) / (t1 - t0)
    raise ConfigError(
        f"no two evaluations enclose {tokens:,.0f} tokens; evaluate more often (run.eval_every) "
        "or train longer (run.steps)"
    )


def late_loss(curve: Sequence[Point], budget: float) -> float:
    """Return the loss at equal tokens: the mean of the evaluations of the last 5 % of the tokens, or the last one.

    Args:
        curve: not empty.
        budget: tokens of the whole run.
    """
    late = [loss for tokens, loss in curve if tokens >= LATE * budget]
    return fmean(late) if late else curve[-1][1]


def late_slope(curve: Sequence[Point], budget: float) -> float:
    """Return the slope of the loss over the logarithm of the tokens, by least squares over the last half of the tokens.

    Args:
        curve: finite losses.
        budget: tokens of the whole run.

    Returns:
        Nats per e-fold of tokens; NaN with fewer than two evaluations there.
    """
    late = [(math.log(tokens), loss) for tokens, loss in curve if tokens >= budget / 2]
    return linear_regression(*zip(*late, strict=True)).slope if len(late) > 1 else math.nan


def flags(curve: Sequence[Point], vocabulary: int) -> list[str]:
    """Return what looks wrong about a run by RULES["flag"], whether it counts as diverged or not.

    Args:
        curve: the evaluations; a loss that is not finite is the matter of the divergence rule alone.
        vocabulary: entries of the tokenizer.
    """
    losses = [loss for _, loss in finite_part(curve)]
    if not losses:
        return []
    found, uniform = [], math.log(vocabulary)
    if min(losses) > uniform:
        found.append(
            f"its loss stays above that of a uniform guess, {uniform:.2f}: it ends at {losses[-1]:.2f}"
        )
    if losses[-1] > min(losses) + RISE:
        found.append(f"it ends {losses[-1] - min(losses):.2f} nats above its own minimum")
    return found


def first_crossing(curve: Sequence[Point], target: float) -> Crossing:
    """Return the first crossing of the piecewise-linear curve; a loss equal to the target has reached it.

    Args:
        curve: (tokens, loss) with tokens ascending; it counts up to its first non-finite loss.
        target: nats per token.

    Returns:
        `crossed` at the interpolated tokens, `first` at the first evaluation, or `never` at the last.
    """
    finite = finite_part(curve)
    if not finite:
        return Crossing(Reach.NEVER, 0.0)
    if finite[0][1] <= target:
        return Crossing(Reach.FIRST, finite[0][0])
    for (t0, l0), (t1, l1) in pairwise(finite):
        if l1 <= target:
            return Crossing(Reach.CROSSED, t0 + (t1 - t0) * (l0 - target) / (l0 - l1))
    return Crossing(Reach.NEVER, finite[-1][0])


def spacing(curve: Sequence[Point], tokens: float) -> float:
    """Return the distance between the two evaluations around a number of tokens, or the nearest two."""
    gaps = [(max(t0 - tokens, tokens - t1, 0.0), t1 - t0) for (t0, _), (t1, _) in pairwise(curve)]
    return min(gaps)[1] if gaps else math.inf
