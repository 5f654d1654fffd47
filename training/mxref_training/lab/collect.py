"""Brings results of several folders and machines together, after checks that they are of one ladder.

A result file stands alone, so no checkpoint and no log is needed. The results must agree in model, data, optimizer,
run, backend and code, and each recipe must be that of the ladder's arm. A run that was trained twice must have equal
bits, unless a compiler chose its kernels by their time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mxref.errors import FileFormatError
from mxref.tomlio import to_table
from mxref_training.config import config_from_table
from mxref_training.errors import ConfigError
from mxref_training.lab import result_file
from mxref_training.lab.arm import set_aside
from mxref_training.lab.fingerprint import code_digest, differences
from mxref_training.lab.ladder import Ladder
from mxref_training.lab.result_file import Record, plain, write_json
from mxref_training.lab.results import assemble

if TYPE_CHECKING:
    from mxref_training.config import TrainConfig

_SHOWN = 3  # results that an error names


@dataclass(frozen=True)
class Found:
    """A result file."""

    path: Path
    table: dict[str, Any]

    @property
    def record(self) -> Record:
        """The result."""
        record: Record = self.table["record"]
        return record

    @property
    def name(self) -> str:
        """Name of the run."""
        return str(self.table["name"])

    @property
    def shared(self) -> dict[str, Any]:
        """The part of the fingerprint that all runs of a ladder share."""
        key: dict[str, Any] = self.table["key"]
        run = {name: value for name, value in key["run"].items() if name not in ("seed", "data_seed")}
        return {name: part for name, part in key.items() if name not in ("recipe", "phases")} | {"run": run}

    @property
    def is_repeatable(self) -> bool:
        """Whether the run gives equal bits on every machine of a kind: no compiler chooses its kernels by their time."""
        run = self.table["config"]["run"]
        return bool(run["deterministic"] or run["compile"] == "none")

    @property
    def device(self) -> str:
        """The device that computed it."""
        return str(self.record["environment"].get("hardware", {}).get("device", "unknown"))


@dataclass(frozen=True)
class _Corpus:
    """What the results say of their tokens."""

    hashes: dict[str, str]
    report: str


def collect(
    ladder: Ladder, folders: Sequence[Path], out: Path, say: Callable[[str], None] = print
) -> dict[str, Any] | None:
    """Copy the results of folders into `out`, where the ladder then counts them as finished, and compare them.

    Args:
        ladder: the ladder that all of them are of.
        folders: ladders' directories, or any folders with result files at any depth.
        out: directory of a ladder; results that it has already are collected too.
        say: prints one line.

    Returns:
        What `run_ladder` returns; None while no run of the reference arm is there.

    Raises:
        FileFormatError: a result file is damaged, or was edited.
        ConfigError: a folder has no results; they are of different ladders, configurations, tokens, backends or code;
            or a run that is repeatable has other bits in another folder.
    """
    others = [folder for folder in folders if folder.resolve() != out.resolve()]
    # Those of `out` come first: they stay where they are.
    found = [*_results_in(out, required=not others), *(f for folder in others for f in _results_in(folder))]
    for result in found:
        _require_arm(ladder, result)
    _require_one_ladder(found)
    config = _config(ladder, found)
    runs = _once(found, say)
    for result in runs.values():
        _keep(result, out, say)
    by_arm: dict[str, list[Record]] = {arm.name: [] for arm in ladder.arm}
    for result in sorted(runs.values(), key=lambda result: result.record["pair"]):
        by_arm[result.record["arm"]].append(result.record)
    say(f"{len(runs)} runs in {out}, trained on {', '.join(sorted({r.device for r in runs.values()}))}")
    table = found[0].table
    if table["key"]["code"] != code_digest():
        say("they were trained by other code than this: 'mxref ablate' would train them again")
    if not by_arm[ladder.reference.name]:
        say(f"no run of {ladder.reference.name}, the reference, so there is nothing to compare with")
        return None
    seeds = 1 + max(result.record["pair"] for result in runs.values())
    corpus = _Corpus(table["key"]["data"], table["corpus"])
    backend = table["key"]["backend"]["name"]
    results = assemble(ladder, config, by_arm, seeds=seeds, corpus=corpus, backend=backend)
    written: dict[str, Any] = plain(results)
    write_json(out / "results.json", written)
    return written


def _results_in(folder: Path, *, required: bool = True) -> Iterator[Found]:
    paths = sorted(path for path in folder.rglob(result_file.NAME) if "superseded" not in path.parts)
    if required and not paths:
        raise ConfigError(
            f"{folder} holds no {result_file.NAME}: name the --out of 'mxref ablate', or a folder with such directories"
        )
    for path in paths:
        table = result_file.read(path)
        if table is None:
            raise FileFormatError(
                f"{path} is damaged, was edited, or is of another version of mxref: copy it again, or delete it"
            )
        yield Found(path, table)


def _require_arm(ladder: Ladder, result: Found) -> None:
    """Raise ConfigError unless the run is an arm of the ladder, under the recipe that the arm has there."""
    try:
        arm = ladder.named(result.record["arm"])
    except ConfigError as err:
        raise ConfigError(f"{result.path}: {err}; name the ladder that these results are of") from err
    recipe = plain(to_table(ladder.resolve(arm)))
    if found := differences(recipe, result.table["key"]["recipe"]):
        raise ConfigError(
            f"{result.path}: arm {arm.name} has another recipe than in the ladder, by {_some(found)}; "
            "name the ladder that these results are of"
        )


def _require_one_ladder(found: Sequence[Found]) -> None:
    """Raise ConfigError, which says what differs and where, unless all runs were trained under equal conditions."""
    first = found[0]
    other = [(result, differences(first.shared, result.shared)) for result in found]
    wrong = [f"{result.path} by {_some(parts)}" for result, parts in other if parts]
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
        shift = ladder.named(result.record["arm"]).seed_offset + result.record["pair"]
        seed, order = result.record["seed"], result.record["data_seed"]
        firsts.setdefault((seed - shift, None if order is None else order - shift), result)
    if len(firsts) > 1:
        (a, one), (b, other) = list(firsts.items())[:2]
        raise ConfigError(
            f"{one.path} is of a ladder whose first seeds (run.seed, run.data_seed) are {a}, and {other.path} of one "
            f"with {b}: their pairs are no pairs. Collect them into another --out"
        )
    (seed, order), result = next(iter(firsts.items()))
    config = config_from_table(result.table["config"], str(result.path))
    return replace(config, run=replace(config.run, seed=seed, data_seed=order))


def _once(found: Sequence[Found], say: Callable[[str], None]) -> dict[str, Found]:
    """Return each run once, by name; ConfigError if a repeatable run has other bits elsewhere."""
    runs: dict[str, Found] = {}
    equal = 0
    for result in found:
        first = runs.setdefault(result.name, result)
        if first is result:
            continue
        part = _parting(first, result)
        if not part:
            equal += 1
        elif first.is_repeatable:
            raise ConfigError(
                f"{result.name} has other bits in {result.path} ({_where(result)}) than in {first.path} "
                f"({_where(first)}): {part}. Leave one of the folders out"
            )
        else:
            say(f"{result.name}: {result.path} has other bits than {first.path}, which is kept: {part}")
    if equal:
        say(f"{equal} results are there more than once, with equal bits")
    return runs


def _parting(one: Found, other: Found) -> str:
    """Return where two results of one run part; empty if they are equal."""
    if one.table["metrics"] == other.table["metrics"] and _curves(one) == _curves(other):
        return ""
    for (what, a), (_, b) in zip(_curves(one).items(), _curves(other).items(), strict=True):
        for mine, theirs in zip_longest(a, b):
            if mine != theirs:
                step = (mine or theirs)[0]
                values = " and ".join("none" if x is None else repr(x[1]) for x in (mine, theirs))
                return f"the {what} losses part at step {step}: {values}"
    return "the logs differ, though the curves do not: steps between the points of the curves, or their gradient norms"


def _curves(result: Found) -> dict[str, list[Any]]:
    return {"validation": result.record["losses"], "training": result.record["train_curve"]}


def _where(result: Found) -> str:
    facts = result.record["environment"]
    versions = facts.get("versions", {})
    return f"{result.device}, torch {versions.get('torch', 'unknown')}"


def _keep(result: Found, out: Path, say: Callable[[str], None]) -> None:
    """Write a result into the ladder's directory, unless it is there."""
    folder = out / "arms" / result.name
    target = folder / result_file.NAME
    if target == result.path:
        return
    if (folder / "run.json").exists():  # an unfinished run, whose result is here now
        say(f"{result.name}: the unfinished run moves to {set_aside(out, folder)}")
    write_json(target, result.table)


def _some(parts: Sequence[str], between: str = ", ") -> str:
    more = f"{between}and {len(parts) - _SHOWN} more" if len(parts) > _SHOWN else ""
    return between.join(parts[:_SHOWN]) + more
