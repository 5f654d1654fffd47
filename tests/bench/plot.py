"""The bars of docs/explanation/performance.rst: each operation as a multiple of copying the same array."""

from __future__ import annotations

import io
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from bench.goals import COPY_RATIO
from mxref_training.report.drawing import COLOURS, GRID, INK, MUTED

STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 9.5,
    "axes.edgecolor": GRID,
    "axes.labelcolor": MUTED,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "text.color": INK,
    "xtick.color": MUTED,
    "ytick.color": INK,
    "svg.fonttype": "none",
    "svg.hashsalt": "performance",
}
"""How the plots of the documentation look."""
_HEIGHT = 0.76
"""Of the bars of an operation together, one for each set of kernels."""


def plot(results: dict[str, Any], size: int) -> str:
    """Return an SVG of the operations at one size and thread: every set of kernels, and a mark at each goal."""
    rows = [
        row
        for row in results["rows"]
        if row["kind"] == "operation" and row["size"] == size and row["threads"] == 1
    ]
    backends = list(dict.fromkeys(row["backend"] for row in rows))
    labels = list(dict.fromkeys(row["operation"] for row in rows))
    with mpl.rc_context(STYLE):
        figure = Figure(figsize=(9.0, 0.42 * len(labels) + 1.2), layout="constrained")
        axes = figure.subplots()
        height = _HEIGHT / len(backends)
        for i, (backend, colour) in enumerate(
            zip(backends, (COLOURS[0], COLOURS[2], "#b3bac3"), strict=False)
        ):
            ratio = {row["operation"]: row["ratio"] for row in rows if row["backend"] == backend}
            places = [labels.index(label) + height * (i - (len(backends) - 1) / 2) for label in ratio]
            bars = axes.barh(places, list(ratio.values()), height, color=colour, label=backend)
            axes.bar_label(bars, fmt="%.2f", padding=3, fontsize=8, color=MUTED)
        goals = [(COPY_RATIO[label], labels.index(label)) for label in labels if label in COPY_RATIO]
        axes.scatter(*zip(*goals, strict=True), marker="|", s=330, color=COLOURS[3], label="goal", zorder=3)
        axes.axvline(1, color=INK, linewidth=0.8, linestyle=(0, (4, 3)), zorder=0)
        axes.set_yticks(range(len(labels)), labels)
        axes.invert_yaxis()
        axes.tick_params(axis="y", length=0)
        axes.set_xlabel(f"times the speed of np.copyto on the same {size} x {size} array, one thread")
        axes.legend(frameon=False, loc="lower left", bbox_to_anchor=(0, 1), ncols=3)
        axes.margins(y=0.01)
        out = io.StringIO()
        figure.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()
