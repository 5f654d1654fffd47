"""`mxref train`: nothing but click is imported until the command runs, so that its help needs no PyTorch."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from mxref.cli.known import recipes_or_files
from mxref.cli.ranks import ForRanks
from mxref.cores import wait_passively
from mxref_training.cli import known
from mxref_training.cli.report import require
from mxref_training.cli.setting import BACKEND, DATA, FOLDER, SET

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
    "--ranks",
    type=click.IntRange(1),
    metavar="N",
    help="With --dry-run: plan a run of N ranks, without starting any.",
)
@click.option(
    "--peak-tflops",
    type=click.FloatRange(0, 1e6, min_open=True),
    metavar="X",
    help="With --dry-run: peak rate of a rank, in 10^12 FLOP/s.",
)
@click.option(
    "--utilisation",
    type=click.FloatRange(0, 1, min_open=True),
    metavar="X",
    help="With --dry-run: the assumed share of the peak rate, as in 0.4.",
)
def train(
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
      mxref train mine.toml --dry-run --ranks 8
      torchrun --nproc-per-node 8 -m mxref train mine.toml --out runs/mine
    """  # noqa: D301 - click takes \\b for a paragraph that keeps its lines
    wait_passively()
    require("train", "torch", "tokenizers")
    from mxref_training import trainer
    from mxref_training.cli.train_parts import loaded, print_result, say
    from mxref_training.cli.train_plan import print_plan
    from mxref_training.distributed.connect import connected, restarted, started_ranks
    from mxref_training.forecast import Mesh
    from mxref_training.interrupt import Interrupted
    from mxref_training.observe import Observation, Window

    mesh: dict[str, Any] = {"ranks": ranks, "peak_tflops": peak_tflops, "utilisation": utilisation}
    mesh = {name: value for name, value in mesh.items() if value is not None}
    started = started_ranks()
    if dry_run:
        if started.first:
            mesh = {"ranks": started.world} | mesh
            print_plan(*loaded(config, recipe, overrides, data, backend), Mesh(**mesh))
        return
    if mesh:
        raise click.UsageError(f"--{next(iter(mesh)).replace('_', '-')} is an option of --dry-run")
    folder = out or Path("runs") / f"{Path(config).stem}-{Path(recipe).stem}"
    if not resume and restarted():
        resume = True  # otherwise each restart would delete the training of the attempt before
        say(
            started, "torchrun has started the ranks again: the run goes on, --no-resume deletes nothing more"
        )
    try:
        with connected(started):
            settings, treatment, chosen, why = loaded(config, recipe, overrides, data, backend)
            said = f"recipe {recipe} ({treatment.digest}), backend {chosen.name} ({why}), writing to {folder}"
            say(started, said)
            observe = Observation(track or "", Window.parse(profile) if profile else None)
            result = trainer.train(
                settings, treatment, folder, backend=chosen, resume=resume, observe=observe, ranks=started
            )
    except Interrupted as err:  # it was asked to stop, and lost nothing
        say(started, f"interrupted: {err}")
    else:
        if started.first:
            print_result(result, folder)
