"""The option `--jobs`, shared by the commands that start processes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import click

from mxref.cli.known import one_of


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
