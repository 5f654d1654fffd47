"""What the numbers say: overheads in tokens, outcomes of contrasts, and verdicts on the claims of papers.

Every rule that the report applies is stated once, in `RULES`; the numbers are those of `measures` and `contrasts`.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from statistics import fmean, stdev

from mxref_training.lab.contrasts import EQUAL_NATS, LEVEL, OUTLIER_LEVEL, Difference, student_point
from mxref_training.lab.ladder import Says
from mxref_training.lab.measures import RISE, Crossing, Reach
from mxref_training.log import SPIKE
from mxref_training.wording import counted

MIN_RUNS = 3
"""Runs that an interval needs before it can support a verdict."""

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


# ---- overheads, and the claims of a paper's table ----


@dataclass(frozen=True)
class Noise:
    """The effect of the seed alone: the 95 % half-width in percent for one pair, and the number of runs behind it."""

    half_width: float = math.inf
    runs: int = 1


def seed_noise(crossings: Sequence[Crossing]) -> Noise:
    """Return the noise by the crossings of runs of the reference's recipe at different seeds, its own first.

    From n runs: t(n - 1) times their standard deviation times the root of two, because a difference has the noise of
    two runs. Infinite if n < 2 or a run gives only a bound.
    """
    runs = len(crossings)
    if runs < 2 or any(c.reach is not Reach.CROSSED for c in crossings):
        return Noise(math.inf, runs)
    spread = stdev(c.tokens for c in crossings) / crossings[0].tokens
    return Noise(100 * student_point(LEVEL, runs - 1) * spread * math.sqrt(2), runs)


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
    """Return an arm's overhead over the reference: `diverged` or a bound if any seed gives that, else the mean.

    A pair has the arm's crossing and the reference's, which is `crossed`. `noise` is the uncertainty of an arm with one
    seed, `resolution` half the distance between evaluations in percent of the reference's tokens.
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
        half_width = student_point(LEVEL, seeds - 1) * stdev(percents) / math.sqrt(seeds)
    return Overhead(reach, fmean(percents), max(half_width, resolution), runs, diverged, seeds)


class Verdict(StrEnum):
    """What the runs say about a paper's claim, at this scale."""

    REPRODUCED = "reproduced"
    NOT_REPRODUCED = "not reproduced"
    UNDERPOWERED = "underpowered"


def judge(claim: tuple[float, float] | None, found: Overhead | None, budget: float) -> tuple[Verdict, str]:
    """Return the verdict on a paper's claim by RULES["verdict"], and its reason in a few words.

    The claim is the lowest and highest overhead in percent, or None for "does not converge". None is `found` if the
    reference has no crossing to compare with. `budget` is the overhead that the tokens would just allow.
    """
    if found is None:
        return Verdict.UNDERPOWERED, "no target to compare at"
    if found.runs < MIN_RUNS:
        return Verdict.UNDERPOWERED, f"{counted(found.runs, 'run')}, {MIN_RUNS} needed"
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


# ---- contrasts, and the predictions of sources ----


class Outcome(StrEnum):
    """The outcome of a contrast."""

    DIVERGES = "diverges"
    """Every run of the arm diverged, and none of the arm that it is held against."""
    UNDECIDED = "undecided"
    """Some runs diverged, in another way."""
    LOWER = "lower"
    HIGHER = "higher"
    EQUAL = "equal"
    """Not shown to differ, and shown to lie within the bound."""
    UNDERPOWERED = "underpowered"
    MISSING = "missing"
    """No pair of runs has finished."""


Counts = tuple[int, int]
"""How many runs of an arm diverged, and how many there are."""


def outcome(found: Difference | None, corrected: float, arm: Counts, against: Counts) -> Outcome:
    """Return the outcome of a contrast, by its difference in nats over pairs that did not diverge and its p-value."""
    if arm[0] or against[0]:
        every = arm[0] == arm[1] and against[1] and not against[0]
        return Outcome.DIVERGES if every else Outcome.UNDECIDED
    if found is None:
        return Outcome.MISSING
    if corrected < LEVEL:
        return Outcome.LOWER if found.estimate < 0 else Outcome.HIGHER
    return Outcome.EQUAL if found.equal_p(EQUAL_NATS) < LEVEL else Outcome.UNDERPOWERED


def judge_prediction(says: Says, seen: Outcome, converged: bool) -> Verdict:
    """Return the verdict on a prediction by the outcome of its contrast.

    The arm `converged` if none of its runs diverged and all of them reached the target.
    """
    if seen.value == says.value:
        return Verdict.REPRODUCED
    decided = converged if says is Says.DIVERGES else seen not in _OPEN
    return Verdict.NOT_REPRODUCED if decided else Verdict.UNDERPOWERED


_OPEN = (Outcome.UNDECIDED, Outcome.UNDERPOWERED, Outcome.MISSING)


def sentence(
    seen: Outcome, found: Difference | None, arm: Counts, against: Counts, decide: int | None
) -> str:
    """Return the answer of a contrast in one sentence or two."""
    if seen is Outcome.MISSING:
        return "Not run yet."
    if seen is Outcome.DIVERGES:
        return f"All {arm[1]} runs diverged, and none of the other arm's."
    if seen is Outcome.UNDECIDED:
        return (
            f"No difference is computed: {arm[0]} of {arm[1]} runs diverged, and {against[0]} of {against[1]} of the "
            "other arm's."
        )
    assert found is not None
    apart, interval = _signed(found.estimate), f"95 % interval {_signed(found.low)} to {_signed(found.high)}"
    if seen is Outcome.EQUAL:
        said = f"Equal to within {EQUAL_NATS:.3f} nats: the losses differ by {apart} ({interval})."
    elif seen is Outcome.UNDERPOWERED and found.freedom <= 0:
        said = f"Cannot be told: the loss is {apart} nats apart, and no spread is known."
    elif seen is Outcome.UNDERPOWERED:
        more = f"; about {decide} seeds would tell." if decide else "."
        said = f"Cannot be told: the losses differ by {apart} nats ({interval}){more}"
    else:
        small = "; less than the bound of equality" if found.equal_p(EQUAL_NATS) < LEVEL else ""
        said = f"{seen.value.capitalize()} by {abs(found.estimate):.4f} nats ({interval}{small})."
    noisy = " Its pairs scatter more than twice as much as the pooled spread says." if found.is_noisy else ""
    return said + noisy


def _signed(value: float) -> str:
    return f"{value:+.4f}".replace("-", "−")
