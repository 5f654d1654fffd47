"""The terminal output of `mxref explain`, for 80 columns or more; from 116 columns on it has reasons in words."""

from __future__ import annotations

from collections.abc import Iterable
from fractions import Fraction
from itertools import groupby

import numpy as np
from rich.console import Console
from rich.measure import Measurement
from rich.table import Table
from rich.text import Text

from mxref.explain import BlockExplanation, Case, ElementExplanation
from mxref.explain.text import notes, number, reason, scale_steps, scaled
from mxref.recipe import OperandSpec
from mxref.steps.four_over_six import FourOverSix
from mxref.steps.hadamard import SignPolicy
from mxref.steps.quotient import Arithmetic
from mxref.steps.rounding import Rounding
from mxref.terminal import BOX, HEAD, QUIET, console

WIDE = 116
_LISTED = 16
"""The longest grid whose magnitudes are printed."""
_LEFT_OUT = ("value", "bits", "error")
"""Columns that a table leaves out where the terminal is too narrow, in this order."""
_UNBOUNDED = 1000
"""Columns of a terminal in which each table fits."""

_STYLES = {Case.SATURATED: "yellow", Case.TIE: "magenta", Case.NAN: "red", Case.EXACT: QUIET}
_SHORT = {Case.SATURATED: "sat"}


def show(block: BlockExplanation, operand: str) -> None:
    """Print one block: inputs, transform, shared scale, rounding, packed bytes, notes."""
    out = console()
    of = f" of 0..{block.blocks - 1}" if block.blocks > 1 else ""
    out.print(Text.assemble((f"Block {block.index}{of}", "bold"), f"  {_span(block)} of shape {block.shape}"))
    out.print(Text(_treatment(block, operand), style=QUIET))
    if block.rotation:
        out.print(
            _heading("Signs and Hadamard", f"groups of {block.rotation.n} along the block axis, in float32")
        )
        out.print(_transform_table(block))
    out.print(_heading("Shared scale", ""))
    out.print(_list((f"{i}.", step) for i, step in enumerate(scale_steps(block), 1)))
    divisor = "(X t)" if block.format.tensor_scale else "X"
    v = f"|y| / {divisor}" if block.rotation else f"|x| / {divisor}"
    element = block.format.element
    v = f"{element.prescale:g} {v}" if block.spec.prescale else v
    listed = len(element.magnitudes) <= _LISTED
    grid = " ".join(f"{m:g}" for m in element.magnitudes) if listed else f"of {element.name}"
    out.print(_heading(f"Rounding to the grid {grid}", f"v = {v}"))
    out.print(_rounding_table(block, out))
    out.print(_heading("Stored", ""))
    scale = f"{block.scale.byte:02x}"
    out.print(
        Text.assemble("  scale ", (scale, "bold green"), "  codes ", (block.packed.hex(" "), "bold green"))
    )
    if block.scale.tensor_scale is not None:
        t = int(np.float32(block.scale.tensor_scale).view(np.uint32))
        out.print(Text.assemble("  scale of the tensor ", (f"{t:08x}", "bold green"), ", a float32"))
    out.print(Text(f"  {_quality(block)}"))
    out.print(_list(("-", note) for note in notes(block)))
    out.print()


def _list(items: Iterable[tuple[str, str]]) -> Table:
    """Return lines with hanging indents."""
    grid = Table.grid(padding=(0, 1))
    for mark, text in items:
        grid.add_row(Text(f"  {mark}", QUIET), Text(text))
    return grid


def _heading(title: str, detail: str) -> Text:
    return Text.assemble("\n", (title, HEAD), (f"  {detail}" if detail else "", QUIET))


def _span(block: BlockExplanation) -> str:
    real = sum(not e.padded for e in block.elements)
    if not real:
        return "only padding, beyond the end"
    parts = [f"{s}:{s + real}" if axis == block.axis else str(s) for axis, s in enumerate(block.start)]
    return f"elements [{', '.join(parts)}]"


def _treatment(block: BlockExplanation, operand: str) -> str:
    spec = block.spec
    words = [block.format.title] if block.format is not OperandSpec().format else []
    words += [
        f"scale {spec.scale_rule.value}",
        f"rounding {spec.rounding.value}",
        f"block {spec.block}",
    ]
    if spec.rounding is Rounding.SR:
        words.append(f"R = {spec.sr_bits}")
    if spec.prescale:
        words.append(f"prescale {Fraction(block.format.element.prescale)}")
    if spec.arithmetic is not Arithmetic.REAL:
        words.append(f"arithmetic {spec.arithmetic.value}")
    if spec.four_over_six is not FourOverSix.OFF:
        words.append(f"four over six {spec.four_over_six.value}")
    if block.rotation:
        words.append(f"H{block.rotation.n} signs {spec.sign_vector or spec.signs.value}")
    if block.stream and (spec.rounding is Rounding.SR or spec.signs is not SignPolicy.NONE):
        s = block.stream
        words.append(f"random: seed {s.seed}, step {s.step}, layer {s.layer}, {operand}")
    return " · ".join(words)


