"""Runs a ladder: every arm is trained under equal conditions in its own directory, and no finished arm again."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mxref.backend import Backend
from mxref.errors import FileFormatError, UnsupportedError
from mxref.tomlio import nearest, shown
from mxref_torch.conversion.convert import require_supported
from mxref_training.errors import ConfigError
from mxref_training.lab.arm import DESIGN, ArmRun, fingerprint
from mxref_training.lab.costs import Costs
from mxref_training.lab.ladder import SEED, Arm, Ladder
from mxref_training.lab.last_checkpoint import Extra
from mxref_training.lab.result_file import Record, plain, read_json, write_json
from mxref_training.lab.results import FORMAT, assemble
from mxref_training.sources import code_digest

if TYPE_CHECKING:
    from mxref_training.config import TrainConfig

RESULTS = "results.json"
_SPARSE = 10
"""Results are written again when a tenth more runs have finished: all runs wait for it, and it grows slower."""

Runner = Callable[[Sequence[ArmRun], "Tally", Any], None]
"""Trains runs, started in this order, on the tokens of a corpus, and tells a tally of each that begins, ends or fails.

`queue.Queue` is the one of `mxref ablate`.
"""


def planned(
    ladder: Ladder, config: TrainConfig, out: Path, seeds: int | None, arms: list[str] | None = None
) -> list[ArmRun]:
    """Return the runs of a ladder in order, without their fingerprints.

    All arms run at the first seeds before any runs at the next ones, so that pairs are complete early. The reference
    is the first arm of each. Each runs `seeds` times, or as often as it asks for if None. `arms` are names, to which
    the reference is added; None is all.
    """
    selected = sorted(ladder.select(arms), key=lambda arm: arm is not ladder.reference)
    times = {arm.name: ladder.repetitions(arm, seeds) for arm in selected}
    kept = ladder.last.keep
    return [
        ArmRun(
            out, arm, seed, seeded(config, arm, seed), ladder.resolve(arm),
            keep_checkpoints=kept is None or arm.name in kept,
        )
        for seed in range(max(times.values()))
        for arm in selected
        if seed < times[arm.name]
    ]  # fmt: skip


def seeded(config: TrainConfig, arm: Arm, seed: int) -> TrainConfig:
    """Return the configuration of one arm and repetition: the arm's own keys, and the seeds."""
    shift = arm.seed_offset + seed
    config = arm.config(config)
    run = config.run
    order = None if run.data_seed is None else run.data_seed + shift
    return replace(config, run=replace(run, seed=run.seed + shift, data_seed=order))


@dataclass(frozen=True)
class Study:
    """What the runs of a ladder share, whole ones and branches."""

    ladder: Ladder
    config: TrainConfig
    """The configuration of all arms; its seeds are those of the first repetition."""
    out: Path
    """Directory of the ladder."""
    backend: Backend
    runner: Runner
    corpus: Callable[[], Any]
    """Makes the tokens of all arms; it is called once, after all checks."""
    seeds: int | None = None
    """Repetitions of every arm, each pair at equal seeds; None: as many as each arm, or the branch design, asks for."""
    arms: list[str] | None = None
    """Names of the arms to run; None is all. The reference, or the trunk's arm, is always among them."""
    costs: Costs = field(default_factory=Costs)
    """Learns how long the finished runs took."""
    extra: Callable[[Any], Extra] = lambda corpus: Extra()
    """Makes, of the tokens, what the last checkpoint of each run is evaluated on too."""
    say: Callable[[str], None] = print
    """Prints one line."""

    @cached_property
    def tokens(self) -> Any:
        """The tokens, which their `hashes` identify."""
        return self.corpus()

    @cached_property
    def _code(self) -> str:
        """The digest of the code as it was when the study began."""
        return code_digest()

    @cached_property
    def _evaluated(self) -> Extra:
        return self.extra(self.tokens)

    @property
    def facts(self) -> dict[str, Any]:
        """What results say of all runs: hashes of the tokens with a line about their documents, and the backend."""
        data = {"hashes": dict(self.tokens.hashes), "report": str(self.tokens.report)}
        return {"data": data, "backend": self.backend.name}

    def require_runnable(self, arms: Sequence[Arm]) -> None:
        """Raise UnsupportedError if the backend cannot compute an arm: before the first one trains, not hours later."""
        for arm in arms:
            try:
                for treatment in self.ladder.resolve(arm).treatments():
                    require_supported(self.backend, treatment)
            except UnsupportedError as err:
                raise UnsupportedError(
                    f"arm {arm.name}: {err}; --arms=-{arm.name} leaves the arm out"
                ) from err

    def identified(self, run: ArmRun, design: dict[str, Any] | None = None, ranks: int = 1) -> ArmRun:
        """Return a planned run with its fingerprint; `design` says where it starts and ends if it is not whole."""
        key = fingerprint(run.config, run.recipe, self.backend, self.tokens, self._code, ranks)
        key |= {DESIGN: plain(design)} if design else {}
        return replace(run, key=key, corpus=str(self.tokens.report), extra=self._evaluated)


