"""The value of `--jobs`, shared by the commands that start processes."""

from __future__ import annotations

import click


def parse_jobs(ctx: click.Context, param: click.Parameter, value: str) -> int | None:
    """Return the number of processes, None for `auto`; a usage error where it is neither."""
    if value == "auto":
        return None
    if not value.isdecimal() or int(value) < 1:
        raise click.BadParameter(f"{value!r} is neither a whole number from 1 nor 'auto'", ctx, param)
    return int(value)
