"""`results.json`: everything that the report of a ladder shows, as plain values."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from statistics import fmean
from typing import TYPE_CHECKING, Any

import mxref
from mxref.tomlio import to_table
from mxref_training.lab.answers import Answers
from mxref_training.lab.contrasts import paired
from mxref_training.lab.ladder import Arm, Ladder
from mxref_training.lab.measures import Reach, flags, measure, spacing
from mxref_training.lab.result_file import Record
from mxref_training.lab.verdict import MIN_RUNS, RULES, Noise, Overhead, Verdict, judge, overhead, seed_noise

if TYPE_CHECKING:
    from mxref_training.config import TrainConfig

FORMAT = "mxref-ablation/1"


def assemble(
    ladder: Ladder,
    config: TrainConfig,
    records: Sequence[Record],
    *,
    seeds: int,
    planned: int,
    data: dict[str, Any],
    backend: str,
) -> dict[str, Any]:
    """Return everything that the report shows of the finished runs, as plain values.

    `seeds` are the repetitions that were asked for, `planned` the runs of the whole ladder. `data` has the hashes of
    the shared tokens, and a line about their documents.
    """
    by_arm = {arm.name: [one for one in records if one["arm"] == arm.name] for arm in ladder.arm}
    study = PairedRuns(ladder, config, by_arm, seeds)
    arms = [study.row(arm) for arm in ladder.arm if by_arm[arm.name]]
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
        "runs": {"planned": planned, "finished": len(records)},
        "unfinished": [name for name, of in by_arm.items() if not of],
        "data": data,
        "target": to_table(ladder.target)
        | {"losses": study.measures.targets, "budget_percent": study.allowed},
        "noise": study.noise_summary(),
        "rules": RULES,
        "verdicts": {verdict.value: verdicts.count(verdict) for verdict in Verdict},
        "min_runs": MIN_RUNS,
        "contrasts": study.answers.table(),
        "spread": study.answers.spread(),
        "power": study.answers.power(),
        "exploratory": study.answers.explored(),
        "flagged": study.flagged(config.model.vocab),
        "arms": arms,
    }


class PairedRuns:
    """The runs of a ladder, each held against the reference of its seed."""

    def __init__(
        self, ladder: Ladder, config: TrainConfig, records: Mapping[str, Sequence[Record]], seeds: int
    ) -> None:
        self.ladder, self.records = ladder, records
        self.budget = config.run.steps * config.run.step_tokens
        self.measures = found = measure(ladder, config, records)
        self.answers = Answers(ladder, found, seeds)
        own = found.curves.get(ladder.reference.name, {})
        crossed = found.reference.items()
        self.allowed = min((100 * (self.budget / c.tokens - 1) for _, c in crossed), default=math.nan)
        self.resolution = max(
            (50 * spacing(own[seed], c.tokens) / c.tokens for seed, c in crossed), default=math.nan
        )
        self.repeated = [
            (name, seed)
            for name in [ladder.reference.name, *(arm.name for arm in ladder.arm if arm.seed_offset)]
            for seed in found.curves.get(name, ())
        ]
        """The runs of the reference's recipe, whose spread is the effect of the seed alone."""
        self.noise = self._noise()

    def _noise(self) -> Noise:
        """Return the effect of the seed alone: from all runs of the reference's recipe, at the first seed's target."""
        met, target = self.measures.reference.get(0), self.measures.targets.get(0)
        if met is None or target is None:
            return Noise()
        first = self.ladder.reference.name, 0
        others = (self.measures.crossing(*run, target) for run in self.repeated if run != first)
        return seed_noise([met, *others])

    def flagged(self, vocabulary: int) -> list[dict[str, Any]]:
        """Return the runs that are flagged, the reference's first, each with the reason."""
        reference = self.ladder.reference.name
        found = [
            {"arm": name, "pair": seed, "reason": reason, "reference": name == reference}
            for name, of in self.measures.curves.items()
            for seed, curve in of.items()
            for reason in flags(curve, vocabulary)
        ]
        return sorted(found, key=lambda one: not one["reference"])

    def noise_summary(self) -> dict[str, Any]:
        """Return the spread between seeds: half-width in percent, runs, and the final losses in nats."""
        losses = self.measures.losses
        known = [losses[name][seed] for name, seed in self.repeated if seed in losses[name]]
        alone = self.noise.half_width
        return {
            "half_width": alone if math.isfinite(alone) else self.answers.noise(),
            "runs": self.noise.runs,
            "loss_spread": max(known) - min(known) if len(known) > 1 else math.nan,
        }

    def _gap(self, arm: str, other: str) -> float | None:
        """Return the loss at equal tokens less that of another arm, as the mean over the pairs, in nats.

        A run without a partner is left out, as in a contrast. None if a run of a pair diverged.
        """
        runs, losses = self.measures.curves, self.measures.losses
        values = paired(losses.get(arm, {}), losses.get(other, {}))
        all_there = len(values) == len(paired(runs[arm], runs.get(other, {})))
        return fmean(mine - theirs for mine, theirs in values) if values and all_there else None

    def _overhead(self, arm: str) -> Overhead | None:
        pairs = paired(self.measures.crossings[arm], self.measures.reference)
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
        kept = ("reach", "percent", "half_width", "low", "high", "runs")
        said = found and {"text": str(found)} | {key: getattr(found, key) for key in kept}
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
            "overhead": None if is_reference else said,
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
        seed, measures = record["pair"], self.measures
        found = measures.crossings[arm].get(seed)
        kept = {key: value for key, value in record.items() if key not in ("losses", "arm")}
        return kept | {
            "curve": [list(point) for point in measures.curves[arm][seed]],
            "crossing": {"reach": found.reach.value, "tokens": found.tokens} if found else None,
            "diverged": measures.diverged[arm][seed],
        }
