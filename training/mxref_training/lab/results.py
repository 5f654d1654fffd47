"""Compute the numbers of the report from the records of finished runs: targets, overheads, gaps, verdicts."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

import mxref
from mxref.tomlio import to_table
from mxref_training.lab.answers import Answers, Measures, explored
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
from mxref_training.lab.verdict import MIN_RUNS, RULES, Noise, Overhead, judge, overhead, seed_noise
from mxref_training.log import Point, has_diverged

if TYPE_CHECKING:
    from mxref_training.config import TrainConfig

Record = dict[str, Any]
Records = Mapping[str, Sequence[Record]]


def assemble(
    ladder: Ladder,
    config: TrainConfig,
    records: Records,
    *,
    seeds: int,
    planned: int,
    corpus: Any,
    backend: str,
) -> dict[str, Any]:
    """Return everything that the report shows, as plain values.

    Args:
        ladder: the arms and the target.
        config: the configuration that the arms share.
        records: the finished runs of each arm, by name; an unfinished ladder has some.
        seeds: repetitions asked for.
        planned: runs of the whole ladder.
        corpus: the shared tokens; `hashes` and `report` are kept.
        backend: name of the backend.
    """
    study = _Study(ladder, config, records, seeds)
    arms = [study.row(arm) for arm in ladder.arm if records.get(arm.name)]
    verdicts = [row["verdict"]["verdict"] for row in arms if row["verdict"]]
    return {
        "format": "mxref-ablation/1",
        "title": ladder.title,
        "description": ladder.description.strip(),
        "mxref": mxref.__version__,
        "backend": backend,
        "config": to_table(config),
        "tokens": study.budget,
        "seeds": seeds,
        "runs": {"planned": planned, "finished": sum(map(len, records.values()))},
        "unfinished": [arm.name for arm in ladder.arm if not records.get(arm.name)],
        "data": {"hashes": dict(corpus.hashes), "report": str(corpus.report)},
        "target": to_table(ladder.target) | {"losses": study.targets, "budget_percent": study.allowed},
        "noise": study.noise_summary(),
        "rules": RULES,
        "verdicts": {v: verdicts.count(v) for v in ("reproduced", "not reproduced", "underpowered")},
        "min_runs": MIN_RUNS,
        "contrasts": study.answers.table(),
        "spread": study.answers.spread(),
        "power": study.answers.power(),
        "exploratory": study.exploratory(),
        "flagged": study.flagged(),
        "arms": arms,
    }


def summary(record: Record) -> str:
    """Return the result of a run in one line."""
    if record["diverged"]:
        return f"diverged: {record['reason']}"
    rate = record["tokens_per_second"] or 0.0
    loss = record["losses"][-1][1] if record["losses"] else None
    said = "not finite" if loss is None else f"{loss:.4f}"
    return f"validation loss {said} after {record['tokens']:,} tokens, {rate:,.0f} tokens/s"


class _Study:
    """The runs of a ladder, and the reference's crossings with which they are compared."""

    def __init__(self, ladder: Ladder, config: TrainConfig, records: Records, seeds: int) -> None:
        self.ladder = ladder
        self.records = records
        self.step_tokens = config.run.batch * config.run.seq_len
        self.budget = config.run.steps * self.step_tokens
        self.vocabulary = config.model.vocab
        pairs = {record["pair"]: self.curve(record) for record in records.get(ladder.reference.name, ())}
        self.reference_curves = pairs
        self.targets = {pair: self._target(curve) for pair, curve in pairs.items()}
        self.crossings: dict[int, Crossing] = {}
        """The reference's crossings, for the pairs in which it reaches the target."""
        for pair, target in self.targets.items():
            found = first_crossing(pairs[pair], target) if target is not None else None
            if found and found.reach is Reach.CROSSED:
                self.crossings[pair] = found
        self.noise = self._noise()
        crossed = self.crossings.values()
        self.allowed = min((100 * (self.budget / c.tokens - 1) for c in crossed), default=math.nan)
        self.resolution = max(
            (50 * spacing(pairs[pair], c.tokens) / c.tokens for pair, c in self.crossings.items()),
            default=math.nan,
        )
        self.answers = Answers(ladder, self._measures(), seeds)

    def _measures(self) -> Measures:
        runs = {name: {record["pair"]: record for record in found} for name, found in self.records.items()}
        finals = {
            name: {pair: self._final(record) for pair, record in of.items()} for name, of in runs.items()
        }
        return Measures(
            losses={
                name: {pair: loss for pair, loss in of.items() if loss is not None}
                for name, of in finals.items()
            },
            crossings={
                name: {p: self._crossing(r, p) for p, r in of.items() if p in self.crossings}
                for name, of in runs.items()
            },
            diverged={
                name: (sum(self._has_diverged(r) for r in of.values()), len(of)) for name, of in runs.items()
            },
        )

    def exploratory(self) -> dict[str, Any]:
        """Return the second analysis, of the arms of which no run diverged."""
        whole: dict[str, Sequence[Record]] = {
            arm.name: records
            for arm in self.ladder.arm
            if not arm.seed_offset
            and (records := self.records.get(arm.name))
            and all(self._final(record) is not None for record in records)
        }
        return explored(
            self.ladder,
            {
                name: {r["pair"]: late_loss(self.curve(r), self.budget) for r in of}
                for name, of in whole.items()
            },
            {
                name: {r["pair"]: late_slope(self.curve(r), self.budget) for r in of}
                for name, of in whole.items()
            },
        )

    def flagged(self) -> list[dict[str, Any]]:
        """Return the runs that are flagged, the reference's first, each with the reason."""
        found = [
            {
                "arm": name,
                "pair": record["pair"],
                "reason": reason,
                "reference": name == self.ladder.reference.name,
            }
            for name, records in self.records.items()
            for record in records
            for reason in flags(self.curve(record), self.vocabulary)
        ]
        return sorted(found, key=lambda one: not one["reference"])

    def _has_diverged(self, record: Record) -> bool:
        return bool(record["diverged"]) or has_diverged(self.curve(record))

    def curve(self, record: Record) -> list[Point]:
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

    def _crossing(self, record: Record, pair: int) -> Crossing:
        curve = self.curve(record)
        if self._has_diverged(record):
            return Crossing(Reach.DIVERGED, math.nan)
        target = self.targets[pair]
        if target is None:
            raise ValueError(f"pair {pair} has no target")
        return first_crossing(curve, target)

    def _noise(self) -> Noise:
        """Return the effect of the seed alone: from all runs of the reference's recipe, at the first pair's target."""
        if 0 not in self.crossings:
            return Noise()
        others = [r for r in self.records[self.ladder.reference.name] if r["pair"] != 0]
        others += [r for arm in self.ladder.arm if arm.seed_offset for r in self.records.get(arm.name, ())]
        return seed_noise([self.crossings[0], *(self._crossing(record, 0) for record in others)])

    def noise_summary(self) -> dict[str, Any]:
        """Return the spread between seeds: half-width in percent, runs, and the final losses in nats."""
        names = [self.ladder.reference.name, *(arm.name for arm in self.ladder.arm if arm.seed_offset)]
        finals = [self._final(r) for name in names for r in self.records.get(name, ())]
        known = [loss for loss in finals if loss is not None]
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
        losses = self.answers.losses
        slopes = [late_slope(curve, self.budget) for curve in self.reference_curves.values()]
        if losses.freedom > 0 and slopes and (slope := -fmean(slopes)) > 0:
            return 100 * student_point(LEVEL, losses.freedom) * losses.spread / slope
        return math.inf

    def _final(self, record: Record) -> float | None:
        curve = self.curve(record)
        return None if self._has_diverged(record) or not curve else late_loss(curve, self.budget)

    def _gap(self, arm: Arm, other: str) -> float | None:
        """Return the loss at equal tokens minus that of another arm, as the mean over the pairs, in nats.

        A run without a partner is left out, as in a contrast. None if a run of a pair diverged.
        """
        theirs = {record["pair"]: self._final(record) for record in self.records.get(other, ())}
        gaps = []
        for record in self.records[arm.name]:
            if record["pair"] not in theirs:
                continue
            mine, their = self._final(record), theirs[record["pair"]]
            if mine is None or their is None:
                return None
            gaps.append(mine - their)
        return fmean(gaps) if gaps else None

    def _overhead(self, arm: Arm) -> Overhead | None:
        pairs = [
            (self._crossing(record, record["pair"]), self.crossings[record["pair"]])
            for record in self.records[arm.name]
            if record["pair"] in self.crossings
        ]
        if not pairs:
            return None
        found = overhead(pairs, self.noise, self.resolution)
        if found.reach is not Reach.CROSSED or len(pairs) < 2:
            return found
        pooled = self.answers.tokens_half_width(arm.name, found.percent)
        return found if pooled is None else replace(found, half_width=max(pooled, self.resolution))

    def row(self, arm: Arm) -> dict[str, Any]:
        """Return one row of the table, and the data from which it is made."""
        recipe = self.ladder.resolve(arm)
        records = self.records[arm.name]
        found = self._overhead(arm)
        is_reference = arm is self.ladder.reference
        claim = None
        if arm.paper and not is_reference:
            verdict, reason = judge(arm.paper.range, found, self.allowed)
            claim = {"verdict": verdict.value, "reason": reason}
        finals = [self._final(record) for record in records]
        known = [loss for loss in finals if loss is not None]
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
            "overhead": None if found is None or is_reference else _overhead_table(found),
            "tokens_to_target": self._tokens_to_target(records),
            "final_loss": fmean(known) if known and len(known) == len(finals) else None,
            "gap_reference": self._gap(arm, self.ladder.target.reference),
            "gap_high_precision": self._gap(arm, self.ladder.target.high_precision),
            "verdict": claim,
            "seconds": seconds,
            "tokens_per_second": tokens / seconds if seconds else None,
            "runs": [self._run(record) for record in records],
        }

    def _tokens_to_target(self, records: Sequence[Record]) -> float | None:
        found = [
            self._crossing(record, record["pair"]) for record in records if record["pair"] in self.crossings
        ]
        if not found or any(c.reach is not Reach.CROSSED for c in found):
            return None
        return fmean(c.tokens for c in found)

    def _run(self, record: Record) -> dict[str, Any]:
        found = self._crossing(record, record["pair"]) if record["pair"] in self.crossings else None
        kept = {key: value for key, value in record.items() if key not in ("losses", "fingerprint", "arm")}
        return kept | {
            "curve": [[tokens, loss] for tokens, loss in self.curve(record)],
            "crossing": {"reach": found.reach.value, "tokens": found.tokens} if found else None,
            "diverged": self._has_diverged(record),
        }


def _overhead_table(found: Overhead) -> dict[str, Any]:
    return {
        "text": str(found),
        "reach": found.reach.value,
        "percent": found.percent,
        "half_width": found.half_width,
        "low": found.low,
        "high": found.high,
        "runs": found.runs,
    }
