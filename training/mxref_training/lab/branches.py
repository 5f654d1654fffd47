"""Runs the branch design: a trunk up to each moment, and from there every recipe on the same batches.

`OUT/branch/trunk/` has the trunk's run and its checkpoints, `OUT/branch/step-N/` the branches of a moment, each laid
out as a ladder. The trunk is not trained where the ladder's own run of that arm has kept checkpoints of all moments.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from pathlib import Path
from statistics import fmean
from typing import TYPE_CHECKING, Any

import mxref
from mxref.tomlio import shown, to_table
from mxref_training.config import Schedule
from mxref_training.errors import ConfigError
from mxref_training.lab.arm import DESIGN, ArmRun, Start, set_aside
from mxref_training.lab.contrasts import scatter
from mxref_training.lab.ladder import Arm, Branch, Ladder
from mxref_training.lab.last_checkpoint import VALIDATION, Extra
from mxref_training.lab.result_file import Record, digest, write_json
from mxref_training.lab.study import Study, Tally, require_runnable, seeded

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

    Args:
        study: the ladder, whose table `[branch]` is the design, and how it is trained. `run.steps` sets what a share
            of the run is; a branch takes `updates` steps.

    Raises:
        ConfigError: a moment does not fit the run, or an unknown arm.
        UnsupportedError: the backend does not declare what an arm asks for.
        Interrupted: the trainer or the runner was interrupted; the next call continues there.
    """
    ladder, config, design = study.ladder, study.config, study.ladder.branch
    chosen = branching(ladder, study.arms)
    require_runnable(ladder, chosen, study.backend)
    for arm in chosen:
        if "model" in arm.train:
            raise ConfigError(
                f"arm {arm.name!r} sets keys of train.model, and a branch goes on with the trunk's model: "
                f"--arms=-{arm.name} leaves the arm out"
            )
    plan = branch_runs(ladder, config, study.out, study.seeds)
    trunks = {run.seed: _trunk(study, run) for run in plan if not run.start}
    branches = [_branch(study, run, trunks[run.seed]) for run in plan if run.start]
    wanted = [run for run in branches if run.arm in chosen]

    def results(records: dict[str, Record]) -> dict[str, Any]:
        found = {
            (run.start.step, run.arm.name, run.seed): records[run.title]
            for run in branches
            if run.start and run.title in records
        }
        shared = branch_config(config, replace(design, anneal=False), 0)
        table = assemble_branches(ladder, shared, found, study.data, study.backend.name)
        written: dict[str, Any] = write_json(study.out / RESULTS, table)
        return written

    tally = Tally(study, branches, wanted, results)
    needed = [trunk for trunk in trunks.values() if _is_needed(trunk, tally.missing)]
    for trunk in needed:
        if trunk.finished():
            study.say(f"{trunk.title}: its checkpoints are gone, so it is trained again")
            set_aside(trunk.out, trunk.folder)
    Tally(study, needed, needed, lambda records: None).train()
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
        for step in steps:
            for arm in branching(ladder, arms):
                own = branch_config(seeded(config, arm, seed), design, step)
                branch = ArmRun(out / branch_place(step), arm, seed, own, ladder.resolve(arm))
                start, stops = Start(made.folder, step), (step + design.updates,)
                found.append(replace(branch, start=start, stops=stops, keep_checkpoints=False))
    return found


def moments(design: Branch, steps: int) -> tuple[int, ...]:
    """Return the steps of the moments in a run of that many steps, ascending.

    Raises:
        ConfigError: a moment is no number or share, is not between two evaluations of a branch, has too few steps
            after it, or is named twice.
    """
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
        whole = study.identified(made, {"moments": list(made.stops)})
    return replace(whole, extra=Extra())


def _branch(study: Study, run: ArmRun, trunk: ArmRun) -> ArmRun:
    """Return a planned branch with its fingerprint, which has that of its trunk."""
    design, same = study.ladder.branch, {key: value for key, value in trunk.key.items() if key != DESIGN}
    assert run.start
    place = {
        "from": trunk.arm.name,
        "trunk": digest(same)[:12],
        "step": run.start.step,
        "updates": design.updates,
    }
    place |= {"anneal": True} if design.anneal else {}
    return study.identified(replace(run, start=Start(trunk.folder, run.start.step)), place)


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


def _is_needed(trunk: ArmRun, missing: Iterable[ArmRun]) -> bool:
    """Return whether a branch has to be trained whose checkpoint is not there."""
    starts = [run.start for run in missing if run.seed == trunk.seed]
    return any(start and not _checkpoint(start.trunk, start.step).exists() for start in starts)


def _checkpoint(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / f"step-{step}"


# ---- the numbers ----


def assemble_branches(
    ladder: Ladder,
    config: TrainConfig,
    found: Mapping[tuple[int, str, int], Record],
    data: dict[str, Any],
    backend: str,
) -> dict[str, Any]:
    """Return the results of the branch design, as plain values.

    A difference is the loss of a branch less that of the trunk's own branch with the same seed, at the same step. Its
    interval is Student's over the seeds, at 95 %; there is none from one seed.

    Args:
        ladder: the arms, and the design.
        config: the configuration that all runs share.
        found: the records of finished branches by step, arm and seed.
        data: hashes of the shared tokens, and a line about their documents.
        backend: name of the backend.
    """
    by_moment: dict[int, dict[str, dict[int, Record]]] = defaultdict(lambda: defaultdict(dict))
    for (step, name, seed), record in found.items():
        by_moment[step][name][seed] = record
    trunk = ladder.trunk.name
    # The trunk's own branch need not be the first that has ended.
    arms = [ladder.trunk, *(arm for arm in ladder.arm if arm.name != trunk)]
    moments = [
        {
            "step": step,
            "tokens": step * config.run.step_tokens,
            "arms": [_row(ladder, arm, of[arm.name], of.get(trunk, {})) for arm in arms if arm.name in of],
        }
        for step, of in sorted(by_moment.items())
    ]
    return {
        "format": FORMAT,
        "title": ladder.title,
        "mxref": mxref.__version__,
        "backend": backend,
        "config": to_table(config),
        "design": to_table(ladder.branch) | {"trunk": trunk},
        "data": data,
        "last": LAST,
        "moments": moments,
    }


def _row(
    ladder: Ladder, arm: Arm, records: Mapping[int, Record], trunk: Mapping[int, Record]
) -> dict[str, Any]:
    pairs = [(records[seed], trunk[seed]) for seed in sorted(records) if seed in trunk]
    train = [_less(curve(a, "train_curve"), curve(b, "train_curve")) for a, b in pairs]
    validation = [_less(curve(a, "losses"), curve(b, "losses")) for a, b in pairs]
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
    found = scatter(known)
    return {"mean": found.estimate, "half_width": found.half_width(), "pairs": found.pairs}
