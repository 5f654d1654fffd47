"""What `mxref ablate` prints beside the page of a ladder: its arms, the branch design, and an estimate."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mxref.terminal import BOX, HEAD, QUIET, console, echo

if TYPE_CHECKING:
    from mxref_training.lab.costs import Estimate
    from mxref_training.lab.ladder import Ladder


def show_arms(ladder: Ladder, names: Sequence[str]) -> None:
    """Print the arms that are named, with the treatment of each."""
    from rich.table import Table

    table = Table(box=BOX, header_style=HEAD, padding=(0, 1, 0, 0))
    for name in ("arm", "stage", "paper", "treatment"):
        table.add_column(name, style=QUIET if name == "stage" else "", no_wrap=name != "treatment")
    for arm in [arm for arm in ladder.arm if arm.name in names]:
        paper = arm.paper.overhead if arm.paper else ""
        table.add_row(arm.name, arm.stage, paper, _in_words(ladder.treatment(arm)))
    console().print(table)


def _in_words(treatment: list[tuple[str, str]]) -> str:
    """Return the treatment of the three GEMMs, those treated alike named together."""
    roles: dict[str, list[str]] = {}
    for role, text in treatment:
        roles.setdefault(text, []).append(role)
    if len(roles) == 1:
        return next(iter(roles))
    return "; ".join(f"{' + '.join(names)}: {text}" for text, names in roles.items())


def show_branches(results: dict[str, Any], folder: Path) -> None:
    """Print the differences of the branches, and write those of each step as CSV files."""
    from mxref_training.report.branches import branch_screen, branch_tables
    from mxref_training.report.table import write_csv

    console().print(branch_screen(results))
    write_csv(branch_tables(results), folder / "branch")


def show_estimate(found: Estimate, places: int, gpus_per_run: int) -> None:
    """Print what the missing runs take, and what the estimate assumes."""
    from rich.table import Table

    from mxref_training.lab.costs import GPUS, SPARE, UTILISATION
    from mxref_training.wording import clock, counted, si

    def table(*names: str) -> Table:
        made = Table(box=BOX, header_style=HEAD, padding=(0, 1, 0, 0))
        for number, name in enumerate(names):
            made.add_column(name, justify="right" if 0 < number < 4 else "left")
        return made

    arms = table("arm", "runs", "one run", "all", "")
    for arm in found.arms:
        one, every = ("?" if arm.seconds is None else clock(arm.seconds * n) for n in (1, arm.runs))
        note = "" if arm.timed else "not timed" if arm.seconds is None else "as the slowest"
        arms.add_row(arm.name, str(arm.runs), one, every, note)
    screen = console()
    screen.print(arms)
    runs = sum(arm.runs for arm in found.arms)
    echo(
        f"{counted(found.parameters, 'parameter')}, {found.tokens:,} tokens and {si(found.flops)}FLOP in "
        f"{counted(runs, 'run')}, {si(found.memory)}B of memory for each rank, about {si(found.disk)}B of disk"
    )
    if found.wall is not None:
        echo(
            f"time: about {clock(found.wall)} in {counted(places, 'place')}, by the tokens per second of the finished "
            f"runs here; each run may take {SPARE - 1:.0%} longer than the slowest one of its arm"
        )
        return
    echo(
        f"time: no run has finished here. At {UTILISATION:.0%} of the BF16 peak, which is assumed, all runs one after "
        f"another take, on {gpus_per_run} of:"
    )
    gpus = table("GPU", "TFLOP/s", "GB", "time")
    for gpu in GPUS:
        seconds = found.seconds_on(gpu, gpus_per_run)
        gpus.add_row(
            gpu.name,
            f"{gpu.tflops:g}",
            str(gpu.gigabytes),
            "too little memory" if seconds is None else clock(seconds),
        )
    screen.print(gpus)
