"""Tokens to a target loss, overheads with their uncertainty, and the verdict on a paper's claim.

Plain arithmetic on validation curves. Every rule that the report applies is stated once, in `RULES`,
beside the code that applies it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise
from statistics import fmean, linear_regression, stdev

from mxref_training.errors import ConfigError
from mxref_training.lab.comparison import EQUAL_NATS, LEVEL
from mxref_training.lab.distributions import student_point
from mxref_training.lab.pooling import OUTLIER_LEVEL
from mxref_training.log import SPIKE, Point

LATE = 0.95
"""Evaluations after this share of the tokens make up the loss at equal tokens."""
MIN_RUNS = 3
"""Runs that an interval needs before it can support a verdict."""

RISE = 0.3
"""Nats above its own minimum with which a run may end before it is flagged."""

RULES = {
    "crossing": "Tokens to target: where the validation curve, drawn as straight lines between evaluations, first "
    "meets the target. An arm already there at its first evaluation is shown as “≤”, an arm that never gets there "
    "as “>” the overhead that its budget would have allowed.",
    "pairing": "An arm is compared with the reference of the same seed: same initial weights, same data in the same "
    "order.",
    "divergence": "Diverged (DNC): a loss or gradient stopped being finite, or the last validation loss lies above the "
    f"arm's own minimum by more than {SPIKE} nats and by more than half of all that it had gained.",
    "flag": "Flag: a run is flagged if its validation loss stays above the logarithm of the vocabulary, the loss of a "
    f"uniform guess, or if it ends more than {RISE} nats above its own minimum. A flag changes no verdict.",
    "loss": "Loss at equal tokens: the mean of the validation losses over the evaluations of the last 5 % of the "
    "tokens.",
    "interval": "Interval: 95 %, by Student's t, not corrected for the number of arms. With two or more seeds, from "
    "the spread of a paired difference, which is pooled over the arms (residuals of an effect of the arm plus one of "
    "the seed); an arm that is visibly noisier than the others (F test, 1 % shared among the arms) or diverged in "
    "a run leaves the pool, and its own pairs count. With one seed, from the spread of the reference's own "
    "repetitions with other seeds. Never narrower than half the distance between evaluations.",
    "verdict": f"Verdict: “underpowered” with fewer than {MIN_RUNS} runs behind the interval. Else a claimed "
    "overhead is “not reproduced” if the interval misses the paper's range, and “reproduced” if it meets it and its "
    "half-width is at most half of the claimed overhead; a claimed divergence is “reproduced” if every seed diverges "
    "while the reference does not, and “not reproduced” if the whole interval lies within the budget. What is left "
    "is “underpowered”. A verdict is about this model, data and budget.",
    "contrast": f"Contrast: the mean paired difference of the losses at equal tokens. “Lower” or “higher” if the "
    f"two-sided p-value, corrected by Holm's method over all contrasts of the ladder, is below {LEVEL}; else “equal” "
    f"if two one-sided tests at {LEVEL} show that it lies within ± {EQUAL_NATS:.3f} nats; else “underpowered”. "
    "“Diverges” if every run of the arm diverged and none of the other arm's; “undecided” if runs diverged otherwise.",
    "exploratory": "Exploratory: the contrasts computed a second time, with those that were declared after runs had "
    "been seen. Arms that round an operand of Fprop stochastically have a pool of their own if an F test at "
    f"{OUTLIER_LEVEL} shows them noisier than the rest; between the pools the freedom is that of Welch. Holm's method "
    "corrects for all contrasts of this table. The slope is that of the difference over the logarithm of the tokens, "
    "by least squares over the last half of the tokens. No verdict rests on these numbers.",
}
"""The stated rules, as the report prints them."""


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


@dataclass(frozen=True)
class Noise:
    """The effect of the seed alone: the 95 % half-width in percent for one pair, and the number of runs behind it."""

    half_width: float = math.inf
    runs: int = 1


def seed_noise(crossings: Sequence[Crossing]) -> Noise:
    """Return the half-width of the overhead of one run over another of the same recipe.

    From n runs of the reference with different seeds: t(n - 1) times their standard deviation times the root of two,
    because a difference has the noise of two runs. Infinite if n < 2 or a run gives only a bound.

    Args:
        crossings: the reference's own first, then its repetitions'.
    """
    runs = len(crossings)
    if runs < 2 or any(c.reach is not Reach.CROSSED for c in crossings):
        return Noise(math.inf, runs)
    spread = stdev(c.tokens for c in crossings) / crossings[0].tokens
    return Noise(100 * student_point(0.05, runs - 1) * spread * math.sqrt(2), runs)


@dataclass(frozen=True)
class Overhead:
    """Tokens to target beyond the reference's, in percent."""

    reach: Reach
    percent: float
    """A lower bound if never reached, an upper bound if reached at the first evaluation, NaN if diverged."""
    half_width: float = math.inf
    """Half of the 95 % interval, in percent."""
    runs: int = 1
    """Runs that the interval comes from: seeds of the arm, or of the reference if the arm has one."""
    diverged: int = 0
    """Seeds that diverged; the arm is `diverged` if any did."""
    seeds: int = 1

    @property
    def low(self) -> float:
        """Lower end of the interval."""
        return -math.inf if self.reach is Reach.FIRST else self.percent - self.half_width

    @property
    def high(self) -> float:
        """Upper end of the interval."""
        return math.inf if self.reach is Reach.NEVER else self.percent + self.half_width

    def __str__(self) -> str:
        if self.reach is Reach.DIVERGED:
            return "DNC" if self.diverged == self.seeds else f"DNC ({self.diverged} of {self.seeds})"
        if self.reach is Reach.CROSSED:
            return f"{self.percent:+.1f} %"
        return f"{'>' if self.reach is Reach.NEVER else '≤'} {self.percent:.1f} %"


