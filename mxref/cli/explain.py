"""`mxref explain`: the quantization of one block, from the bits of its inputs to its packed bytes."""

from __future__ import annotations

import difflib
import json
import math
from collections.abc import Sequence
from dataclasses import asdict, replace
from enum import Enum
from pathlib import Path
from typing import Any

import click
import numpy as np
from click.core import ParameterSource

from mxref.cli import known
from mxref.cli.array_files import SUFFIXES, read_array
from mxref.dialects import DIALECTS, dialect
from mxref.explain import BlockExplanation, explain_block
from mxref.explain.link import explorer_link
from mxref.explain.text import notes, reason, scale_steps
from mxref.formats import BLOCK_FORMATS, BlockFormat
from mxref.recipe import OperandSpec
from mxref.roles import OPERANDS
from mxref.steps.four_over_six import FourOverSix
from mxref.steps.hadamard import SIZES, SignPolicy
from mxref.steps.quotient import Arithmetic
from mxref.steps.random import Stream
from mxref.steps.rounding import MAX_SR_BITS, Rounding
from mxref.steps.scale import ScaleRule
from mxref.tomlio import to_table

OPERAND_IDS = {f"{role.value}.{o.tensor}": o.id for role, operands in OPERANDS.items() for o in operands}

_ZERO_SCALES = sorted({0, *(made.scale.one_code for made in BLOCK_FORMATS.values())})

# Numbers may be negative, so click passes unknown options as arguments; `_floats` refuses other words.
_SETTINGS = {"ignore_unknown_options": True}


