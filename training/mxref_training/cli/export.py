"""The command `mxref export`: a run's model as a Hugging Face folder."""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import click

from mxref.cli.known import backends, dialects, files, recipes_or_files
from mxref_training.cli import known
from mxref_training.cli.report import require

if TYPE_CHECKING:
    from mxref.recipe import Recipe

_UNITS = {"": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


class _Size(click.ParamType[int]):
    """A number of bytes, as in 5GB or 500MiB."""

    name = "size"

    def convert(self, value: object, param: click.Parameter | None, ctx: click.Context | None) -> int:
        """Return the bytes."""
        found = re.fullmatch(r"(\d{1,6}) ?([KMG]I?B)?", str(value).strip(), re.IGNORECASE)
        if not found or not int(found[1]):
            self.fail(f"{value!r} is no size like 5GB or 500MiB", param, ctx)
        return int(found[1]) * _UNITS[(found[2] or "").upper()]


@click.command()
@click.argument(
    "source", metavar="RUN|CHECKPOINT", type=click.Path(path_type=Path), shell_complete=known.runs
)
@click.argument("out", type=click.Path(path_type=Path))
@click.option(
    "--dtype",
    type=click.Choice(["float32", "bfloat16"]),
    help="Type of the weights; bfloat16 rounds to nearest, ties to even.  [default: float32; with --packed bfloat16]",
)
@click.option(
    "--packed",
    type=click.Choice(["compressed-tensors", "quark"]),
    help="Pack the linear layers' weights in MXFP4 or MXFP8, as loaders of this kind read them.",
)
@click.option(
    "--recipe",
    metavar="NAME|FILE",
    shell_complete=recipes_or_files,
    help="With --packed: quantize the weights as Fprop reads them under this recipe.  [default: the run's]",
)
@click.option(
    "--dialect",
    metavar="NAME",
    shell_complete=dialects,
    help="With --packed: quantize the weights in MXFP4 under this dialect, as in ocp or amd.",
)
@click.option(
    "--tokenizer",
    metavar="FILE",
    shell_complete=files,
    help="The tokenizer.json, if it is not where the run had it.",
)
@click.option("--no-tokenizer", is_flag=True, help="Write no tokenizer.")
@click.option(
    "--max-shard-size",
    type=_Size(),
    default="5GB",
    show_default=True,
    help="Largest file of weights; beyond it there are several, with an index.",
)
@click.option(
    "--backend",
    metavar="NAME",
    shell_complete=backends,
    help="Backend that quantizes the weights under --packed.",
)
def export(
    source: Path,
    out: Path,
    dtype: str | None,
    packed: str | None,
    recipe: str | None,
    dialect: str | None,
    tokenizer: str | None,
    no_tokenizer: bool,
    max_shard_size: int,
    backend: str | None,
) -> None:
    """Write a run's model into a folder that Transformers loads.

    The first argument is the folder of a run, for its newest checkpoint, or RUN/checkpoints/step-N. The
    new folder OUT has model.safetensors, config.json and the run's tokenizer. It appears when all of it is on the disk.

    \b
    Examples:
      mxref export runs/b model                  the weights as they are
      mxref export runs/b/checkpoints/step-300 model --dtype bfloat16
      mxref export runs/b model --packed compressed-tensors
      mxref export runs/b model --packed quark --dialect amd
    """  # noqa: D301 - click takes \b for a paragraph that keeps its lines
    require("export", "torch", "tokenizers")
    if packed is None and (
        extra := [n for n, v in (("--recipe", recipe), ("--dialect", dialect)) if v is not None]
    ):
        raise click.UsageError(f"{extra[0]} says how weights are packed: give --packed too")
    if packed is not None and dtype == "float32":
        raise click.UsageError(
            "--dtype float32 beside --packed: what is not packed is bfloat16; leave --dtype out"
        )
    if recipe is not None and dialect is not None:
        raise click.UsageError("--recipe and --dialect both say how weights are quantized: give one of them")
    if no_tokenizer and tokenizer is not None:
        raise click.UsageError("--tokenizer beside --no-tokenizer: give one of them")
    from mxref.discovery import get_backend
    from mxref.terminal import echo
    from mxref_training.export.model import Packing, export_model
    from mxref_training.wording import counted

    packing = Packing(packed, get_backend(backend), _treatment(recipe, dialect)) if packed else None
    echo(f"reading {source}", err=True)  # a large checkpoint takes minutes to verify
    done = export_model(
        source,
        out,
        dtype=dtype or "float32",
        packing=packing,
        tokenizer=tokenizer,
        with_tokenizer=not no_tokenizer,
        max_shard=max_shard_size,
    )
    how = (
        f"{counted(done.packed, 'linear layer')} packed for {packed}, the rest bfloat16"
        if packed
        else dtype or "float32"
    )
    echo(
        f"{out}: {done.parameters:,} parameters after {counted(done.step, 'step')}, {how}, in "
        f"{counted(len(done.files), 'file')} of weights"
    )
    if not packed:
        echo(
            "its loss in float32 may differ from the logged one, by up to 3e-4 for a run in BF16 and by more for one "
            "in FP8 or block formats: a run multiplies in the formats of its recipe",
            err=True,
        )


def _treatment(recipe: str | None, dialect: str | None) -> Recipe | None:
    """Return the recipe whose Fprop weight is wanted; None is the run's own."""
    from mxref.recipe_files import load_recipe, recipe_from_table

    if dialect is not None:
        return recipe_from_table({"dialect": dialect})
    return None if recipe is None else load_recipe(recipe)
