"""The numbers of the branch design: losses of each branch less those of the trunk's own, step by step."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from statistics import fmean, stdev
from typing import TYPE_CHECKING, Any

import mxref
from mxref.tomlio import to_table
from mxref_training.lab.contrasts import student_point
from mxref_training.lab.last_checkpoint import VALIDATION
from mxref_training.lab.result_file import Record

if TYPE_CHECKING:
    from mxref_training.config import TrainConfig
    from mxref_training.lab.arm import ArmRun
    from mxref_training.lab.ladder import Ladder

FORMAT = "mxref-branch/1"
LAST = 0.25
"""Part of the updates over which the training loss at the end is averaged."""
_LEVEL = 0.05

Curve = dict[int, float]
"""Loss by step."""


def assemble_branches(
    ladder: Ladder, config: TrainConfig, found: Iterable[tuple[ArmRun, Record]], corpus: Any, backend: str
) -> dict[str, Any]:
    """Return the results of the branch design, as plain values.

    A difference is the loss of a branch less that of the trunk's own branch with the same seed, at the same step. Its
    interval is Student's over the seeds, at 95 %; there is none from one seed.

    Args:
        ladder: the arms, and the design.
        config: the configuration that all runs share.
        found: finished branches and their records.
        corpus: the shared tokens; `hashes` and `report` are kept.
        backend: name of the backend.
    """
    by_moment: dict[int, dict[str, dict[int, Record]]] = defaultdict(lambda: defaultdict(dict))
    runs: dict[str, ArmRun] = {}
    for run, record in found:
        if run.start:
            by_moment[run.start.step][run.arm.name][run.seed] = record
            runs[run.arm.name] = run
    trunk = ladder.trunk.name
    # The trunk's own branch need not be the first that has ended.
    names = [trunk, *(arm.name for arm in ladder.arm if arm.name != trunk)]
    moments = [
        {
            "step": step,
            "tokens": step * config.run.step_tokens,
            "arms": [_row(runs[name], of[name], of.get(trunk, {})) for name in names if name in of],
        }
        for step, of in sorted(by_moment.items())
    ]
    return {
        "format": FORMAT,
        "title": ladder.title,
        "mxref": mxref.__version__,
        "backend": backend,
        "config": to_table(config),
        "design": to_table(ladder.branch) | {"trunk": ladder.trunk.name},
        "data": {"hashes": dict(corpus.hashes), "report": str(corpus.report)},
        "last": LAST,
        "moments": moments,
    }


def _row(run: ArmRun, records: Mapping[int, Record], trunk: Mapping[int, Record]) -> dict[str, Any]:
    pairs = [(records[seed], trunk[seed]) for seed in sorted(records) if seed in trunk]
    train = [_less(curve(a, "train_curve"), curve(b, "train_curve")) for a, b in pairs]
    validation = [_less(curve(a, "losses"), curve(b, "losses")) for a, b in pairs]
    kept = ("pair", "seed", "diverged", "reason", "losses", "train_curve", "environment", "last")
    return {
        "name": run.arm.name,
        "label": run.arm.label,
        "stage": run.arm.stage,
        "recipe": run.recipe.digest,
        "runs": [
            {key: record[key] for key in kept if key in record} for _, record in sorted(records.items())
        ],
        "difference": {"train": _mean(train), "validation": _mean(validation)},
        "train_last": _interval([_end(one, LAST) for one in train]),
        "validation_last": _interval([_end(one, 0) for one in validation]),
        "evaluated": _evaluated(pairs),
    }


def _evaluated(pairs: Sequence[tuple[Record, Record]]) -> dict[str, Any]:
    """Return for each recipe with which the last checkpoints were evaluated too: their loss less the trunk's own."""
    losses = [[run.get("last", {}).get("losses", {}) for run in pair] for pair in pairs]
    names = list(losses[0][0]) if losses else []
    return {
        name: _interval(
            [
                None if a is None or b is None else a - b
                for a, b in ((mine[name][VALIDATION], theirs[name][VALIDATION]) for mine, theirs in losses)
            ]
        )
        for name in names
        if all(name in one for pair in losses for one in pair)
    }


def curve(record: Record, key: str) -> Curve:
    """Return the finite losses of a record by step."""
    return {int(step): loss for step, loss in record[key] if loss is not None and math.isfinite(loss)}


def _less(curve: Curve, other: Curve) -> Curve:
    return {step: loss - other[step] for step, loss in curve.items() if step in other}


def _mean(curves: Sequence[Curve]) -> list[list[float]]:
    """Return step and mean, where all curves have the step."""
    common = sorted(set.intersection(*map(set, curves))) if curves else []
    return [[step, fmean(curve[step] for curve in curves)] for step in common]


def _end(curve: Curve, part: float) -> float | None:
    """Return the mean of the last part of a curve, its last point at least; None if it has none."""
    steps = sorted(curve)[-max(1, round(part * len(curve))) :]
    return fmean(curve[step] for step in steps) if steps else None


def _interval(values: Sequence[float | None]) -> dict[str, Any] | None:
    """Return mean and half-width of the 95 % interval; None where a branch or its pair has no end."""
    known = [value for value in values if value is not None]
    if not known or len(known) < len(values):
        return None
    half = None
    if len(known) > 1:
        half = student_point(_LEVEL, len(known) - 1) * stdev(known) / math.sqrt(len(known))
    return {"mean": fmean(known), "half_width": half, "pairs": len(known)}
