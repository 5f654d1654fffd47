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
from matplotlib.lines import Line2D
from matplotlib.ticker import FuncFormatter, MaxNLocator, NullLocator

from mxref_training.probe.results import CAUSES, Results, Row, rows
from mxref_training.report.drawing import SMALLEST, WIDTH, label_ends, quiet, styled, svg
from mxref_training.report.palette import COLOURS, GOLD, GREY, GRID, INK, MUTED, PAPER
from mxref_training.report.probe.tables import ROLES, SLOTS, slot_title

_FEW = 3
"""Dots that do not cover each other, such as three quartiles, and are not drawn faint."""
_CAUSES = dict(zip(CAUSES, (COLOURS[3], COLOURS[0], GOLD, GREY), strict=True))
"""Colours told apart by lightness too, so that colour-blind readers and grey prints lose nothing."""
_CAUSE_LEGEND = [
    (title, {"marker": "s", "color": _CAUSES[cause]})
    for cause, title in zip(CAUSES, ("scale bias", "dead zone", "clipping", "grid noise"), strict=True)
]
_MEAN_LEGEND: list[tuple[str, dict[str, Any]]] = [
    ("of the operand", {"marker": "o", "mfc": PAPER, "mec": MUTED, "color": MUTED}),
    ("of its error", {"marker": "o", "color": COLOURS[3]}),
]


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


Panels = Sequence[tuple[str, Sequence[Row]]]
"""Titles, and the rows that they show."""
Draw = Callable[[Axes, Sequence[Row], Sequence[str]], None]
"""Draws the rows of a panel for some recipes."""


def figures(results: Results, form: Form = Form()) -> dict[str, str]:
    """Return all figures by name; variance and growth only where bits were drawn."""
    names = [moment["name"] for moment in results["moments"]]

    def panels(table: str, slots: Sequence[tuple[str, ...]], title: Callable[..., str]) -> Panels:
        """Return a panel for each GEMM or operand and checkpoint."""
        found = rows(results, table)
        return [
            (
                f"{title(*slot)}\n{name}" if len(names) > 1 else title(*slot),
                [
                    row
                    for row in found
                    if (row["moment"], row["role"], row.get("operand"))[: 1 + len(slot)] == (name, *slot)
                ],
            )
            for slot in slots
            for name in names
        ]

    gemms = [(role,) for role in ROLES]
    products = panels("products", gemms, str.capitalize)
    # Of several checkpoints Wgrad's operands alone.
    slots = SLOTS if len(names) == 1 else [slot for slot in SLOTS if slot[0] == "wgrad"]
    operands = panels("operands", slots, slot_title)
    limits = _limits(products)
    found = {
        "snr": (products, _strip("snr", ".1f", limits=limits), "SNR of the product, dB", ()),
        "bias": (
            panels("products", [("wgrad",)], lambda _: "dW"),
            _strip("bias", "+.2f", 100.0, signed=True),
            "bias of dW, %",
            (),
        ),
        "split": (operands, _stack, "energy of the error, % of the operand's", _CAUSE_LEGEND),
        "mean": (operands, _pair, "share in the means of groups, %", _MEAN_LEGEND),
    }
    if limits:
        found["snr"] = (*found["snr"][:2], f"{found['snr'][2]}; an arrow: beyond the axis", ())
    if results["variances"]["rows"]:
        label = "variance over the draws, % of the product's energy"
        found["variance"] = (
            panels("variances", gemms, str.capitalize), _strip("variance", ".2g", 100.0), label, (),
        )  # fmt: skip
    drawn = {name: _figure(results, name, *parts, form) for name, parts in found.items()}
    if results["growth"]["rows"]:
        drawn["growth"] = _growth(results, form)
    return drawn


