"""What `mxref train --dry-run` prints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from rich.table import Table
from rich.text import Text

from mxref.backend import Backend
from mxref.recipe import Recipe
from mxref.terminal import HEAD, QUIET, console
from mxref_training.config import TrainConfig
from mxref_training.forecast import Mesh, dry_run
from mxref_training.preflight import planned


def print_plan(
    config: TrainConfig, recipe: Recipe, backend: Backend, why: str, mesh: Mapping[str, Any]
) -> None:
    """Print what a run would do and need, on the ranks of a `Mesh`."""
    assumed = Mesh(**mesh)
    model, axes = planned(config, recipe, backend, assumed.ranks)
    table = Table.grid(padding=(0, 2))
    for heading, lines in dry_run(config, recipe, backend, why, model, axes, assumed):
        table.add_row(Text(heading, style=HEAD), Text(""))
        for key, text in lines:
            table.add_row(Text(f"  {key}", style=QUIET), Text(text))
    console().print(table)
