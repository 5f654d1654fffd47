"""The command `mxref ablate`."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mxref.cli.jobs import Positive, jobs_option
from mxref.cli.ranks import OneProcess
from mxref.cores import wait_passively
from mxref_training.cli import known
from mxref_training.cli.report import require, show_ladder
from mxref_training.cli.setting import BACKEND, FOLDER, SET
from mxref_training.errors import ConfigError

if TYPE_CHECKING:
    from mxref.backend import Backend
    from mxref_training.config import TrainConfig
    from mxref_training.lab.ladder import Ladder
    from mxref_training.lab.queue import Slot

EXIT_INTERRUPTED = 130
MAX_SEEDS = 1000
MAX_GPUS = 1024
_OF_THE_LADDER = ("branch", "last", "target", "train")
"""Tables of a ladder's file whose keys `--set` changes too."""


@click.command(
    cls=OneProcess,
    instead="it uses all GPUs by itself, --gpus-per-run N gives each run N of them, and `mxref train` under torchrun "
    "trains one model on all",
)
@click.pass_context
@click.argument("ladder", shell_complete=known.ladders)
@click.argument(
    "folders", nargs=-1, metavar="[FOLDER]...", type=click.Path(path_type=Path), shell_complete=known.runs
)
@click.option("--out", type=FOLDER, help="Directory of the ladder.  [default: runs/NAME]")
@SET
@click.option(
    "--arms",
    shell_complete=known.arms,
    help="Comma-separated names: run these and the reference. -NAME leaves one out: --arms=-mxfp8 on a GPU, where its "
    "`ordered` GEMM is slow. NAME.seed2 is a single run, the third of its arm, without the reference.",
)
@click.option(
    "--seeds",
    type=click.IntRange(1, MAX_SEEDS),
    help="Repetitions of every arm; a verdict needs 3.  [default: `seeds` of each arm, or 1]",
)
@BACKEND
@jobs_option(
    "Runs at a time, each in a process: on its share of the cores, or on each GPU. auto: one per core, 8 at most, or "
    "4 on each GPU."
)
@click.option(
    "--gpus-per-run",
    type=click.IntRange(1, MAX_GPUS),
    default=1,
    show_default=True,
    metavar="N",
    help="GPUs of each run: torchrun starts it on N ranks, which split the model by FSDP2. On a CPU, N processes.",
)
@click.option(
    "--max-minutes",
    type=Positive(),
    metavar="M",
    help="End within M minutes: start no run that would take longer, and stop the others with a checkpoint.",
)
@click.option(
    "--branch",
    "branches",
    is_flag=True,
    help="Train one arm up to some moments, and from each all arms on the same batches: the table [branch].",
)
@click.option(
    "--collect",
    "collects",
    is_flag=True,
    help="Train nothing: bring the results of the FOLDERs, or archives, together in --out, and compare them.",
)
@click.option(
    "--estimate",
    "estimates",
    is_flag=True,
    help="Train nothing: print what the missing runs cost in operations, memory, time and disk.",
)
@click.option("--list", "list_arms", is_flag=True, help="Show the arms and their treatment, and stop.")
def ablate(
    ctx: click.Context,
    ladder: str,
    folders: tuple[Path, ...],
    out: Path | None,
    overrides: tuple[str, ...],
    arms: str | None,
    seeds: int | None,
    backend: str | None,
    jobs: int | None,
    gpus_per_run: int,
    max_minutes: float | None,
    branches: bool,
    collects: bool,
    estimates: bool,
    list_arms: bool,
) -> None:
    """Train the arms of a LADDER and compare them.

    LADDER is a TOML file, or the name of one that is shipped: demo, paper, readings, paper_50m, paper_8b, tseng, mx64,
    mx64_50m, shrinkage, annealed or formats. --set changes a key of the training, as of `mxref train`, or one of the
    ladder's tables [branch], [last], [target] and [train].
    Finished arms are kept, and the same command goes on with an interrupted ladder. The report is in report.html and
    report.md of the directory, every number in results.json. The results of several machines are brought together by
    --collect; the ladder then goes on with the runs that are missing.

    \b
    Examples:
      mxref ablate paper --list                         the arms, nothing trained
      mxref ablate paper --seeds 3 --out runs/ladder
      mxref ablate paper --set data.train=text.jsonl --set data.val=held_out.jsonl
      mxref ablate paper --jobs auto                    a run on every core
      mxref ablate paper --jobs 4                       on GPUs: four runs on each
      mxref ablate paper_8b --gpus-per-run 8 --set run.micro_batch=8
      mxref ablate paper --collect one two --out all    results of two machines
      mxref ablate paper --estimate                     what the runs will cost
      mxref ablate paper --branch --set branch.updates=100
      mxref ablate paper --max-minutes 9                the runs that end in time
      mxref ablate paper --arms all,all-h16             two arms, and FP8
      mxref ablate paper --arms=-mxfp8                  all but one
    """  # noqa: D301 - click takes \b for a paragraph that keeps its lines
    began = time.monotonic()
    wait_passively()
    from mxref_training.lab.ladder import SEED, load_ladder

    own = [text for text in overrides if text.partition(".")[0].strip() in _OF_THE_LADDER]
    loaded = load_ladder(ladder, own)
    words = [word.strip() for word in (arms or "").split(",") if word.strip()]
    names, single = loaded.names(words), [word for word in words if SEED in word]
    if list_arms:
        from mxref_training.cli.ablate_pages import show_arms

        show_arms(loaded, names)
        return
    if folders and not collects:
        raise click.UsageError(f"{folders[0]}: folders of results need --collect")
    folder = out or Path("runs") / Path(ladder).stem
    if (folder / "run.json").exists():
        raise ConfigError(f"{folder} holds a run of 'mxref train': give the ladder another --out")
    require("ablate", "torch", "tokenizers", "matplotlib", "jinja2", "scipy")
    if collects:
        if out is None or not folders:
            raise click.UsageError("--collect needs folders, and --out for what is collected")
        _collect(loaded, folders, out)
        return
    from mxref_training.config_files import load_config

    config = load_config(
        loaded.train.preset, [loaded.train.overlay(), *(text for text in overrides if text not in own)]
    )
    if estimates:
        _estimate(loaded, config, folder, names, seeds, jobs, gpus_per_run, branches)
        return
    _require_simple(loaded, single, gpus_per_run, branches)
    from mxref.discovery import get_backend
    from mxref.terminal import echo
    from mxref_training.cli.ablate_pages import show_branches
    from mxref_training.data.corpus import prepare_corpus
    from mxref_training.device import default_backend
    from mxref_training.interrupt import Interrupted
    from mxref_training.lab.branches import branch_runs, run_branches
    from mxref_training.lab.costs import Costs
    from mxref_training.lab.last_checkpoint import prepare
    from mxref_training.lab.queue import TO_STOP, Queue, make_slots, on_share
    from mxref_training.lab.study import Study, planned, run_ladder

    chosen, why = default_backend(backend, config.run.device)
    computes = get_backend(chosen)
    echo(f"ladder {ladder}, backend {chosen} ({why}), writing to {folder}", err=True)
    runs = (branch_runs if branches else planned)(loaded, config, folder, seeds, names)
    slots = make_slots(jobs, gpus_per_run, config, computes, len(single or runs))
    config = on_share(config, slots) if len(slots) > 1 or gpus_per_run > 1 else config
    _preflight(loaded, config, names, computes, slots)
    costs = Costs()
    deadline = None if max_minutes is None else began + 60 * max_minutes - TO_STOP
    study = Study(
        loaded,
        config,
        folder,
        computes,
        Queue(slots, chosen, costs, deadline),
        corpus=lambda: prepare_corpus(config),
        seeds=seeds,
        arms=names,
        costs=costs,
        extra=lambda corpus: prepare(loaded.last.val, loaded.last.recipes, config, corpus, computes),
        say=lambda line: echo(line, err=True),
    )
    try:
        if branches:
            show_branches(run_branches(study), folder)
            return
        results = run_ladder(study, single=single, ranks=gpus_per_run)
    except Interrupted as err:
        echo(f"interrupted: {err}", err=True)
        ctx.exit(EXIT_INTERRUPTED)
    if all(arm["role"] != "reference" for arm in results["arms"]):
        echo(
            f"no run of {loaded.reference.name}, the reference, is here: --collect brings it together with these"
        )
        return
    if loaded.last.probe:
        from mxref_training.cli.probe import probe_reference

        left_out = [arm.name for arm in loaded.arm if arm.name not in names]
        probe_reference(loaded, left_out, folder, computes)
    show_ladder(results, folder)


