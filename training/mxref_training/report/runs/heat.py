"""Panels of a number by layer: depth by kind of layer, as colours."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import Normalize, TwoSlopeNorm
from matplotlib.ticker import MaxNLocator
from numpy.typing import NDArray

from mxref_training.report.drawing import SMALLEST
from mxref_training.report.runs.grid import LayerGrid
from mxref_training.report.runs.metrics import Metric, value_of
from mxref_training.report.runs.read import Line


def draw_panel(
    axes: Axes, values: NDArray[np.float64], grid: LayerGrid, metric: Metric, norm: Normalize, depths: bool
) -> Any:
    """Draw one panel; cells without a number stay empty."""
    image = axes.imshow(
        np.ma.masked_invalid(values), cmap=metric.colours, norm=norm, aspect="auto", interpolation="nearest"
    )
    axes.set_xticks(
        range(len(grid.kinds)), grid.kinds, rotation=90 if len(grid.kinds) > 3 else 0, fontsize=SMALLEST
    )
    step = max(1, math.ceil(len(grid.depths) / max(2, rows_height(grid) / 0.15)))
    ticks = range(0, len(grid.depths), step)
    axes.set_yticks(
        ticks, [grid.depths[i] for i in ticks] if depths else [""] * len(ticks), fontsize=SMALLEST
    )
    axes.tick_params(length=0, pad=2)
    for spine in axes.spines.values():
        spine.set_visible(False)
    return image


def draw_scale(figure: Any, image: Any, panels: Any) -> None:
    """Draw the scale of the colours right of all panels."""
    boxes = [axes.get_position() for axes in panels]
    low, high = min(box.y0 for box in boxes), max(box.y1 for box in boxes)
    right = max(box.x1 for box in boxes)
    place = figure.add_axes((right + 0.012, low, 0.011, high - low))
    bar = place.figure.colorbar(image, cax=place)
    bar.outline.set_visible(False)
    bar.locator = MaxNLocator(5)
    bar.update_ticks()
    place.tick_params(labelsize=SMALLEST, length=2)


def colour_range(tables: Sequence[NDArray[np.float64]], metric: Metric) -> Normalize:
    """Return the range of the colours over all panels."""
    found = np.concatenate([table[np.isfinite(table)] for table in tables])
    low, high = (float(found.min()), float(found.max())) if found.size else (0.0, 1.0)
    if metric.signed:
        most = max(abs(low), abs(high)) or 1.0
        return TwoSlopeNorm(0.0, -most, most)
    if metric.from_zero:
        low = 0.0
    return Normalize(low, high if high > low else low + 1.0)


def by_place(lines: Sequence[Line], grid: LayerGrid, metric: Metric) -> NDArray[np.float64]:
    """Return a number of each layer at its place in the grid; NaN where there is none."""
    values = np.full((len(grid.depths), len(grid.kinds)), np.nan)
    for line in lines:
        value = value_of(line, metric)
        if value is not None:
            values[grid.place[line["layer"]]] = value
    return values


def rows_height(grid: LayerGrid) -> float:
    """Return the height of a panel in inches."""
    return min(4.2, max(0.9, 0.16 * len(grid.depths)))


def latest(lines: Sequence[Line]) -> list[Line]:
    """Return the lines of the last measured step."""
    return [line for line in lines if line["step"] == lines[-1]["step"]]
