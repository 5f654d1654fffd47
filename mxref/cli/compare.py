"""`mxref compare`: the codes and scales that a kernel wrote, held against the reference."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

import click
from click.core import ParameterSource

from mxref.cli import known
from mxref.cli.array_files import read_dumped, refuse_key
from mxref.cli.explain import OPERAND_IDS
from mxref.dialects import DIALECTS
from mxref.errors import FileFormatError
from mxref.steps.random import Stream
from mxref.terminal import echo

if TYPE_CHECKING:
    from mxref.conformance.dump import Comparison
    from mxref.conformance.stacks import StackComparison

_PARTS = ("x", "codes", "scales")


@click.command()
@click.argument(
    "files", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="X CODES SCALES | A B"
)
@click.option(
    "--key",
    "keys",
    multiple=True,
    metavar="NAME",
    help="Names of x, codes and scales in files with several arrays, if they have others: give it three times.",
)
@click.option(
    "--dialect",
    "--spec",
    "spec",
    default="ocp",
    show_default=True,
    metavar="NAME",
    shell_complete=known.dialects,
    help=f"The treatment: {', '.join(DIALECTS)}, or an operand of a recipe, as in mxfp4_h16:wgrad.dy.",
)
@click.option("--axis", type=int, default=-1, show_default=True, help="Block axis of x.")
@click.option(
    "--layout",
    "layouts",
    multiple=True,
    metavar="NAME",
    help="How codes or scales are stored; `any` tries all, an unknown name lists them. May be given twice.",
)
@click.option("--pad", is_flag=True, help="The kernel fills the block axis up with zeros.")
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the random bits.")
@click.option("--step", type=int, default=0, show_default=True, help="Optimizer step.")
@click.option("--layer", type=int, default=0, show_default=True, help="Layer index.")
@click.option(
    "--operand", type=click.Choice(list(OPERAND_IDS)), default="fprop.x", show_default=True, help="GEMM operand."
)  # fmt: skip
def compare(
    files: tuple[Path, ...],
    keys: tuple[str, ...],
    spec: str,
    axis: int,
    layouts: tuple[str, ...],
    pad: bool,
    seed: int,
    step: int,
    layer: int,
    operand: str,
) -> None:
    """Compare a kernel's bytes with the reference, or two stacks.

    Every byte is compared. The files are .npy, .npz, .safetensors or .pt. One file with arrays named x, codes and
    scales is enough. The exit code is 0 if all bytes are equal, 1 if some differ, 2 on bad usage. --seed, --step,
    --layer and --operand are for treatments with random bits.

    Two files are operands of two stacks, from mxref_torch.record_operands. The first layer, GEMM, operand and block
    whose bytes differ is named, with the treatment of either side.

    \b
    Examples:
      mxref compare x.npy codes.npy scales.npy --dialect amd
      mxref compare dump.safetensors --layout nvidia_128x4 --layout high_first
      mxref compare x.npy codes.npy scales.npy --axis 0 --layout any
      mxref compare dump.npz --key act --key fp4 --key sf
      mxref compare ours.npz torchao.npz
    """  # noqa: D301 - the character \\b tells click to keep the lines that follow
    if len(files) == 2 and all(file.suffix == ".npz" for file in files):
        _compare_stacks(files[0], files[1])
    from mxref.check import compare as compared

    x, codes, scales = _arrays(files, keys)
    stream = Stream(seed, step, layer, OPERAND_IDS[operand])
    report = compared(x, codes, scales, spec, axis=axis, layout=layouts, stream=stream, pad=pad)
    _report(report)


def _compare_stacks(a: Path, b: Path) -> None:
    from mxref.conformance.stacks import compare_stacks, load_stack

    context = click.get_current_context()
    given = [
        name for name in context.params if context.get_parameter_source(name) is ParameterSource.COMMANDLINE
    ]
    if others := [name for name in given if name != "files"]:
        raise click.UsageError(
            f"two files are operands of two stacks, without options: leave out {', '.join(others)}"
        )
    _report(compare_stacks(load_stack(a), load_stack(b)))


def _report(report: Comparison | StackComparison) -> NoReturn:
    for line in str(report).splitlines():
        echo(line)
    click.get_current_context().exit(0 if report.ok else 1)


def _arrays(files: tuple[Path, ...], keys: tuple[str, ...]) -> tuple[Any, Any, Any]:
    if len(files) not in (1, 3):
        raise click.UsageError(
            f"got {len(files)} files: give x, codes and scales, one file that holds arrays of these names, or two .npz "
            "of operands"
        )
    if len(files) == 1 and files[0].suffix == ".npy":
        raise FileFormatError(f"{files[0]} holds one array: give x, codes and scales as three files")
    if len(keys) not in (0, 3):
        raise click.UsageError(f"--key is given {len(keys)} times: name x, codes and scales, in this order")
    if keys and all(file.suffix == ".npy" for file in files):
        refuse_key(files[0])
    exact = len(files) == 1 or bool(keys)
    x, codes, scales = (
        read_dumped(file, name, exact)
        for file, name in zip(files * (3 // len(files)), keys or _PARTS, strict=True)
    )
    return x, codes, scales
