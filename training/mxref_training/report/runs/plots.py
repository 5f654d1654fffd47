"""The figures of a report of runs as SVG text: curves over the steps, and telemetry by layer."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from copy import copy
from dataclasses import dataclass
from statistics import median

import numpy as np
from matplotlib.axes import Axes
from matplotlib.colors import CenteredNorm, Normalize
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from mxref_training.report.drawing import (
    SMALLEST,
    WIDTH,
    count_tokens,
    name_curves,
    plot,
    quiet,
    styled,
    svg,
    zoom,
)
from mxref_training.report.palette import INK, MUTED
from mxref_training.report.probe.tables import SLOTS, slot_title
from mxref_training.report.runs.tables import Line, Run

Points = list[tuple[float, float]]
Slot = tuple[str, str]
"""Role and tensor of an operand, or of a gradient."""


@dataclass(frozen=True)
class Metric:
    """A number of telemetry, and how it is drawn."""

    key: str
    title: str
    colours: str = "viridis"
    norm: Normalize | None = None
    """Where the colours begin and end, if not at the lowest and highest value."""
    scale: float = 1

    def lines(self, run: Run) -> list[tuple[int, Slot, str, float]]:
        """Return step, slot, layer and value wherever the run has measured the number."""
        return [
            (line["step"], (line["role"], line["operand"]), line["layer"], self.scale * line[self.key])
            for line in (*run.operands, *run.gradients)
            if line.get(self.key) is not None
        ]


METRICS = (
    Metric("snr", "SNR, dB"),
    Metric("clipped", "Clipped, %", "YlOrRd", Normalize(vmin=0)),
    Metric("zeroed", "Zeroed, %", "YlOrRd", Normalize(vmin=0)),
    Metric("bias", "Bias, %", "RdBu_r", CenteredNorm(), 100),
)
"""The numbers that figures show for each operand."""
COSINE = Metric("cosine", "Cosine of dW")
GRADIENT = ("wgrad", "dw")


def curves_svg(runs: Sequence[Run]) -> str:
    """Return training and validation loss over tokens, and for several runs the difference from the first."""
    tokens = max((line["tokens"] for run in runs for line in (*run.steps, *run.evaluations)), default=1)
    with styled("curves"):
        figure = Figure(figsize=(WIDTH, 4.0), layout="constrained")
        panels = figure.subplots(1, min(2, len(runs)), squeeze=False)[0]
        seen: list[float] = []
        base = dict(_points(runs[0].evaluations, "tokens", "val_loss"))
        for i, run in enumerate(runs):
            look = {"color": f"C{i}", "label": _clipped(run.name, 22)}
            train = _points(run.steps, "tokens", "loss")
            val = _points(run.evaluations, "tokens", "val_loss")
            plot(panels[0], train, lw=0.8, alpha=0.45, color=f"C{i}")
            plot(panels[0], val, lw=1.8, marker="o", ms=3.5, **look)
            seen += [value for _, value in (*train, *val)]
            _phases(panels[0], run)
            apart = [(x, value - base[x]) for x, value in val if x in base]
            if len(runs) > 1 and apart:
                plot(panels[1], apart, lw=1.8, marker="o", ms=3.5, **look)
        panels[0].set_title("Loss, nats per token: thin training, bold validation")
        zoom(panels[0], seen)
        for axes in panels:
            quiet(axes)
            count_tokens(axes, tokens)
        if len(runs) > 1:
            panels[1].set_title(f"Validation loss less that of {_clipped(runs[0].name, 22)}")
            name_curves(panels[1])
        return svg(figure, "curves")


def _phases(axes: Axes, run: Run) -> None:
    """Mark where the run's recipe changed by its schedule."""
    for line in run.steps:
        if line.get("phase"):
            x = line["tokens"] - run.step_tokens
            axes.axvline(x, color=MUTED, lw=1, ls=":")
            axes.annotate(
                str(line["phase"]), (x, 0.98), (3, 0), xycoords=("data", "axes fraction"),
                textcoords="offset points", color=MUTED, fontsize=SMALLEST, va="top",
            )  # fmt: skip


