"""The figures of a probe as SVG text: a line of each panel is a recipe, a dot is a layer."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, median
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from mxref_training.probe.layer import Row
from mxref_training.probe.results import Results, rows
from mxref_training.probe.split import CAUSES
from mxref_training.report.drawing import SMALLEST, styled, svg
from mxref_training.report.palette import COLOURS, GOLD, GREY, GRID, INK, MUTED, PAPER
from mxref_training.report.probe.tables import ROLES, SLOTS

WIDTH = 11.2
"""Of a report's figures, in inches."""
_LINE = 0.235
"""Height of a recipe's line, in inches."""
_NAMES = 0.185
"""Share of the width that the recipes' names take at least."""
_LETTER = 0.0062
"""The share of a letter."""
_FEW = 3
"""Dots that do not cover each other, such as three quartiles, and are not drawn faint."""
_ROOM = 0.25
"""Room for the medians beside the dots."""
_NARROW_ROOM = 0.45
"""The same on a phone."""

CAUSE_TITLES = {"scale": "scale bias", "dead": "dead zone", "clip": "clipping", "grid": "grid noise"}
_CAUSE_COLOURS = dict(zip(CAUSES, (COLOURS[3], COLOURS[0], GOLD, GREY), strict=True))
"""Told apart by lightness too, so that colour-blind readers and grey prints lose nothing."""
TENSORS = {"x": "X", "w": "W", "dy": "dY"}


@dataclass(frozen=True)
class Form:
    """The room that a figure has."""

    width: float = WIDTH
    """Of the figure, in inches."""
    across: int = 9
    """Most panels side by side."""
    suffix: str = ""
    """Of the ids in the figure, where a page has it in several forms."""

    @property
    def is_narrow(self) -> bool:
        """Whether a legend and a label take several lines."""
        return self.width < WIDTH / 2


REPORT = Form()


@dataclass(frozen=True)
class Panel:
    """A column of a figure."""

    title: str
    rows: Sequence[Row]


Draw = Callable[[Axes, Panel, Sequence[str]], None]
Entry = tuple[str, dict[str, Any]]
"""Of a legend: the text and the look of the mark."""


def snr_svg(results: Results, form: Form = REPORT) -> str:
    """Return the SNR of every product: a panel for each GEMM and checkpoint.

    The axis reaches as far above the median recipe as the worst one lies below it, so that a decibel is seen: 16 bits
    and 8 would stretch it. A median beyond is an arrow at its end.
    """
    panels = _by_role(results, "products")
    limits = _limits(panels)
    return _figure(
        results,
        "snr",
        panels,
        _strip("snr", ".1f", limits=limits),
        "SNR of the product, dB; an arrow: beyond the axis" if limits else "SNR of the product, dB",
        form,
        room=_ROOM,
        limits=limits,
    )


def _limits(panels: Sequence[Panel]) -> tuple[float, float] | None:
    """Return the ends of the axis of the SNR; None if nothing lies beyond them."""
    known = [row for panel in panels for row in panel.rows if row["snr"] is not None]
    cells = {(row["recipe"], row["role"], row["moment"]) for row in known}
    medians = [
        median(row["snr"] for row in known if (row["recipe"], row["role"], row["moment"]) == cell)
        for cell in cells
    ]
    if not medians:
        return None
    lowest = min(row["snr"] for row in known)
    end = 2 * median(medians) - min(medians)
    return (lowest - 0.5, end + 0.5) if lowest < end < max(medians) else None


def bias_svg(results: Results, form: Form = REPORT) -> str:
    """Return the bias of dW: a panel for each checkpoint."""
    found = [row for row in rows(results, "products") if row["role"] == "wgrad"]
    return _figure(
        results,
        "bias",
        _by_moment(results, found, "dW"),
        _strip("bias", "+.2f", 100.0, signed=True),
        "bias of dW, %",
        form,
        room=0.08,
    )


def split_svg(results: Results, form: Form = REPORT) -> str:
    """Return the error of the operands by cause, as stacked bars: means over the layers."""
    return _figure(
        results,
        "split",
        _by_slot(results),
        _stack,
        "energy of the error, % of the operand's",
        form,
        legend=_CAUSE_LEGEND,
    )


def mean_svg(results: Results, form: Form = REPORT) -> str:
    """Return how much of each operand and of its error lies in the means of groups."""
    return _figure(
        results,
        "mean",
        _by_slot(results),
        _pair,
        "share in the means of groups, %",
        form,
        legend=_MEAN_LEGEND,
    )


