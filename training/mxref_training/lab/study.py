"""Run a ladder: every arm is trained under equal conditions in its own directory, and no finished arm again.

The runs go one after another in this process, or several at a time in child processes
(`mxref_training.lab.processes`). Both train a single run by `mxref_training.lab.runner`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mxref.backend import Backend
from mxref.errors import FileFormatError, UnsupportedError
from mxref_torch.conversion.convert import require_supported
from mxref_training.errors import ConfigError
from mxref_training.lab.arm import ArmRun
from mxref_training.lab.costs import Costs
from mxref_training.lab.fingerprint import fingerprint
from mxref_training.lab.ladder import Arm, Ladder
from mxref_training.lab.last_checkpoint import Extra
from mxref_training.lab.result_file import Record, plain, write_json
from mxref_training.lab.results import assemble
from mxref_training.lab.runner import Before, Runner, Trainer
from mxref_training.lab.tally import Tally, one_by_one
from mxref_training.sources import code_digest

if TYPE_CHECKING:
    from mxref_training.config import TrainConfig

RESULTS = "results.json"


def run_ladder(
    ladder: Ladder,
    config: TrainConfig,
    out: Path,
    *,
    backend: Backend,
    trainer: Trainer,
    corpus: Callable[[], Any],
    seeds: int | None = 1,
    arms: list[str] | None = None,
    keep_checkpoints: Sequence[str] | None = None,
    progress: Any = None,
    runner: Runner | None = None,
    costs: Costs | None = None,
    before: Before | None = None,
    extra: Callable[[Any], Extra] = lambda corpus: Extra(),
    then: str = "",
    say: Callable[[str], None] = print,
) -> dict[str, Any]:
    """Train the arms that are not finished, and return the results, also written to `out/results.json`.

    Args:
        ladder: the arms and the target.
        config: the configuration that they share; its seeds are those of the first repetition.
        out: directory of the ladder.
        backend: computes the block formats.
        trainer: the training loop.
        corpus: makes the tokens that all arms share; it is called once, after all checks. `hashes` identifies the
            tokens.
        seeds: repetitions of every arm, each pair at equal seeds; None: as many as each arm asks for.
        arms: names of the arms to run; default all. The reference is always among them.
        keep_checkpoints: names of the arms whose checkpoints stay when they are finished; default all.
        progress: handed to the trainer.
        runner: trains the runs; by default `trainer` trains them one after another in this process.
        costs: learns how long the finished runs took.
        before: is told all runs that will train, before the first one does.
        extra: makes, of the tokens, what the last checkpoint of each run is evaluated on too.
        then: what the caller does behind the ladder, as in `the probe`; a signal in the last run stops that too.
        say: prints one line.

    Raises:
        ConfigError: evaluations too rare to interpolate the target, or an unknown arm.
        UnsupportedError: the backend does not declare what an arm asks for.
        Interrupted: the trainer or the runner was interrupted; the next call continues there.
    """
    most = max(ladder.repetitions(arm, seeds) for arm in ladder.select(arms))
    selected = {(arm.name, seed) for arm, seed in planned(ladder, seeds, arms)}
    _check(ladder, ladder.select(arms), config, backend, seeds, keep_checkpoints or ())
    code, tokens = code_digest(), corpus()
    asked = extra(tokens)

    def resolved(arm: Arm, seed: int) -> ArmRun:
        run, recipe = seeded(config, arm, seed), ladder.resolve(arm)
        key = fingerprint(run, recipe, backend, tokens, code)
        kept = keep_checkpoints is None or arm.name in keep_checkpoints
        return ArmRun(out, arm, seed, run, recipe, key, str(tokens.report), kept, extra=asked)

    # Arms that are not asked for, or not yet reached, are in the results if an earlier call finished them.
    runs = [resolved(arm, seed) for arm, seed in planned(ladder, seeds)]
    wanted = [run for run in runs if (run.arm.name, run.seed) in selected]

    def results(records: dict[str, Record]) -> dict[str, Any]:
        by_arm: dict[str, list[Record]] = {arm.name: [] for arm in ladder.arm}
        for run in runs:
            by_arm[run.arm.name] += [records[run.title]] if run.title in records else []
        table = assemble(
            ladder, config, by_arm, seeds=most, planned=len(runs), corpus=tokens, backend=backend.name
        )
        written: dict[str, Any] = plain(table)
        # Without a run of the reference there is nothing to compare with, so no results are written.
        if by_arm[ladder.reference.name]:
            write_json(out / RESULTS, written)
        return written

    tally = Tally(runs, wanted, results, say)
    if costs:
        costs.learn_records((run, tally.records[run.title]) for run in runs if run.title in tally.records)
    unfinished = tally.unfinished()
    if before:
        before(unfinished, tokens)
    try:
        (runner or one_by_one(trainer, backend, progress))(unfinished, tally, tokens, then=then)
    finally:
        final = results(tally.records)
    return final


def planned(ladder: Ladder, seeds: int | None, arms: list[str] | None = None) -> list[tuple[Arm, int]]:
    """Return the runs of a ladder in order, each as its arm and the number of its repetition.

    All arms run at the first seeds before any runs at the next ones, so that pairs are complete early. The reference
    is the first arm of each. An arm with a seed offset is itself a repetition, and runs once.

    Args:
        ladder: the arms.
        seeds: repetitions of every arm; None: as many as each arm asks for.
        arms: names, to which the reference is added; default all.
    """
    selected = sorted(ladder.select(arms), key=lambda arm: arm is not ladder.reference)
    times = {arm.name: ladder.repetitions(arm, seeds) for arm in selected}
    return [(arm, seed) for seed in range(max(times.values())) for arm in selected if seed < times[arm.name]]


def load_results(folder: Path) -> dict[str, Any]:
    """Return the results of a ladder's directory; FileFormatError if there are none, or damaged ones."""
    path = folder / RESULTS
    try:
        results = json.loads(path.read_text(encoding="utf-8"))
    except OSError as err:
        raise FileFormatError(
            f"cannot read {path}: {err.strerror or err}; 'mxref ablate LADDER --out {folder}' makes it"
        ) from err
    except ValueError as err:
        raise FileFormatError(
            f"{path} is damaged ({err}); run the ladder again, finished arms are kept"
        ) from err
    if not isinstance(results, dict) or results.get("format") != "mxref-ablation/1":
        raise FileFormatError(
            f"{path} holds no results of 'mxref ablate'; run the ladder again, finished arms are kept"
        )
    return dict(results)


