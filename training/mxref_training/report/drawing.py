"""The look of every figure: style, colours, labels of curves, and SVG text that can stand inside a page."""

from __future__ import annotations

import io
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

INK, MUTED, GRID, BAND = "#1f2933", "#6b7785", "#e6e9ee", "#f1f3f6"
# Okabe and Ito's colours, told apart by readers with any colour vision, and more for long ladders.
COLOURS = (
    "#0072b2",
    "#56b4e9",
    "#009e73",
    "#d55e00",
    "#cc79a7",
    "#e69f00",
    "#7b4fb5",
    "#8c6d31",
    "#a50f4f",
    "#4c78a8",
    "#5f6f1f",
)

_STYLE: Any = {
    "font.family": "DejaVu Sans",
    "font.size": 9.5,
    "axes.edgecolor": GRID,
    "axes.labelcolor": MUTED,
    "axes.linewidth": 0.8,
    "axes.titlecolor": INK,
    "axes.titlelocation": "left",
    "axes.titlesize": 11,
    "axes.titleweight": "bold",
    "axes.spines.top": False,
    "axes.spines.right": False,
    "grid.color": GRID,
    "grid.linewidth": 0.8,
    "text.color": INK,
    # Labels are text: a dollar sign begins no formula.
    "text.parse_math": False,
    "text.usetex": False,
    "xtick.color": MUTED,
    "ytick.color": MUTED,
    "svg.fonttype": "none",
    "axes.facecolor": "none",
    "figure.facecolor": "none",
    "savefig.facecolor": "none",
}

VARIABLES = {INK: "--ink", MUTED: "--muted", GRID: "--line", BAND: "--soft"}
"""Colours that follow the page's own, light or dark."""


@contextmanager
def styled(salt: str) -> Iterator[None]:
    """Draw in the report's style; a reader's browser has the letters that the font here lacks."""
    with mpl.rc_context(_STYLE | {"svg.hashsalt": salt}), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        yield


def label_ends(axes: Axes, ends: list[tuple[float, float, str, str]]) -> None:
    """Write each curve's name beside its end, moved apart where they would overlap."""
    if not ends:
        return
    bottom, top = axes.get_ylim()
    axes.set_ylim(bottom, top)
    height = axes.get_window_extent().height * 72 / axes.figure.dpi  # in points
    ordered = sorted(ends)
    places = _spread([value for value, _, _, _ in ordered], 11.5 / height * (top - bottom))
    for (value, x, text, colour), y in zip(ordered, places, strict=True):
        axes.annotate(
            text,
            xy=(x, value),
            xytext=(1.06, y),
            textcoords=("axes fraction", "data"),
            va="center",
            fontsize=8.5,
            color=colour,
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": colour,
                "lw": 0.6,
                "shrinkA": 1,
                "shrinkB": 0,
                "relpos": (0, 0.5),
            },
        )


def _spread(values: Sequence[float], step: float) -> list[float]:
    """Return ascending values moved as little as possible until neighbours are `step` apart."""
    groups: list[tuple[float, int]] = []  # centre and number of labels that touch
    for value in values:
        groups.append((value, 1))
        while len(groups) > 1 and groups[-1][0] - groups[-2][0] < step * (groups[-1][1] + groups[-2][1]) / 2:
            (b, n), (a, m) = groups.pop(), groups.pop()
            groups.append(((a * m + b * n) / (m + n), m + n))
    return [centre + step * (i - (n - 1) / 2) for centre, n in groups for i in range(n)]


def zoom(axes: Axes, losses: list[float]) -> None:
    """Cut off the first fall of the loss, which would press all differences into one line."""
    if len(losses) > 2 and min(losses) < max(losses):
        ordered = sorted(losses)
        upper = ordered[int(0.97 * (len(ordered) - 1))]
        room = 0.06 * (upper - ordered[0])
        axes.set_ylim(ordered[0] - room, upper + room)


def token_unit(tokens: float) -> tuple[float, str]:
    """Return the unit in which an axis up to `tokens` is labelled, and its name."""
    for unit, name in ((1e9, "billion"), (1e6, "million"), (1e3, "thousand")):
        if tokens >= unit:
            return unit, name
    return 1.0, "number of"


def svg(figure: Figure, prefix: str) -> str:
    """Return the figure as an `<svg>` element without namespaces, metadata or ids that another could share."""
    buffer = io.StringIO()
    figure.savefig(
        buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None}
    )
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    text = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", text)
    # An image's id is a hash of its content, which two panels can share; nothing refers to it.
    text = re.sub(r'(<image\b[^>]*?)\sid="[^"]*"', r"\1", text)
    text = re.sub(r'\bid="([^"]+)"', rf'id="{prefix}-\1"', text)
    text = re.sub(r'href="#([^"]+)"', rf'href="#{prefix}-\1"', text)
    text = re.sub(r"url\(#([^)]+)\)", rf"url(#{prefix}-\1)", text)
    text = text.replace("'DejaVu Sans'", "system-ui")
    for colour, variable in VARIABLES.items():
        text = text.replace(colour, f"var({variable})")
    return re.sub(r'<svg ([^>]*?)height="[^"]*"([^>]*?)width="[^"]*"', r'<svg role="img" \1\2', text, count=1)
