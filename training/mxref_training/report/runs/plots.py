"""The figures of a report of runs as SVG text: curves over the steps, and telemetry by layer."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import CenteredNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, LogLocator, MaxNLocator, NullLocator
from numpy.typing import NDArray

from mxref_training.report.drawing import (
    SMALLEST,
    WIDTH,
    label_ends,
    plot,
    quiet,
    styled,
    svg,
    token_unit,
    zoom,
)
from mxref_training.report.palette import COLOURS, INK, MUTED
from mxref_training.report.probe.tables import SLOTS, slot_title
from mxref_training.report.runs.read import Line, Run

Points = list[tuple[float, float]]


@dataclass(frozen=True)
class Metric:
    """A number of telemetry, and how it is drawn."""

    key: str
    title: str
    of: Callable[[Line], float | None] | None = None
    """Its value in a line, where that is not the key's."""
    colours: str = "viridis"
    signed: bool = False
    """Whether zero is the middle of the colours."""
    from_zero: bool = False

    def value(self, line: Line) -> float | None:
        """Return the number of a line as figures show it."""
        return self.of(line) if self.of else line.get(self.key)


def _percent_bias(line: Line) -> float | None:
    return None if line["bias"] is None else 100 * line["bias"]


def _binades(line: Line) -> float | None:
    """Return the spread of the scales in powers of two."""
    low, high = line["scale_min"], line["scale_max"]
    if low is None or high is None:
        return None
    # The scales of block formats are exponents; that of FP8 is the factor itself.
    return float(math.log2(high / low)) if line["format"] == "fp8" else float(high - low)


METRICS = (
    Metric("snr", "SNR, dB"),
    Metric("clipped", "Clipped, %", colours="YlOrRd", from_zero=True),
    Metric("zeroed", "Zeroed, %", colours="YlOrRd", from_zero=True),
    Metric("bias", "Bias, %", _percent_bias, "RdBu_r", signed=True),
    Metric("spread", "Spread of scales, binades", _binades, from_zero=True),
)
"""The numbers that figures show for each operand."""
COSINE = Metric("cosine", "Cosine of dW")
GRADIENT = ("wgrad", "dw")


def run_colours(runs: Sequence[Run]) -> dict[str, str]:
    """Return a colour for each run's name."""
    return {run.name: COLOURS[i % len(COLOURS)] for i, run in enumerate(runs)}


def curves_svg(runs: Sequence[Run]) -> str:
    """Return training and validation loss over tokens, and for several runs the difference from the first."""
    colour = run_colours(runs)
    tokens = max((line["tokens"] for run in runs for line in (*run.steps, *run.evaluations)), default=1)
    unit, unit_name = token_unit(tokens)
    with styled("curves"):
        figure = Figure(figsize=(WIDTH, 4.0), layout="constrained")
        panels = figure.subplots(1, min(2, len(runs)), squeeze=False)[0]
        seen: list[float] = []
        for run in runs:
            train = _points(run.steps, "tokens", "loss", unit)
            val = _points(run.evaluations, "tokens", "val_loss", unit)
            plot(panels[0], train, lw=0.8, alpha=0.45, color=colour[run.name])
            plot(panels[0], val, lw=1.8, marker="o", ms=3.5, color=colour[run.name])
            seen += [value for _, value in (*train, *val)]
            _phases(panels[0], run, unit)
        panels[0].set_title("Loss, nats per token: thin training, bold validation")
        zoom(panels[0], seen)
        ends = []
        base = dict(_points(runs[0].evaluations, "tokens", "val_loss", unit))
        for run in runs if len(runs) > 1 else ():
            val = _points(run.evaluations, "tokens", "val_loss", unit)
            apart = [(x, value - base[x]) for x, value in val if x in base]
            plot(panels[1], apart, lw=1.8, marker="o", ms=3.5, color=colour[run.name])
            panels[1].set_title(f"Validation loss less that of {_clipped(runs[0].name, 22)}")
            ends += [(*apart[-1][::-1], _clipped(run.name, 22), colour[run.name])] if apart else []
        for axes in panels:
            axes.set_xlim(0, 1.01 * tokens / unit)
            axes.set_xlabel(f"{unit_name} tokens")
            quiet(axes)
        label_ends(panels[-1], ends)
        return svg(figure, "curves")


def _phases(axes: Axes, run: Run, unit: float) -> None:
    """Mark where the run's recipe changed by its schedule."""
    for line in run.steps:
        if line.get("phase"):
            x = (line["tokens"] - run.step_tokens) / unit
            axes.axvline(x, color=MUTED, lw=1, ls=":")
            axes.annotate(
                str(line["phase"]), (x, 0.98), (3, 0), xycoords=("data", "axes fraction"),
                textcoords="offset points", color=MUTED, fontsize=SMALLEST, va="top",
            )  # fmt: skip


