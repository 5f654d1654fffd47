"""docs/explanation/projection.rst: its tables as reStructuredText, and its plot as SVG."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from bench.plot import WIDE, charts, label_below
from bench.records import RECORDS, newest, read
from mxref_training.report.drawing import SMALLEST
from mxref_training.report.palette import AZURE, COLOURS, GREY, INK, MINT, MUTED, PAPER, SLATE, TANGERINE
from projection.__main__ import larger_projection, projection_of
from projection.assumptions import Level
from projection.compare import Projection
from projection.published import PUBLISHED
from projection.step import ARMS, Part, by_part, total
from projection.tables import Table, of_a_card, tables
from rst_table import csv_table

TABLES, PLOT = "projection.inc", "projection"
SHOWN = ("Beside what was published", "One step", "Tokens per second of one card")
"""The tables of the page; the command prints all."""

_COLOUR = {
    Part.FPROP: COLOURS[0], Part.DGRAD: AZURE, Part.WGRAD: COLOURS[1],
    Part.QUANTIZE_X: COLOURS[3], Part.QUANTIZE_W: TANGERINE, Part.QUANTIZE_DY: COLOURS[5],
    Part.ATTENTION: COLOURS[2], Part.HEAD: MINT,
    Part.LAYERS: SLATE, Part.REST: GREY, Part.COMMUNICATION: COLOURS[4],
}  # fmt: skip


def tables_text(projection: Projection, larger: Projection, document: Mapping[str, Any]) -> str:
    """Return the tables of the page as reStructuredText.

    Args:
        projection: what is shown.
        larger: what is shown beside it in the last table.
        document: the counts, with their date and Triton's version.
    """
    shown = [*tables(projection), of_a_card({"8B": projection, "70B": larger})]
    head = f"Instructions counted on {document['date']} in code that Triton {document['triton']} compiles for gfx950.\n"
    return "\n".join([head, *(_section(t) for t in shown if t.title in SHOWN)])


def _section(table: Table) -> str:
    body = csv_table(table.headings, table.rows, "performance")
    lines = [table.title, "-" * len(table.title), "", table.note, "", body]
    return _power("\n".join(lines))


def _power(text: str) -> str:
    return text.replace("10^9", r"10\ :sup:`9`").replace("2^40", r"2\ :sup:`40`")


def plot(projection: Projection, width: float = WIDE) -> Figure:
    """Return a figure of the step's parts, one bar per arm, with the bounds and what was published."""
    published = {p.key.removesuffix(" samples/s"): p.value for p in PUBLISHED if p.key.endswith(" samples/s")}
    figure = Figure(figsize=(width, 4.3 if width == WIDE else 5.0), layout="constrained")
    axes = figure.subplots()
    for place, arm in enumerate(ARMS):
        left = 0.0
        for part, seconds in by_part(projection.times(arm)).items():
            axes.barh(
                place, seconds * 1e3, 0.56, left, color=_COLOUR[part], label=None if place else part.value,
                edgecolor=PAPER, linewidth=0.4,
            )  # fmt: skip
            left += seconds * 1e3
        ends = [total(projection.at(level).times(arm)) * 1e3 for level in (Level.HIGH, Level.LOW)]
        axes.plot(ends, (place + 0.40, place + 0.40), color=MUTED, linewidth=1, marker="|", markersize=6)
        axes.text(left + 12, place, f"{left:.0f} ms", va="center", fontweight="bold")
        if arm.key in published:
            where = projection.work.batch / published[arm.key] * 1e3
            label = None if any(t.get_label() == "published" for t in axes.lines) else "published"
            axes.plot([where], [place - 0.36], marker="v", color=INK, linestyle="", markersize=7, label=label)
    axes.plot([], [], color=MUTED, linewidth=1, marker="|", label="all assumptions at one end")
    axes.set_yticks(range(len(ARMS)), [arm.label for arm in ARMS])
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.set_xlim(left=0, right=1.12 * axes.get_xlim()[1])
    label_below(axes, "milliseconds of one optimizer step, computed, not measured", width)
    figure.legend(
        frameon=False, loc="outside upper left", ncols=4 if width == WIDE else 2, fontsize=SMALLEST,
        handlelength=1.5, columnspacing=1,
    )  # fmt: skip
    return figure


def parts(records: Path = RECORDS) -> dict[str, str]:
    """Return the tables and the plot of the newest counts, by the names under which the page includes them."""
    document = read(newest("projection", records))
    projection = projection_of(document)
    return {TABLES: tables_text(projection, larger_projection(document), document)} | charts(
        PLOT, partial(plot, projection)
    )
