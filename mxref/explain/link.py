"""The address of the explorer page that shows a block: everything that its bits depend on is in the URL.

docs/reference/explorer.rst says how the address is built.
"""

from __future__ import annotations

from dataclasses import fields
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np

from mxref.dialects import DIALECTS, Dialect
from mxref.errors import FileFormatError, UnsupportedError
from mxref.explain.block import BlockPart, block_part
from mxref.recipe import OperandSpec
from mxref.roles import OPERANDS
from mxref.steps.four_over_six import FourOverSix
from mxref.steps.hadamard import SignPolicy, hadamard
from mxref.steps.random import Stream
from mxref.steps.rounding import Rounding
from mxref.steps.scale import magnitude_bits
from mxref.tomlio import to_table

EXPLORER = Path(__file__).resolve().with_name("explorer")
"""The files of the explorer page."""
_UNSEEN = ("nonfinite",)
"""Fields that leave the bits of a block as they are; the page shows the block that others refuse."""


def explorer_page() -> str:
    """Return the address of the explorer page of this package, a `file:` URL.

    Raises:
        FileFormatError: the page is missing.
    """
    page = EXPLORER / "index.html"
    if not page.is_file():
        raise FileFormatError(
            f"no explorer page at {page}; give its address, as in --explorer https://host/explorer/"
        )
    return page.as_uri()


def explorer_link(
    x: Any,
    spec: OperandSpec | Dialect | str | None = None,
    rng: Stream | None = None,
    *,
    axis: int = -1,
    index: int = 0,
    pad: bool = False,
    page: str | None = None,
    amax: float | None = None,
) -> str:
    """Return the URL at which the explorer page shows one block of `x`; arguments and errors as in `explain_block`.

    Args:
        x: float32, bfloat16 or float16, any shape.
        spec: the treatment; default the dialect `ocp`.
        rng: random stream, needed for SR and random signs.
        axis: the block axis.
        index: number of the block in storage order.
        pad: append zeros along the block axis.
        page: address of the page; default `explorer_page()`.
        amax: the largest finite magnitude of the tensor, for a format with a scale of the tensor.

    Raises:
        UnsupportedError: a tile under `four_over_six`.
        FileFormatError: no `page` is given, and the package's own is missing.
    """
    part = block_part(x, spec, rng, axis=axis, index=index, pad=pad, amax=amax)
    if part.spec.block.is_tile and part.spec.four_over_six is not FourOverSix.OFF:
        raise UnsupportedError(
            f"the page shows one row of a tile, and under four_over_six = '{part.spec.four_over_six}' its scale "
            "depends on all rows: leave four_over_six or the tile out, or read mxref explain"
        )
    rows = part.rows()
    words = rows[part.row].view(np.uint32)
    state = {"x": _words(words), "a": treatment_text(part.spec)}
    if part.block:
        state["block"] = str(part.block)
    if others := _others(part, rows):
        state["others"] = f"{others:08x}"
    if part.tensor_amax is not None:
        state["amax"] = f"{np.float32(part.tensor_amax).view(np.uint32):08x}"
    if rng is not None and _is_random(part.spec):
        state |= _place(part, rng)
    return f"{page or explorer_page()}#" + "&".join(f"{key}={value}" for key, value in state.items())


def treatment_text(spec: OperandSpec) -> str:
    """Return a treatment as the page's address has it: the nearest dialect, then each key that differs from it."""
    wanted = to_table(spec)
    changes = {}
    for name, dialect in DIALECTS.items():
        named = dialect.spec.stated | {"format": dialect.spec.format}
        base = {f.name: getattr(OperandSpec(spec.format), f.name) for f in fields(OperandSpec)} | named
        changes[name] = {
            key: wanted.get(key) for key in base if key not in _UNSEEN and getattr(spec, key) != base[key]
        }
    nearest = min(changes, key=lambda name: len(changes[name]))
    return ",".join([nearest, *(f"{key}={_text(value)}" for key, value in changes[nearest].items())])


def _text(value: Any) -> str:
    return (
        str(value).lower()
        if isinstance(value, bool)
        else quote("" if value is None else str(value), safe="-")
    )


def _words(words: np.ndarray[Any, Any]) -> str:
    """Return float32 bits as hexadecimal digits, eight each; zeros at the end are left out."""
    last = np.flatnonzero(words)
    return "".join(f"{word:08x}" for word in words[: last[-1] + 1]) if last.size else "00000000"


def _others(part: BlockPart, rows: np.ndarray[Any, Any]) -> int:
    """Return the bits of the largest magnitude in the other rows of the block's tile; 0 for a block of one row."""
    if not part.spec.block.is_tile:
        return 0
    k = part.whole.format.k
    y = hadamard(rows, part.plan.rotation) if part.plan.rotation else rows
    tile = magnitude_bits(np.ascontiguousarray(y[:, part.block * k : (part.block + 1) * k]))
    return int(np.delete(tile, part.row, axis=0).max(initial=0))


def _is_random(spec: OperandSpec) -> bool:
    return spec.rounding is Rounding.SR or spec.signs is not SignPolicy.NONE


def _place(part: BlockPart, rng: Stream) -> dict[str, str]:
    """Return the random stream, and the index of the first word in the logical tensor."""
    names = {o.id: f"{role.value}.{o.tensor}" for role, operands in OPERANDS.items() for o in operands}
    first = int(part.plan.global_rows()[part.row]) * part.plan.global_length + part.plan.first
    place = {
        "seed": rng.seed,
        "step": rng.step,
        "layer": rng.layer,
        "operand": names[rng.operand],
        "at": first,
    }
    return {key: str(value) for key, value in place.items()}