def progress_svg(runs: Sequence[Run]) -> str:
    """Return gradient norm, learning rate and tokens per second over the steps."""
    colour = run_colours(runs)
    titles = {"grad_norm": "Gradient norm", "lr": "Learning rate", "tokens_per_second": "Tokens per second"}
    with styled("progress"):
        figure = Figure(figsize=(WIDTH, 2.5), layout="constrained")
        for axes, (key, title) in zip(figure.subplots(1, 3), titles.items(), strict=True):
            for run in runs:
                points = _points(run.timing if key == "tokens_per_second" else run.steps, "step", key)
                plot(axes, points, lw=1.1, color=colour[run.name])
            axes.set_ylim(bottom=0)
            if key == "grad_norm" and any(y > 0 for line in axes.lines for y in line.get_ydata()):
                axes.set_yscale("log")
                axes.autoscale(axis="y")
                axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
                axes.yaxis.set_minor_locator(NullLocator())
            axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:,.6g}"))
            axes.set_title(title)
            axes.set_xlabel("step")
            quiet(axes, ticks=5, whole=True)
        return svg(figure, "progress")


def lines_svg(runs: Sequence[Run], metrics: Sequence[Metric]) -> str:
    """Return telemetry over the steps: a row for each number, a column for each operand.

    One run shows a thin line for each layer and their median; several show their medians.
    """
    slots = _slots(runs, metrics[0])
    prefix = f"lines-{metrics[0].key}"
    with styled(prefix):
        figure = Figure(figsize=(WIDTH, 1.0 + 1.4 * len(metrics)), layout="constrained")
        panels = figure.subplots(len(metrics), len(slots), squeeze=False, sharex=True, sharey="row")
        for row, metric in zip(panels, metrics, strict=True):
            for axes, slot in zip(row, slots, strict=True):
                for run in runs:
                    _series(axes, run, [x for x in _lines(run, metric) if _slot(x) == slot], metric, runs)
                quiet(axes, ticks=4, whole=True)
                axes.yaxis.set_major_locator(MaxNLocator(4))
                axes.tick_params(labelsize=SMALLEST)
            row[0].set_ylabel(metric.title, fontsize=9, color=INK)
        for axes, slot in zip(panels[0], slots, strict=True):
            axes.set_title(slot_title(*slot), fontsize=10)
        figure.supxlabel("step", fontsize=9, color=MUTED)
        figure.align_ylabels(panels[:, 0])
        return svg(figure, prefix)


def _series(axes: Axes, run: Run, lines: Sequence[Line], metric: Metric, runs: Sequence[Run]) -> None:
    """Draw a number over the steps: each layer of a single run and their median, or the median of one of several."""
    by_layer: dict[str, Points] = defaultdict(list)
    by_step: dict[float, list[float]] = defaultdict(list)
    for line in lines:
        if (value := metric.value(line)) is not None:
            by_layer[line["layer"]].append((line["step"], value))
            by_step[line["step"]].append(value)
    steps = sorted(by_step)
    middle = [(step, median(by_step[step])) for step in steps]
    look: dict[str, Any] = {"marker": "o", "ms": 3} if len(steps) == 1 else {}
    colour = run_colours(runs)[run.name]
    if len(runs) == 1:
        for points in by_layer.values():
            plot(axes, points, lw=0.6, color=colour, alpha=0.5, **look)
        plot(axes, middle, lw=1.6, color=INK, **look)
        return
    plot(axes, middle, lw=1.4, color=colour, **look)
    if len(steps) > 1:
        low, high = ([float(np.quantile(by_step[step], q)) for step in steps] for q in (0.1, 0.9))
        axes.fill_between(steps, low, high, color=colour, alpha=0.15, lw=0)


