"""`mxref compare`: the codes and scales that a kernel wrote, held against the reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from mxref.cli.explain import OPERAND_IDS, read_array
from mxref.dialects import DIALECTS
from mxref.errors import FileFormatError
from mxref.steps.random import Stream
from mxref.terminal import echo

_PARTS = ("x", "codes", "scales")


@click.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="X CODES SCALES")
@click.option(
    "--dialect",
    "--spec",
    "spec",
    default="ocp",
    show_default=True,
    metavar="NAME",
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
    spec: str,
    axis: int,
    layouts: tuple[str, ...],
    pad: bool,
    seed: int,
    step: int,
    layer: int,
    operand: str,
) -> None:
    """Compare the codes and scales that a kernel wrote with the reference, byte by byte.

    The files are .npy, .npz, .safetensors or .pt. One file with arrays named x, codes and scales is enough. The exit
    code is 0 if all bytes are equal, 1 if some differ, 2 on bad usage. --seed, --step, --layer and --operand are for
    treatments with random bits.

    \b
    mxref compare x.npy codes.npy scales.npy --dialect amd
    mxref compare dump.safetensors --layout nvidia_128x4 --layout high_first
    mxref compare x.npy codes.npy scales.npy --axis 0 --layout any
    """  # noqa: D301 - the character \\b tells click to keep the lines that follow
    from mxref.check import compare as compared

    x, codes, scales = _arrays(files)
    stream = Stream(seed, step, layer, OPERAND_IDS[operand])
    report = compared(x, codes, scales, spec, axis=axis, layout=layouts, stream=stream, pad=pad)
    for line in str(report).splitlines():
        echo(line)
    click.get_current_context().exit(0 if report.ok else 1)


def _arrays(files: tuple[Path, ...]) -> tuple[Any, Any, Any]:
    if len(files) not in (1, 3):
        raise click.UsageError(
            f"got {len(files)} files: give x, codes and scales, or one file that holds arrays of these names"
        )
    x, codes, scales = (
        _read(file, part) for file, part in zip(files * (3 // len(files)), _PARTS, strict=True)
    )
    return x, codes, scales


def _read(path: Path, part: str) -> Any:
    """Return a file's array of a name, or the only one that it holds.

    Raises:
        FileFormatError: as `read_array`; or a type that only PyTorch reads, which is not installed.
    """
    if path.suffix in (".pt", ".pth"):
        return _of_torch(path, part)
    if path.suffix == ".safetensors":
        return _of_safetensors(path, part)
    if path.suffix == ".npz" and part in _names(path):
        return read_array(path, part)
    return read_array(path)


def _names(path: Path) -> list[str]:
    import numpy as np

    try:
        with np.load(path, allow_pickle=False) as file:
            return list(file.files)
    except Exception:  # `read_array` says what is wrong with the file
        return []


def _of_safetensors(path: Path, part: str) -> Any:
    """Return a tensor; PyTorch reads the types that NumPy does not have, such as float8_e8m0fnu."""
    from safetensors import safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            names = list(file.keys())
    except Exception:  # `read_array` says what is wrong with the file
        names = []
    key = part if part in names else None
    try:
        return read_array(path, key)
    except FileFormatError as err:
        if not (names and (key or len(names) == 1)):
            raise
        try:
            import torch  # noqa: F401
        except ImportError:
            raise FileFormatError(
                f"{err}; install torch, which knows more types, or store bytes as uint8"
            ) from err
    with safe_open(path, framework="pt") as file:
        return file.get_tensor(key or names[0])


def _of_torch(path: Path, part: str) -> Any:
    """Return a tensor of a file of `torch.save`; files that hold code are refused."""
    try:
        import torch
    except ImportError:
        raise FileFormatError(f"cannot read {path}: PyTorch is not installed; store a .npy file") from None
    try:
        held = torch.load(path, map_location="cpu", weights_only=True)
    except Exception as err:  # each kind of damage has an exception of its own
        text = str(err).partition("\n")[0]
        raise FileFormatError(f"cannot read {path}: {type(err).__name__}: {text}") from err
    if isinstance(held, dict):
        held = held.get(part) if part in held else next(iter(held.values())) if len(held) == 1 else None
    if not isinstance(held, torch.Tensor):
        raise FileFormatError(
            f"{path} holds no tensor {part!r}: save a tensor, or a dict of x, codes and scales"
        )
    return held
