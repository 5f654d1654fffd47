"""`mxref compare`: the codes and scales that a kernel wrote, held against the reference."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import click

from mxref.cli import known
from mxref.cli.array_files import read_array, refuse_key
from mxref.cli.explain import OPERAND_IDS
from mxref.dialects import DIALECTS
from mxref.errors import FileFormatError
from mxref.steps.random import Stream
from mxref.terminal import echo

_PARTS = ("x", "codes", "scales")


@click.command()
@click.argument("files", nargs=-1, required=True, type=click.Path(path_type=Path), metavar="X CODES SCALES")
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
    """Compare the codes and scales of a kernel with the reference.

    Every byte is compared. The files are .npy, .npz, .safetensors or .pt. One file with arrays named x, codes and
    scales is enough. The exit code is 0 if all bytes are equal, 1 if some differ, 2 on bad usage. --seed, --step,
    --layer and --operand are for treatments with random bits.

    \b
    Examples:
      mxref compare x.npy codes.npy scales.npy --dialect amd
      mxref compare dump.safetensors --layout nvidia_128x4 --layout high_first
      mxref compare x.npy codes.npy scales.npy --axis 0 --layout any
      mxref compare dump.npz --key act --key fp4 --key sf
    """  # noqa: D301 - the character \\b tells click to keep the lines that follow
    from mxref.check import compare as compared

    x, codes, scales = _arrays(files, keys)
    stream = Stream(seed, step, layer, OPERAND_IDS[operand])
    report = compared(x, codes, scales, spec, axis=axis, layout=layouts, stream=stream, pad=pad)
    for line in str(report).splitlines():
        echo(line)
    click.get_current_context().exit(0 if report.ok else 1)


def _arrays(files: tuple[Path, ...], keys: tuple[str, ...]) -> tuple[Any, Any, Any]:
    if len(files) not in (1, 3):
        raise click.UsageError(
            f"got {len(files)} files: give x, codes and scales, or one file that holds arrays of these names"
        )
    if len(files) == 1 and files[0].suffix == ".npy":
        raise FileFormatError(f"{files[0]} holds one array: give x, codes and scales as three files")
    if len(keys) not in (0, 3):
        raise click.UsageError(f"--key is given {len(keys)} times: name x, codes and scales, in this order")
    if keys and all(file.suffix == ".npy" for file in files):
        refuse_key(files[0])
    exact = len(files) == 1 or bool(keys)
    x, codes, scales = (
        _read(file, name, exact) for file, name in zip(files * (3 // len(files)), keys or _PARTS, strict=True)
    )
    return x, codes, scales


def _read(path: Path, name: str, exact: bool) -> Any:
    """Return a file's array of a name; unless `exact`, the only one that it holds may have another name.

    Raises:
        FileFormatError: as `read_array`; or a type that only PyTorch reads, which is not installed.
    """
    if path.suffix in (".pt", ".pth"):
        return _of_torch(path, name, exact)
    if path.suffix == ".safetensors":
        return _of_safetensors(path, name, exact)
    if path.suffix == ".npz":
        return read_array(path, _chosen(path, _names(path), name, exact))
    return read_array(path)


def _chosen(path: Path, names: list[str], name: str, exact: bool) -> str | None:
    """Return the name of the array to read; None if the names are unknown, because the file cannot be read."""
    if name in names or not names:
        return name if names else None
    if len(names) == 1 and not exact:
        return names[0]
    raise FileFormatError(
        f"{path} has no array {name!r}, but {', '.join(sorted(names))}: name x, codes and scales by --key NAME, three "
        "times"
    )


def _names(path: Path) -> list[str]:
    import numpy as np

    try:
        with np.load(path, allow_pickle=False) as file:
            return list(file.files)
    except Exception:  # `read_array` says what is wrong with the file
        return []


def _of_safetensors(path: Path, name: str, exact: bool) -> Any:
    """Return a tensor; PyTorch reads the types that NumPy does not have, such as float8_e8m0fnu."""
    from safetensors import safe_open

    try:
        with safe_open(path, framework="numpy") as file:
            names = list(file.keys())
    except Exception:  # `read_array` says what is wrong with the file
        names = []
    key = _chosen(path, names, name, exact)
    try:
        return read_array(path, key)
    except FileFormatError as err:
        if key is None:
            raise
        try:
            import torch  # noqa: F401
        except ImportError:
            raise FileFormatError(
                f"{err}; install torch, which knows more types, or store bytes as uint8"
            ) from err
    with safe_open(path, framework="pt") as file:
        return file.get_tensor(key)


def _of_torch(path: Path, name: str, exact: bool) -> Any:
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
        held = held.get(_chosen(path, [str(key) for key in held], name, exact))
    elif exact:
        raise FileFormatError(
            f"{path} holds no dict of tensors: save one, or give x, codes and scales as three files"
        )
    if not isinstance(held, torch.Tensor):
        raise FileFormatError(
            f"{path} holds no tensor {name!r}: save a tensor, or a dict of x, codes and scales"
        )
    return held
