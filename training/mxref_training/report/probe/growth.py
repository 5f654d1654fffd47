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
from mxref_training.report.probe.plots import WIDTH
from mxref_training.report.probe.tables import ROLES

_SERIES = {
    "plain": ("SR", COLOURS[0], "-"),
    "rotated": ("SR + RHT64", COLOURS[3], "-"),
    "plain_bound": ("bound of SR", COLOURS[0], "--"),
    "rotated_bound": ("bound of SR + RHT64", COLOURS[3], "--"),
}
_TICKS = 5
"""Lengths that a panel has room for."""


def growth_svg(results: Results) -> str:
    """Return the variance by contraction length in the last checkpoint: a panel for each GEMM.

    Each layer is drawn relative to its own variance at the shortest length without a transform; lines are medians.
    """
    last = results["moments"][-1]["name"]
    found = [row for row in rows(results, "growth") if row["moment"] == last]
    with styled("growth"):
        figure = Figure(figsize=(WIDTH, 3.4))
        panels = figure.subplots(1, len(ROLES), sharey=True)
        for axes, role in zip(panels, ROLES, strict=True):
            ends = _draw(axes, [row for row in found if row["role"] == role])
            axes.set_title(role.capitalize())
        panels[0].set_ylabel("variance, 1 = SR at the shortest")
        figure.tight_layout(rect=(0, 0, 0.86, 1))
        label_ends(panels[-1], ends)
        return svg(figure, "growth")


def _draw(axes: Axes, found: Sequence[Row]) -> list[tuple[float, float, str, str]]:
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
    shown = lengths[:: 1 + len(lengths) // (_TICKS + 1)]
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
