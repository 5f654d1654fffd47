"""The figures of a report as SVG text: curves, progress, and telemetry as small multiples."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator

from mxref_training.report.drawing import label_ends, label_room, styled, svg, token_unit, zoom
from mxref_training.report.palette import COLOURS, DEPTHS, INK, MUTED
from mxref_training.report.runs.grid import layer_grid
from mxref_training.report.runs.heat import (
    by_place,
    colour_range,
    draw_panel,
    draw_scale,
    latest,
    rows_height,
)
from mxref_training.report.runs.metrics import COSINE, METRICS, Metric, value_of
from mxref_training.report.runs.read import SLOTS, Line, Run
from mxref_training.report.runs.tables import slot_title

WIDTH = 11.2
"""Of every figure, in inches."""


def run_colours(runs: Sequence[Run]) -> dict[str, str]:
    """Return a colour for each run's name."""
    return {run.name: COLOURS[i % len(COLOURS)] for i, run in enumerate(runs)}


def curves_svg(runs: Sequence[Run]) -> str:
    """Return training and validation loss over tokens, and for several runs the difference from the first."""
    with styled("curves"):
        figure = Figure(figsize=(WIDTH, 4.0))
        axes = figure.subplots(1, 2, width_ratios=(1, 1)) if len(runs) > 1 else [figure.subplots()]
        loss, colour = axes[0], run_colours(runs)
        tokens = max((line["tokens"] for run in runs for line in (*run.steps, *run.evaluations)), default=1)
        unit, unit_name = token_unit(tokens)
        seen = []
        for run in runs:
            train = [(x["tokens"] / unit, x["loss"]) for x in run.steps if _real(x["loss"])]
            val = _validation(run, unit)
            shade: Any = {"color": colour[run.name]}
            loss.plot(*_xy(train), lw=0.8, alpha=0.45, zorder=2, **shade)
            loss.plot(*_xy(val), lw=1.8, marker="o", ms=3.5, zorder=3, **shade)
            seen += [value for _, value in (*train, *val)]
            _phases(loss, run, unit)
        loss.set_title("Loss: thin training, bold validation" if runs[0].steps else "Loss")
        loss.set_ylabel("nats per token")
        zoom(loss, seen)
        for each in axes:
            each.set_xlim(0, tokens / unit)
            each.set_xlabel(f"{unit_name} tokens")
            _plain(each, MaxNLocator(6))
        if len(runs) > 1:
            ends = _differences(axes[1], runs, unit, colour)
            figure.tight_layout(
                w_pad=2.5, rect=(0, 0, 1 - label_room((name for _, _, name, _ in ends), WIDTH), 1)
            )
            label_ends(axes[1], ends)
        else:
            figure.tight_layout()
        return svg(figure, "curves")


def _phases(axes: Axes, run: Run, unit: float) -> None:
    """Mark where the run's recipe changed by its schedule."""
    for line in run.steps:
        if line.get("phase"):
            x = (line["tokens"] - run.step_tokens) / unit
            axes.axvline(x, color=MUTED, lw=1, ls=":")
            axes.annotate(
                str(line["phase"]),
                (x, 0.98),
                xycoords=("data", "axes fraction"),
                xytext=(3, 0),
                textcoords="offset points",
                color=MUTED,
                fontsize=8,
                va="top",
            )


def _differences(
    axes: Axes, runs: Sequence[Run], unit: float, colour: dict[str, str]
) -> list[tuple[float, float, str, str]]:
    base = dict(_validation(runs[0], unit))
    ends = []
    for run in runs:
        shared = [(x, value - base[x]) for x, value in _validation(run, unit) if x in base]
        axes.plot(*_xy(shared), lw=1.8, marker="o", ms=3.5, color=colour[run.name])
        if shared:
            ends.append((shared[-1][1], shared[-1][0], _clipped(run.name, 22), colour[run.name]))
    axes.set_title(f"Validation loss less that of {_clipped(runs[0].name, 22)}")
    return ends


