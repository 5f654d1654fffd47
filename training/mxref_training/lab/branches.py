"""Runs the branch design: a trunk up to each moment, and from there every recipe on the same batches.

`OUT/branch/trunk/` has the trunk's run and its checkpoints, `OUT/branch/step-N/` the branches of a moment, each laid
out as a ladder. The trunk is not trained where the ladder's own run of that arm has kept checkpoints of all moments.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mxref.backend import Backend
from mxref_training.config import Schedule
from mxref_training.errors import ConfigError
from mxref_training.lab.arm import DESIGN, ArmRun, Start, fingerprint, run_name
from mxref_training.lab.costs import Costs, Planned
from mxref_training.lab.ladder import Arm, Ladder
from mxref_training.lab.last_checkpoint import Extra
from mxref_training.lab.moments import Branch
from mxref_training.lab.paired import assemble_branches
from mxref_training.lab.result_file import Record, digest, plain, write_json
from mxref_training.lab.study import Runner, Tally, require_runnable, seeded
from mxref_training.sources import code_digest

if TYPE_CHECKING:
    from mxref_training.config import TrainConfig

RESULTS = "branch.json"
_FOLDER = "branch"
_ALL = 1_000_000  # checkpoints of a trunk that are kept


def run_branches(
    ladder: Ladder,
    config: TrainConfig,
    out: Path,
    *,
    backend: Backend,
    runner: Runner,
    corpus: Callable[[], Any],
    seeds: int | None = None,
    arms: list[str] | None = None,
    costs: Costs | None = None,
    extra: Callable[[Any], Extra] = lambda corpus: Extra(),
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Train the branches that are not finished, and return the results, also written to `out/branch.json`.

    Args:
        ladder: the arms; its table `[branch]` is the design.
        config: the configuration that they share. `run.steps` sets what a share of the run is; a branch takes
            `updates` steps.
        out: directory of the ladder.
        backend: computes the block formats.
        runner: trains the runs.
        corpus: makes the tokens that all arms share.
        seeds: trunks; None: as many as the design asks for.
        arms: names of the arms that branch off; default all. The trunk's own arm is always among them.
        costs: learns how long the finished runs took.
        extra: makes, of the tokens, what the last checkpoint of each branch is evaluated on too.
        say: prints one line.

    Raises:
        ConfigError: a moment does not fit the run, or an unknown arm.
        UnsupportedError: the backend does not declare what an arm asks for.
        Interrupted: the trainer or the runner was interrupted; the next call continues there.
    """
    design = ladder.branch
    moments = design.steps(config.run.steps)
    chosen = branching(ladder, arms)
    require_runnable(ladder, chosen, backend)
    for arm in chosen:
        if "model" in arm.train:
            raise ConfigError(
                f"arm {arm.name!r} sets keys of train.model, and a branch goes on with the trunk's model: "
                f"--arms=-{arm.name} leaves the arm out"
            )
    code, tokens = code_digest(), corpus()
    plan = _Plan(ladder, config, out, design, moments, backend, tokens, code, extra(tokens))
    count = design.seeds if seeds is None else seeds
    trunks = [plan.trunk(seed) for seed in range(count)]
    branches = [
        plan.branch(trunk, arm, step)
        for trunk in trunks
        for step in moments
        for arm in branching(ladder, None)
    ]
    wanted = [run for run in branches if run.arm in chosen]

    def results(records: dict[str, Record]) -> dict[str, Any]:
        found = ((run, records[run.title]) for run in branches if run.title in records)
        shared = branch_config(config, replace(design, anneal=False), moments[0])
        table = assemble_branches(ladder, shared, found, tokens, backend.name)
        written: dict[str, Any] = plain(table)
        write_json(out / RESULTS, written)
        return written

    tally = Tally(branches, wanted, results, say)
    if costs:
        for record in tally.records.values():
            costs.learn_record(record)
    missing = [run for run in wanted if run.title not in tally.records]
    needed = [trunk for trunk in trunks if _is_needed(trunk, missing)]
    for trunk in needed:
        if trunk.finished():
            say(f"{trunk.title}: its checkpoints are gone, so it is trained again")
            trunk.forget()
    at_trunks = Tally(needed, needed, lambda records: None, say)
    runner(at_trunks.unfinished(), at_trunks, tokens, then="the branches")
    try:
        runner(tally.unfinished(), tally, tokens)
    finally:
        final = results(tally.records)
    return final


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


def branch_runs(
    ladder: Ladder, config: TrainConfig, seeds: int | None, arms: list[str] | None
) -> list[Planned]:
    """Return the trunks, each up to its last moment, and the branches."""
    design = ladder.branch
    moments = design.steps(config.run.steps)
    found = []
    for seed in range(design.seeds if seeds is None else seeds):
        name = run_name(ladder.trunk.name, seed)
        found.append(Planned(ladder.trunk, moments[-1], Path(_FOLDER, "trunk", "arms", name)))
        for step in moments:
            found += [
                Planned(
                    arm, design.updates, branch_place(step) / "arms" / run_name(arm.name, seed), whole=False
                )
                for arm in branching(ladder, arms)
            ]
    return found


def _is_needed(trunk: ArmRun, missing: Iterable[ArmRun]) -> bool:
    """Return whether a branch has to be trained whose checkpoint is not there."""
    starts = [run.start for run in missing if run.seed == trunk.seed]
    return any(start and not _checkpoint(start.trunk, start.step).exists() for start in starts)


def _checkpoint(folder: Path, step: int) -> Path:
    return folder / "checkpoints" / f"step-{step}"


@dataclass(frozen=True)
class _Plan:
    """What all runs of the design share."""

    ladder: Ladder
    config: TrainConfig
    out: Path
    design: Branch
    moments: Sequence[int]
    backend: Backend
    tokens: Any
    code: str
    extra: Extra

    def trunk(self, seed: int) -> ArmRun:
        """Return the run that has the checkpoints, or makes them."""
        arm = self.ladder.trunk
        config = seeded(self.config, arm, seed)
        plainly = self._run(self.out, arm, seed, config, {})
        if plainly.has_begun() and all(_checkpoint(plainly.folder, step).exists() for step in self.moments):
            return plainly
        config = replace(config, run=replace(config.run, checkpoint_every=0, keep=_ALL))
        made = self._run(self.out / _FOLDER / "trunk", arm, seed, config, {"moments": list(self.moments)})
        return replace(made, stops=tuple(self.moments))

    def branch(self, trunk: ArmRun, arm: Arm, step: int) -> ArmRun:
        """Return the run of an arm that goes on from a step of a trunk."""
        design = self.design
        config = branch_config(seeded(self.config, arm, trunk.seed), design, step)
        same = {key: value for key, value in trunk.key.items() if key != DESIGN}
        place = {"from": trunk.arm.name, "trunk": digest(same)[:12], "step": step, "updates": design.updates}
        place |= {"anneal": True} if design.anneal else {}
        made = self._run(self.out / branch_place(step), arm, trunk.seed, config, place)
        return replace(
            made,
            start=Start(trunk.folder, step),
            stops=(step + design.updates,),
            keep_checkpoints=False,
            extra=self.extra,
        )

    def _run(self, out: Path, arm: Arm, seed: int, config: TrainConfig, place: dict[str, Any]) -> ArmRun:
        recipe = self.ladder.resolve(arm)
        key = fingerprint(config, recipe, self.backend, self.tokens, self.code)
        key |= {DESIGN: place} if place else {}
        return ArmRun(out, arm, seed, config, recipe, key, str(self.tokens.report))
