"""The options by which `train` and `ablate` take data and settings of one's own, with one meaning in both."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import click

from mxref.cli.known import backends
from mxref_training.cli import known


class _Folder(click.Path):
    """The name of a folder to write; an empty one, of a shell variable that is not set, is refused."""

    def convert(
        self, value: str | os.PathLike[str], param: click.Parameter | None, ctx: click.Context | None
    ) -> Any:
        """Return the path."""
        if value == "":
            self.fail("the name of the folder is empty: give one (`.` is this one)", param, ctx)
        return super().convert(value, param, ctx)


FOLDER = _Folder(path_type=Path)
DATA = click.option(
    "--data",
    metavar="PATH",
    shell_complete=known.texts,
    help="Training text: JSONL file, folder or pattern; `builtin`, `c4` or hf:NAME; or Megatron's token files.",
)
BACKEND = click.option(
    "--backend",
    metavar="NAME",
    shell_complete=backends,
    help="Default: see `mxref backends`. Also module:object or file.py:object.",
)
SET = click.option(
    "--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Change a key, as in run.batch=16."
)
