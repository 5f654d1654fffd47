"""Compute the numbers of the report from the records of finished runs: targets, overheads, gaps, verdicts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

import mxref
from mxref.tomlio import to_table
from mxref_training.lab.answers import Answers, Measures
from mxref_training.lab.contrasts import LEVEL, student_point
from mxref_training.lab.curves import (
    Crossing,
    Reach,
    finite_part,
    first_crossing,
    flags,
    late_loss,
    late_slope,
    loss_at,
    spacing,
)
from mxref_training.lab.ladder import Arm, Ladder
from mxref_training.lab.verdict import (
    MIN_RUNS,
    RULES,
    Noise,
    Overhead,
    Verdict,
    judge,
    overhead,
    seed_noise,
)
from mxref_training.log import Point, has_diverged

if TYPE_CHECKING:
    from mxref_training.config import TrainConfig

FORMAT = "mxref-ablation/1"

Record = dict[str, Any]
Records = Mapping[str, Sequence[Record]]


def assemble(
    ladder: Ladder,
    config: TrainConfig,
    records: Records,
    *,
    seeds: int,
    planned: int,
    data: dict[str, Any],
    backend: str,
) -> dict[str, Any]:
    """Return everything that the report shows, as plain values.

    Args:
        ladder: the arms and the target.
        config: the configuration that the arms share.
        records: the finished runs of each arm, by name; an unfinished ladder has some.
        seeds: repetitions asked for.
        planned: runs of the whole ladder.
        data: hashes of the shared tokens, and a line about their documents.
        backend: name of the backend.
    """
    study = _Study(ladder, config, records, seeds)
    arms = [study.row(arm) for arm in ladder.arm if records.get(arm.name)]
    verdicts = [row["verdict"]["verdict"] for row in arms if row["verdict"]]
    return {
        "format": FORMAT,
        "title": ladder.title,
        "description": ladder.description.strip(),
        "mxref": mxref.__version__,
        "backend": backend,
        "config": to_table(config),
        "tokens": study.budget,
        "seeds": seeds,
        "runs": {"planned": planned, "finished": sum(map(len, records.values()))},
        "unfinished": [arm.name for arm in ladder.arm if not records.get(arm.name)],
        "data": data,
        "target": to_table(ladder.target) | {"losses": study.targets, "budget_percent": study.allowed},
        "noise": study.noise_summary(),
        "rules": RULES,
        "verdicts": {verdict.value: verdicts.count(verdict) for verdict in Verdict},
        "min_runs": MIN_RUNS,
        "contrasts": study.answers.table(),
        "spread": study.answers.spread(),
        "power": study.answers.power(),
        "exploratory": study.answers.explored(),
        "flagged": study.flagged(),
        "arms": arms,
    }


class _Study:
    """The curves of a ladder's runs, by arm and repetition, and what is measured on them."""

    def __init__(self, ladder: Ladder, config: TrainConfig, records: Records, seeds: int) -> None:
        self.ladder, self.records = ladder, records
        self.step_tokens = config.run.step_tokens
        self.budget = config.run.steps * self.step_tokens
        self.vocabulary = config.model.vocab
        self.curves = {
            name: {record["pair"]: self._curve(record) for record in of} for name, of in records.items()
        }
        self.diverged = {
            name: {r["pair"] for r in of if r["diverged"] or has_diverged(self.curves[name][r["pair"]])}
            for name, of in records.items()
        }
        reference = self.curves.get(ladder.reference.name, {})
        self.targets = {pair: self._target(curve) for pair, curve in reference.items()}
        self.crossings: dict[int, Crossing] = {}
        """The reference's crossings, for the pairs in which it reaches the target."""
        for pair, target in self.targets.items():
            if (
                target is not None
                and (found := first_crossing(reference[pair], target)).reach is Reach.CROSSED
            ):
                self.crossings[pair] = found
        self.measures = Measures(
            losses={
                name: {
                    pair: late_loss(curve, self.budget)
                    for pair, curve in of.items()
                    if curve and pair not in self.diverged[name]
                }
                for name, of in self.curves.items()
            },
            crossings={
                name: {pair: self._crossing(name, pair, pair) for pair in of if pair in self.crossings}
                for name, of in self.curves.items()
            },
            diverged={name: (len(self.diverged[name]), len(of)) for name, of in self.curves.items()},
            slopes={
                name: {pair: late_slope(curve, self.budget) for pair, curve in of.items()}
                for name, of in self.curves.items()
                if not self.diverged[name]
            },
        )
        self.noise = self._noise()
        crossed = self.crossings.items()
        self.allowed = min((100 * (self.budget / c.tokens - 1) for _, c in crossed), default=math.nan)
        self.resolution = max(
            (50 * spacing(reference[pair], c.tokens) / c.tokens for pair, c in crossed), default=math.nan
        )
        self.answers = Answers(ladder, self.measures, seeds)

    def _curve(self, record: Record) -> list[Point]:
        """Return the validation curve over tokens; a missing loss was not finite."""
        return [
            (step * self.step_tokens, math.nan if loss is None else loss) for step, loss in record["losses"]
        ]

    def _target(self, curve: list[Point]) -> float | None:
        if self.ladder.target.loss is not None:
            return self.ladder.target.loss
        tokens = self.ladder.target.fraction * self.budget
        finite = finite_part(curve)
        if not finite or has_diverged(curve) or not finite[0][0] <= tokens <= finite[-1][0]:
            return None
        return loss_at(finite, tokens)

    def _crossing(self, name: str, pair: int, of: int) -> Crossing:
        """Return where a run meets the target of a pair, whose reference meets it."""
        target = self.targets[of]
        assert target is not None
        if pair in self.diverged[name]:
            return Crossing(Reach.DIVERGED, math.nan)
        return first_crossing(self.curves[name][pair], target)

    def flagged(self) -> list[dict[str, Any]]:
        """Return the runs that are flagged, the reference's first, each with the reason."""
        reference = self.ladder.reference.name
        found = [
            {"arm": name, "pair": pair, "reason": reason, "reference": name == reference}
            for name, of in self.curves.items()
            for pair, curve in of.items()
            for reason in flags(curve, self.vocabulary)
        ]
        return sorted(found, key=lambda one: not one["reference"])

    def _repeated(self) -> list[tuple[str, int]]:
        """Return the runs of the reference's recipe, the first one first."""
        names = [self.ladder.reference.name, *(arm.name for arm in self.ladder.arm if arm.seed_offset)]
        return [(name, pair) for name in names for pair in self.curves.get(name, ())]

    def _noise(self) -> Noise:
        """Return the effect of the seed alone: from all runs of the reference's recipe, at the first pair's target."""
        if 0 not in self.crossings:
            return Noise()
        first = self.ladder.reference.name, 0
        others = (self._crossing(*run, 0) for run in self._repeated() if run != first)
        return seed_noise([self.crossings[0], *others])

    def noise_summary(self) -> dict[str, Any]:
        """Return the spread between seeds: half-width in percent, runs, and the final losses in nats."""
        losses = self.measures.losses
        known = [losses[name][pair] for name, pair in self._repeated() if pair in losses[name]]
        alone = self.noise.half_width
        return {
            "half_width": alone if math.isfinite(alone) else self._pooled_noise(),
            "runs": self.noise.runs,
            "loss_spread": max(known) - min(known) if len(known) > 1 else math.nan,
        }

    def _pooled_noise(self) -> float:
        """Return the 95 % half-width of one pair by the pooled spread, in percent of the tokens; infinite if unknown.

        Where runs give only bounds of their tokens, the spread of the losses stands for it, by the reference's slope.
        """
        if (tokens := self.answers.tokens).freedom > 0:
            return 100 * student_point(LEVEL, tokens.freedom) * tokens.spread
        losses, slopes = self.answers.losses, self.measures.slopes.get(self.ladder.reference.name)
        if losses.freedom > 0 and slopes and (slope := -fmean(slopes.values())) > 0:
            return 100 * student_point(LEVEL, losses.freedom) * losses.spread / slope
        return math.inf

    def _gap(self, arm: str, other: str) -> float | None:
        """Return the loss at equal tokens minus that of another arm, as the mean over the pairs, in nats.

        A run without a partner is left out, as in a contrast. None if a run of a pair diverged.
        """
        mine, theirs = (self.measures.losses.get(name, {}) for name in (arm, other))
        pairs = self.curves[arm].keys() & self.curves.get(other, {}).keys()
        if not pairs or not pairs <= mine.keys() & theirs.keys():
            return None
        return fmean(mine[pair] - theirs[pair] for pair in pairs)

    def _overhead(self, arm: str) -> Overhead | None:
        pairs = [(found, self.crossings[pair]) for pair, found in self.measures.crossings[arm].items()]
        if not pairs:
            return None
        found = overhead(pairs, self.noise, self.resolution)
        if found.reach is not Reach.CROSSED or len(pairs) < 2:
            return found
        pooled = self.answers.tokens_half_width(arm, found.percent)
        return found if pooled is None else replace(found, half_width=max(pooled, self.resolution))

    def row(self, arm: Arm) -> dict[str, Any]:
        """Return one row of the table, and the data from which it is made."""
        recipe, records = self.ladder.resolve(arm), self.records[arm.name]
        found = self._overhead(arm.name)
        is_reference = arm is self.ladder.reference
        claim = None
        if arm.paper and not is_reference:
            verdict, reason = judge(arm.paper.range, found, self.allowed)
            claim = {"verdict": verdict.value, "reason": reason}
        losses, crossings = self.measures.losses[arm.name], self.measures.crossings[arm.name]
        crossed = bool(crossings) and all(c.reach is Reach.CROSSED for c in crossings.values())
        seconds = sum(record.get("seconds") or 0.0 for record in records)
        tokens = sum(record.get("tokens") or 0 for record in records)
        return {
            "name": arm.name,
            "label": arm.label,
            "stage": arm.stage,
            "role": "reference" if is_reference else "noise" if arm.seed_offset else "arm",
            "paper": to_table(arm.paper) | {"range": arm.paper.range} if arm.paper else None,
            "recipe": {
                "digest": recipe.digest,
                "table": to_table(recipe),
                "treatment": self.ladder.treatment(arm),
            },
            "overhead": None if found is None or is_reference else found.numbers,
            "tokens_to_target": fmean(c.tokens for c in crossings.values()) if crossed else None,
            "final_loss": fmean(losses.values()) if losses and len(losses) == len(records) else None,
            "gap_reference": self._gap(arm.name, self.ladder.target.reference),
            "gap_high_precision": self._gap(arm.name, self.ladder.target.high_precision),
            "verdict": claim,
            "seconds": seconds,
            "tokens_per_second": tokens / seconds if seconds else None,
            "runs": [self._run(arm.name, record) for record in records],
        }

    def _run(self, arm: str, record: Record) -> dict[str, Any]:
        pair = record["pair"]
        found = self.measures.crossings[arm].get(pair)
        kept = {key: value for key, value in record.items() if key not in ("losses", "arm")}
        return kept | {
            "curve": [list(point) for point in self.curves[arm][pair]],
            "crossing": {"reach": found.reach.value, "tokens": found.tokens} if found else None,
            "diverged": pair in self.diverged[arm],
        }