def _limits(panels: Panels) -> tuple[float, float] | None:
    """Return the ends of the axis of the SNR, so that a decibel is seen: 16 bits and 8 would stretch it.

    It reaches as far above the median recipe as the worst one lies below it; None if nothing lies beyond.
    """
    medians, lowest = [], math.inf
    for _, found in panels:
        for recipe in {row["recipe"] for row in found}:
            values = [row["snr"] for row in found if row["recipe"] == recipe and row["snr"] is not None]
            if values:
                medians.append(median(values))
                lowest = min(lowest, *values)
    if not medians:
        return None
    end = 2 * median(medians) - min(medians)
    return (lowest - 0.5, end + 0.5) if lowest < end < max(medians) else None


def _figure(
    results: Results,
    name: str,
    panels: Panels,
    draw: Draw,
    label: str,
    legend: Sequence[tuple[str, dict[str, Any]]],
    form: Form,
) -> str:
    """Return panels side by side, which share the recipes' lines and the axis; those that do not fit stand below.

    Args:
        results: of the probe.
        name: of the figure.
        panels: what they show.
        draw: draws one.
        label: of the shared axis.
        legend: entries above the panels, each a text and the look of its mark.
        form: the room for them.
    """
    shown = {row["recipe"] for _, found in panels for row in found}
    recipes = {one["name"]: one["label"] for one in results["recipes"] if one["name"] in shown}
    down = -(-len(panels) // form.across)
    across = -(-len(panels) // down)
    height = down * (0.235 * len(recipes) + 0.65) + 0.3 + 0.3 * bool(legend)
    with styled(name + form.suffix):
        figure = Figure(figsize=(form.width, height), layout="constrained")
        grid = figure.subplots(down, across, squeeze=False, sharey=True, sharex=True)
        for axes in grid.ravel()[len(panels) :]:
            axes.set_visible(False)
        for axes, (title, found) in zip(grid.ravel(), panels, strict=False):
            for y in range(len(recipes)):
                axes.axhline(y, color=GRID, lw=0.6, zorder=0)
            draw(axes, found, list(recipes))
            axes.set_title(title, fontsize=9)
            axes.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10]))
            axes.tick_params(labelsize=SMALLEST, labelbottom=True)
            axes.tick_params(axis="y", length=0, labelcolor=INK, labelsize=8.5)
            axes.spines["left"].set_visible(False)
        grid[0, 0].set_ylim(len(recipes) - 0.4, -0.6)
        grid[0, 0].set_yticks(range(len(recipes)), list(recipes.values()))
        figure.supxlabel(textwrap.fill(label, 32) if form.is_narrow else label, fontsize=9, color=MUTED)
        marks = [Line2D([], [], ls="", ms=7, label=text, **look) for text, look in legend]
        if marks:
            figure.legend(
                handles=marks, loc="outside upper left", ncols=2 if form.is_narrow else len(marks), fontsize=9,
            )  # fmt: skip
        return svg(figure, name + form.suffix)


def _strip(
    key: str,
    form: str,
    scale: float = 1.0,
    signed: bool = False,
    limits: tuple[float, float] | None = None,
) -> Draw:
    """Return a function that draws a dot for each layer and a line at their median, whose number stands at the right.

    Of what lies beyond the limits only the median is drawn, as an arrow.
    """
    low, high = limits or (-math.inf, math.inf)

    def draw(axes: Axes, found: Sequence[Row], recipes: Sequence[str]) -> None:
        if signed:
            axes.axvline(0, color=MUTED, lw=1)
        for y, recipe in enumerate(recipes):
            values = [
                scale * row[key] for row in found if row["recipe"] == recipe and row.get(key) is not None
            ]
            if not values:
                continue
            middle, faint = median(values), 0.35 if len(values) > _FEW else 0.9
            inside = [value for value in values if low <= value <= high]
            axes.plot(inside, [y] * len(inside), "o", ms=3.2, color=COLOURS[0], alpha=faint, mew=0)
            if middle > high:
                axes.plot(high, y, ">", ms=4.5, color=INK, mew=0)
            else:
                axes.plot([middle, middle], [y - 0.34, y + 0.34], color=INK, lw=1.6)
            axes.annotate(
                format(middle, form).replace("-", "−"), (1, y), (2, 0), xycoords=axes.get_yaxis_transform(),
                textcoords="offset points", va="center", fontsize=SMALLEST, color=INK, annotation_clip=False,
            )  # fmt: skip
        if limits:
            axes.set_xlim(limits)

    return draw


