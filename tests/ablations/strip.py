"""A line for each arm: its estimate with the interval, in the colour of its stage."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.plot import WIDE, label_below
from mxref_training.report.drawing import SMALLEST
from mxref_training.report.palette import COLOURS, INK, PAPER

Estimate = tuple[dict[str, Any], float, float]
"""An arm, its estimate, and half of its interval."""


def strip(found: Iterable[Estimate], label: str, width: float = WIDE) -> Figure:
    """Return a figure of a width with a line for each arm, and `label` below it."""
    found = list(found)
    stages = list(dict.fromkeys(arm["stage"] for arm, _, _ in found))
    figure = Figure(
        figsize=(width, (0.27 if width == WIDE else 0.4) * len(found) + 1.0), layout="constrained"
    )
    axes = figure.subplots()
    for y, (arm, value, half) in enumerate(found):
        mark(axes, value, y, half, COLOURS[stages.index(arm["stage"]) % len(COLOURS)])
    name_lines(axes, [f"{arm['stage']}: {arm['label']}" for arm, _, _ in found], width)
    axes.axvline(0, color=INK, linewidth=0.8)
    axes.grid(axis="x")
    axes.set_axisbelow(True)
    label_below(axes, label, width)
    return figure


def name_lines(axes: Axes, names: Sequence[str], width: float) -> None:
    """Write the names of the lines: left of the axis, or above each line where a chart is narrow."""
    axes.set_yticks(range(len(names)), names if width == WIDE else [""] * len(names))
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.set_ylim(len(names) - 0.4, -0.6 if width == WIDE else -0.9)
    for y, name in enumerate([] if width == WIDE else names):
        axes.text(
            0, y - 0.28, name, transform=axes.get_yaxis_transform(), fontsize=SMALLEST, va="bottom",
            bbox={"facecolor": PAPER, "edgecolor": "none", "pad": 0.8},
        )  # fmt: skip


def mark(axes: Axes, value: float, y: float, half: float, colour: str) -> None:
    """Draw an estimate with its interval; hollow and without one where it has none."""
    if math.isinf(half):
        axes.plot(value, y, "o", color=colour, markersize=5, markerfacecolor=PAPER)
    else:
        axes.errorbar(value, y, xerr=half, fmt="o", color=colour, capsize=3, markersize=5)