def overhead(pairs: Sequence[tuple[Crossing, Crossing]], noise: Noise, resolution: float = 0.0) -> Overhead:
    """Return an arm's overhead over the reference, averaged over its seeds.

    Args:
        pairs: for each seed the arm's crossing and the reference's, which must be `crossed`.
        noise: the effect of the seed alone; the uncertainty of an arm with one seed.
        resolution: half the distance between evaluations, in percent of the reference's tokens.

    Returns:
        `diverged` if any seed did; a bound if any seed gives only a bound; else the mean.
    """
    reaches = [arm.reach for arm, _ in pairs]
    diverged, seeds = reaches.count(Reach.DIVERGED), len(pairs)
    runs = seeds if seeds > 1 else noise.runs
    reach = next((r for r in (Reach.DIVERGED, Reach.NEVER, Reach.FIRST) if r in reaches), Reach.CROSSED)
    if reach is Reach.DIVERGED:
        return Overhead(reach, math.nan, math.nan, runs, diverged, seeds)
    percents = [100 * (arm.tokens / reference.tokens - 1) for arm, reference in pairs]
    half_width = noise.half_width
    if seeds > 1:
        half_width = student_point(0.05, seeds - 1) * stdev(percents) / math.sqrt(seeds)
    return Overhead(reach, fmean(percents), max(half_width, resolution), runs, diverged, seeds)


class Verdict(StrEnum):
    """What the runs say about a paper's claim, at this scale."""

    REPRODUCED = "reproduced"
    NOT_REPRODUCED = "not reproduced"
    UNDERPOWERED = "underpowered"


def judge(claim: tuple[float, float] | None, found: Overhead | None, budget: float) -> tuple[Verdict, str]:
    """Return the verdict by RULES["verdict"], and its reason in a few words.

    Args:
        claim: the paper's lowest and highest overhead in percent; None for "does not converge".
        found: the measured overhead; None if the reference has no crossing to compare with.
        budget: overhead in percent that the budget of tokens would just allow.
    """
    if found is None:
        return Verdict.UNDERPOWERED, "no target to compare at"
    if found.runs < MIN_RUNS:
        return (
            Verdict.UNDERPOWERED,
            f"{found.runs} run{'s' * (found.runs != 1)}, {MIN_RUNS} needed",
        )
    if found.reach is Reach.DIVERGED:
        if claim is not None:
            return Verdict.NOT_REPRODUCED, "diverged"
        if found.diverged == found.seeds:
            return Verdict.REPRODUCED, "diverged, the reference did not"
        return Verdict.UNDERPOWERED, f"{found.diverged} of {found.seeds} seeds diverged"
    if claim is None:
        if found.high < budget:
            return Verdict.NOT_REPRODUCED, "reached the target"
        return Verdict.UNDERPOWERED, "neither diverged nor surely converged"
    low, high = claim
    if found.low > high or found.high < low:
        return Verdict.NOT_REPRODUCED, "interval misses the paper's"
    if found.reach is Reach.CROSSED and found.half_width <= (low + high) / 4:
        return Verdict.REPRODUCED, "interval meets the paper's"
    return Verdict.UNDERPOWERED, "interval too wide to tell"