def run_ladder(study: Study, *, single: Sequence[str] = (), ranks: int = 1) -> dict[str, Any]:
    """Train the arms that are not finished, and return the results, also written to `results.json`.

    With names of `single` runs, as in `NAME.seed2`, these are trained alone, without the reference. `ranks` are the
    processes of each run.

    Raises:
        ConfigError: evaluations too rare to interpolate the target, or an unknown arm or run.
        UnsupportedError: the backend does not declare what an arm asks for.
        Interrupted: the runner was interrupted; the next call continues there.
    """
    ladder, config, seeds = study.ladder, study.config, study.seeds
    selected = [run.name for run in planned(ladder, config, study.out, seeds, study.arms)]
    asked_for = [name.removesuffix(f"{SEED}0") for name in single] or selected
    for name in asked_for:
        if name not in selected:
            raise ConfigError(f"no run is named {shown(name)}{nearest(name, selected)}: --seeds has too few?")
    target, run = ladder.target, config.run
    if target.loss is None and run.eval_every > target.fraction * run.steps:
        raise ConfigError(
            f"run.eval_every = {run.eval_every} leaves no evaluation before {target.fraction:.0%} of the "
            f"{run.steps} steps, where the target is read; set run.eval_every = {max(1, run.steps // 10)}"
        )
    arms = ladder.select(study.arms)
    study.require_runnable(arms)
    # Arms that are not asked for, or not yet reached, are in the results if an earlier call finished them.
    runs = [study.identified(run, ranks=ranks) for run in planned(ladder, config, study.out, seeds)]
    repetitions = max(ladder.repetitions(arm, seeds) for arm in arms)

    def results(records: dict[str, Record]) -> dict[str, Any]:
        found = [records[run.title] for run in runs if run.title in records]
        table = assemble(ladder, config, found, seeds=repetitions, planned=len(runs), **study.facts)
        # Without a run of the reference there is nothing to compare with, so no results are written.
        compared = any(record["arm"] == ladder.reference.name for record in found)
        written: dict[str, Any] = write_json(study.out / RESULTS, table) if compared else plain(table)
        return written

    wanted = [run for run in runs if run.name in asked_for]
    final: dict[str, Any] = Tally(study, runs, wanted, results).train()
    return final


class Tally:
    """Collects the records, prints a line about each run, and writes the results from time to time."""

    def __init__(
        self,
        study: Study,
        runs: Sequence[ArmRun],
        wanted: Sequence[ArmRun],
        results: Callable[[dict[str, Record]], Any],
    ) -> None:
        """Count the finished ones of the `runs` whose results count; those that are `wanted` will be trained.

        `results` writes what the records say, which are given by the titles of their runs, and returns it.
        """
        self.records = {run.title: record for run in runs if (record := run.finished())}
        self._study, self._results, self._wanted = study, results, wanted
        self._written = 0  # how many records the last results had
        self._titles = {run.title: f"[{i}/{len(wanted)}] {run.title}" for i, run in enumerate(wanted, 1)}
        for record in self.records.values():
            study.costs.learn_record(record)

    @property
    def missing(self) -> list[ArmRun]:
        """The runs that remain to be trained."""
        return [run for run in self._wanted if run.title not in self.records]

    def train(self) -> Any:
        """Train what is missing, after a line for each finished run, and return the results."""
        for run in self._wanted:
            if run.title in self.records:
                self.begin(run)
                run.drop_checkpoints()
        try:
            self._study.runner(self.missing, self, self._study.tokens)
        finally:
            final = self._results(self.records)
        return final

    def begin(self, run: ArmRun) -> None:
        """Prepare a run's directory just before it trains, and print what will happen."""
        self._say(run, run.prepare())

    def done(self, run: ArmRun, record: Record) -> None:
        """Keep the record of a finished run. Write the results if some more runs have finished since they were."""
        self.records[run.title] = record
        finished = len(self.records)
        if _SPARSE * (finished - self._written) >= finished:
            self._results(self.records)
            self._written = finished
        self._say(run, summary(record))

    def failed(self, run: ArmRun, reason: str) -> None:
        """Print why a run has no result."""
        self._say(run, f"failed: {reason}")

    def _say(self, run: ArmRun, text: str) -> None:
        self._study.say(f"{self._titles[run.title]}: {text}")


def summary(record: Record) -> str:
    """Return the result of a run in one line."""
    if record["diverged"]:
        return f"diverged: {record['reason']}"
    rate = record["tokens_per_second"] or 0.0
    loss = record["losses"][-1][1] if record["losses"] else None
    said = "not finite" if loss is None else f"{loss:.4f}"
    return f"validation loss {said} after {record['tokens']:,} tokens, {rate:,.0f} tokens/s"


def load_results(folder: Path) -> dict[str, Any]:
    """Return the results of a ladder's directory; FileFormatError if there are none, or damaged ones."""
    path = folder / RESULTS
    if not path.exists():
        raise FileFormatError(
            f"cannot read {path}: there is none; 'mxref ablate LADDER --out {folder}' makes it"
        )
    results = read_json(path)
    if not results or results.get("format") != FORMAT:
        raise FileFormatError(
            f"{path} is damaged, or holds no results of 'mxref ablate'; run the ladder again, finished arms are kept"
        )
    return results