def _require_simple(ladder: Ladder, single: list[str], gpus_per_run: int, branches: bool) -> None:
    """Raise ConfigError for what needs the whole model in one process, or whole runs."""
    last = ladder.last
    if branches and single:
        raise ConfigError(
            f"--arms {single[0]} is a run of the ladder, and --branch trains branches: name arms"
        )
    if branches and last.probe:
        raise ConfigError("last.probe reads the last checkpoint of whole runs, which --branch does not train")
    if gpus_per_run > 1 and (branches or last.probe or last.val or last.recipes):
        what = "--branch" if branches else "the table [last]"
        raise ConfigError(f"{what} reads checkpoints in one process: leave it out, or give --gpus-per-run 1")


def _preflight(
    ladder: Ladder, config: TrainConfig, names: list[str], backend: Backend, slots: list[Slot]
) -> None:
    """Check that each arm fits on each place before anything is read or allocated."""
    from mxref.errors import RecipeError
    from mxref_training.distributed.ranks import SOLE, Ranks
    from mxref_training.preflight import preflight

    ranks = slots[0].ranks
    at_once = sum(slot.devices == slots[0].devices for slot in slots)
    for arm in ladder.select(names):
        try:
            preflight(
                arm.config(config),
                ladder.resolve(arm),
                backend,
                at_once,
                Ranks(0, ranks, 0, ranks) if ranks > 1 else SOLE,
            )
        except RecipeError as err:
            raise type(err)(f"arm {arm.name}: {err}") from err


def _collect(ladder: Ladder, folders: tuple[Path, ...], out: Path) -> None:
    """Bring the results of folders together in `out`, print the comparison, and write its pages; train nothing."""
    from mxref.terminal import echo
    from mxref_training.cli.ablate_pages import show_branches
    from mxref_training.lab.collect import collect

    found = collect(ladder, folders, out, lambda line: echo(line, err=True))
    if found.ladder:
        show_ladder(found.ladder, out)
    if found.branches:
        show_branches(found.branches, out)


def _estimate(
    ladder: Ladder,
    config: TrainConfig,
    out: Path,
    names: list[str],
    seeds: int | None,
    jobs: int | None,
    gpus_per_run: int,
    branches: bool,
) -> None:
    """Print what the missing runs take; no data is read, and nothing is allocated."""
    from mxref_training.cli.ablate_pages import show_estimate
    from mxref_training.lab.branches import branch_runs
    from mxref_training.lab.costs import estimate
    from mxref_training.lab.study import planned

    runs = (branch_runs if branches else planned)(ladder, config, out, seeds, names)
    places = jobs or 1
    show_estimate(estimate(config, runs, places, gpus_per_run), places, gpus_per_run)
