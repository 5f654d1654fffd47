"""The results of several machines in one folder: `mxref ablate LADDER --collect`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from mxref_training.cli.report import require, show_ladder

if TYPE_CHECKING:
    from mxref_training.lab.ladder import Ladder


def collect_folders(ladder: Ladder, folders: tuple[Path, ...], out: Path | None) -> None:
    """Bring the results of folders together in `out`, print the comparison, and write its pages; train nothing."""
    if out is None or not folders:
        raise click.UsageError("--collect needs folders, and --out for what is collected")
    require("ablate", "torch", "tokenizers", "matplotlib", "jinja2", "scipy")
    from mxref.terminal import echo
    from mxref_training.cli.ablate_pages import show_branches
    from mxref_training.lab.collect import collect

    found = collect(ladder, folders, out, lambda line: echo(line, err=True))
    if found.ladder:
        show_ladder(found.ladder, out)
    if found.branches:
        show_branches(found.branches, out)