def _quality(block: BlockExplanation) -> str:
    if block.sqnr_db is None:
        return "SQNR is not defined for a block of " + ("NaN" if block.is_nan else "zeros")
    if block.sqnr_db == np.inf:
        return "exact: every value is represented"
    return f"SQNR {block.sqnr_db:.2f} dB, largest error {block.max_error:.4g}"


def _transform_table(block: BlockExplanation) -> Table:
    table = Table(box=BOX, header_style=HEAD, pad_edge=False, show_edge=False)
    for heading in ("#", "x", "x bits", "sign", "y", "y bits"):
        table.add_column(heading, justify="right", no_wrap=True)
    for e in block.elements:
        x_style = QUIET if e.padded else ""
        table.add_row(
            str(e.position), Text(number(e.x), x_style), Text(f"{e.x_bits:08x}", QUIET),
            "-" if e.d < 0 else "+", number(e.y), Text(f"{e.y_bits:08x}", QUIET),
        )  # fmt: skip
    return table


def _rounding_table(block: BlockExplanation, out: Console) -> Table:
    """Return the rounding of each element, without the columns for which the terminal has no room."""
    hidden = set() if block.spec.rounding is Rounding.SR else {"T", "r"}
    table = _table_without(hidden, block, out.width >= WIDE, gap=1)
    for count in range(len(_LEFT_OUT) + 1):
        if Measurement.get(out, out.options.update_width(_UNBOUNDED), table).maximum <= out.width:
            break
        table = _table_without(hidden | set(_LEFT_OUT[:count]), block, wide=False, gap=0)
    return table


def _table_without(hidden: set[str], block: BlockExplanation, wide: bool, gap: int) -> Table:
    x = "y" if block.rotation else "x"
    headings = ["#", x, "bits", "v", "grid", "T", "r", "code", "P", "value", "error", "why"]
    shown = [heading for heading in headings if heading not in hidden]
    table = Table(box=BOX, header_style=HEAD, pad_edge=False, show_edge=False, padding=(0, gap, 0, 0))
    for heading in shown:
        words = heading == "why"
        title = "" if words and not wide else heading
        table.add_column(title, justify="left" if words else "right", no_wrap=True)
    for trivial, group in groupby(block.elements, key=lambda e: _is_padding_zero(e, block)):
        run = list(group)
        for e in run[:1] if trivial else run:
            cells = _cells(e, block, wide)
            if trivial and len(run) > 1:
                cells |= {"#": Text(f"{e.position}-{run[-1].position}", QUIET), "T": Text(), "r": Text()}
            table.add_row(*(cells["x" if heading == "y" else heading] for heading in shown))
    return table


def _is_padding_zero(e: ElementExplanation, block: BlockExplanation) -> bool:
    """Return whether an element is padding that stays zero; consecutive ones share one line."""
    return e.padded and block.rotation is None


def _cells(e: ElementExplanation, block: BlockExplanation, wide: bool) -> dict[str, Text]:
    if e.lower is None or e.upper is None:
        grid = ""
    elif e.case is Case.SATURATED:
        grid = f"> {e.upper:.9g}"
    else:
        grid = f"{e.lower:.9g}" if e.case is Case.EXACT else f"{e.lower:.9g}..{e.upper:.9g}"
    why = _SHORT.get(e.case, e.case.value)
    if wide:
        why = "padding" if _is_padding_zero(e, block) else reason(e, block)
    digits = 6 if wide else 5  # the bits are exact, where they are shown
    return {
        "#": Text(str(e.position), QUIET),
        "x": Text(f"{e.y:.{digits}g}"),
        "bits": Text(f"{e.y_bits:08x}", QUIET),
        "v": Text(scaled(e, block)),
        "grid": Text(grid),
        "T": Text("" if e.threshold is None else str(e.threshold), QUIET),
        "r": Text("" if e.random is None else str(e.random), QUIET),
        "code": Text(f"{e.code:0{block.format.element.bits}b}", "bold"),
        "P": Text("nan" if e.case is Case.NAN else f"{e.element:.9g}"),
        "value": Text(f"{e.value:.{digits}g}"),
        "error": Text("" if e.error is None else f"{e.error:.2g}", QUIET if not e.error else ""),
        "why": Text(why, _STYLES.get(e.case, "")),
    }