def heat_svg(runs: Sequence[Run], metric: Metric) -> str:
    """Return a number in each run's last measured step: a panel for each operand, depth by kind of layer."""
    slots = _slots(runs, metric)
    grid = layer_grid(list(dict.fromkeys(x["layer"] for run in runs for x in _lines(run, metric))))
    height = min(4.2, max(0.9, 0.16 * len(grid.depths)))
    values = {
        (run.name, slot): _by_place(
            [x for x in _latest(_lines(run, metric)) if _slot(x) == slot], grid, metric
        )
        for run in runs
        for slot in slots
    }
    norm = CenteredNorm() if metric.signed else Normalize(vmin=0.0 if metric.from_zero else None)
    every = np.ma.masked_invalid(list(values.values()))
    norm.autoscale_None(every if every.count() else [0.0, 1.0])
    prefix = f"heat-{metric.key}"
    with styled(prefix):
        figure = Figure(figsize=(WIDTH, 0.75 + len(runs) * (height + 0.2)), layout="constrained")
        panels = figure.subplots(len(runs), len(slots), squeeze=False, sharex=True, sharey=True)
        step = max(1, math.ceil(len(grid.depths) / max(2, height / 0.15)))
        for row, run in zip(panels, runs, strict=True):
            for axes, slot in zip(row, slots, strict=True):
                shown = np.ma.masked_invalid(values[run.name, slot])
                image = axes.imshow(shown, metric.colours, norm, aspect="auto", interpolation="nearest")
                axes.set_xticks(range(len(grid.kinds)), grid.kinds, rotation=90 if len(grid.kinds) > 3 else 0)
                axes.set_yticks(range(0, len(grid.depths), step), grid.depths[::step])
                axes.tick_params(length=0, labelsize=SMALLEST)
                axes.spines[:].set_visible(False)
                if run is runs[0]:
                    axes.set_title(slot_title(*slot), fontsize=10)
            if len(runs) > 1:
                row[0].set_ylabel(_clipped(run.name, round(14 * height)), fontsize=SMALLEST, color=INK)
        bar = figure.colorbar(image, ax=panels, fraction=0.02, pad=0.01)
        bar.outline.set_visible(False)
        bar.ax.tick_params(labelsize=SMALLEST, length=2)
        return svg(figure, prefix)


@dataclass(frozen=True)
class LayerGrid:
    """Where each layer of a model stands: a row for each depth, a column for each kind, as in q_proj of block 7."""

    depths: list[str]
    """Labels of the rows."""
    kinds: list[str]
    """Labels of the columns."""
    place: dict[str, tuple[int, int]]
    """Row and column by the layer's name."""


def layer_grid(names: Sequence[str]) -> LayerGrid:
    """Return the grid of some layers: the first number in a name is its depth, the rest its kind."""
    split = {name: _split(name) for name in names}
    depths = sorted({depth for depth, _ in split.values()}, key=lambda depth: (depth < 0, depth))
    kinds = list(dict.fromkeys(kind for _, kind in split.values()))
    place = {name: (depths.index(depth), kinds.index(kind)) for name, (depth, kind) in split.items()}
    return LayerGrid([str(depth) if depth >= 0 else "–" for depth in depths], _short(kinds), place)


def _split(name: str) -> tuple[int, str]:
    """Return the first number in a dotted name, -1 without one, and the name without it."""
    parts = name.split(".")
    for i, part in enumerate(parts):
        if part.isdecimal():
            return int(part), ".".join(parts[:i] + parts[i + 1 :])
    return -1, name


def _short(kinds: Sequence[str]) -> list[str]:
    """Return the last parts of dotted names, as many as tell them apart; without the suffix `_proj`."""
    parts = [kind.split(".") for kind in kinds]
    for length in range(1, max((len(each) for each in parts), default=1) + 1):
        labels = [".".join(each[-length:]) for each in parts]
        if len(set(labels)) == len(labels):
            break
    bare = [label.removesuffix("_proj") for label in labels]
    return bare if len(set(bare)) == len(bare) else labels


def _by_place(lines: Sequence[Line], grid: LayerGrid, metric: Metric) -> NDArray[np.float64]:
    """Return a number of each layer at its place in the grid; NaN where there is none."""
    values = np.full((len(grid.depths), len(grid.kinds)), np.nan)
    for line in lines:
        if (value := metric.value(line)) is not None:
            values[grid.place[line["layer"]]] = value
    return values


def _lines(run: Run, metric: Metric) -> list[Line]:
    return run.gradients if metric is COSINE else run.operands


def _slot(line: Line) -> tuple[str, str]:
    return line["role"], line["operand"]


def _slots(runs: Sequence[Run], metric: Metric) -> list[tuple[str, str]]:
    """Return the operands or gradients that any of the runs has measured."""
    found = {_slot(line) for run in runs for line in _lines(run, metric)}
    return [slot for slot in (*SLOTS, GRADIENT) if slot in found]


def _latest(lines: Sequence[Line]) -> list[Line]:
    """Return the lines of the last measured step."""
    return [line for line in lines if line["step"] == lines[-1]["step"]]


def _points(lines: Sequence[Line], x: str, y: str, unit: float = 1) -> Points:
    """Return a number over another one, where it is finite."""
    return [(line[x] / unit, line[y]) for line in lines if line.get(y) is not None and math.isfinite(line[y])]


def _clipped(text: str, length: int) -> str:
    return text if len(text) <= length else f"…{text[1 - length :]}"
