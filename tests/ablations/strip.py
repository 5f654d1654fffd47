"""A line for each arm: its estimate with the interval, in the colour of its stage."""

from __future__ import annotations

import io
import math
from collections.abc import Iterable
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.plot import STYLE
from mxref_training.report.drawing import COLOURS, GRID, INK, MUTED

Estimate = tuple[dict[str, Any], float, float]
"""An arm, its estimate, and half of its interval."""


def strip(found: Iterable[Estimate], label: str, salt: str) -> str:
    """Return an SVG with a line for each arm, and `label` below it; `salt` is of its ids."""
    found = list(found)
    stages = list(dict.fromkeys(arm["stage"] for arm, _, _ in found))
    with mpl.rc_context(STYLE | {"svg.hashsalt": salt, "grid.color": GRID}):
        drawing = Figure(figsize=(8.4, 0.27 * len(found) + 1.0), layout="constrained")
        axes = drawing.subplots()
        for y, (arm, value, half) in enumerate(found):
            mark(axes, value, y, half, COLOURS[stages.index(arm["stage"]) % len(COLOURS)])
        axes.axvline(0, color=INK, linewidth=0.8)
        axes.set_yticks(range(len(found)), [f"{arm['stage']}: {arm['label']}" for arm, _, _ in found])
        axes.tick_params(axis="y", length=0)
        axes.invert_yaxis()
        axes.grid(axis="x")
        axes.set_axisbelow(True)
        axes.set_xlabel(label, color=MUTED)
        out = io.StringIO()
        drawing.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()


def mark(axes: Axes, value: float, y: float, half: float, colour: str) -> None:
    """Draw an estimate with its interval; hollow and without one where it has none."""
    if math.isinf(half):
        axes.plot(value, y, "o", color=colour, markersize=5, markerfacecolor="white")
    else:
        axes.errorbar(value, y, xerr=half, fmt="o", color=colour, capsize=3, markersize=5)