def progress_svg(runs: Sequence[Run]) -> str:
    """Return gradient norm, learning rate and tokens per second over the steps."""
    titles = {"grad_norm": "Gradient norm", "lr": "Learning rate", "tokens_per_second": "Tokens per second"}
    with styled("progress"):
        figure = Figure(figsize=(WIDTH, 2.5), layout="constrained")
        for axes, (key, title) in zip(figure.subplots(1, 3), titles.items(), strict=True):
            for i, run in enumerate(runs):
                points = _points(run.timing if key == "tokens_per_second" else run.steps, "step", key)
                plot(axes, points, lw=1.1, color=f"C{i}")
            axes.set_ylim(bottom=0)
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
            for i, run in enumerate(runs):
                by_layer: dict[tuple[Slot, str], Points] = defaultdict(list)
                by_step: dict[tuple[Slot, int], list[float]] = defaultdict(list)
                for step, slot, layer, value in metric.lines(run):
                    by_layer[slot, layer].append((step, value))
                    by_step[slot, step].append(value)
                for axes, slot in zip(row, slots, strict=True):
                    middle = [(step, median(found)) for (own, step), found in by_step.items() if own == slot]
                    look = {"marker": "o", "ms": 3} if len(middle) == 1 else {}
                    for (own, _), points in by_layer.items() if len(runs) == 1 else ():
                        if own == slot:
                            plot(axes, points, lw=0.6, color="C0", alpha=0.5, **look)
                    plot(axes, middle, lw=1.6, color=f"C{i}" if len(runs) > 1 else INK, **look)
            row[0].set_ylabel(metric.title, fontsize=9, color=INK)
        for axes in panels.ravel():
            quiet(axes, ticks=4, whole=True)
            axes.yaxis.set_major_locator(MaxNLocator(4))
            axes.tick_params(labelsize=SMALLEST)
        for axes, slot in zip(panels[0], slots, strict=True):
            axes.set_title(slot_title(*slot), fontsize=10)
        figure.supxlabel("step", fontsize=9, color=MUTED)
        figure.align_ylabels(panels[:, 0])
        return svg(figure, prefix)


def heat_svg(runs: Sequence[Run], metric: Metric) -> str:
    """Return a number in each run's last measured step: a panel for each operand, depth by kind of layer."""
    slots = _slots(runs, metric)
    found = [[line for line in lines if line[0] == lines[-1][0]] for lines in map(metric.lines, runs)]
    depths, kinds, places = layer_grid([layer for lines in found for _, _, layer, _ in lines])
    values = np.full((len(runs), len(slots), len(depths), len(kinds)), np.nan)
    for i, lines in enumerate(found):
        for _, slot, layer, value in lines:
            values[i, slots.index(slot), *places[layer]] = value
    shown = np.ma.masked_invalid(values)
    norm = copy(metric.norm) if metric.norm else Normalize()
    norm.autoscale_None(shown)
    height = min(4.2, max(0.9, 0.16 * len(depths)))
    every = max(1, math.ceil(len(depths) / max(2, height / 0.15)))
    prefix = f"heat-{metric.key}"
    with styled(prefix):
        figure = Figure(figsize=(WIDTH, 0.75 + len(runs) * (height + 0.2)), layout="constrained")
        panels = figure.subplots(len(runs), len(slots), squeeze=False, sharex=True, sharey=True)
        for i, run in enumerate(runs):
            for axes, image in zip(panels[i], shown[i], strict=True):
                axes.imshow(image, metric.colours, norm, aspect="auto", interpolation="nearest")
                axes.set_xticks(range(len(kinds)), kinds, rotation=90 if len(kinds) > 3 else 0)
                axes.set_yticks(range(0, len(depths), every), depths[::every])
                axes.tick_params(length=0, labelsize=SMALLEST)
                axes.spines[:].set_visible(False)
            if len(runs) > 1:
                panels[i, 0].set_ylabel(_clipped(run.name, round(14 * height)), fontsize=SMALLEST, color=INK)
        for axes, slot in zip(panels[0], slots, strict=True):
            axes.set_title(slot_title(*slot), fontsize=10)
        bar = figure.colorbar(panels[0, 0].images[0], ax=panels, fraction=0.02, pad=0.01)
        bar.outline.set_visible(False)
        bar.ax.tick_params(labelsize=SMALLEST, length=2)
        return svg(figure, prefix)


def layer_grid(names: Sequence[str]) -> tuple[list[str], list[str], dict[str, tuple[int, int]]]:
    """Return labels of depths and of kinds of layers, and each layer's row and column, as of q_proj in block 7.

    The first number in a name is the layer's depth, and the rest its kind.
    """
    split = {}
    for name in names:
        parts = name.split(".")
        numbers = [i for i, part in enumerate(parts) if part.isdecimal()]
        depth = parts.pop(numbers[0]) if numbers else "–"
        split[name] = depth, ".".join(parts)
    depths = sorted({depth for depth, _ in split.values()}, key=lambda depth: (depth == "–", depth.zfill(9)))
    kinds = list(dict.fromkeys(kind for _, kind in split.values()))
    places = {name: (depths.index(depth), kinds.index(kind)) for name, (depth, kind) in split.items()}
    short = [kind.rpartition(".")[2].removesuffix("_proj") for kind in kinds]
    return depths, short if len(set(short)) == len(short) else kinds, places


def _slots(runs: Sequence[Run], metric: Metric) -> list[Slot]:
    """Return the operands or gradients of which any of the runs has the number."""
    found = {slot for run in runs for _, slot, _, _ in metric.lines(run)}
    return [slot for slot in (*SLOTS, GRADIENT) if slot in found]


def _points(lines: Sequence[Line], x: str, y: str) -> Points:
    """Return a number over another one, where it is finite."""
    return [(line[x], line[y]) for line in lines if line.get(y) is not None and math.isfinite(line[y])]


def _clipped(text: str, length: int) -> str:
    return text if len(text) <= length else f"…{text[1 - length :]}"
