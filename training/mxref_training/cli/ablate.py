"""The command `mxref ablate`."""

from __future__ import annotations

import time
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mxref.cli.jobs import Positive, jobs_option
from mxref.cli.known import files, recipes_or_files
from mxref.cli.ranks import OneProcess
from mxref.cores import wait_passively
from mxref_training.cli import known
from mxref_training.cli.ablate_arms import kept_arms, show_arms, words
from mxref_training.cli.report import require, show_ladder
from mxref_training.cli.setting import (
    BACKEND,
    DATA,
    FOLDER,
    SET,
    SHADOW,
    STEPS,
    TELEMETRY,
    TOKENIZER,
    VAL,
    overlays,
)
from mxref_training.errors import ConfigError

if TYPE_CHECKING:
    from collections.abc import Sequence

    from mxref_training.lab.arm import ArmRun
    from mxref_training.lab.runner import Runner


EXIT_INTERRUPTED = 130
MAX_SEEDS = 1000


@click.command(
    cls=OneProcess,
    instead="--devices all --jobs N trains N runs of the ladder on each GPU, and `mxref train` under torchrun one "
    "model on all of them",
)
@click.pass_context
@click.argument("ladder", shell_complete=known.ladders)
@click.argument(
    "folders", nargs=-1, metavar="[FOLDER]...", type=click.Path(path_type=Path), shell_complete=known.runs
)
@click.option("--out", type=FOLDER, help="Directory of the ladder.  [default: runs/NAME]")
@click.option(
    "--config",
    "preset",
    metavar="NAME|FILE",
    shell_complete=known.presets,
    help="A preset or TOML file in place of the ladder's preset.",
)
@DATA
@VAL
@TOKENIZER
@STEPS
@click.option(
    "--seeds",
    type=click.IntRange(1, MAX_SEEDS),
    help="Repetitions of every arm; a verdict needs 3.  [default: `seeds` of each arm, or 1]",
)
@click.option("--arms", shell_complete=known.arms, help="Comma-separated names: run these and the reference.")
@click.option(
    "--without",
    shell_complete=known.arms,
    help="Comma-separated names: leave these out, such as mxfp8 on a GPU, whose backend has no `ordered` GEMM of it.",
)
@SET
@SHADOW
@TELEMETRY
@jobs_option(
    "Runs at a time, each in a process on its share of the cores; with --devices, on each GPU. auto: one per core, "
    "8 at most, or 4 on each GPU."
)
@click.option("--devices", metavar="N,N|all", help="GPUs that train runs at the same time, as in 0,1,2,3.")
@click.option(
    "--max-minutes",
    type=Positive(),
    metavar="M",
    help="End within M minutes: start no run that would take longer, and stop the others with a checkpoint.",
)
@click.option(
    "--keep-checkpoints",
    metavar="ARMS|none",
    shell_complete=known.arms,
    help="Comma-separated names: delete the checkpoints of all other arms when they are finished.  [default: keep all]",
)
@click.option(
    "--last-val",
    "last_val",
    multiple=True,
    metavar="PATH",
    shell_complete=files,
    help="JSONL on which each run's last checkpoint is evaluated too, by the field `source` of its documents.",
)
@click.option(
    "--last-recipe",
    "last_recipes",
    multiple=True,
    metavar="NAME|FILE",
    shell_complete=recipes_or_files,
    help="A recipe with whose Fprop each run's last checkpoint is evaluated too.",
)
@click.option(
    "--probe",
    "probes",
    is_flag=True,
    help="At the end, compare the GEMMs of all recipes on the reference's last checkpoint, as `mxref probe` does.",
)
@BACKEND
@click.option(
    "--collect",
    "collects",
    is_flag=True,
    help="Train nothing: bring the results of the FOLDERs together in --out, and compare them.",
)
@click.option(
    "--branch",
    "branches",
    is_flag=True,
    help="Train one arm up to some moments, and from each all arms on the same batches: the table [branch].",
)
@click.option(
    "--moments", metavar="STEP|SHARE,...", help="With --branch: where the arms branch off, as in 25%,50%."
)
@click.option(
    "--updates", type=click.IntRange(min=1), metavar="N", help="With --branch: optimizer steps of each arm."
)
@click.option(
    "--estimate",
    "estimates",
    is_flag=True,
    help="Train nothing: print what the unfinished runs cost in operations, time and disk.",
)
@click.option(
    "--calibrate",
    "calibrates",
    is_flag=True,
    help="Time a few steps of each kind of recipe first, for the estimate and for --max-minutes.",
)
@click.option("--list", "list_arms", is_flag=True, help="Show the arms and their treatment, and stop.")
def ablate(
    ctx: click.Context,
    ladder: str,
    folders: tuple[Path, ...],
    out: Path | None,
    preset: str | None,
    data: str | None,
    val: str | None,
    tokenizer: str | None,
    steps: int | None,
    seeds: int | None,
    arms: str | None,
    without: str | None,
    overrides: tuple[str, ...],
    shadow: float | None,
    telemetry: int | None,
    jobs: int | None,
    devices: str | None,
    max_minutes: float | None,
    keep_checkpoints: str | None,
    last_val: tuple[str, ...],
    last_recipes: tuple[str, ...],
    probes: bool,
    backend: str | None,
    collects: bool,
    branches: bool,
    moments: str | None,
    updates: int | None,
    estimates: bool,
    calibrates: bool,
    list_arms: bool,
) -> None:
    """Train the arms of a LADDER and compare them.

    LADDER is a TOML file, or the name of one that is shipped: demo, paper, readings, paper_50m, paper_8b, tseng, mx64,
    mx64_50m, shrinkage or annealed.
    Finished arms are kept, and the same command goes on with an interrupted ladder. The report is in report.html and
    report.md of the directory, every number in results.json. The results of several machines are brought together by
    --collect; the ladder then goes on with the runs that are missing.

    \b
    Examples:
      mxref ablate paper --list                         the arms, nothing trained
      mxref ablate paper --seeds 3 --out runs/ladder
      mxref ablate paper --config mine.toml --data text.jsonl --val held_out.jsonl
      mxref ablate paper --jobs auto                    a run on every core
      mxref ablate paper --devices all --jobs 4         four runs on each GPU
      mxref ablate paper --collect one two --out all    results of two machines
      mxref ablate paper --estimate --calibrate         what the runs will cost
      mxref ablate paper --branch --moments 50% --updates 200
      mxref ablate paper --max-minutes 9                the runs that end in time
      mxref ablate paper --arms all,all-h16 --steps 400   two arms, and FP8
      mxref ablate paper --without mxfp8                as on a GPU
    """  # noqa: D301 - click takes \b for a paragraph that keeps its lines
    began = time.monotonic()
    if (moments or updates) and not branches:
        raise click.UsageError("--moments and --updates need --branch")
    wait_passively()
    from mxref_training.lab.ladder import load_ladder

    loaded = load_ladder(ladder)
    names = loaded.names(words(arms), words(without))
    if list_arms:
        show_arms(loaded, names)
        return
    if folders and not collects:
        raise click.UsageError(f"{folders[0]}: folders of results need --collect")
    folder = out or Path("runs") / Path(ladder).stem
    if (folder / "run.json").exists():
        raise ConfigError(f"{folder} holds a run of 'mxref train': give the ladder another --out")
    if collects:
        from mxref_training.cli.ablate_collect import collect_folders

        collect_folders(loaded, folders, out)
        return
    from mxref.discovery import get_backend
    from mxref.errors import RecipeError
    from mxref.terminal import echo

    require("ablate", "torch", "tokenizers", "matplotlib", "jinja2", "scipy")
    from mxref_training.cli.ablate_pages import show_branches, show_forecast
    from mxref_training.config import load_config
    from mxref_training.data.corpus import prepare_corpus
    from mxref_training.device import choose_device, default_backend
    from mxref_training.environment import device_name
    from mxref_training.interrupt import Interrupted
    from mxref_training.lab.branches import branching, run_branches
    from mxref_training.lab.budget import Budget
    from mxref_training.lab.calibrate import calibrate
    from mxref_training.lab.costs import Costs
    from mxref_training.lab.forecast import forecast
    from mxref_training.lab.fresh import train_afresh
    from mxref_training.lab.last_checkpoint import prepare
    from mxref_training.lab.processes import ChildProcesses
    from mxref_training.lab.slots import make_slots, on_share
    from mxref_training.lab.study import planned, run_ladder
    from mxref_training.lab.tally import one_by_one
    from mxref_training.preflight import preflight
    from mxref_training.wording import clock, counted

    given = overlays(
        overrides, data=data, val=val, tokenizer=tokenizer, steps=steps, shadow=shadow, telemetry=telemetry
    )
    config = load_config(preset or loaded.train.preset, [loaded.train.overlay(), *given])
    kept = None if keep_checkpoints is None else kept_arms(keep_checkpoints)
    if probes and branches:
        raise ConfigError(
            "--probe reads the last checkpoint of whole runs, which --branch does not train: give one"
        )
    if probes and kept is not None and loaded.reference.name not in kept:
        raise ConfigError(
            f"--probe reads the checkpoint of {loaded.reference.name}, which --keep-checkpoints deletes: name it there"
        )
    chosen, why = default_backend(backend, "cuda" if devices else config.run.device)
    computes = get_backend(chosen)
    echo(f"ladder {ladder}, backend {chosen} ({why}), writing to {folder}", err=True)
    if branches:
        asked = None if moments is None else words(moments)
        loaded = replace(loaded, branch=loaded.branch.asked(asked, updates))
        runs = len(branching(loaded, names)) * len(loaded.branch.moments) * (seeds or loaded.branch.seeds)
    else:
        runs = len(planned(loaded, seeds, names))
    slots = make_slots(jobs, devices, config, computes, runs)
    config = on_share(config, len(slots)) if len(slots) > 1 else config
    for device in slots.devices or [config.run.device]:
        on = replace(config, run=replace(config.run, device=device))
        for arm in loaded.select(names):
            try:
                preflight(arm.config(on), loaded.resolve(arm), computes, slots.per_device)
            except RecipeError as err:
                raise type(err)(f"arm {arm.name}: {err}") from err
    costs, measured = Costs.load(folder)
    run_all: Runner = one_by_one(train_afresh, computes, None)
    if len(slots) > 1 or slots.devices or max_minutes:
        budget = Budget.of_minutes(max_minutes, began, costs.expected, costs.learn)
        run_all = ChildProcesses(slots.slots, chosen, budget)

    def say(line: str) -> None:
        echo(line, err=True)

    def before(runs: Sequence[ArmRun], corpus: Any) -> None:
        facts = {
            "device": device_name(choose_device(config.run.device, computes)),
            "places": len(slots),
            "per_device": slots.per_device,
        }
        if calibrates and runs:
            costs.rates = calibrate(runs, len(slots), folder, run_all, corpus, say).rates
            costs.save(folder, facts)
            measured.update(facts)
        foreseen = forecast(config, runs, costs, len(slots))
        if estimates:
            show_forecast(foreseen, facts, measured)
            ctx.exit(0)
        if runs and foreseen.wall is not None:
            say(
                f"about {clock(foreseen.wall)} for {counted(len(runs), 'run')} in {counted(len(slots), 'place')}"
            )

    shared: dict[str, Any] = {
        "backend": computes,
        "trainer": train_afresh,
        "corpus": lambda: prepare_corpus(config),
        "seeds": seeds,
        "arms": names,
        "runner": run_all,
        "costs": costs,
        "before": before,
        "extra": lambda corpus: prepare(
            [*loaded.last.val, *last_val], [*loaded.last.recipes, *last_recipes], config, corpus, computes
        ),
        "say": say,
    }
    try:
        if branches:
            show_branches(run_branches(loaded, config, folder, **shared), folder)
            return
        results = run_ladder(
            loaded,
            config,
            folder,
            keep_checkpoints=kept,
            then="the probe" if probes else "",
            **shared,
        )
    except Interrupted as err:
        echo(f"interrupted: {err}", err=True)
        ctx.exit(EXIT_INTERRUPTED)
    if probes:
        from mxref_training.cli.probe import probe_reference

        left_out = [arm.name for arm in loaded.arm if arm.name not in names]
        probe_reference(loaded, left_out, folder, computes)
    show_ladder(results, folder)
