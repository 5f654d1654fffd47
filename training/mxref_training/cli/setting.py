"""The options by which `train` and `ablate` take data and settings of one's own, with one meaning in both."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import click

from mxref.cli.known import backends, files
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
VAL = click.option(
    "--val",
    metavar="PATH",
    shell_complete=files,
    help="Validation text. Default: the source's own, or 2 % of the documents.",
)
TOKENIZER = click.option(
    "--tokenizer",
    metavar="FILE",
    shell_complete=files,
    help="A tokenizer.json. Default: a BPE trained on the training text.",
)
STEPS = click.option(
    "--steps", type=click.IntRange(min=1), help="Optimizer steps; the same as --set run.steps=N."
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
SHADOW = click.option(
    "--shadow",
    type=click.FloatRange(0, 1),
    metavar="SHARE",
    help="Repeat this share of the operations in block formats by the reference, as in 1e-3, and stop at a bit that "
    "differs; the same as --set run.shadow=SHARE.",
)
TELEMETRY = click.option(
    "--telemetry",
    type=click.IntRange(min=0),
    metavar="N",
    help="Measure every N steps what quantization does to each operand; the same as --set run.telemetry_every=N.",
)


def overlays(
    overrides: Sequence[str],
    *,
    data: str | None,
    val: str | None,
    tokenizer: str | None,
    steps: int | None,
    shadow: float | None,
    telemetry: int | None,
) -> list[str | dict[str, Any]]:
    """Return what the options change in a configuration, for `load_config`; an option of its own wins over `--set`."""
    sides = {"train": data, "val": val, "tokenizer": tokenizer}
    run = {"steps": steps, "shadow": shadow, "telemetry_every": telemetry}
    tables: dict[str, dict[str, Any]] = {"data": sides, "run": run}
    given = {
        name: {key: value for key, value in table.items() if value is not None}
        for name, table in tables.items()
    }
    return [*overrides, given]
