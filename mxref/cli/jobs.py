"""Options that are shared by the commands that start processes: how many, and for how long."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import click

from mxref.cli.known import one_of


class Positive(click.FloatRange):
    """A number above 0; neither `nan`, which no comparison refuses, nor `inf`."""

    def __init__(self) -> None:
        super().__init__(min=0, min_open=True)

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> float:
        """Return the number."""
        number = float(super().convert(value, param, ctx))
        if not math.isfinite(number):
            self.fail(f"{value} is not a finite number", param, ctx)
        return number


def jobs_option(help: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Return a decorator that adds the option `jobs`: a number of processes, or None for `auto`."""
    return click.option(
        "--jobs", default="1", show_default=True, metavar="N|auto", callback=_parsed, help=help,
        shell_complete=one_of(lambda: ["auto"]),
    )  # fmt: skip


def _parsed(ctx: click.Context, param: click.Parameter, value: str) -> int | None:
    if value == "auto":
        return None
    if not value.isdecimal() or int(value) < 1:
        raise click.BadParameter(f"{value!r} is neither a whole number from 1 nor 'auto'", ctx, param)
    return int(value)