def progress_svg(runs: Sequence[Run]) -> str:
    """Return gradient norm, learning rate and tokens per second over the steps."""
    with styled("progress"):
        figure = Figure(figsize=(WIDTH, 2.5))
        colour = run_colours(runs)
        panels = figure.subplots(1, 3)
        for axes, title, key in zip(
            panels,
            ("Gradient norm", "Learning rate", "Tokens per second"),
            ("grad_norm", "lr", "tokens_per_second"),
            strict=True,
        ):
            for run in runs:
                lines = run.timing if key == "tokens_per_second" else run.steps
                points = [(x["step"], x[key]) for x in lines if _real(x.get(key))]
                axes.plot(*_xy(points), lw=1.1, color=colour[run.name])
            if key == "grad_norm" and any(
                _real(x.get(key)) and x[key] > 0 for run in runs for x in run.steps
            ):
                axes.set_yscale("log")
                axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
                axes.yaxis.set_minor_locator(NullLocator())
            else:
                axes.set_ylim(bottom=0)
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
            axes.set_title(title)
            axes.set_xlabel("step")
            _plain(axes, MaxNLocator(5, integer=True))
        figure.tight_layout(w_pad=2.0)
        return svg(figure, "progress")


def lines_svg(runs: Sequence[Run]) -> str:
    """Return telemetry over the steps: a row for each number, a column for each operand.

    One run shows a thin line for each layer, coloured by its depth; several show their medians over the layers.
    """
    slots = _slots(runs)
    metrics = METRICS[:4]
    with styled("lines"):
        figure = Figure(figsize=(WIDTH, 0.7 + 1.45 * len(metrics)))
        panels = figure.subplots(len(metrics), len(slots), squeeze=False, sharex=True, sharey="row")
        for row, metric in zip(panels, metrics, strict=True):
            for axes, slot in zip(row, slots, strict=True):
                for run in runs:
                    lines = [x for x in run.operands if (x["role"], x["operand"]) == slot]
                    _draw_series(axes, run, lines, metric, runs)
                _plain(axes, MaxNLocator(4, integer=True))
                axes.yaxis.set_major_locator(MaxNLocator(4))
                axes.tick_params(labelsize=8)
            row[0].set_ylabel(metric.title, fontsize=9, color=INK)
        for axes, slot in zip(panels[0], slots, strict=True):
            axes.set_title(slot_title(*slot), fontsize=10)
        for axes in panels[-1]:
            axes.set_xlabel("step", fontsize=8.5)
        figure.align_ylabels(panels[:, 0])
        figure.tight_layout(w_pad=0.8, h_pad=0.8)
        return svg(figure, "lines")


