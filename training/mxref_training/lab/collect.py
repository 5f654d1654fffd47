"""Brings results of several folders, archives and machines together, after checks that they are of one ladder.

A result stands alone, so no checkpoint and no log is needed. An archive is a text file with one result a line. The
results must agree in model, data, optimizer, run, backend and code, and each recipe must be that of the ladder's arm.
A run that was trained twice must have equal bits, unless a compiler chose its kernels by their time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mxref.errors import FileFormatError
from mxref.tomlio import merge, to_table
from mxref_training.config_files import recorded_config
from mxref_training.errors import ConfigError
from mxref_training.lab import result_file
from mxref_training.lab.arm import DESIGN, differences, run_name, set_aside
from mxref_training.lab.branches import RESULTS as BRANCHES
from mxref_training.lab.branches import assemble_branches, branch_place
from mxref_training.lab.ladder import Ladder
from mxref_training.lab.result_file import Record, Table, plain, write_json
from mxref_training.lab.results import assemble
from mxref_training.lab.study import RESULTS
from mxref_training.sources import code_digest
from mxref_training.wording import counted

if TYPE_CHECKING:
    from mxref_training.config import TrainConfig

_SHOWN = 3  # results that an error names
_NAME_IT = "name the ladder that these results are of"
_ANNEALED = {"optim.schedule", "optim.decay_start", "optim.decay_steps"}
_UNSHARED = {"run.seed", "run.data_seed", f"{DESIGN}.step", f"{DESIGN}.trunk"}
"""Keys of the fingerprint that differ between the runs of a ladder, beside the recipe and its phases."""


class Found:
    """A result, and its place in the directory of its ladder."""

    def __init__(self, path: str, table: Table) -> None:
        """`path` is its file, with the line in an archive."""
        self.path, self.table = path, table
        self.record: Record = table["record"]
        self.key: Table = table["key"]
        self.design: Table = self.key.get(DESIGN) or {}
        """Where the run starts and ends; empty if it is a whole one."""
        self.arm, self.pair = self.record["arm"], self.record.get("pair")
        self.step = self.design.get("step", 0)
        # The `name` in the file is not used as a path.
        self.name = run_name(self.arm, self.pair)
        self.place = (branch_place(self.step) if self.design else Path()) / "arms" / self.name
        environment = self.record["environment"]
        self.device = str(environment.get("hardware", {}).get("device", "unknown"))
        self.torch = environment.get("versions", {}).get("torch", "unknown")

    def __str__(self) -> str:
        return f"{self.path} ({self.device}, torch {self.torch})"


def results_in(source: Path, *, required: bool = True) -> Iterator[Found]:
    """Yield the results of an archive, or of a folder at any depth.

    Raises:
        FileFormatError: one is damaged, or was edited.
        ConfigError: there is none, and `required`.
    """
    if source.is_file():
        with source.open("rb") as lines:
            tables = [(f"{source}, line {n}", result_file.parsed(line)) for n, line in enumerate(lines, 1)]
    else:
        paths = sorted(path for path in source.rglob(result_file.NAME) if "superseded" not in path.parts)
        tables = [(str(path), result_file.read(path)) for path in paths]
    if required and not tables:
        raise ConfigError(
            f"{source} holds no {result_file.NAME}: name the --out of 'mxref ablate', a folder with such directories, "
            "or an archive"
        )
    for path, table in tables:
        found = table and Found(path, table)
        # A trunk is kept for its checkpoints, and is not compared.
        if found and found.design and "step" not in found.design:
            continue
        # The directory is named by these two numbers.
        if not found or not all(type(number) is int and number >= 0 for number in (found.pair, found.step)):
            raise FileFormatError(
                f"{path} is damaged, was edited, or is of another version of mxref: copy it again, or delete it"
            )
        yield found


def parting(one: Found, other: Found) -> str:
    """Return where two results of one run begin to differ; empty if they are equal."""
    for what, key in (("validation", "losses"), ("training", "train_curve")):
        for mine, theirs in zip_longest(one.record[key], other.record[key]):
            if mine != theirs:
                values = " and ".join("none" if x is None else repr(x[1]) for x in (mine, theirs))
                return f"the {what} losses part at step {(mine or theirs)[0]}: {values}"
    if one.table["metrics"] == other.table["metrics"]:
        return ""
    return "the logs differ, though the curves do not: steps between the points of the curves, or their gradient norms"


@dataclass(frozen=True)
class Collected:
    """The collected results of a ladder."""

    ladder: dict[str, Any] | None
    """As `run_ladder` returns it; None while no run of the reference arm is there."""
    branches: dict[str, Any] | None
    """As `run_branches` returns it; None while no branch of the trunk's own arm is there."""


