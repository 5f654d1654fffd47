"""Which linear layers an entry of a recipe selects: by globs over names, and by places of numbered blocks."""

from __future__ import annotations

import difflib
import math
import re
from collections.abc import Collection, Sequence
from fnmatch import fnmatchcase
from fractions import Fraction

from mxref.errors import RecipeError
from mxref.tomlio import shown

_BLOCKS = re.compile(r"(-?\d{1,9})|(-?\d{1,9})?:(-?\d{1,9})?|(-?\d{1,3}(\.\d{1,6})?) ?%")
_NEAREST = 3


def require_blocks(text: str, where: str) -> None:
    """Raise RecipeError unless the text is a place (`-1`), a range of places (`-2:`, `0:4`) or a share (`-15%`)."""
    if not _BLOCKS.fullmatch(text) or (text.endswith("%") and not 0 < abs(_share(text)) <= 1):
        raise RecipeError(
            f"{where} = {shown(text)} is neither a block like '-1' nor a range like '-2:' (the last two) or '0:4' nor "
            "a share like '-15%' (the last 15 %)"
        )


def _share(text: str) -> Fraction:
    """Return a share of the blocks, negative where it is counted from the end."""
    return Fraction(text.rstrip("% ")) / 100


def matching(names: Collection[str], glob: str, where: str) -> list[str]:
    """Return the names that a glob matches; RecipeError with the nearest names if there are none."""
    found = [name for name in names if fnmatchcase(name, glob)]
    if not found:
        near = difflib.get_close_matches(glob, names, n=_NEAREST, cutoff=0)
        raise RecipeError(
            f"{where}: {shown(glob)} matches no linear layer; the nearest names are {', '.join(map(repr, near))}"
        )
    return found


def in_blocks(names: Collection[str], among: Collection[str], text: str, where: str) -> list[str]:
    """Return the layers that lie in the chosen blocks of a model.

    A block is what the first number in a name tells apart: `model.layers.3.mlp.up_proj` lies in the block 3 of
    `model.layers`. Blocks are counted from 0 in ascending order of their numbers, negative places from the end.

    Args:
        names: qualified names of all linear layers.
        among: those to choose from.
        text: a place, a range or a share, as `require_blocks` allows.
        where: the key in error messages.

    Raises:
        RecipeError: no numbered block, blocks of several series, a place beyond them, or no layer left.
    """
    numbered = {name: place for name in names if (place := _place(name))}
    series = sorted({numbered[name][0] for name in among if name in numbered})
    if len(series) != 1:
        which = ", ".join(f"{prefix}.*".lstrip(".") for prefix in series)
        raise RecipeError(
            f"{where} counts numbered blocks, and "
            + (
                f"there are several series: {which}; choose one with match"
                if series
                else "no layer has a number"
            )
        )
    blocks = sorted({number for prefix, number in numbered.values() if prefix == series[0]})
    chosen = _chosen(blocks, text, where)
    found = [name for name in among if name in numbered and numbered[name][1] in chosen]
    if not found:
        raise RecipeError(f"{where} = {text!r} and match have no layer in common")
    return found


def _place(name: str) -> tuple[str, int] | None:
    """Return what precedes the first number in a name, and the number; None if there is none."""
    parts = name.split(".")
    for i, part in enumerate(parts):
        if part.isascii() and part.isdigit():
            return ".".join(parts[:i]), int(part)
    return None


def _chosen(blocks: Sequence[int], text: str, where: str) -> Sequence[int]:
    """Return the numbers of the blocks at a place, in a range or in a share; RecipeError if one is beyond them."""
    require_blocks(text, where)
    if text.endswith("%"):
        count = math.ceil(abs(_share(text)) * len(blocks))
        return blocks[:count] if _share(text) > 0 else blocks[-count:]
    first, colon, end = text.partition(":")
    for bound in filter(None, (first, end)):
        if not -len(blocks) <= int(bound) <= len(blocks):
            raise RecipeError(f"{where} = {text!r}: the model has {len(blocks)} blocks")
    if colon:
        chosen = blocks[int(first) if first else None : int(end) if end else None]
    else:
        chosen = [block for i, block in enumerate(blocks) if int(first) in (i, i - len(blocks))]
    if not chosen:
        raise RecipeError(f"{where} = {text!r} selects none of {len(blocks)} blocks")
    return chosen
