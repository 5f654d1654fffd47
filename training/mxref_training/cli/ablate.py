"""The command `mxref ablate`."""

from __future__ import annotations

import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mxref.cli.jobs import jobs_option
from mxref_training.cli.report import require, show_ladder

if TYPE_CHECKING:
    from mxref_training.lab.ladder import Ladder


EXIT_INTERRUPTED = 130
MAX_SEEDS = 1000


@click.command()
@click.argument("ladder")
@click.argument("folders", nargs=-1, metavar="[FOLDER]...", type=click.Path(path_type=Path))
@click.option("--out", type=click.Path(path_type=Path), help="Directory of the ladder.  [default: runs/NAME]")
@click.option("--data", help="Training data, as data.train: builtin, c4, or JSONL files.")
@click.option("--val", help="Validation data, as data.val.")
@click.option("--tokenizer", help="A tokenizer.json, as data.tokenizer.")
@click.option("--steps", type=click.IntRange(min=1), help="Optimizer steps of every arm, as run.steps.")
@click.option(
    "--seeds",
    type=click.IntRange(1, MAX_SEEDS),
    help="Repetitions of every arm; a verdict needs 3.  [default: `seeds` of each arm, or 1]",
)
@click.option("--arms", help="Comma-separated names: run these and the reference.")
@click.option("--without", help="Comma-separated names: leave these out.")
@click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Any other setting, as run.batch=16."
)
@jobs_option(
    "Runs at a time, each in a process on its share of the cores; with --devices, on each GPU. auto: one per core, "
    "8 at most, or 4 on each GPU."
)
@click.option("--devices", metavar="N,N|all", help="GPUs that train runs at the same time, as in 0,1,2,3.")
@click.option(
    "--max-minutes",
    type=click.FloatRange(min=0, min_open=True),
    metavar="M",
    help="End within M minutes: start no run that would take longer, and stop the others with a checkpoint.",
)
@click.option(
    "--keep-checkpoints",
    metavar="ARMS|none",
    help="Comma-separated names: delete the checkpoints of all other arms when they are finished.  [default: keep all]",
)
@click.option("--backend", "backend_name", help="Backend that computes the block formats.")
@click.option(
    "--collect",
    "collects",
    is_flag=True,
    help="Train nothing: bring the results of the FOLDERs together in --out, and compare them.",
)
@click.option("--list", "list_arms", is_flag=True, help="Show the arms and their treatment, and stop.")
def ablate(
    ladder: str,
    folders: tuple[Path, ...],
    out: Path | None,
    data: str | None,
    val: str | None,
    tokenizer: str | None,
    steps: int | None,
    seeds: int | None,
    arms: str | None,
    without: str | None,
    overrides: tuple[str, ...],
    jobs: int | None,
    devices: str | None,
    max_minutes: float | None,
    keep_checkpoints: str | None,
    backend_name: str | None,
    collects: bool,
    list_arms: bool,
) -> None:
    """Train the arms of a LADDER and compare them: a TOML file, or the name of one that is shipped (paper).

    Finished arms are kept, and the same command goes on with an interrupted ladder. The report is in
    report.html and report.md of the directory, every number in results.json. The results of several machines are
    brought together by --collect; the ladder then goes on with the runs that are missing.

    \b
    Examples:
      mxref ablate paper --list                           the arms, nothing trained
      mxref ablate paper --seeds 3 --out runs/ladder
      mxref ablate paper --jobs auto                      a run on every core
      mxref ablate paper --devices all --jobs 4           four runs on each GPU
      mxref ablate paper --collect one two --out all      the results of two machines
      mxref ablate paper --max-minutes 9                  as many runs as end in time; the next call goes on
      mxref ablate paper --arms all,all-h16 --steps 400   two arms and the reference
      mxref ablate paper --without mxfp8                  for a GPU, whose backend has no `ordered` GEMM of MXFP8
    """  # noqa: D301 - click takes \b for a paragraph that keeps its lines
    began = time.monotonic()
    from mxref_training.lab.ladder import load_ladder

    loaded = load_ladder(ladder)
    if list_arms:
        _list(loaded)
        return
    if folders and not collects:
        raise click.UsageError(f"{folders[0]}: folders are named with --collect")
    if collects:
        _collect(loaded, folders, out)
        return
    from mxref.discovery import choose, get_backend
    from mxref.terminal import echo

    require("ablate", "torch", "tokenizers", "matplotlib", "jinja2")
    from mxref_training.config import load_config
    from mxref_training.data.corpus import prepare_corpus
    from mxref_training.lab.budget import Budget
    from mxref_training.lab.costs import Costs
    from mxref_training.lab.fresh import train_afresh
    from mxref_training.lab.processes import ChildProcesses
    from mxref_training.lab.slots import make_slots, on_share
    from mxref_training.lab.study import planned, run_ladder
    from mxref_training.run.estimate import preflight
    from mxref_training.run.interrupt import Interrupted

    paths = {"train": data, "val": val, "tokenizer": tokenizer}
    given = {
        "data": {key: value for key, value in paths.items() if value is not None},
        "run": {"steps": steps} if steps is not None else {},
    }
    config = load_config(loaded.train.preset, [loaded.train.overlay(), *overrides, given])
    folder = out or Path("runs") / Path(ladder).stem
    names = loaded.names(_names(arms), _names(without))
    chosen, _ = choose(backend_name)
    backend = get_backend(chosen)
    slots = make_slots(jobs, devices, config, backend, len(planned(loaded, seeds, names)))
    config = on_share(config, len(slots)) if len(slots) > 1 else config
    for device in slots.devices or [config.run.device]:
        on = replace(config, run=replace(config.run, device=device))
        for arm in loaded.arm:
            preflight(on, loaded.resolve(arm), backend, slots.per_device)
    costs, runner = Costs(), None
    if len(slots) > 1 or slots.devices or max_minutes:
        budget = Budget.of_minutes(max_minutes, began, costs.expected, costs.learn)
        runner = ChildProcesses(slots.slots, chosen, budget)
    try:
        results = run_ladder(
            loaded,
            config,
            folder,
            backend=backend,
            trainer=train_afresh,
            corpus=lambda: prepare_corpus(config),
            seeds=seeds,
            arms=names,
            keep_checkpoints=None if keep_checkpoints is None else _kept(keep_checkpoints),
            runner=runner,
            costs=costs,
            say=lambda line: echo(line, err=True),
        )
    except Interrupted as err:
        echo(f"interrupted: {err}", err=True)
        sys.exit(EXIT_INTERRUPTED)
    show_ladder(results, folder)