def seeded(config: TrainConfig, arm: Arm, seed: int) -> TrainConfig:
    """Return the configuration of one arm and repetition: the arm's own keys, and the seeds."""
    shift = arm.seed_offset + seed
    config = arm.config(config)
    run = config.run
    order = None if run.data_seed is None else run.data_seed + shift
    return replace(config, run=replace(run, seed=run.seed + shift, data_seed=order))


def _check(
    ladder: Ladder,
    arms: Sequence[Arm],
    config: TrainConfig,
    backend: Backend,
    seeds: int | None,
    keep_checkpoints: Sequence[str],
) -> None:
    if seeds is not None and seeds < 1:
        raise ConfigError(f"seeds = {seeds} is below 1")
    for name in keep_checkpoints:
        ladder.named(name)
    run = config.run
    last_first = ladder.target.fraction * run.steps
    if ladder.target.loss is None and run.eval_every > last_first:
        raise ConfigError(
            f"run.eval_every = {run.eval_every} leaves no evaluation before {ladder.target.fraction:.0%} of the "
            f"{run.steps} steps, where the target is read; set run.eval_every = {max(1, run.steps // 10)}"
        )
    require_runnable(ladder, arms, backend)


def require_runnable(ladder: Ladder, arms: Sequence[Arm], backend: Backend) -> None:
    """Raise UnsupportedError if the backend cannot compute an arm: before the first one trains, not hours later."""
    for arm in arms:
        try:
            for treatment in ladder.resolve(arm).treatments():
                require_supported(backend, treatment)
        except UnsupportedError as err:
            raise UnsupportedError(f"arm {arm.name}: {err}; --without {arm.name} leaves the arm out") from err
