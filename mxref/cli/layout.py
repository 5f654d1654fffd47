"""`mxref layout`: codes and scales of a file in another layout, or under another library's names."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import click

from mxref.cli import known
from mxref.formats import BLOCK_FORMATS
from mxref.layouts.conventions import CONVENTIONS, OWN
from mxref.layouts.foreign import LAYOUTS
from mxref.terminal import echo

if TYPE_CHECKING:
    from mxref.exchange import Read

_NAMES = f"{OWN}, {', '.join(CONVENTIONS)}, or one or two of {', '.join(LAYOUTS)}, joined by a comma"


@click.command()
@click.argument("origin", metavar="FROM", shell_complete=known.layouts)
@click.argument("target", metavar="TO", shell_complete=known.layouts)
@click.argument("source", metavar="FILE", type=click.Path(path_type=Path))
@click.argument("result", metavar="[RESULT]", required=False, type=click.Path(path_type=Path))
@click.option("--check", is_flag=True, help="Only check that FILE fits FROM and TO; write nothing.")
@click.option(
    "--key",
    "keys",
    multiple=True,
    metavar="NAME",
    help="The layer in a file with several; may be given twice: the names of codes and of scales.",
)
@click.option(
    "--format",
    type=click.Choice(list(BLOCK_FORMATS)),
    help="Block format, where FILE does not record it; default mxfp4.",
)
@click.option("--shape", metavar="ROWS,K", help="Shape of the array, if its codes are stored flat.")
@click.option("--name", default="weight", show_default=True, help="Name of the layer in RESULT.")
@click.option(
    "--typed", is_flag=True, help="Give the bytes of a .safetensors file the types F4, F8_E4M3 and F8_E8M0."
)
def layout(
    origin: str,
    target: str,
    source: Path,
    result: Path | None,
    check: bool,
    keys: tuple[str, ...],
    format: str | None,
    shape: str | None,
    name: str,
    typed: bool,
) -> None:
    """Convert codes and scales between layouts, byte for byte.

    The files are .npz or .safetensors. FROM and TO are mxref, a convention (gpt-oss, quark, compressed-tensors,
    ggml), or layouts of codes and of scales, as in high_first,nvidia_128x4; an unknown name lists them all. RESULT
    records its layouts, and no recorded layout is converted twice.

    \b
    Examples:
      mxref layout mxref nvidia_128x4 w.npz kernel.safetensors
      mxref layout nvidia_128x4 mxref kernel.safetensors --check
      mxref layout gpt-oss mxref model.safetensors w.npz --key NAME
    """  # noqa: D301 - the character \\b tells click to keep the lines that follow
    from mxref import exchange

    if (result is None) != check:
        raise click.UsageError("name RESULT, the file to write, or give --check, which writes none")
    found = exchange.read(source, origin, key=keys, format=format, shape=_shape(shape))
    echo(f"{source} ({origin}): {_described(found)}")
    for line in _doubts(found, origin):
        echo(f"  {line}")
    if result is None:
        arrays, title = exchange.stored(found.array, target, name), "would be stored as"
    else:
        arrays, title = exchange.save(found.array, result, target, key=name, typed=typed), f"-> {result}"
    held = ", ".join(f"{part} {array.dtype} {list(array.shape)}" for part, array in arrays.items())
    echo(f"{title} ({target}{', typed' if typed else ''}): {held}")


def _shape(text: str | None) -> tuple[int, ...] | None:
    try:
        return None if text is None else tuple(int(number) for number in text.split(","))
    except ValueError:
        raise click.BadParameter(
            f"{text!r} is no list of numbers, as 128,4096", param_hint="--shape"
        ) from None


def _described(found: Read) -> str:
    q = found.array
    blocks = q.scales.size
    filled = "" if q.length == q.shape[q.axis] else f", filled up to {q.length}"
    return f"{q.format.title}, shape {list(q.shape)}, blocks along axis {q.axis}{filled}, {blocks:,} blocks"


def _doubts(found: Read, origin: str) -> list[str]:
    """Return what the bytes do not prove."""
    lines = []
    if found.padding:
        state = f"{found.nonzero:,} of them are not 0" if found.nonzero else "all 0"
        lines.append(f"{found.padding:,} bytes of scales are padding, {state}")
        if found.nonzero:
            lines.append(
                f"either the writer left padding as it was, or these scales are not in the layout {origin}: they may "
                "have been converted twice"
            )
    if found.fitting:
        lines.append(
            f"the file does not record its layout, and {', '.join(found.fitting)} have the same size: to be sure, hold "
            "the bytes against their numbers with mxref compare"
        )
    return lines