@click.command(context_settings=_SETTINGS)
@click.argument("numbers", nargs=-1, type=click.UNPROCESSED)
@click.option(
    "--file", type=click.Path(path_type=Path), help="Read an array from a .npy, .npz or .safetensors file."
)
@click.option("--key", help="Name of the array in a file with several arrays.")
@click.option(
    "--block", "index", type=click.IntRange(min=0), help="Block number in storage order, block axis last."
)
@click.option("--axis", type=int, default=-1, show_default=True, help="Block axis of the array.")
@click.option(
    "--dialect",
    "name",
    default="ocp",
    show_default=True,
    shell_complete=known.dialects,
    help=f"Start from {', '.join(DIALECTS)}.",
)
@click.option("--format", type=click.Choice(list(BLOCK_FORMATS)), help="Block format.")
@click.option(
    "--scale-rule",
    shell_complete=known.scale_rules,
    help=f"Rule of the shared scale: {', '.join(ScaleRule)}, or a number, as '>1.5'.",
)
@click.option("--rounding", type=click.Choice([r.value for r in Rounding]), help="Rounding of the elements.")
@click.option("--sr-bits", type=click.IntRange(1, MAX_SR_BITS), help="R, random bits per element under SR.")
@click.option(
    "--hadamard", type=click.Choice(["0", *map(str, SIZES)]), help="Size of the transform; 0 is none."
)
@click.option(
    "--signs",
    type=click.Choice([p.value for p in SignPolicy]),
    help="When the random signs of the transform are drawn.",
)
@click.option(
    "--prescale/--no-prescale",
    default=None,
    help="Multiply by the format's constant below 1 before rounding: 3/4 for MXFP4.",
)
@click.option(
    "--zero-scale",
    type=click.Choice([str(code) for code in _ZERO_SCALES]),
    help="Scale code of an all-zero block: 0, or that of the scale 1.",
)
@click.option(
    "--arithmetic",
    type=click.Choice([each.value for each in Arithmetic]),
    help="How quotients by scales with a mantissa are computed: real, or in one implementation's order.",
)
@click.option(
    "--four-over-six",
    type=click.Choice([each.value for each in FourOverSix]),
    help="Error by which a block may take amax / 4 in place of amax / 6.",
)
@click.option("--tile", is_flag=True, help="Share a scale over square tiles, as 32x32, instead of rows.")
@click.option(
    "--amax",
    metavar="NUMBER",
    help="Largest magnitude of the tensor, for a format with a scale of the tensor; default that of the array.",
)
@click.option("--seed", type=int, default=0, show_default=True, help="Seed of the random bits.")
@click.option("--step", type=int, default=0, show_default=True, help="Optimizer step.")
@click.option("--layer", type=int, default=0, show_default=True, help="Layer index.")
@click.option(
    "--operand",
    type=click.Choice(list(OPERAND_IDS)),
    default="fprop.x",
    show_default=True,
    help="GEMM operand.",
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON instead of tables.")
@click.option(
    "--link", is_flag=True, help="Print the URL of the explorer page that shows the block, and nothing else."
)
@click.option(
    "--explorer",
    metavar="URL",
    help="Address of the explorer page for --link; default the page of the package.",
)
def explain(
    numbers: tuple[str, ...],
    file: Path | None,
    key: str | None,
    index: int | None,
    axis: int,
    name: str,
    seed: int,
    step: int,
    layer: int,
    operand: str,
    amax: str | None,
    as_json: bool,
    link: bool,
    explorer: str | None,
    **options: Any,
) -> None:
    """Explain how a block is quantized, bit by bit.

    NUMBERS are the elements, 32 per block (16 for NVFP4), padded with zeros: decimals, nan, inf, -0,
    or float32 bits such as 0x7fc00000. Alternatively, name a --file and a --block.

    \b
    Examples:
      mxref explain 1 -2 0.5 7
      mxref explain --scale-rule rceil --rounding sr 0.1 0x7f7fffff
      mxref explain --format nvfp4 --amax 260 1.5234375 -0.75
      mxref explain --dialect te_nvfp4 --amax 260 1.5234375 -0.75
      mxref explain --file weights.npy --block 17 --dialect tseng
      mxref explain 1 -2 0.5 7 --dialect amd --link
    """  # noqa: D301 - the character \\b tells click to keep the lines that follow
    if bool(numbers) == bool(file):
        raise click.UsageError("give either numbers or --file, as in: mxref explain 1 -2 0.5")
    if link and as_json:
        raise click.UsageError("--link prints a URL and --json prints JSON: give one of them")
    if explorer is not None and not link:
        raise click.UsageError("--explorer is the address of the page for --link: give --link too")
    if not file and (key or axis != -1):
        raise click.UsageError("--key and --axis need --file")
    x = read_array(file, key) if file else np.array(_floats(numbers), np.float32)
    spec = _spec(name, options)
    _require_used(spec, options["sr_bits"])
    rng = Stream(seed, step, layer, OPERAND_IDS[operand])
    whole: dict[str, Any] = {"axis": axis, "pad": True, "amax": None if amax is None else _amax(amax)}
    first = explain_block(x, spec, rng, index=index or 0, **whole)
    wanted = range(1, first.blocks) if index is None and not file else range(0)
    if link:
        for i in (first.index, *wanted):
            click.echo(explorer_link(x, spec, rng, index=i, page=explorer, **whole))
        return
    blocks = [first, *(explain_block(x, spec, rng, index=i, **whole) for i in wanted)]
    if as_json:
        click.echo(json.dumps({"blocks": [_plain(b) for b in blocks]}, indent=2))
        return
    from mxref.explain.table import show

    for block in blocks:
        show(block, operand)


def _spec(name: str, options: dict[str, Any]) -> OperandSpec:
    """Return the dialect's spec, changed by the given options."""
    named = dialect(name).spec
    changes: dict[str, Any] = {"format": named.format} | named.stated
    for field, convert in (
        ("scale_rule", str), ("rounding", Rounding), ("signs", SignPolicy), ("hadamard", int),
        ("zero_scale", int), ("sr_bits", int), ("prescale", bool), ("format", str), ("arithmetic", str),
        ("four_over_six", str),
    ):  # fmt: skip
        if options[field] is not None:
            changes[field] = convert(options[field])
    if changes.get("hadamard") == 0 and options["signs"] is None:
        changes.pop("signs", None)  # without a transform, the dialect's signs must go too
    spec = OperandSpec(**changes)
    if options["tile"]:
        assert isinstance(spec.format, BlockFormat)
        spec = replace(spec, block=spec.format.tile)
    return spec


def _require_used(spec: OperandSpec, sr_bits: int | None) -> None:
    """Raise UsageError for an option that has no effect on the block's bits."""
    if spec.rounding is Rounding.SR:
        return
    if sr_bits is not None:
        raise click.UsageError(f"--sr-bits needs --rounding sr, but the rounding is {spec.rounding}")
    if spec.signs is not SignPolicy.NONE:
        return
    ctx = click.get_current_context()
    for option in ("seed", "step", "layer"):
        if ctx.get_parameter_source(option) is ParameterSource.COMMANDLINE:
            raise click.UsageError(
                f"--{option} has no effect here: it needs --rounding sr, or --hadamard with --signs"
            )


def _floats(words: Sequence[str]) -> list[np.float32]:
    out = []
    for word in (part for w in words for part in w.split(",") if part):
        try:
            out.append(_float(word))
        except OverflowError:
            raise click.UsageError(
                f"{word!r} is beyond float32, whose largest value is 3.4028235e38: write inf for infinity"
            ) from None
        except ValueError:
            if word.startswith("--"):
                context = click.get_current_context()
                known = [o for p in context.command.get_params(context) for o in p.opts if o[:2] == "--"]
                close = difflib.get_close_matches(word.partition("=")[0], known, n=1)
                raise click.NoSuchOption(word, possibilities=close) from None
            if word.endswith(SUFFIXES):
                raise click.UsageError(
                    f"{word!r} is not a number; to read an array, give --file {word}"
                ) from None
            raise click.UsageError(
                f"{word!r} is not a float32 number: write decimals, nan, inf, -0, or bits such as 0x7fc00000"
            ) from None
    return out


def _amax(word: str) -> float:
    try:
        return float(_float(word))
    except (OverflowError, ValueError):
        raise click.UsageError(f"--amax {word!r} is not a float32 number") from None


def _float(word: str) -> np.float32:
    if word.lower().startswith("0x"):
        bits = int(word, 16)
        if bits >> 32:
            raise ValueError(word)
        return np.uint32(bits).view(np.float32)
    value = float(word)
    with np.errstate(over="ignore"):
        narrow = np.float32(value)
    is_number = not word.lower().lstrip("+-").startswith(("inf", "nan"))
    if is_number and not np.isfinite(narrow):
        raise OverflowError(word)
    return narrow


def _plain(block: BlockExplanation) -> Any:
    """Return an explanation as JSON values. NaN and Inf become strings, because JSON has no such numbers."""
    out = asdict(block) | {
        "spec": to_table(block.spec),
        "packed": block.packed.hex(),
        "sqnr_db": block.sqnr_db,
        "max_error": block.max_error,
        "steps": scale_steps(block),
        "notes": notes(block),
    }
    for element, plain in zip(block.elements, out["elements"], strict=True):
        plain["reason"] = reason(element, block)
    return _json_values(out)


def _json_values(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _json_values(v) for k, v in value.items()}
    if isinstance(value, list | tuple):
        return [_json_values(v) for v in value]
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
