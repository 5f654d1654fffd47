"""The report of a probe. In a figure a line of each panel is a recipe, a dot is a layer."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import fmean, median

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.patches import Patch
from matplotlib.ticker import MaxNLocator

from mxref_training.probe.results import CAUSES, Results, Row, rows
from mxref_training.report.drawing import SMALLEST, WIDTH, styled, svg
from mxref_training.report.page import Page
from mxref_training.report.palette import COLOURS, GOLD, GREY, GRID, INK, MUTED
from mxref_training.report.probe.tables import ROLES, SLOTS, headline, slot_title, summary
from mxref_training.report.table import Column, Table, facts_of, written

NAME = "probe"
_FEW = 3
"""Dots that do not cover each other, such as three quartiles, and are not drawn faint."""
_CAUSES = dict(zip(CAUSES, (COLOURS[3], COLOURS[0], GOLD, GREY), strict=True))
"""Colours told apart by lightness too, so that colour-blind readers and grey prints lose nothing."""
_NAMES = dict(zip(CAUSES, ("scale bias", "dead zone", "clipping", "grid noise"), strict=True))

Panels = Sequence[tuple[str, Sequence[Row]]]
"""Titles, and the rows that they show."""
Draw = Callable[[Axes, int, Sequence[Row]], None]
"""Draws the rows of a recipe in its line of a panel."""


def write_page(results: Results, folder: Path) -> tuple[Path, Path]:
    """Write `probe.html` and `probe.md` into a folder, as `Page.write` does."""
    return probe_page(results).write(folder, NAME, "free some space, or choose another --out")


def probe_page(results: Results) -> Page:
    """Return the page: what decides, the medians, the figures, and what the numbers stand on."""
    page = Page(f"Probe of {', '.join(moment['name'] for moment in results['moments'])}")
    page.add("text", headline(results), "headline")
    page.add(
        "text",
        f"{len(results['recipes'])} recipes on {results['batch']['name']}. One forward and backward pass in BF16 gives "
        "X, W and dY of every linear layer. Each recipe's operands and GEMMs are compared with exact products on them. "
        "A recipe with phases is shown as it is at the step of the checkpoint. No weight is updated.",
        "lead",
    )
    page.add(
        "table",
        summary(results),
        "Medians over the layers, also over those that a recipe leaves in BF16. SNR: energy of the exact product over "
        "that of the error. Bias: the error's projection on the exact product, over that product's own; negative means "
        "that the result shrinks.",
    )
    for name, drawn in figures(results).items():
        title, caption = _FIGURES[name]
        page.add("h2", title)
        page.add("figure", drawn, caption)
    page.add("h2", "Recipes")
    columns = [Column("recipe", "Recipe", of="label", left=True), Column("digest", "Digest", left=True)]
    columns += [Column(role.capitalize(), left=True) for role in ROLES]
    page.add(
        "table", Table.of("recipes", columns, [one | dict(one["treatment"]) for one in results["recipes"]])
    )
    page.add("h2", "Provenance")
    page.add("terms", _provenance(results))
    return page


_FIGURES = {
    "snr": (
        "SNR of the products",
        "A dot is a layer, the bar their median, which the number gives. More is better.",
    ),
    "bias": (
        "Bias of the gradients of the weights",
        "A dot is a layer. A bias adds up over the steps, noise averages out.",
    ),
    "split": (
        "Error of the operands by cause",
        "Means over the layers; the four parts add up to the whole error. Scale bias: what one better factor for each "
        "block would take away. Dead zone: elements that became zero. Clipping: elements above the largest magnitude. "
        "Grid noise: the rest.",
    ),
    "variance": (
        "Variance over draws of the random bits",
        "A dot is a layer: the variance of an element of the product, averaged over a corner of it. Recipes without "
        "random bits have none.",
    ),
}
"""Heading and caption of each figure."""


def _provenance(results: Results) -> list[tuple[str, str]]:
    batch, backend = results["batch"], results["backend"]
    moments = [
        (
            moment["name"],
            f"{moment['checkpoint']}, after {moment['tokens']:,} tokens, trained by recipe "
            f"{moment['trained_by'] or 'without a name'}, loss of the batch {moment['loss']:.4f}; SHA-256 of the "
            f"weights {moment['model_sha256']}",
        )
        for moment in results["moments"]
    ]
    return [
        ("mxref", f"{results['mxref']}, backend {backend['name']} {backend['details']}".strip()),
        (
            "Batch",
            f"{batch['sequences']} × {batch['length']} tokens, {batch['name']}; SHA-256 {batch['sha256']}",
        ),
        *moments,
        *((part.capitalize(), facts_of(results[part])) for part in ("versions", "hardware")),
    ]


# ---- the figures ----


def figures(results: Results, width: float = WIDTH, across: int = 9, suffix: str = "") -> dict[str, str]:
    """Return all figures by name; the variance only where bits were drawn.

    Args:
        results: of the probe.
        width: of a figure, in inches.
        across: most panels side by side.
        suffix: of the ids in the figures, where a page has them in several widths.
    """
    names = [moment["name"] for moment in results["moments"]]

    def panels(table: str, slots: Sequence[tuple[str, ...]], title: Callable[..., str]) -> Panels:
        """Return a panel for each GEMM or operand and checkpoint."""
        places: dict[tuple[str, ...], list[Row]] = {(name, *slot): [] for slot in slots for name in names}
        for row in rows(results, table):
            place = tuple(row[key] for key in ("moment", "role", "operand")[: 1 + len(slots[0])])
            if place in places:
                places[place].append(row)
        return [
            (f"{title(*slot)}\n{name}" if len(names) > 1 else title(*slot), found)
            for (name, *slot), found in places.items()
        ]

    def drawn(
        name: str, shown: Panels, draw: Draw, label: str, limits: tuple[float, float] | None = None
    ) -> str:
        recipes = {row["recipe"] for _, found in shown for row in found}
        lines = {one["name"]: one["label"] for one in results["recipes"] if one["name"] in recipes}
        narrow = width < WIDTH / 2
        down = math.ceil(len(shown) / across)
        height = down * (0.235 * len(lines) + 0.65) + 0.6
        with styled(name + suffix):
            figure = Figure(figsize=(width, height), layout="constrained")
            grid = figure.subplots(
                down, math.ceil(len(shown) / down), squeeze=False, sharey=True, sharex=True
            ).ravel()
            for axes in grid[len(shown) :]:
                axes.set_visible(False)
            for axes, (title, found) in zip(grid, shown, strict=False):
                for y, recipe in enumerate(lines):
                    axes.axhline(y, color=GRID, lw=0.6, zorder=0)
                    draw(axes, y, [row for row in found if row["recipe"] == recipe])
                axes.set_title(title, fontsize=9)
                axes.xaxis.set_major_locator(MaxNLocator(4, steps=[1, 2, 5, 10]))
                axes.tick_params(labelsize=SMALLEST, labelbottom=True)
                axes.tick_params(axis="y", length=0, labelcolor=INK, labelsize=8.5)
                axes.spines["left"].set_visible(False)
            grid[0].set_xlim(limits)
            grid[0].set_ylim(len(lines) - 0.4, -0.6)
            grid[0].set_yticks(range(len(lines)), list(lines.values()))
            figure.supxlabel(textwrap.fill(label, 32) if narrow else label, fontsize=9, color=MUTED)
            if draw is _stack:
                marks = [Patch(color=_CAUSES[cause], label=_NAMES[cause]) for cause in CAUSES]
                figure.legend(handles=marks, loc="outside upper left", ncols=2 if narrow else 4, fontsize=9)
            return svg(figure, name + suffix)

    gemms = [(role,) for role in ROLES]
    products = panels("products", gemms, str.capitalize)
    # Of several checkpoints Wgrad's operands alone.
    operands = panels(
        "operands", [slot for slot in SLOTS if len(names) == 1 or slot[0] == "wgrad"], slot_title
    )
    limits = _limits(products)
    snr = f"SNR of the product, dB{'; an arrow: beyond the axis' if limits else ''}"
    found = {
        "snr": drawn("snr", products, _strip("snr", ".1f", limits=limits), snr, limits),
        "bias": drawn(
            "bias",
            panels("products", [("wgrad",)], lambda _: "dW"),
            _strip("bias", "+.2f", 100.0),
            "bias of dW, %",
        ),
        "split": drawn("split", operands, _stack, "energy of the error, % of the operand's"),
    }
    if results["variances"]["rows"]:
        shown = panels("variances", gemms, str.capitalize)
        label = "variance over the draws, % of the product's energy"
        found["variance"] = drawn("variance", shown, _strip("variance", ".2g", 100.0), label)
    return found


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


def _strip(key: str, form: str, scale: float = 1.0, limits: tuple[float, float] | None = None) -> Draw:
    """Return a function that draws a dot for each layer and a line at their median, whose number stands at the right.

    Of what lies beyond the limits only the median is drawn, as an arrow.
    """
    low, high = limits or (-math.inf, math.inf)

    def draw(axes: Axes, y: int, found: Sequence[Row]) -> None:
        values = [scale * row[key] for row in found if row[key] is not None]
        if not values:
            return
        middle, faint = median(values), 0.35 if len(values) > _FEW else 0.9
        inside = [value for value in values if low <= value <= high]
        axes.plot(inside, [y] * len(inside), "o", ms=3.2, color=COLOURS[0], alpha=faint, mew=0)
        if middle > high:
            axes.plot(high, y, ">", ms=4.5, color=INK, mew=0)
        else:
            axes.plot([middle, middle], [y - 0.34, y + 0.34], color=INK, lw=1.6)
        axes.annotate(
            written(middle, form), (1, y), (2, 0), xycoords=axes.get_yaxis_transform(),
            textcoords="offset points", va="center", fontsize=SMALLEST, color=INK, annotation_clip=False,
        )  # fmt: skip

    return draw


def _stack(axes: Axes, y: int, found: Sequence[Row]) -> None:
    """Draw the means over the layers of the four parts of the error."""
    own = [row for row in found if row["noise"] is not None]
    left = 0.0
    for cause, colour in _CAUSES.items():
        width = 100 * fmean(row[f"noise_{cause}"] or 0.0 for row in own) if own else 0.0
        axes.barh(y, width, left=left, height=0.66, color=colour)
        left += width
