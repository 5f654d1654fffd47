"""Runs the branch design: a trunk up to each moment, and from there every recipe on the same batches.

`OUT/branch/trunk/` has the trunk's run and its checkpoints, `OUT/branch/step-N/` the branches of a moment, each laid
out as a ladder. The trunk is not trained where the ladder's own run of that arm has kept checkpoints of all moments.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import mxref
from mxref.tomlio import shown, to_table
from mxref_training.config import Schedule
from mxref_training.errors import ConfigError
from mxref_training.lab.arm import DESIGN, ArmRun, set_aside
from mxref_training.lab.contrasts import paired, scatter
from mxref_training.lab.ladder import Arm, Branch, Ladder
from mxref_training.lab.last_checkpoint import VALIDATION, Extra
from mxref_training.lab.result_file import Record, digest, write_json
from mxref_training.lab.study import Study, Tally, seeded

if TYPE_CHECKING:
    from mxref_training.config import TrainConfig

FORMAT = "mxref-branch/1"
LAST = 0.25
"""Part of the updates over which the training loss at the end is averaged."""

Curve = dict[int, float]
"""Loss by step."""

RESULTS = "branch.json"
_FOLDER = "branch"
_ALL = 1_000_000  # checkpoints of a trunk that are kept
_MOMENT = re.compile(r"(?P<step>\d+)|(?P<share>\d+(?:\.\d+)?)\s*%")


def run_branches(study: Study) -> dict[str, Any]:
    """Train the branches that are not finished, and return the results, also written to `branch.json`.

    Raises:
        ConfigError: a moment does not fit the run, or an unknown arm.
        UnsupportedError: the backend does not declare what an arm asks for.
        Interrupted: the trainer or the runner was interrupted; the next call continues there.
    """
    ladder, config = study.ladder, study.config
    chosen = branching(ladder, study.arms)
    study.require_runnable(chosen)
    for arm in chosen:
        if "model" in arm.train:
            raise ConfigError(
                f"arm {arm.name!r} sets keys of train.model, and a branch goes on with the trunk's model: "
                f"--arms=-{arm.name} leaves the arm out"
            )
    plan = branch_runs(ladder, config, study.out, study.seeds)
    trunks = {run.seed: _trunk(study, run) for run in plan if not run.trunk}
    branches = [_branch(study, run, trunks[run.seed]) for run in plan if run.trunk]

    def results(records: dict[str, Record]) -> dict[str, Any]:
        found = [(run.first, records[run.title]) for run in branches if run.title in records]
        shared = branch_config(config, replace(ladder.branch, anneal=False), 0)
        written: dict[str, Any] = write_json(
            study.out / RESULTS, assemble_branches(ladder, shared, found, **study.facts)
        )
        return written

    tally = Tally(study, branches, [run for run in branches if run.arm in chosen], results)
    # A trunk is trained for the missing branches whose checkpoint is not there.
    needed = {
        run.seed for run in tally.missing if run.trunk and not _checkpoint(run.trunk, run.first).exists()
    }
    wanted = [trunk for seed, trunk in trunks.items() if seed in needed]
    for trunk in wanted:
        if trunk.finished():
            study.say(f"{trunk.title}: its checkpoints are gone, so it is trained again")
            set_aside(trunk.out, trunk.folder)
    Tally(study, wanted, wanted, lambda records: None).train()
    final: dict[str, Any] = tally.train()
    return final


def branch_runs(
    ladder: Ladder, config: TrainConfig, out: Path, seeds: int | None, arms: list[str] | None = None
) -> list[ArmRun]:
    """Return for each seed the trunk, up to its last moment, and the branches; arguments as of `study.planned`."""
    design, trunk = ladder.branch, ladder.trunk
    steps = moments(design, config.run.steps)
    found = []
    for seed in range(design.seeds if seeds is None else seeds):
        whole = seeded(config, trunk, seed)
        whole = replace(whole, run=replace(whole.run, checkpoint_every=0, keep=_ALL))
        made = ArmRun(out / _FOLDER / "trunk", trunk, seed, whole, ladder.resolve(trunk), stops=steps)
        found.append(made)
        found += [
            ArmRun(
                out / branch_place(step), arm, seed, branch_config(seeded(config, arm, seed), design, step),
                ladder.resolve(arm), keep_checkpoints=False,
                trunk=made.folder, first=step, stops=(step + design.updates,),
            )
            for step in steps
            for arm in branching(ladder, arms)
        ]  # fmt: skip
    return found


def moments(design: Branch, steps: int) -> tuple[int, ...]:
    """Return the steps of the moments in a run of that many steps, ascending; ConfigError if one does not fit."""
    found: list[int] = []
    for text in design.moments:
        said = _MOMENT.fullmatch(text.strip())
        if not said:
            raise ConfigError(
                f"branch.moments: {shown(text)} is neither a step nor a share of the run, as in 500 or 25%"
            )
        if said["share"]:
            step = round(Fraction(said["share"]) * steps / 100 / design.interval) * design.interval
        else:
            step = int(said["step"])
        if step % design.interval:
            raise ConfigError(
                f"branch.moments: step {step} is not a multiple of {design.interval}, the steps between evaluations, "
                "so the end of a branch would not be evaluated"
            )
        if not 1 <= step <= steps - design.updates:
            raise ConfigError(
                f"branch.moments: {text} is step {step}, which is not from 1 to {steps - design.updates}: a branch "
                f"takes {design.updates} of the {steps} steps"
            )
        if step in found:
            raise ConfigError(f"branch.moments names step {step} twice")
        found.append(step)
    return tuple(sorted(found))


def _trunk(study: Study, made: ArmRun) -> ArmRun:
    """Return the ladder's own run, if it has the checkpoints of the moments, or the one that makes them."""
    own = replace(made, out=study.out, config=seeded(study.config, made.arm, made.seed), stops=())
    whole = study.identified(own)
    if not (whole.has_begun() and all(_checkpoint(whole.folder, step).exists() for step in made.stops)):
        whole = study.identified(made, {"moments": made.stops})
    return replace(whole, extra=Extra())


