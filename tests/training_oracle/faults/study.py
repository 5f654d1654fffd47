"""Faults of the ablation: seeds, crossings, pairs, targets and intervals; planted as in `loop`."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from itertools import pairwise
from statistics import fmean
from typing import Any

import pytest

from mxref_training.lab import answers, contrasts, measures, results, study, verdict
from mxref_training.lab.contrasts import Difference
from mxref_training.lab.measures import Crossing, Reach
from mxref_training.lab.results import PairedRuns
from mxref_training.lab.verdict import Overhead
from training_oracle.faults.loop import Patch, Plant

# ---- seeds ----

_right_seeded = study.seeded


def _seeded(change: Callable[[Any, Any, int], Any]) -> Plant:
    return lambda patch: patch.setattr(study, "seeded", change)


@_seeded
def one_data_seed(config: Any, arm: Any, seed: int) -> Any:
    found = _right_seeded(config, arm, seed)
    return replace(found, run=replace(found.run, data_seed=config.run.data_seed))


@_seeded
def seed_of_the_arm(config: Any, arm: Any, seed: int) -> Any:
    found = _right_seeded(config, arm, seed)
    return replace(found, run=replace(found.run, seed=found.run.seed + 100 * len(arm.name)))


# ---- crossings ----

_right_crossing = measures.first_crossing


def _crossing(change: Callable[[Any, float], Crossing]) -> Plant:
    return lambda patch: patch.setattr(measures, "first_crossing", change)


@_crossing
def crossing_not_interpolated(curve: Any, target: float) -> Crossing:
    found = _right_crossing(curve, target)
    if found.reach is not Reach.CROSSED:
        return found
    return replace(found, tokens=next(tokens for tokens, loss in curve if loss <= target))


@_crossing
def crossing_from_the_end(curve: Any, target: float) -> Crossing:
    found = _right_crossing(curve, target)
    if found.reach is not Reach.CROSSED:
        return found
    before, after = next((a, b) for (a, _), (b, loss) in pairwise(curve) if loss <= target)
    return replace(found, tokens=before + after - found.tokens)


@_crossing
def last_crossing(curve: Any, target: float) -> Crossing:
    found = _right_crossing(curve, target)
    for number in range(1, len(curve) - 1):
        if curve[number][1] > target >= curve[number + 1][1]:
            found = _right_crossing(curve[number:], target)
    return found


@_crossing
def censoring_dropped(curve: Any, target: float) -> Crossing:
    found = _right_crossing(curve, target)
    return replace(found, reach=Reach.CROSSED) if found.reach is Reach.NEVER else found


@_crossing
def first_taken_for_crossed(curve: Any, target: float) -> Crossing:
    found = _right_crossing(curve, target)
    return replace(found, reach=Reach.CROSSED) if found.reach is Reach.FIRST else found


# ---- pairs ----


def _paired(partner: Callable[[PairedRuns, int], int]) -> Plant:
    """The reference of another pair than the arm's own."""

    def overhead(self: PairedRuns, arm: str) -> Overhead | None:
        found = self.measures.crossings[arm].items()
        pairs = [(crossing, self.measures.reference[partner(self, pair)]) for pair, crossing in found]
        return results.overhead(pairs, self.noise, self.resolution)

    return lambda patch: patch.setattr(PairedRuns, "_overhead", overhead)


paired_with_the_first = _paired(lambda self, pair: 0)
paired_with_the_next = _paired(lambda self, pair: (pair + 1) % len(self.measures.reference))

_right_overhead = verdict.overhead


def _overhead(change: Callable[..., Overhead]) -> Plant:
    return lambda patch: patch.setattr(results, "overhead", change)


@_overhead
def other_sign(pairs: Any, noise: Any, resolution: float) -> Overhead:
    found = _right_overhead(pairs, noise, resolution)
    return replace(found, percent=-found.percent)


@_overhead
def relative_to_the_arm(pairs: Any, noise: Any, resolution: float) -> Overhead:
    found = _right_overhead(pairs, noise, resolution)
    return replace(found, percent=fmean(100 * (1 - theirs.tokens / arm.tokens) for arm, theirs in pairs))


@_overhead
def ratio_of_means(pairs: Any, noise: Any, resolution: float) -> Overhead:
    found = _right_overhead(pairs, noise, resolution)
    arm, theirs = (fmean(pair[i].tokens for pair in pairs) for i in (0, 1))
    return replace(found, percent=100 * (arm / theirs - 1))


@_overhead
def censored_left_out(pairs: Any, noise: Any, resolution: float) -> Overhead:
    kept = [pair for pair in pairs if pair[0].reach is not Reach.NEVER]
    return _right_overhead(kept or pairs, noise, resolution)


@_overhead
def diverged_left_out(pairs: Any, noise: Any, resolution: float) -> Overhead:
    kept = [pair for pair in pairs if pair[0].reach is not Reach.DIVERGED]
    return _right_overhead(kept or pairs, noise, resolution)


# ---- intervals ----

_right_half_width = Difference.half_width
_right_pool = answers.pool


def spread_of_one(patch: Patch) -> None:
    patch.setattr(
        Difference,
        "half_width",
        lambda self: _right_half_width(self) * math.sqrt(self.pairs),
    )


def spread_of_a_run(patch: Patch) -> None:
    def pool(runs: Any) -> Any:
        found = _right_pool(runs)
        return replace(found, spread=found.spread / math.sqrt(2))

    patch.setattr(answers, "pool", pool)


def freedom_of_the_seeds(patch: Patch) -> None:
    patch.setattr(answers, "pool", lambda runs: replace(_right_pool(runs), freedom=2))


def normal_points(patch: Patch) -> None:
    patch.setattr(contrasts, "student_point", lambda level, freedom: 1.96)


# ---- targets ----

_right_measure = measures.measure


def target_of_the_first_seed(patch: Patch) -> None:
    def measure(ladder: Any, config: Any, records: Any) -> Any:
        first = _right_measure(ladder, config, records).targets[0]
        with pytest.MonkeyPatch.context() as inner:
            inner.setattr(measures, "target_loss", lambda *_: first)
            return _right_measure(ladder, config, records)

    patch.setattr(results, "measure", measure)


def target_not_interpolated(patch: Patch) -> None:
    patch.setattr(
        measures, "loss_at", lambda curve, tokens: min(curve, key=lambda point: abs(point[0] - tokens))[1]
    )
