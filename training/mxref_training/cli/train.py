"""`mxref train`: nothing but click is imported until the command runs, so that its help needs no PyTorch."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mxref.cli import EXIT_ERROR
from mxref.cli.known import recipes_or_files
from mxref.cli.ranks import ForRanks
from mxref.cores import wait_passively
from mxref_training.cli import known
from mxref_training.cli.setting import BACKEND, DATA, FOLDER, SET

if TYPE_CHECKING:
    from mxref.backend import Backend
    from mxref.recipe import Recipe
    from mxref_training.config import TrainConfig
    from mxref_training.log import TrainResult


_LET_IT_SPEAK = 5
"""Seconds that a rank waits to be ended after another one has failed."""


_SET_BY = {
    "--val": "--set data.val=PATH", "--tokenizer": "--set data.tokenizer=FILE", "--steps": "--set run.steps=N",
    "--shadow": "--set run.shadow=SHARE", "--init-from": "--set run.init_from=FOLDER",
    "--telemetry": "--set run.telemetry_every=N", "--tensorboard": "--track tensorboard",
}  # fmt: skip
"""Options that the command once had, and what says the same."""


class _Train(ForRanks):
    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Parse the words of the command; an option that it once had is an error that says what to write."""
        try:
            return super().parse_args(ctx, args)
        except click.NoSuchOption as err:
            if instead := _SET_BY.get(err.option_name):
                raise click.UsageError(
                    f"{err.option_name} is no option any more: write {instead}", ctx
                ) from None
            raise


@click.command(cls=_Train)
@click.argument("config", default="demo", shell_complete=known.presets)
@click.option(
    "--recipe",
    default="mxfp4_h16",
    show_default=True,
    metavar="NAME|FILE",
    shell_complete=recipes_or_files,
    help=f"Treatment of the linear layers: a TOML file, or one of {', '.join(known.shipped('recipes'))}; "
    "`mxref recipes` describes them. A file may give layers and steps other recipes.",
)
@DATA
@click.option("--out", type=FOLDER, help="Folder of the run. Default: runs/CONFIG-RECIPE.")
@BACKEND
@SET
@click.option(
    "--resume/--no-resume",
    default=True,
    show_default=True,
    help="Go on with the run in --out; --no-resume deletes that run and starts over.",
)
@click.option(
    "--track",
    type=click.Choice(["tensorboard", "trackio", "wandb"]),
    help="Pass the numbers on: into TensorBoard's event files in the run's folder, or to Trackio or W&B.",
)
@click.option(
    "--profile", metavar="FIRST:LAST", help="Write a trace of these steps by torch.profiler, as in 10:13."
)
@click.option(
    "--dry-run", is_flag=True, help="Print parameters, memory, operations, recipe and backend; train nothing."
)
@click.option(
    "--ranks", type=int, metavar="N", help="With --dry-run: plan a run of N ranks, without starting any."
)
@click.option(
    "--peak-tflops",
    type=float,
    metavar="X",
    help="With --dry-run: peak rate of a rank, in 10^12 FLOP/s.",
)
@click.option(
    "--utilisation",
    type=float,
    metavar="X",
    help="With --dry-run: the assumed share of the peak rate, as in 0.4.",
)
@click.pass_context
def train(
    ctx: click.Context,
    /,
    config: str,
    recipe: str,
    data: str | None,
    out: Path | None,
    backend: str | None,
    overrides: tuple[str, ...],
    resume: bool,
    track: str | None,
    profile: str | None,
    dry_run: bool,
    ranks: int | None,
    peak_tflops: float | None,
    utilisation: float | None,
) -> None:
    """Train a Llama with the GEMMs of a recipe.

    CONFIG is a TOML file or a preset: demo (the default), tiny, lab_20m, lab_50m, llama31_8b, llama31_70b. A run
    that was stopped goes on from its latest checkpoint when the same command is given again, bit for bit as if it had
    never stopped. Started by torchrun on several ranks, the command trains on all of them.

    \b
    Examples:
      mxref train                                 a small Llama in MXFP4 + H16
      mxref train demo --recipe fp8 --set run.steps=200
      mxref train demo --data text.jsonl --set data.val=held_out.jsonl
      mxref train demo --recipe mine.toml --dry-run    each layer and phase
      mxref train demo --set model.layers=6 --set optim.lr=5e-4 --dry-run
      mxref train mine.toml --set run.init_from=Llama-3.2-1B
      mxref train demo --set run.telemetry_every=50    for `mxref report`
      mxref train demo --profile 10:13            with a trace of four steps

    \b
    On eight GPUs, plan a run, and train:
      mxref train llama31_8b --set run.micro_batch=8 --dry-run --ranks 8
      torchrun --nproc-per-node 8 -m mxref train mine.toml --out runs/mine
    """  # noqa: D301 - click takes \\b for a paragraph that keeps its lines
    wait_passively()
    _require_torch()
    from mxref.terminal import echo
    from mxref_training import trainer
    from mxref_training.distributed.connect import connected, restarted, started_ranks
    from mxref_training.distributed.failing import one_error
    from mxref_training.errors import PeerStopped
    from mxref_training.interrupt import Interrupted
    from mxref_training.track import Observation, Window

    tables: list[str | dict[str, Any]] = [*overrides]
    if data is not None:
        tables.append({"data": {"train": data}})
    mesh = {"ranks": ranks, "peak_tflops": peak_tflops, "utilisation": utilisation}
    mesh = {name: value for name, value in mesh.items() if value is not None}
    started = started_ranks()
    if dry_run:
        if started.first:
            _print_plan(*_loaded(config, recipe, tables, backend), {"ranks": started.world} | mesh)
        return
    if mesh:
        raise click.UsageError(f"--{next(iter(mesh)).replace('_', '-')} is an option of --dry-run")
    folder = out or Path("runs") / f"{Path(config).stem}-{Path(recipe).stem}"
    if not resume and restarted():
        resume = True  # otherwise each restart would delete the training of the attempt before
        if started.first:
            echo(
                "torchrun has started the ranks again: the run goes on, --no-resume deletes nothing more",
                err=True,
            )
    try:
        with connected(started), one_error(started):
            loaded, treatment, chosen, why = _loaded(config, recipe, tables, backend)
            if started.first:
                echo(
                    f"recipe {recipe} ({treatment.digest}), backend {chosen.name} ({why}), writing to {folder}",
                    err=True,
                )
            result = trainer.train(
                loaded,
                treatment,
                folder,
                backend=chosen,
                resume=resume,
                observe=Observation(track or "", Window.parse(profile) if profile else None),
                ranks=started,
            )
    except Interrupted as err:  # it was asked to stop, and lost nothing
        if started.first:
            echo(f"interrupted: {err}", err=True)
    except PeerStopped:  # the rank that failed shows its error
        # `torchrun` ends all ranks when the first one has ended, and calls that one the root cause.
        time.sleep(_LET_IT_SPEAK)
        ctx.exit(EXIT_ERROR)
    else:
        if started.first:
            _print_result(result, folder)


