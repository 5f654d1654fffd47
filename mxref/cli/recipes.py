"""`mxref recipes`: the shipped recipes, and the text of one."""

from __future__ import annotations

from itertools import takewhile
from pathlib import Path

import click
from rich.table import Table

from mxref.cli import known
from mxref.errors import RecipeError
from mxref.recipe_files import load_recipe, shipped_recipes
from mxref.terminal import BOX, HEAD, QUIET, console, echo
from mxref.tomlio import nearest


@click.command()
@click.argument("name", required=False, shell_complete=known.recipes)
def recipes(name: str | None) -> None:
    """List the shipped recipes, or print one to start from.

    \b
    Examples:
      mxref recipes
      mxref recipes mxfp4_h16 > mine.toml
    """  # noqa: D301 - click takes \\b for a paragraph that keeps its lines
    shipped = shipped_recipes()
    if not shipped:
        raise RecipeError(
            "no recipes are installed, because the package mxref_training is missing: install mxref again"
        )
    if name is None:
        _list(shipped)
    elif name in shipped:
        echo(shipped[name].read_text(encoding="utf-8").rstrip("\n"))
    else:
        raise RecipeError(f"unknown recipe {name!r}{nearest(name, shipped)}")


def _list(shipped: dict[str, Path]) -> None:
    """Print name, digest and the comment at the head of each file."""
    table = Table(box=BOX, header_style=HEAD, padding=(0, 1, 0, 0))
    for column in ("recipe", "digest", "treatment"):
        table.add_column(column, style=QUIET if column == "digest" else "", no_wrap=column != "treatment")
    for name, file in shipped.items():
        lines = file.read_text(encoding="utf-8").splitlines()
        head = takewhile(lambda line: line.startswith("#"), lines)
        table.add_row(name, load_recipe(file).digest, " ".join(line.lstrip("# ") for line in head))
    console().print(table)
