"""The bars of docs/explanation/performance.rst, and what all charts of the documentation share."""

from __future__ import annotations

import re
import textwrap
from collections.abc import Callable
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from bench.goals import operation_goals
from mxref_training.report.drawing import SMALLEST, styled, svg
from mxref_training.report.palette import COLOURS, GREY, INK, MUTED, variables

WIDE, NARROW = 7.66, 3.72
"""Widths of a chart in inches: of a page's column, and of the screen of a phone."""
_HEIGHT = 0.76
"""Of the bars of an operation together, one for each set of kernels that has it."""


def chart(name: str, draw: Callable[[float], Figure], width: float = WIDE) -> str:
    """Return the SVG file of a chart; `draw` makes a figure of a width."""
    prefix = name.replace("_", "-") + ("-narrow" if width == NARROW else "")
    with styled(prefix):
        return standalone(svg(draw(width), prefix))


def standalone(svg: str) -> str:
    """Return a figure as a file: with namespaces, and with the palette and the ground that a page would give it."""
    names = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    width, height = re.findall(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)[0]
    head = f'<svg {names} width="{width}pt" height="{height}pt" '
    used = set(re.findall(r"var\(--([\w-]+)\)", svg)) | {"paper"}
    colours = f'<style class="palette">{variables("svg", used)}\nsvg {{ background: var(--paper); }}</style>'
    text = re.sub(r"(?<![\w:])href=", "xlink:href=", svg.replace("<svg ", head, 1))
    return re.sub(r"(<svg [^>]*>)", lambda found: f"{found[0]}\n{colours}", text, count=1)


def charts(name: str, draw: Callable[[float], Figure]) -> dict[str, str]:
    """Return the files of a chart by their names: for wide screens and for narrow ones."""
    return {f"{name}.svg": chart(name, draw), f"{name}.narrow.svg": chart(name, draw, NARROW)}


def label_below(axes: Axes, text: str, width: float) -> None:
    """Label the horizontal axis, in several lines where a chart is narrow."""
    if width == WIDE:
        axes.set_xlabel(text)
    else:
        axes.set_xlabel(textwrap.fill(text, 50), loc="right")


def _coloured(backends: list[str]) -> list[tuple[str, str]]:
    """Return each backend with its colour.

    Raises:
        ValueError: more of them than there are colours.
    """
    colours = COLOURS[0], COLOURS[2], GREY, COLOURS[1]
    if len(backends) > len(colours):
        raise ValueError(
            f"the chart has {len(colours)} colours, but {len(backends)} sets of kernels: {backends}"
        )
    return list(zip(backends, colours, strict=False))


def plot(results: dict[str, Any], size: int, width: float = WIDE) -> Figure:
    """Return a figure of the operations at one size and thread: every set of kernels, and a mark at each goal.

    A goal lies on the bar of the path that has it.

    Raises:
        ValueError: more sets of kernels than there are colours.
    """
    rows = [
        row
        for row in results["rows"]
        if row["kind"] == "operation" and row["size"] == size and row["threads"] == 1
    ]
    backends = list(dict.fromkeys(row["backend"] for row in rows))
    labels = list(dict.fromkeys(row["operation"] for row in rows))
    having = {
        label: list(dict.fromkeys(row["backend"] for row in rows if row["operation"] == label))
        for label in labels
    }
    most = max(len(found) for found in having.values())
    figure = Figure(figsize=(width, max(0.42, 0.19 * most) * len(labels) + 1.2), layout="constrained")
    axes = figure.subplots()
    height = _HEIGHT / most
    goals = []
    for backend, colour in _coloured(backends):
        of_backend = {row["operation"]: row for row in rows if row["backend"] == backend}
        places = {
            label: labels.index(label)
            + height * (having[label].index(backend) - (len(having[label]) - 1) / 2)
            for label in of_backend
        }
        ratios = {label: row["ratio"] for label, row in of_backend.items()}
        axes.barh(list(places.values()), list(ratios.values()), height, color=colour, label=backend)
        found = {label: operation_goals(row).get(label) for label, row in of_backend.items()}
        goals += [(goal, places[label]) for label, goal in found.items() if goal is not None]
        for label, ratio in ratios.items():
            # Beyond a mark that would lie on the number.
            end = found[label] if ratio < (found[label] or 0) < ratio + 0.25 else ratio
            axes.annotate(
                f"{ratio:.2f}",
                (end, places[label]),
                xytext=(3, 0),
                textcoords="offset points",
                va="center_baseline",
                fontsize=SMALLEST,
                color=MUTED,
            )
    if goals:
        across, down = zip(*goals, strict=True)
        axes.scatter(across, down, marker="|", s=330 / most, color=COLOURS[3], label="goal", zorder=3)
    axes.axvline(1, color=INK, linewidth=0.8, linestyle=(0, (4, 3)), zorder=0)
    axes.set_yticks(range(len(labels)), labels)
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    label_below(axes, f"times the speed of np.copyto on the same {size} x {size} array, one thread", width)
    axes.legend(
        frameon=False, loc="lower right", bbox_to_anchor=(1, 1), ncols=3, handlelength=1.2, columnspacing=1
    )
    axes.margins(x=0.1, y=0.01)
    return figure
