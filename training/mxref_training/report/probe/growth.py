"""The figure of the variance of stochastic rounding by contraction length, beside its bounds."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from mxref_training.probe.layer import Row
from mxref_training.probe.results import Results, rows
from mxref_training.report.drawing import label_ends, styled, svg
from mxref_training.report.palette import COLOURS
from mxref_training.report.probe.plots import REPORT, Form
from mxref_training.report.probe.tables import ROLES

_SERIES = {
    "plain": ("SR", COLOURS[0], "-"),
    "rotated": ("SR + RHT64", COLOURS[3], "-"),
    "plain_bound": ("bound of SR", COLOURS[0], "--"),
    "rotated_bound": ("bound of SR + RHT64", COLOURS[3], "--"),
}
_TICKS = 5
"""Lengths that a panel of a report has room for."""
_NAMES = 1.568
"""Room for the names of the lines, in inches."""


def growth_svg(results: Results, form: Form = REPORT) -> str:
    """Return the variance by contraction length in the last checkpoint: a panel for each GEMM.

    Each layer is drawn relative to its own variance at the shortest length without a transform; lines are medians.
    """
    last = results["moments"][-1]["name"]
    found = [row for row in rows(results, "growth") if row["moment"] == last]
    across = min(form.across, len(ROLES))
    ticks = _TICKS if form == REPORT else 1 if form.is_narrow else 2
    down = -(-len(ROLES) // across)
    with styled("growth" + form.suffix):
        figure = Figure(figsize=(form.width, 3.4 if down == 1 else 2.6 * down))
        panels = figure.subplots(down, across, sharey=True).ravel()
        drawn = []
        for axes, role in zip(panels, ROLES, strict=True):
            drawn.append(_draw(axes, [row for row in found if row["role"] == role], ticks))
            axes.set_title(role.capitalize())
        for axes in panels[::across]:
            axes.set_ylabel("variance, 1 = SR at the shortest")
        figure.tight_layout(rect=(0, 0, 1 - _NAMES / form.width, 1))
        for axes, ends in zip(panels[across - 1 :: across], drawn[across - 1 :: across], strict=True):
            label_ends(axes, ends)
        return svg(figure, "growth" + form.suffix)


def _draw(axes: Axes, found: Sequence[Row], ticks: int) -> list[tuple[float, float, str, str]]:
    """Draw a GEMM, and return the ends of its lines as `label_ends` takes them."""
    lengths = sorted({row["length"] for row in found})
    ends = []
    for key, (label, colour, style) in _SERIES.items():
        # Decades on a linear axis: `label_ends` moves labels apart on such a one.
        points = [(length, math.log10(value)) for length in lengths if (value := _middle(found, key, length))]
        xs, ys = [x for x, _ in points], [y for _, y in points]
        axes.plot(xs, ys, style, color=colour, lw=1.6, marker="o", ms=3)
        if points:
            ends.append((ys[-1], xs[-1], label, colour))
    axes.set_xscale("log", base=2)
    shown = lengths[:: 1 + len(lengths) // (ticks + 1)]
    axes.set_xticks(shown, [f"{length:,}" for length in shown])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: _decade(round(value))))
    axes.set_xlabel("contraction length b")
    axes.grid(axis="y")
    return ends


def _decade(exponent: int) -> str:
    return f"{10**exponent:,}" if exponent >= 0 else f"{float(f'1e{exponent}'):g}"


def _middle(found: Sequence[Row], key: str, length: int) -> float | None:
    """Return the median over the layers; None where no layer has a variance."""
    shortest = min(row["length"] for row in found)
    first = {row["layer"]: row["plain"] for row in found if row["length"] == shortest}
    values = [
        row[key] / first[row["layer"]] for row in found if row["length"] == length and first[row["layer"]]
    ]
    return median(values) if values else None
