"""How `mxref explain` looks in a terminal: from 80 columns on, with the reasons in words from 110."""

from __future__ import annotations

from itertools import groupby

import numpy as np
from rich.table import Table
from rich.text import Text

from mxref.cli_style import BOX, HEAD, QUIET, console
from mxref.explain import BlockExplanation, Case, ElementExplanation
from mxref.explain_text import notes, number, reason, scale_steps
from mxref.formats import E8M0
from mxref.hadamard import SignPolicy
from mxref.rounding import Rounding

WIDE = 110

_STYLES = {Case.SATURATED: "yellow", Case.TIE: "magenta", Case.NAN: "red", Case.EXACT: QUIET}
_SHORT = {Case.SATURATED: "sat"}


def show(block: BlockExplanation, operand: str) -> None:
    """Print one block: inputs, transform, shared scale, rounding, packed bytes, notes."""
    out = console()
    last = list(block.start)
    last[block.axis] += sum(not e.padded for e in block.elements) - 1
    span = ", ".join(str(a) if a == b else f"{a}:{b + 1}" for a, b in zip(block.start, last, strict=True))
    out.print(
        Text.assemble(
            (f"Block {block.index} of {block.blocks}", "bold"), f"  elements [{span}] of shape {block.shape}"
        )
    )
    out.print(Text(_treatment(block, operand), style=QUIET))
    if block.rotation:
        out.print(
            _heading("Signs and Hadamard", f"groups of {block.rotation.n} along the block axis, in float32")
        )
        out.print(_transform_table(block))
    out.print(_heading("Shared scale", ""))
    for i, step in enumerate(scale_steps(block), 1):
        out.print(Text.assemble((f"  {i}. ", QUIET), step))
    v = "|y| / X" if block.rotation else "|x| / X"
    v = f"0.75 {v}" if block.spec.prescale else v
    out.print(_heading("Rounding to the grid 0 0.5 1 1.5 2 3 4 6", f"v = {v}"))
    out.print(_rounding_table(block, out.width >= WIDE))
    out.print(_heading("Stored", ""))
    scale = f"{block.scale.byte:02x}"
    out.print(
        Text.assemble("  scale ", (scale, "bold green"), "  codes ", (block.packed.hex(" "), "bold green"))
    )
    out.print(Text(f"  {_quality(block)}"))
    for note in notes(block):
        out.print(Text.assemble(("  - ", "yellow"), note))
    out.print()


def _heading(title: str, detail: str) -> Text:
    return Text.assemble("\n", (title, HEAD), (f"  {detail}" if detail else "", QUIET))


def _treatment(block: BlockExplanation, operand: str) -> str:
    spec = block.spec
    words = [f"scale {spec.scale_rule.value}", f"rounding {spec.rounding.value}", f"block {spec.block.value}"]
    if spec.rounding is Rounding.SR:
        words.append(f"R = {spec.sr_bits}")
    if spec.prescale:
        words.append("prescale 3/4")
    if block.rotation:
        words.append(f"H{block.rotation.n} signs {spec.signs.value}")
    if block.stream and (spec.rounding is Rounding.SR or spec.signs is not SignPolicy.NONE):
        s = block.stream
        words.append(f"random: seed {s.seed}, step {s.step}, layer {s.layer}, {operand}")
    return " · ".join(words)


def _quality(block: BlockExplanation) -> str:
    if block.sqnr_db is None:
        return "SQNR is not defined for a block of " + (
            "NaN" if block.scale.byte == E8M0.nan_code else "zeros"
        )
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


def _rounding_table(block: BlockExplanation, wide: bool) -> Table:
    stochastic = block.spec.rounding is Rounding.SR
    symbol = "y" if block.rotation else "x"
    table = Table(box=BOX, header_style=HEAD, pad_edge=False, show_edge=False, padding=(0, 1, 0, 0))
    headings = [
        "#",
        symbol,
        "bits",
        "v",
        "between",
        *(("T", "r") if stochastic else ()),
        "code",
        "P",
        "value",
        "error",
    ]
    for heading in headings:
        table.add_column(heading, justify="right", no_wrap=True)
    table.add_column("why" if wide else "", no_wrap=True)
    for trivial, group in groupby(block.elements, key=_is_padding_zero):
        run = list(group)
        for e in run[:1] if trivial else run:
            places = f"{e.position}-{run[-1].position}" if trivial and len(run) > 1 else str(e.position)
            table.add_row(*_rounding_row(e, block, places, stochastic, wide))
    return table


def _is_padding_zero(e: ElementExplanation) -> bool:
    """Return whether a row says nothing but that zero stays zero, so that a run of them needs one line."""
    return e.padded and e.y_bits == 0


def _rounding_row(
    e: ElementExplanation, block: BlockExplanation, places: str, stochastic: bool, wide: bool
) -> list[Text]:
    style = _STYLES.get(e.case, "")
    between = (
        "" if e.lower is None else f"{e.lower:g}" if e.case is Case.EXACT else f"{e.lower:g}..{e.upper:g}"
    )
    if e.case is Case.SATURATED:
        between = "> 6"
    folded = "-" in places
    draws = [Text("" if folded or n is None else str(n), QUIET) for n in (e.threshold, e.random)]
    why = (
        ("padding" if e.padded and folded else reason(e, block)) if wide else _SHORT.get(e.case, e.case.value)
    )
    return [
        Text(places, QUIET),
        Text(number(e.y)),
        Text(f"{e.y_bits:08x}", QUIET),
        Text("" if e.v is None else _short_v(e.v)),
        Text(between),
        *(draws if stochastic else []),
        Text(f"{e.code:04b}", "bold"),
        Text("nan" if e.case is Case.NAN else number(e.element)),
        Text(f"{e.value:.6g}"),
        Text("" if e.error is None else f"{e.error:.2g}", QUIET if not e.error else ""),
        Text(why, style),
    ]


def _short_v(v: float) -> str:
    """Return v exactly where ties are decided, and to three digits below 0.1, where only its size matters."""
    return number(v) if v >= 0.1 or v == 0 else f"{v:.3g}"