def _names(text: str | None) -> list[str]:
    """Return the names of a comma-separated list."""
    return [name.strip() for name in (text or "").split(",") if name.strip()]


def _collect(ladder: Ladder, folders: tuple[Path, ...], out: Path | None) -> None:
    if out is None or not folders:
        raise click.UsageError("--collect needs folders, and --out for what is collected")
    require("ablate", "torch", "tokenizers", "matplotlib", "jinja2")
    from mxref.terminal import echo
    from mxref_training.lab.collect import collect

    if results := collect(ladder, folders, out, lambda line: echo(line, err=True)):
        show_ladder(results, out)


def _kept(text: str) -> list[str]:
    """Return the arms that `--keep-checkpoints` names; `none` names none."""
    return [] if text.strip() == "none" else _names(text)


def _list(ladder: Ladder) -> None:
    from rich.table import Table

    from mxref.terminal import BOX, HEAD, QUIET, console
    from mxref_training.run.treatment import describe

    table = Table(box=BOX, header_style=HEAD, padding=(0, 1, 0, 0))
    for name in ("arm", "stage", "paper", "treatment"):
        table.add_column(name, style=QUIET if name == "stage" else "", no_wrap=name != "treatment")
    for arm in ladder.arm:
        table.add_row(
            arm.name,
            arm.stage,
            arm.paper.overhead if arm.paper else "",
            _in_words(describe(ladder.resolve(arm))),
        )
    console().print(table)


def _in_words(treatment: list[tuple[str, str]]) -> str:
    """Return the treatment of the three GEMMs, those treated alike named together."""
    roles: dict[str, list[str]] = {}
    for role, text in treatment:
        roles.setdefault(text, []).append(role)
    if len(roles) == 1:
        return next(iter(roles))
    return "; ".join(f"{' + '.join(names)}: {text}" for text, names in roles.items())