def cosine_svg(runs: Sequence[Run]) -> str:
    """Return the cosine of each weight's gradient: over the steps, and by layer in the last measured step."""
    with styled("cosine"):
        grid = layer_grid(_names([line for run in runs for line in run.gradients]))
        height = max(2.7, 0.9 + rows_height(grid))
        figure = Figure(figsize=(WIDTH, height))
        sides: Any = figure.subfigures(1, 2, width_ratios=(1, 1.1))
        left, right = sides
        axes = left.subplots()
        for run in runs:
            _draw_series(axes, run, run.gradients, COSINE, runs)
        axes.set_title("Cosine of dW over the steps")
        axes.set_xlabel("step")
        _plain(axes, MaxNLocator(5, integer=True))
        left.subplots_adjust(left=0.12, right=0.95, top=1 - 0.4 / height, bottom=0.5 / height)
        panels = right.subplots(1, len(runs), squeeze=False)[0]
        layers = [by_place(latest(run.gradients), grid, COSINE) for run in runs]
        norm = colour_range(layers, COSINE)
        for i, (cell, run, values) in enumerate(zip(panels, runs, layers, strict=True)):
            image = draw_panel(cell, values, grid, COSINE, norm, depths=i == 0)
            cell.set_title(
                _clipped(run.name, 44 // len(runs)) if len(runs) > 1 else "By layer, last measured step",
                fontsize=10,
            )
        right.subplots_adjust(left=0.07, right=0.86, top=1 - 0.4 / height, bottom=0.62 / height, wspace=0.12)
        draw_scale(right, image, panels)
        return svg(figure, "cosine")


def heat_svg(runs: Sequence[Run], metric: Metric) -> str:
    """Return a number in each run's last measured step: a panel for each operand, depth by kind of layer."""
    slots = _slots(runs)
    prefix = f"heat-{metric.key}"
    with styled(prefix):
        grid = layer_grid(_names([line for run in runs for line in run.operands]))
        one = rows_height(grid)
        height = 0.75 + len(runs) * (one + 0.14) + (0.16 * (len(runs) - 1))
        figure = Figure(figsize=(WIDTH, height))
        panels = figure.subplots(len(runs), len(slots), squeeze=False)
        tables = {
            (run.name, slot): by_place(
                [x for x in latest(run.operands) if (x["role"], x["operand"]) == slot], grid, metric
            )
            for run in runs
            for slot in slots
        }
        norm = colour_range(list(tables.values()), metric)
        for i, run in enumerate(runs):
            for j, slot in enumerate(slots):
                axes = panels[i][j]
                image = draw_panel(axes, tables[run.name, slot], grid, metric, norm, depths=j == 0)
                if i < len(runs) - 1:
                    axes.set_xticklabels([])
                if not i:
                    axes.set_title(slot_title(*slot), fontsize=10)
            if len(runs) > 1:
                panels[i][0].set_ylabel(
                    _clipped(run.name, round(14 * one)), fontsize=8, color=INK, labelpad=6
                )
        figure.subplots_adjust(
            left=0.065, right=0.92, top=1 - 0.3 / height, bottom=0.45 / height, wspace=0.08, hspace=0.14
        )
        draw_scale(figure, image, panels.ravel())
        return svg(figure, prefix)


def _draw_series(axes: Axes, run: Run, lines: Sequence[Line], metric: Metric, runs: Sequence[Run]) -> None:
    """Draw a number over the steps: each layer of a single run and their median, or the median of one of several."""
    series: dict[str, list[tuple[float, float]]] = defaultdict(list)
    by_step: dict[float, list[float]] = defaultdict(list)
    for line in lines:
        value = value_of(line, metric)
        if value is not None:
            series[line["layer"]].append((line["step"], value))
            by_step[line["step"]].append(value)
    middle = [(step, median(values)) for step, values in sorted(by_step.items())]
    alone: Any = {"marker": "o", "ms": 3} if len(middle) == 1 else {}
    if len(runs) > 1:
        shade = run_colours(runs)[run.name]
        axes.plot(*_xy(middle), lw=1.4, color=shade, zorder=3, **alone)
        if len(middle) > 1:
            low, high = ([float(np.quantile(by_step[x], q)) for x, _ in middle] for q in (0.1, 0.9))
            axes.fill_between([x for x, _ in middle], low, high, color=shade, alpha=0.15, lw=0, zorder=1)
        return
    grid = layer_grid(list(series))
    depths = max(1, len(grid.depths) - 1)
    for name, points in series.items():
        depth = DEPTHS[round((len(DEPTHS) - 1) * grid.place[name][0] / depths)]
        axes.plot(*_xy(points), lw=0.7, color=depth, alpha=0.75, zorder=2, **alone)
    axes.plot(*_xy(middle), lw=1.6, color=INK, zorder=3, **alone)


def _slots(runs: Sequence[Run]) -> list[tuple[str, str]]:
    """Return the operands that any of the runs has measured."""
    found = {(line["role"], line["operand"]) for run in runs for line in run.operands}
    return [slot for slot in SLOTS if slot in found]


def _names(lines: Sequence[Line]) -> list[str]:
    return list(dict.fromkeys(line["layer"] for line in lines))


def _validation(run: Run, unit: float) -> list[tuple[float, float]]:
    return [(x["tokens"] / unit, x["val_loss"]) for x in run.evaluations if _real(x["val_loss"])]


def _real(value: Any) -> bool:
    return value is not None and math.isfinite(value)


def _xy(points: Sequence[tuple[float, float]]) -> tuple[list[float], list[float]]:
    return [x for x, _ in points], [y for _, y in points]


def _plain(axes: Axes, locator: MaxNLocator) -> None:
    """Draw a quiet grid behind the lines."""
    axes.grid(axis="y")
    axes.set_axisbelow(True)
    axes.xaxis.set_major_locator(locator)


def _clipped(text: str, length: int) -> str:
    return text if len(text) <= length else f"…{text[1 - length :]}"