def _stack(axes: Axes, found: Sequence[Row], recipes: Sequence[str]) -> None:
    """Draw the means over the layers of the four parts of the error."""
    for y, recipe in enumerate(recipes):
        own = [row for row in found if row["recipe"] == recipe and row["noise"] is not None]
        left = 0.0
        for cause, colour in _CAUSES.items():
            width = 100 * fmean(row[f"noise_{cause}"] or 0.0 for row in own) if own else 0.0
            axes.barh(y, width, left=left, height=0.66, color=colour)
            left += width


def _pair(axes: Axes, found: Sequence[Row], recipes: Sequence[str]) -> None:
    """Draw the medians of the shares in the means of groups: of the operand, and of its error."""
    for y, recipe in enumerate(recipes):
        own = [row for row in found if row["recipe"] == recipe]
        ends = []
        for key, face, edge in (("dc_source", PAPER, MUTED), ("dc_noise", COLOURS[3], COLOURS[3])):
            values = [100 * row[key] for row in own if row[key] is not None]
            if values:
                ends.append(median(values))
                axes.plot(ends[-1], y, "o", ms=4.6, mfc=face, mec=edge, mew=1.2, zorder=3)
        axes.plot(ends, [y] * len(ends), color=MUTED, lw=0.9)
    axes.set_xlim(0, 100)


_SERIES = {
    "plain": ("SR", COLOURS[0], "-"),
    "rotated": ("SR + RHT64", COLOURS[3], "-"),
    "plain_bound": ("bound of SR", COLOURS[0], "--"),
    "rotated_bound": ("bound of SR + RHT64", COLOURS[3], "--"),
}


def _growth(results: Results, form: Form) -> str:
    """Return the variance by contraction length in the last checkpoint: a panel for each GEMM.

    Each layer is drawn relative to its own variance at the shortest length without a transform; lines are medians.
    """
    last = results["moments"][-1]["name"]
    found = [row for row in rows(results, "growth") if row["moment"] == last]
    across = min(form.across, len(ROLES))
    down = -(-len(ROLES) // across)
    with styled("growth" + form.suffix):
        figure = Figure(figsize=(form.width, 3.4 if down == 1 else 2.6 * down), layout="constrained")
        panels = figure.subplots(down, across, sharey=True).ravel()
        for axes, role in zip(panels, ROLES, strict=True):
            ends = _curves(axes, [row for row in found if row["role"] == role], form)
            axes.set_title(role.capitalize())
            if axes in panels[across - 1 :: across]:
                label_ends(axes, ends)
        figure.supylabel("variance, 1 = SR at the shortest", fontsize=9, color=MUTED)
        return svg(figure, "growth" + form.suffix)


def _curves(axes: Axes, found: Sequence[Row], form: Form) -> list[tuple[float, float, str, str]]:
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
    quiet(axes)
    axes.set_xscale("log", base=2)
    ticks = 5 if form == Form() else 1 if form.is_narrow else 2
    shown = lengths[:: 1 + len(lengths) // (ticks + 1)]
    axes.set_xticks(shown, [f"{length:,}" for length in shown])
    axes.xaxis.set_minor_locator(NullLocator())
    axes.yaxis.set_major_locator(MaxNLocator(6, integer=True))
    axes.yaxis.set_major_formatter(FuncFormatter(lambda value, _: f"{10.0 ** round(value):,g}"))
    axes.set_xlabel("contraction length b")
    return ends


def _middle(found: Sequence[Row], key: str, length: int) -> float | None:
    """Return the median over the layers; None where no layer has a variance."""
    shortest = min(row["length"] for row in found)
    first = {row["layer"]: row["plain"] for row in found if row["length"] == shortest}
    values = [
        row[key] / first[row["layer"]] for row in found if row["length"] == length and first[row["layer"]]
    ]
    return median(values) if values else None