def variance_svg(results: Results, form: Form = REPORT) -> str:
    """Return the variance of products over the draws: a panel for each GEMM and checkpoint."""
    return _figure(
        results, "variance", _by_role(results, "variances"), _strip("variance", ".2g", 100.0),
        "variance over the draws, % of the product's energy", form, room=_ROOM,
    )  # fmt: skip


def _figure(
    results: Results,
    prefix: str,
    panels: Sequence[Panel],
    draw: Draw,
    label: str,
    form: Form,
    *,
    legend: Sequence[Entry] = (),
    room: float = 0.0,
    limits: tuple[float, float] | None = None,
) -> str:
    """Return panels side by side, which share the recipes' lines and the axis; those that do not fit stand below.

    Args:
        results: of the probe.
        prefix: of the ids in the figure.
        panels: what they show.
        draw: draws one.
        label: of the shared axis.
        form: the room for them.
        legend: entries of a legend above the panels.
        room: share by which the axis is lengthened at its upper end, for numbers.
        limits: ends of the axis; by default it holds all that is drawn.
    """
    shown = {row["recipe"] for panel in panels for row in panel.rows}
    recipes = [recipe["name"] for recipe in results["recipes"] if recipe["name"] in shown]
    labels = [recipe["label"] for recipe in results["recipes"] if recipe["name"] in shown]
    names = max(_NAMES, _LETTER * max(map(len, labels), default=0)) * WIDTH / form.width
    several = len(results["moments"]) > 1
    down = -(-len(panels) // form.across)
    across = -(-len(panels) // down)
    top, bottom, gap = 0.42 if several else 0.26, 0.46, 0.75
    height = _LINE * len(recipes)
    columns = 2 if form.is_narrow else max(1, len(legend))
    top += 0.3 * -(-len(legend) // columns)
    right = 0.96 if form.is_narrow else 0.985
    if form.is_narrow:
        label = textwrap.fill(label, 32)
        bottom += 0.15 * label.count("\n")
        room = _NARROW_ROOM if room else 0.0
    total = top + down * height + (down - 1) * gap + bottom
    with styled(prefix + form.suffix):
        figure = Figure(figsize=(form.width, total))
        grid = figure.subplots(down, across, squeeze=False, sharey=True, sharex=True)
        for axes in grid.ravel()[len(panels) :]:
            axes.set_visible(False)
        for axes, panel in zip(grid.ravel(), panels, strict=False):
            draw(axes, panel, recipes)
            _lines(axes, len(recipes))
            axes.set_title(panel.title, fontsize=8.5 if several else 9.5)
            axes.tick_params(labelsize=8, labelbottom=True)
        low, high = limits or grid[0, 0].get_xlim()
        grid[0, 0].set_xlim(low, high + room * (high - low))
        for line in grid:
            line[0].set_yticks(range(len(recipes)), labels, fontsize=8.5)
            line[0].tick_params(axis="y", length=0, labelcolor=INK)
        figure.subplots_adjust(
            left=names,
            right=right,
            top=1 - top / total,
            bottom=bottom / total,
            wspace=0.12,
            hspace=gap / height,
        )
        place: dict[str, Any] = {"x": right, "ha": "right"} if form.is_narrow else {"x": (names + right) / 2}
        figure.supxlabel(label, fontsize=9, color=MUTED, y=0.03 / total, va="bottom", **place)
        if legend:
            _legend(figure, legend, columns, 0.0 if form.is_narrow else _NAMES * WIDTH / form.width - 0.01)
        return svg(figure, prefix + form.suffix)


def _lines(axes: Axes, count: int) -> None:
    axes.set_ylim(count - 0.4, -0.6)
    for y in range(count):
        axes.axhline(y, color=GRID, lw=0.6, zorder=0)
    axes.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10]))
    axes.xaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}".replace("-", "−")))
    axes.spines["left"].set_visible(False)
    axes.tick_params(axis="y", length=0)


