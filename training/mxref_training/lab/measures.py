"""The table of a ladder's finished runs: for each arm and seed the validation curve, and what is measured on it."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import pairwise
from statistics import fmean, linear_regression
from typing import TYPE_CHECKING, Any

from mxref_training.errors import ConfigError
from mxref_training.log import Point, has_diverged

if TYPE_CHECKING:
    from mxref_training.config import TrainConfig
    from mxref_training.lab.ladder import Ladder
    from mxref_training.lab.result_file import Record

LATE = 0.95
"""Evaluations after this share of the tokens make up the loss at equal tokens."""
RISE = 0.3
"""Nats above its own minimum with which a run may end before it is flagged."""

Curve = Sequence[Point]
Runs = Mapping[str, Mapping[int, float]]
"""By arm and seed: a measure of the run."""


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


@dataclass(frozen=True)
class Measures:
    """The columns of the table, each by arm and seed."""

    losses: Runs
    """Loss at equal tokens, in nats per token, of the runs that did not diverge."""
    crossings: Mapping[str, Mapping[int, Crossing]]
    """Where each run reaches the target, for the seeds of `reference`."""
    diverged: Mapping[str, Mapping[int, bool]]
    slopes: Runs = field(default_factory=dict)
    """Slope over the last half of the tokens, in nats per e-fold, of the runs that did not diverge."""
    curves: Mapping[str, Mapping[int, Curve]] = field(default_factory=dict)
    """Validation loss over tokens; NaN stands for one that was not finite."""
    targets: Mapping[int, float | None] = field(default_factory=dict)
    """The target of each seed; None where the reference gives none."""
    reference: Mapping[int, Crossing] = field(default_factory=dict)
    """Where the reference crosses the target of its seed, for the seeds in which it does."""

    def crossing(self, arm: str, seed: int, target: float) -> Crossing:
        """Return where a run meets a target."""
        if self.diverged[arm][seed]:
            return Crossing(Reach.DIVERGED, math.nan)
        return first_crossing(self.curves[arm][seed], target)


def measure(ladder: Ladder, config: TrainConfig, records: Mapping[str, Sequence[Record]]) -> Measures:
    """Return what is measured on the runs, whose records are given by arm."""
    budget = config.run.steps * config.run.step_tokens
    curves = {
        arm: {
            record["pair"]: [
                (step * config.run.step_tokens, math.nan if loss is None else loss)
                for step, loss in record["losses"]
            ]
            for record in of
        }
        for arm, of in records.items()
    }
    diverged = {
        arm: {one["pair"]: one["diverged"] or has_diverged(curves[arm][one["pair"]]) for one in of}
        for arm, of in records.items()
    }

    def converged(of: Callable[[Curve, float], float]) -> Runs:
        """Return a number of each curve with evaluations that did not diverge."""
        return {
            arm: {
                seed: of(curve, budget) for seed, curve in runs.items() if curve and not diverged[arm][seed]
            }
            for arm, runs in curves.items()
        }

    own = curves.get(ladder.reference.name, {})
    targets = {seed: target_loss(ladder, curve, budget) for seed, curve in own.items()}
    met = {seed: first_crossing(own[seed], target) for seed, target in targets.items() if target is not None}
    reference = {seed: crossing for seed, crossing in met.items() if crossing.reach is Reach.CROSSED}
    crossings: dict[str, dict[int, Crossing]] = {arm: {} for arm in curves}
    found = Measures(
        converged(late_loss), crossings, diverged, converged(late_slope), curves, targets, reference
    )
    for arm, runs in curves.items():
        for seed in runs:
            if seed in reference and (target := targets[seed]) is not None:
                crossings[arm][seed] = found.crossing(arm, seed, target)
    return found


def target_loss(ladder: Ladder, reference: Curve, budget: float) -> float | None:
    """Return the target of a seed by the curve of its reference; None if that diverged, or has no evaluation there."""
    if ladder.target.loss is not None:
        return ladder.target.loss
    tokens = ladder.target.fraction * budget
    finite = finite_part(reference)
    if not finite or has_diverged(reference) or not finite[0][0] <= tokens <= finite[-1][0]:
        return None
    return loss_at(finite, tokens)


# ---- one curve ----


def finite_part(curve: Sequence[Sequence[Any]]) -> list[Any]:
    """Return the points of a curve up to its first loss that is not finite; None is none."""
    bad = (i for i, (_, loss) in enumerate(curve) if loss is None or not math.isfinite(loss))
    return list(curve[: next(bad, len(curve))])


def loss_at(curve: Curve, tokens: float) -> float:
    """Return the loss at a number of tokens, interpolated; ConfigError outside the evaluated range."""
    for (t0, l0), (t1, l1) in pairwise(curve):
        if t0 <= tokens <= t1:
            return l0 + (l1 - l0) * (tokens - t0) / (t1 - t0)
    raise ConfigError(
        f"no two evaluations enclose {tokens:,.0f} tokens; evaluate more often (run.eval_every) "
        "or train longer (run.steps)"
    )


def late_loss(curve: Curve, budget: float) -> float:
    """Return the mean loss of a curve in the last 5 % of the tokens of the whole run, or its last one."""
    late = [loss for tokens, loss in curve if tokens >= LATE * budget]
    return fmean(late) if late else curve[-1][1]


def late_slope(curve: Curve, budget: float) -> float:
    """Return the slope of the loss over the logarithm of the tokens, by least squares over the last half of them.

    It is in nats per e-fold of tokens; NaN with fewer than two evaluations there.
    """
    late = [(math.log(tokens), loss) for tokens, loss in curve if tokens >= budget / 2]
    return linear_regression(*zip(*late, strict=True)).slope if len(late) > 1 else math.nan


def flags(curve: Curve, vocabulary: int) -> list[str]:
    """Return what looks wrong about a run by RULES["flag"], whether it counts as diverged or not."""
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


def first_crossing(curve: Curve, target: float) -> Crossing:
    """Return the first crossing of the piecewise-linear curve; a loss equal to the target has reached it.

    It is `crossed` at the interpolated tokens, `first` at the first evaluation, or `never` at the last finite one.
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


def spacing(curve: Curve, tokens: float) -> float:
    """Return the distance between the two evaluations around a number of tokens, or the nearest two."""
    gaps = [(max(t0 - tokens, tokens - t1, 0.0), t1 - t0) for (t0, _), (t1, _) in pairwise(curve)]
    return min(gaps)[1] if gaps else math.inf