def _branch(study: Study, run: ArmRun, trunk: ArmRun) -> ArmRun:
    """Return a planned branch with its fingerprint, which has that of its trunk."""
    design = study.ladder.branch
    place: dict[str, Any] = {
        "from": trunk.arm.name,
        "trunk": digest({key: value for key, value in trunk.key.items() if key != DESIGN})[:12],
        "step": run.first,
        "updates": design.updates,
    }
    place |= {"anneal": True} if design.anneal else {}
    return study.identified(replace(run, trunk=trunk.folder), place)


def branch_config(config: TrainConfig, design: Branch, step: int) -> TrainConfig:
    """Return the configuration of a branch from a step of the trunk.

    Every step is logged, and no checkpoint is kept but the newest.
    """
    run = replace(config.run, log_every=1, eval_every=design.interval, checkpoint_every=0, keep=1)
    optim = config.optim
    if design.anneal:
        end = step + design.updates
        optim = replace(optim, schedule=Schedule.WSD, decay_start=step, decay_steps=end)
    return replace(config, run=run, optim=optim)


def branch_place(step: int) -> Path:
    """Return the directory of a moment's branches in that of the ladder."""
    return Path(_FOLDER, f"step-{step}")


def branching(ladder: Ladder, arms: list[str] | None) -> list[Arm]:
    """Return the arms that branch off, the trunk's own first; `arms` are names, default all.

    An arm with a seed offset is a repetition of the reference, and none of a trunk.
    """
    found = [ladder.trunk, *(arm for arm in ladder.select(arms) if not arm.seed_offset)]
    return list({arm.name: arm for arm in found}.values())


def _checkpoint(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / f"step-{step}"


# ---- the numbers ----


def assemble_branches(
    ladder: Ladder,
    config: TrainConfig,
    found: Sequence[tuple[int, Record]],
    *,
    data: dict[str, Any],
    backend: str,
) -> dict[str, Any]:
    """Return the results of the branch design, as plain values; arguments as of `results.assemble`.

    `found` has the finished branches, each with its first step. A difference is the loss of a branch less that of the
    trunk's own branch with the same seed, at the same step. Its interval is Student's over the seeds, at 95 %; there is
    none from one seed.
    """
    # The trunk's own branch is the first, and need not be the first that has ended.
    arms = list({arm.name: arm for arm in (ladder.trunk, *ladder.arm)}.values())
    moments = []
    for step in sorted({step for step, _ in found}):
        runs: dict[str, dict[int, Record]] = {arm.name: {} for arm in arms}
        for record in (record for at, record in found if at == step):
            runs[record["arm"]][record["pair"]] = record
        own = runs[ladder.trunk.name]
        rows = [_row(ladder, arm, runs[arm.name], own) for arm in arms if runs[arm.name]]
        moments.append({"step": step, "tokens": step * config.run.step_tokens, "arms": rows})
    return {
        "format": FORMAT,
        "title": ladder.title,
        "mxref": mxref.__version__,
        "backend": backend,
        "config": to_table(config),
        "design": to_table(ladder.branch) | {"trunk": ladder.trunk.name},
        "data": data,
        "last": LAST,
        "moments": moments,
    }


def _row(
    ladder: Ladder, arm: Arm, records: Mapping[int, Record], trunk: Mapping[int, Record]
) -> dict[str, Any]:
    pairs = paired(records, trunk)
    train, validation = (
        [_less(*(_finite(one[key]) for one in pair)) for pair in pairs] for key in ("train_curve", "losses")
    )
    kept = ("pair", "seed", "diverged", "reason", "losses", "train_curve", "environment", "last")
    return {
        "name": arm.name,
        "label": arm.label,
        "stage": arm.stage,
        "recipe": ladder.resolve(arm).digest,
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
    names = [
        name for name in (losses[0][0] if losses else ()) if all(name in one for of in losses for one in of)
    ]
    ends = {name: [[one[name][VALIDATION] for one in of] for of in losses] for name in names}
    return {
        name: _interval([None if a is None or b is None else a - b for a, b in values])
        for name, values in ends.items()
    }


def _finite(points: Sequence[tuple[int, float | None]]) -> Curve:
    return {step: loss for step, loss in points if loss is not None and math.isfinite(loss)}


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
    found = scatter(known)
    return {"mean": found.estimate, "half_width": found.half_width(), "pairs": found.pairs}