def _strip(
    key: str,
    form: str,
    scale: float = 1.0,
    signed: bool = False,
    limits: tuple[float, float] | None = None,
) -> Draw:
    """Return a function that draws a dot for each layer, and writes the median beside a line at its place.

    Of what lies beyond the limits only the median is drawn, as an arrow.
    """
    low, high = limits or (-math.inf, math.inf)

    def draw(axes: Axes, panel: Panel, recipes: Sequence[str]) -> None:
        if signed:
            axes.axvline(0, color=MUTED, lw=1, zorder=1)
        for y, recipe in enumerate(recipes):
            values = [
                scale * row[key] for row in panel.rows if row["recipe"] == recipe and row.get(key) is not None
            ]
            if not values:
                continue
            faint = 0.35 if len(values) > _FEW else 0.9
            middle = median(values)
            values = [value for value in values if low <= value <= high]
            axes.plot(values, [y] * len(values), "o", ms=3.2, color=COLOURS[0], alpha=faint, mew=0, zorder=2)
            if middle > high:
                axes.plot(high, y, ">", ms=4.5, color=INK, mew=0, zorder=3)
            else:
                axes.plot([middle, middle], [y - 0.34, y + 0.34], color=INK, lw=1.6, zorder=3)
            axes.text(
                1.0, y - 0.02, format(middle, form).replace("-", "−"), transform=axes.get_yaxis_transform(),
                ha="right", va="center", fontsize=SMALLEST, color=INK, zorder=4,
            )  # fmt: skip

    return draw


def _stack(axes: Axes, panel: Panel, recipes: Sequence[str]) -> None:
    for y, recipe in enumerate(recipes):
        own = [row for row in panel.rows if row["recipe"] == recipe and row["noise"] is not None]
        left = 0.0
        for cause in CAUSES:
            width = 100 * fmean(row[f"noise_{cause}"] or 0.0 for row in own) if own else 0.0
            axes.barh(y, width, left=left, height=0.66, color=_CAUSE_COLOURS[cause], zorder=2)
            left += width


def _pair(axes: Axes, panel: Panel, recipes: Sequence[str]) -> None:
    for y, recipe in enumerate(recipes):
        own = [row for row in panel.rows if row["recipe"] == recipe]
        ends = [
            100 * median(values) if values else None
            for values in (
                [row[key] for row in own if row[key] is not None] for key in ("dc_source", "dc_noise")
            )
        ]
        source, error = ends
        if source is not None and error is not None:
            axes.plot([source, error], [y, y], color=MUTED, lw=0.9, zorder=1)
        if source is not None:
            axes.plot(source, y, "o", ms=4.6, mfc=PAPER, mec=MUTED, mew=1.2, zorder=2)
        if error is not None:
            axes.plot(error, y, "o", ms=4.6, color=COLOURS[3], zorder=3)
    axes.set_xlim(0, 100)


_CAUSE_LEGEND: Sequence[Entry] = [
    (CAUSE_TITLES[cause], {"marker": "s", "color": _CAUSE_COLOURS[cause]}) for cause in CAUSES
]
_MEAN_LEGEND: Sequence[Entry] = [
    ("of the operand", {"marker": "o", "mfc": PAPER, "mec": MUTED, "color": MUTED}),
    ("of its error", {"marker": "o", "color": COLOURS[3]}),
]


def _legend(figure: Any, entries: Sequence[Entry], columns: int, left: float) -> None:
    from matplotlib.lines import Line2D

    marks = [Line2D([], [], ls="", ms=7, label=label, **style) for label, style in entries]
    figure.legend(
        handles=marks, loc="upper left", bbox_to_anchor=(left, 1.0), ncols=columns, frameon=False,
        fontsize=9, handletextpad=0.2, columnspacing=1.6, borderaxespad=0.1,
    )  # fmt: skip


def _names(results: Results) -> list[str]:
    return [moment["name"] for moment in results["moments"]]


def _by_role(results: Results, table: str) -> list[Panel]:
    found, names = rows(results, table), _names(results)
    several = len(names) > 1
    return [
        Panel(
            f"{role.capitalize()}\n{name}" if several else role.capitalize(),
            [row for row in found if row["role"] == role and row["moment"] == name],
        )
        for role in ROLES
        for name in names
    ]


def _by_moment(results: Results, found: Sequence[Row], title: str) -> list[Panel]:
    names = _names(results)
    return [
        Panel(name if len(names) > 1 else title, [row for row in found if row["moment"] == name])
        for name in names
    ]


def _by_slot(results: Results) -> list[Panel]:
    """Return a panel for each operand: of one checkpoint all six, of several Wgrad's two over the checkpoints."""
    found, names = rows(results, "operands"), _names(results)
    slots = SLOTS if len(names) == 1 else [slot for slot in SLOTS if slot[0] == "wgrad"]
    return [
        Panel(
            f"{role.capitalize()} {TENSORS[tensor]}" + (f"\n{name}" if len(names) > 1 else ""),
            [row for row in found if (row["moment"], row["role"], row["operand"]) == (name, role, tensor)],
        )
        for role, tensor in slots
        for name in names
    ]