def collect(
    ladder: Ladder, folders: Sequence[Path], out: Path, say: Callable[[str], None] = print
) -> Collected:
    """Copy the results of folders or archives into `out`, where the ladder then counts them as finished; compare them.

    Results that `out` has already are collected too.

    Raises:
        FileFormatError: a result file is damaged, or was edited.
        ConfigError: a folder has no results; they are of different ladders, configurations, tokens, backends or code;
            or a run that is repeatable has other bits in another folder.
    """
    others = [folder for folder in folders if folder.resolve() != out.resolve()]
    # Those of `out` come first: they stay where they are.
    found = [*results_in(out, required=not others), *(f for folder in others for f in results_in(folder))]
    for result in found:
        _require_arm(ladder, result)
    for branched in (False, True):
        if group := [result for result in found if bool(result.design) is branched]:
            _require_one_ladder(ladder, group)
            _config(ladder, group)
    _require_one_ladder(ladder, found, ("model", "optim", "data", "backend", "code"))
    runs = _once(found, say)
    for result in runs:
        _keep(result, out, say)
    say(f"{counted(len(runs), 'run')} in {out}, trained on {', '.join(sorted({r.device for r in runs}))}")
    if found[0].key["code"] != code_digest():
        say("they were trained by other code than this: 'mxref ablate' would train them again")
    runs.sort(key=lambda result: result.pair)
    whole, branches = ([run for run in runs if bool(run.design) is branched] for branched in (False, True))
    reference, trunk = ladder.reference.name, ladder.trunk.name
    collected = {}
    for name, group, arm, missing, compare in (
        (RESULTS, whole, reference, f"run of {reference}, the reference", _ladder_results),
        (BRANCHES, branches, trunk, f"branch of {trunk}, the trunk's own arm", _branch_results),
    ):
        if any(run.arm == arm for run in group):
            first = group[0]
            data = {"hashes": first.key["data"], "report": first.table["corpus"]}
            backend = str(first.key["backend"]["name"])
            table = compare(ladder, _config(ladder, group), group, data=data, backend=backend)
            collected[name] = write_json(out / name, table)
        elif group:
            say(f"no {missing}, so there is nothing to compare with")
    return Collected(collected.get(RESULTS), collected.get(BRANCHES))


def _ladder_results(
    ladder: Ladder, config: TrainConfig, runs: Sequence[Found], **facts: Any
) -> dict[str, Any]:
    there = [run.arm for run in runs]
    planned = sum(max(ladder.repetitions(arm), there.count(arm.name)) for arm in ladder.arm)
    seeds = 1 + max(run.pair for run in runs)
    return assemble(ladder, config, [run.record for run in runs], seeds=seeds, planned=planned, **facts)


def _branch_results(
    ladder: Ladder, config: TrainConfig, runs: Sequence[Found], **facts: Any
) -> dict[str, Any]:
    moments = tuple(str(step) for step in sorted({run.step for run in runs}))
    updates, every = runs[0].design["updates"], config.run.eval_every
    design = replace(ladder.branch, moments=moments, updates=updates, eval_every=every)
    found = [(run.step, run.record) for run in runs]
    return assemble_branches(replace(ladder, branch=design), config, found, **facts)


def _require_arm(ladder: Ladder, result: Found) -> None:
    """Raise ConfigError unless the run is an arm of the ladder, with the recipe and the keys that it has there."""
    if result.design and result.design["from"] != ladder.trunk.name:
        wrong = f"branches off {result.design['from']}, and in the ladder branch.trunk is {ladder.trunk.name}"
        raise ConfigError(f"{result.path} {wrong}: {_NAME_IT}")
    try:
        arm = ladder.named(result.arm)
    except ConfigError as err:
        raise ConfigError(f"{result.path}: {err}; {_NAME_IT}") from err
    config = result.table["config"]
    recipe, used = to_table(ladder.resolve(arm)), result.key["recipe"]
    for what, wanted, found in (
        ("has another recipe than in the ladder, by {}", recipe, used),
        ("was trained with another {} than in the ladder", merge(config, arm.train), config),
    ):
        if keys := differences(plain(wanted), found):
            raise ConfigError(f"{result.path}: arm {arm.name} {what.format(_some(keys))}; {_NAME_IT}")