def _loaded(
    config: str, recipe: str, tables: Sequence[str | Mapping[str, Any]], backend: str | None
) -> tuple[TrainConfig, Recipe, Backend, str]:
    """Return what the command names: configuration, recipe and backend, and why this backend."""
    from mxref.discovery import get_backend
    from mxref.recipe_files import load_recipe
    from mxref_training.config import load_config
    from mxref_training.device import default_backend

    loaded = load_config(config, tables)
    name, why = default_backend(backend, loaded.run.device)
    return loaded, load_recipe(recipe), get_backend(name), why


def _print_result(result: TrainResult, folder: Path) -> None:
    from mxref.terminal import echo
    from mxref_training.wording import clock, counted

    rate = result.tokens / result.seconds if result.seconds else 0.0
    skipped = f", {counted(result.skipped_steps, 'step')} skipped" if result.skipped_steps else ""
    echo(
        f"validation loss {result.final_loss:.4f} after {result.tokens:,} tokens in {clock(result.seconds)} "
        f"({rate:,.0f} tokens/s){skipped}; see {folder / 'metrics.jsonl'}"
    )


def _print_plan(
    config: TrainConfig, recipe: Recipe, backend: Backend, why: str, mesh: Mapping[str, Any]
) -> None:
    from rich.table import Table
    from rich.text import Text

    from mxref.terminal import HEAD, QUIET, console
    from mxref_training.forecast import Mesh, dry_run
    from mxref_training.preflight import planned

    assumed = Mesh(**mesh)
    model, axes = planned(config, recipe, backend, assumed.ranks)
    table = Table.grid(padding=(0, 2))
    for heading, lines in dry_run(config, recipe, backend, why, model, axes, assumed):
        table.add_row(Text(heading, style=HEAD), Text(""))
        for key, text in lines:
            table.add_row(Text(f"  {key}", style=QUIET), Text(text))
    console().print(table)


def _require_torch() -> None:
    """Raise ConfigError that says what to install where PyTorch or another package of the extra is missing."""
    import importlib.util

    from mxref_training.errors import ConfigError

    for package, called in (("torch", "PyTorch"), ("tokenizers", "tokenizers")):
        if importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"mxref train needs {called}, which is not installed: pip install 'mxref[training]'"
            )
