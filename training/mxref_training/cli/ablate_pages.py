"""What `mxref ablate` prints beside the page of a ladder: the branch design, and an estimate."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from mxref.terminal import BOX, HEAD, console, echo
from mxref_training.lab.forecast import Forecast
from mxref_training.report.branches import branch_screen, branch_tables
from mxref_training.report.table import write_csv
from mxref_training.wording import clock, counted, si


def show_branches(results: dict[str, Any], folder: Path) -> None:
    """Print the differences of the branches, and write those of each step as CSV files."""
    console().print(branch_screen(results))
    write_csv(branch_tables(results), folder / "branch")


def show_forecast(found: Forecast, here: Mapping[str, Any], measured: Mapping[str, Any]) -> None:
    """Print what the unfinished runs take, and what the estimate assumes.

    Args:
        found: the estimate.
        here: the device and the places of this call.
        measured: those of the calibration; empty without one.
    """
    from rich.table import Table

    table = Table(box=BOX, header_style=HEAD, padding=(0, 1, 0, 0))
    for name, justify in (
        ("arm", "left"),
        ("runs", "right"),
        ("one run", "right"),
        ("all", "right"),
        ("", "left"),
    ):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for arm in found.arms:
        known = arm.seconds is not None
        one, every = (clock(arm.seconds * n) if arm.seconds is not None else "?" for n in (1, arm.runs))
        table.add_row(
            arm.name,
            str(arm.runs),
            one,
            every,
            "" if arm.timed else "as the slowest" if known else "not timed",
        )
    screen = console()
    screen.print(table)
    runs = sum(arm.runs for arm in found.arms)
    for line in (
        f"{counted(found.parameters, 'parameter')}, {found.tokens:,} tokens a run, {si(found.flops)}FLOP in "
        f"{counted(runs, 'run')}",
        _time(found, here),
        f"disk: about {si(found.disk)}B for checkpoints and logs",
        *_assumptions(found, here, measured),
    ):
        echo(line)


def _time(found: Forecast, here: Mapping[str, Any]) -> str:
    if found.wall is None or found.busy is None:
        return "time: unknown, because no run has been timed: --calibrate times a few steps of each kind of recipe"
    places = counted(here["places"], "place")
    return (
        f"time: about {clock(found.wall)} in {places} on {here['device']}, {clock(found.busy)} of one place"
    )


def _assumptions(found: Forecast, here: Mapping[str, Any], measured: Mapping[str, Any]) -> list[str]:
    if found.wall is None:
        return []
    lines = [
        "Assumed: a run takes 10 % longer than the slowest one of its cost class, or than its calibration. Every run "
        "starts in the place that is free first. Nothing fails.",
    ]
    changed = [
        f"{key} {measured[key]} -> {here[key]}"
        for key in here
        if key in measured and measured[key] != here[key]
    ]
    if changed:
        lines.append(f"The calibration was made elsewhere: {', '.join(changed)}. --calibrate repeats it.")
    if any(not arm.timed for arm in found.arms):
        lines.append("An arm whose cost class was not timed counts as the slowest one.")
    return lines