def _own_keys(ladder: Ladder, result: Found) -> set[str]:
    """Return the keys that the run's arm, or its annealed branch, sets for itself."""
    tables = ladder.named(result.arm).train
    own = {f"{section}.{key}" for section, keys in tables.items() for key in keys}
    return own | (_ANNEALED if result.design.get("anneal") else set())


def _require_one_ladder(ladder: Ladder, found: Sequence[Found], parts: Sequence[str] = ()) -> None:
    """Raise ConfigError, which says what differs and where, unless all runs were trained under equal conditions.

    Of the fingerprint some `parts` count, or all.
    """
    first = min(found, key=lambda result: len(_own_keys(ladder, result)))
    wrong = []
    for result in found:
        own = _UNSHARED | _own_keys(ladder, first) | _own_keys(ladder, result)
        of = {key: key.partition(".")[0] for key in differences(first.key, result.key) if key not in own}
        if counts := [
            key
            for key, part in of.items()
            if part not in ("recipe", "phases") and (not parts or part in parts)
        ]:
            wrong.append(f"{result.path} by {_some(counts)}")
    if wrong:
        raise ConfigError(
            f"{len(wrong)} of {len(found)} results are not of the ladder of {first.path}. They differ: "
            f"{_some(wrong, '; ')}. Collect them into another --out"
        )


def _config(ladder: Ladder, found: Sequence[Found]) -> TrainConfig:
    """Return the configuration that all runs share, with the seeds of the first repetition.

    Raises:
        ConfigError: repetitions of the same number have different seeds.
    """
    firsts: dict[tuple[int, int | None], Found] = {}
    for result in found:
        shift = ladder.named(result.arm).seed_offset + result.pair
        seed, order = result.record["seed"], result.record["data_seed"]
        place = (seed - shift, None if order is None else order - shift)
        if place not in firsts or _own_keys(ladder, firsts[place]):
            firsts[place] = result
    if len(firsts) > 1:
        (a, one), (b, other) = list(firsts.items())[:2]
        raise ConfigError(
            f"{one.path} is of a ladder whose first seeds (run.seed, run.data_seed) are {a}, and {other.path} of one "
            f"with {b}: their runs cannot be paired. Collect them into another --out"
        )
    (seed, order), result = next(iter(firsts.items()))
    config = recorded_config(result.table["config"], result.path)
    return replace(config, run=replace(config.run, seed=seed, data_seed=order))


def _once(found: Sequence[Found], say: Callable[[str], None]) -> list[Found]:
    """Return each run once; ConfigError if a repeatable run has other bits elsewhere."""
    runs: dict[Path, Found] = {}
    equal = 0
    for result in found:
        first = runs.setdefault(result.place, result)
        if first is result:
            continue
        run = first.table["config"]["run"]
        if not (part := parting(first, result)):
            equal += 1
        elif run["deterministic"] or run["compile"] == "none":  # else a kernel was chosen by its time
            raise ConfigError(
                f"{result.name} has other bits in {result} than in {first}: {part}. Leave one of the folders out"
            )
        else:
            say(f"{result.name}: {result.path} has other bits than {first.path}, which is kept: {part}")
    if equal:
        say(f"{equal} results are there more than once, with equal bits")
    return list(runs.values())


def _keep(result: Found, out: Path, say: Callable[[str], None]) -> None:
    """Write a result into the ladder's directory, unless it is there."""
    folder = out / result.place
    target = folder / result_file.NAME
    if str(target) == result.path:
        return
    if (folder / "run.json").exists():  # an unfinished run, whose result is here now
        say(f"{result.name}: the unfinished run moves to {set_aside(out, folder)}")
    write_json(target, result.table)


def _some(parts: Sequence[str], between: str = ", ") -> str:
    more = f"{between}and {len(parts) - _SHOWN} more" if len(parts) > _SHOWN else ""
    return between.join(parts[:_SHOWN]) + more
