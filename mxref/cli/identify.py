"""`mxref identify`: what a quantized checkpoint was quantized with, by its headers and a sample of its codes."""

from __future__ import annotations

import json
from pathlib import Path

import click

from mxref.cli import known
from mxref.dialects import DIALECTS
from mxref.steps.scale import EXPONENT_RULES
from mxref.terminal import echo

_RULES = (*(rule.value for rule in EXPONENT_RULES), "nearest", "by_error")


@click.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="FILE...")
@click.option(
    "--against",
    type=click.Path(path_type=Path),
    metavar="FILE",
    help="The weights before quantization, a file or a folder: find the dialect that gives every byte.",
)
@click.option(
    "--expect",
    metavar="RULE",
    type=click.Choice([*_RULES, *DIALECTS]),
    shell_complete=known.one_of(lambda: (*_RULES, *DIALECTS)),
    help=f"Exit with 1 unless every weight has this rule ({', '.join(_RULES)}), or that of this dialect.",
)
@click.option(
    "--blocks",
    type=click.IntRange(256, 1 << 20),
    default=16384,
    show_default=True,
    help="Blocks that are read of each group of weights.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
def identify(
    files: tuple[Path, ...], against: Path | None, expect: str | None, blocks: int, as_json: bool
) -> None:
    """Say what a quantized checkpoint was quantized with.

    FILE is a .safetensors, .gguf or .npz file, or a folder of them. Headers are read, and a sample of the codes. For
    each group of weights the command names the format, the packing, the layouts of scales that fit, and the scale rule
    if the codes show it; otherwise it says undecided. --against compares with the weights before quantization.

    \b
    Examples:
      mxref identify model.safetensors
      mxref identify folder --expect even
      mxref identify folder --against original.safetensors
      mxref identify model.gguf --json
    """  # noqa: D301 - the character \\b tells click to keep the lines that follow
    from mxref.identify.against import against as compared
    from mxref.identify.answer import identify as identified
    from mxref.identify.text import lines, plain

    found = identified(files, blocks)
    origins = compared(found, against) if against else []
    if as_json:
        click.echo(json.dumps(plain(found, origins), indent=2))
    else:
        for line in lines(found, origins):
            echo(line)
    if expect is None:
        return
    from mxref.identify.answer import unexpected

    others = unexpected(found, expect)
    for group in others:
        rule = found.rule(group) or "undecided"
        echo(f"expected {expect}, and {group.name} is {rule}", err=True)
    click.get_current_context().exit(1 if others else 0)
