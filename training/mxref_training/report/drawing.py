"""The look of every figure: style, labels of curves, and SVG text that stands inside a page or in a file."""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, Literal

import numpy as np
from cycler import cycler
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import EngFormatter, MaxNLocator

from mxref_training.report.palette import COLOURS, GRID, INK, MUTED, painted

LEGIBLE = 10
"""The least height of letters on a screen, in pixels; a narrower screen scrolls a figure instead of shrinking it."""
SMALLEST = 8
"""The least font size in a figure, in points."""
WIDTH = 11.2
"""Of a report's figures, in inches."""

MANY = cycler(linestyle=["-", "--", ":"]) * cycler(color=COLOURS)
"""The looks of more curves than there are colours."""
_STYLE = {
    "font.size": 9.5, "text.color": INK, "axes.labelcolor": MUTED, "xtick.color": MUTED, "ytick.color": MUTED,
    "axes.titlelocation": "left", "axes.titlesize": 11, "axes.titleweight": "bold",
    "axes.edgecolor": GRID, "grid.color": GRID, "axes.spines.top": False, "axes.spines.right": False,
    "axes.facecolor": "none", "figure.facecolor": "none", "legend.frameon": False, "axes.axisbelow": True,
    "axes.prop_cycle": cycler(color=COLOURS),
    "text.parse_math": False,  # labels are text: a dollar sign begins no formula
    "svg.fonttype": "none",
}  # fmt: skip


@contextmanager
def styled(salt: str) -> Iterator[None]:
    """Draw in the report's style, whatever the user's own is; a browser has the letters that this font lacks."""
    with style.context(["default", _STYLE | {"svg.hashsalt": salt}]), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        yield


def name_curves(
    axes: Axes, place: Literal["outside right upper", "outside lower left"] = "outside right upper"
) -> None:
    """List the curves that have a label at a place of the figure, in the order of their ends."""
    lines = [line for line in axes.lines if not str(line.get_label()).startswith("_")]
    lines.sort(key=lambda line: np.asarray(line.get_ydata())[-1], reverse=True)
    axes.figure.legend(handles=lines, loc=place, fontsize=SMALLEST)


def plot(axes: Axes, points: Sequence[tuple[float, float]], **look: Any) -> None:
    """Draw a curve through points."""
    axes.plot([x for x, _ in points], [y for _, y in points], **look)


def quiet(axes: Axes, along: str = "y", ticks: int = 6, whole: bool = False) -> None:
    """Draw a grid along an axis, and few ticks on the horizontal one."""
    axes.grid(axis=along)  # type: ignore[arg-type]
    axes.xaxis.set_major_locator(MaxNLocator(ticks, steps=[1, 2, 5, 10], integer=whole))


def zoom(axes: Axes, losses: list[float]) -> None:
    """Cut off the first fall of the loss, which would press all differences into one line."""
    if len(losses) > 2 and min(losses) < max(losses):
        ordered = sorted(losses)
        upper = ordered[int(0.97 * (len(ordered) - 1))]
        room = 0.06 * (upper - ordered[0])
        axes.set_ylim(ordered[0] - room, upper + room)


def count_tokens(axes: Axes, tokens: float) -> None:
    """Make the horizontal axis one of tokens, from 0 to a number of them."""
    axes.set_xlabel("tokens")
    axes.set_xlim(0, 1.01 * tokens)
    axes.xaxis.set_major_formatter(EngFormatter())


def svg(figure: Figure, prefix: str) -> str:
    """Return the figure as an `<svg>` element without namespaces, metadata or ids that another could share.

    Its colours are the page's variables, and it is not shown so narrow that its letters become illegible.
    """
    buffer = io.StringIO()
    figure.savefig(
        buffer, format="svg", metadata={"Date": None, "Creator": None, "Format": None, "Type": None}
    )
    text = buffer.getvalue()
    text = text[text.index("<svg") :]
    text = re.sub(r"<metadata>.*?</metadata>", "", text, flags=re.DOTALL)
    # A style element would hold for the whole page; the root hands its own style down to this figure alone.
    text = re.sub(r"<defs>\s*<style.*?</style>\s*</defs>", "", text, flags=re.DOTALL)
    text = re.sub(r'\sxmlns(:\w+)?="[^"]*"', "", text)
    # An image's id is a hash of its content, which two panels can share; nothing refers to it.
    text = re.sub(r'(<image\b[^>]*?)\sid="[^"]*"', r"\1", text)
    text = re.sub(r'\bid="([^"]+)"', rf'id="{prefix}-\1"', text)
    text = re.sub(r'href="#([^"]+)"', rf'href="#{prefix}-\1"', text)
    text = re.sub(r"url\(#([^)]+)\)", rf"url(#{prefix}-\1)", text)
    text = painted(text.replace("'DejaVu Sans'", "system-ui"))
    look = f"stroke-linejoin: round; stroke-linecap: butt; {size_style(text, 4 / 3)}"
    return re.sub(
        r'<svg [^>]*?(viewBox="[^"]*")[^>]*>', rf'<svg role="img" \1 style="{look}">', text, count=1
    )


def size_style(svg: str, unit: float = 1.0) -> str:
    """Return the widths between which a figure is shown, as CSS: its own, and the least at which it is legible.

    Args:
        svg: the figure.
        unit: of its coordinates, in pixels.
    """
    (_, _, width, _) = map(float, re.findall(r'viewBox=["\']([^"\']*)', svg)[0].split())
    sizes = re.findall(r"font(?:-size)?: ?([\d.]+)px", svg) + re.findall(r"font-size=[\"']([\d.]+)", svg)
    least = width * LEGIBLE / min(map(float, sizes)) if sizes else 0
    return f"min-width: {math.ceil(least)}px; max-width: {max(width * unit, least):.0f}px"
