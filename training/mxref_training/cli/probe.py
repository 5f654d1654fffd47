"""The command `mxref probe`: every recipe's operands and GEMMs on a checkpoint, without training."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

import click

from mxref.cli.known import backends, files, recipes_or_files
from mxref.printable import printable
from mxref_training.cli import known
from mxref_training.cli.report import require
from mxref_training.cli.setting import FOLDER

if TYPE_CHECKING:
    from mxref.backend import Backend
    from mxref_training.lab.ladder import Ladder
    from mxref_training.probe.arms import NamedRecipe
    from mxref_training.probe.measure import Said
    from mxref_training.probe.moments import Moment
    from mxref_training.probe.results import Results


CPU_TOKENS = 512
"""On a CPU, the reference of a ladder is probed with this many tokens at most."""


@click.command()
@click.argument(
    "checkpoints",
    nargs=-1,
    required=True,
    metavar="CHECKPOINT...",
    type=click.Path(path_type=Path),
    shell_complete=known.runs,
)
@click.option(
    "--recipe",
    "recipes",
    multiple=True,
    metavar="NAME|FILE",
    shell_complete=recipes_or_files,
    help="A recipe to probe; may be given several times.  [default: all shipped recipes that the backend has]",
)
@click.option(
    "--ladder",
    "ladders",
    multiple=True,
    metavar="NAME|FILE",
    shell_complete=known.ladders,
    help="Probe all recipes of a ladder, as in paper.",
)
@click.option("--without", multiple=True, metavar="NAME", help="Leave out a recipe of this name.")
@click.option(
    "--side",
    type=click.Choice(["val", "train"]),
    default="val",
    show_default=True,
    help="The tokens of the batch: the run's validation or training side.",
)
@click.option(
    "--batch", type=click.IntRange(min=1), help="Sequences of the batch.  [default: those of the run]"
)
@click.option(
    "--length", type=click.IntRange(min=1), help="Tokens of a sequence.  [default: run.seq_len of the run]"
)
@click.option(
    "--first", type=click.IntRange(min=0), default=0, show_default=True, help="Number of the first sequence."
)
@click.option("--layers", default="*", show_default=True, metavar="GLOB", help="Linear layers to probe.")
@click.option(
    "--draws",
    type=click.IntRange(min=0),
    default=0,
    show_default=True,
    metavar="N",
    help="Also draw the random bits N times, and measure variances; 64 is a good number.",
)
@click.option(
    "--out",
    type=FOLDER,
    default=Path("runs/probe"),
    show_default=True,
    help="Folder of probe.json, probe.csv, probe.html and probe.md.",
)
@click.option(
    "--data",
    metavar="PATH",
    shell_complete=known.texts,
    help="Training text, if it is not where the run had it.",
)
@click.option(
    "--val", metavar="PATH", shell_complete=files, help="Validation text, if it is not where the run had it."
)
@click.option(
    "--tokenizer",
    metavar="FILE",
    shell_complete=files,
    help="The tokenizer, if it is not where the run had it.",
)
@click.option(
    "--device", metavar="NAME", help="As run.device: auto, cpu, cuda or cuda:N.  [default: the run's]"
)
@click.option(
    "--backend", metavar="NAME", shell_complete=backends, help="Backend that computes the block formats."
)
def probe(
    checkpoints: tuple[Path, ...],
    recipes: tuple[str, ...],
    ladders: tuple[str, ...],
    without: tuple[str, ...],
    side: str,
    batch: int | None,
    length: int | None,
    first: int,
    layers: str,
    draws: int,
    out: Path,
    data: str | None,
    val: str | None,
    tokenizer: str | None,
    device: str | None,
    backend: str | None,
) -> None:
    """Compare the GEMMs of recipes on a CHECKPOINT with exact ones.

    Their operands are compared too; no weight is updated. A CHECKPOINT is RUN/checkpoints/step-N of an `mxref train`,
    or the folder RUN for its newest one. One batch goes forward and backward in BF16. Every recipe's three GEMMs then
    run on what each linear layer read, so no error of one layer or step reaches another. Several checkpoints of one
    model are shown side by side.

    \b
    Examples:
      mxref probe runs/fp8                                  all shipped recipes
      mxref probe runs/fp8 --ladder paper --out runs/probe  the arms of a ladder
      mxref probe runs/fp8/checkpoints/step-* --recipe mxfp4 --recipe mxfp4_h16
      mxref probe runs/fp8 --recipe tseng --draws 64        with variances
      mxref probe runs/fp8 --layers '*.down_proj' --side train --batch 2
    """  # noqa: D301 - click takes \b for a paragraph that keeps its lines
    require("probe", "torch", "tokenizers", "matplotlib", "jinja2")
    if draws == 1:
        raise click.UsageError("--draws 1 has no variance: give 2 or more, or 0 for none")
    from mxref.discovery import get_backend
    from mxref.terminal import echo
    from mxref_training.device import default_backend
    from mxref_training.lab.ladder import load_ladder
    from mxref_training.probe.arms import chosen_arms, that_a_backend_has
    from mxref_training.probe.batch import Shape, Side
    from mxref_training.probe.moments import find_moments

    arms = chosen_arms(recipes, {Path(name).stem: load_ladder(name) for name in ladders}, without)
    paths = {"train": data, "val": val, "tokenizer": tokenizer}
    overrides: dict[str, Any] = {
        "data": {key: value for key, value in paths.items() if value is not None},
        "run": {"device": device} if device is not None else {},
    }
    moments = find_moments(checkpoints)
    computes = get_backend(default_backend(backend, moments[0].config([overrides]).run.device)[0])
    if not recipes and not ladders:
        arms = that_a_backend_has(arms, computes, lambda line: echo(line, err=True))
    results = _measured(
        moments,
        arms,
        computes,
        out,
        shape=Shape(Side(side), batch, length, first),
        layers=layers,
        draws=draws,
        overrides=overrides,
    )
    _show(results)
    from mxref_training.report.probe.page import write_page
    from mxref_training.report.probe.tables import headline

    page, _ = write_page(results, out)
    echo(f"{headline(results)}\n\n{page}")


def probe_reference(ladder: Ladder, left_out: Collection[str], folder: Path, backend: Backend) -> None:
    """Probe the newest checkpoint of a ladder's reference with every recipe of the ladder, and print the table.

    The files are written into the ladder's folder, whose report shows them.

    Args:
        ladder: the ladder, whose reference is trained.
        left_out: names of arms to leave out.
        folder: of the ladder.
        backend: computes the block formats.

    Raises:
        CheckpointError: the reference has no checkpoint.
        MxrefError: a recipe that the backend does not declare.
    """
    from mxref_training.probe.arms import chosen_arms
    from mxref_training.probe.batch import Shape
    from mxref_training.probe.moments import find_moments
    from mxref_training.report.probe.page import write_page

    moments = find_moments([folder / "arms" / ladder.reference.name])
    arms = chosen_arms([], {"ladder": ladder}, left_out)
    # On a CPU this must not take longer than an arm.
    run = moments[0].config().run
    few = max(1, CPU_TOKENS // run.seq_len) if "cpu" in backend.capabilities.devices else run.sequences
    shape = Shape(sequences=min(few, run.sequences))
    results = _measured(moments, arms, backend, folder, shape=shape, overrides={})
    write_page(results, folder)
    _show(results)


def _measured(
    moments: Sequence[Moment], arms: Sequence[NamedRecipe], backend: Backend, out: Path, **options: Any
) -> Results:
    """Probe the checkpoints, with the progress on standard error, and write the numbers."""
    from mxref_training.probe.results import save
    from mxref_training.probe.study import run_probe
    from mxref_training.report.probe.tables import all_rows
    from mxref_training.report.table import write_csv

    with _progress() as said:
        results = run_probe(moments, arms, backend=backend, said=said, **options)
    save(results, out)
    write_csv([all_rows(results)], out)
    return results


@contextmanager
def _progress() -> Iterator[Said]:
    """Yield a function that shows progress: one changing line if standard error is a terminal, else plain lines."""
    from mxref.terminal import console, echo

    screen = console(stderr=True)
    if not screen.is_terminal:
        yield lambda line: echo(line, err=True)
        return
    with screen.status("") as status:
        yield lambda line: status.update(printable(line))


def _show(results: Results) -> None:
    from mxref.terminal import console, echo
    from mxref_training.report.probe.tables import phases, summary

    table = summary(results).without("bias_fprop", "bias_dgrad")
    console().print(table.screen(f"Medians over the layers: {results['batch']['name']}"))
    for line in phases(results):
        echo(line)
