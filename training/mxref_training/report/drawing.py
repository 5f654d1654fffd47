"""The look of every figure: style, labels of curves, and SVG text that stands inside a page or in a file."""

from __future__ import annotations

import io
import math
import re
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import MaxNLocator

from mxref_training.report.palette import INK, painted, variables

LEGIBLE = 10
"""The least height of letters on a screen, in pixels; a narrower screen scrolls a figure instead of shrinking it."""
SMALLEST = 8
"""The least font size in a figure, in points."""
WIDTH = 11.2
"""Of a report's figures, in inches."""

_STYLE = Path(__file__).with_name("report.mplstyle")


@contextmanager
def styled(salt: str) -> Iterator[None]:
    """Draw in the report's style; a reader's browser has the letters that the font here lacks."""
    with mpl.rc_context({"svg.hashsalt": salt}, _STYLE), warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Glyph .* missing from")
        yield


def label_ends(axes: Axes, ends: list[tuple[float, float, str, str]]) -> None:
    """Write each curve's name beside its end, moved apart where they would overlap; a line of its colour joins them."""
    if not ends:
        return
    axes.figure.draw_without_rendering()  # type: ignore[union-attr] # lays the figure out
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
            color=INK,
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "color": colour,
                "lw": 1.2,
                "shrinkA": 2,
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


def plot(axes: Axes, points: Sequence[tuple[float, float]], *style: str, **look: Any) -> None:
    """Draw a curve through points."""
    axes.plot([x for x, _ in points], [y for _, y in points], *style, **look)


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


def token_unit(tokens: float) -> tuple[float, str]:
    """Return the unit in which an axis up to `tokens` is labelled, and its name."""
    for unit, name in ((1e9, "billion"), (1e6, "million"), (1e3, "thousand")):
        if tokens >= unit:
            return unit, name
    return 1.0, "number of"


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
    style = f"stroke-linejoin: round; stroke-linecap: butt; {size_style(text, 4 / 3)}"
    return re.sub(
        r'<svg [^>]*?(viewBox="[^"]*")[^>]*>', rf'<svg role="img" \1 style="{style}">', text, count=1
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


def standalone(svg: str) -> str:
    """Return a figure as a file: with namespaces, and with the palette and the ground that a page would give it."""
    names = 'xmlns="http://www.w3.org/2000/svg" xmlns:xlink="http://www.w3.org/1999/xlink"'
    width, height = re.findall(r'viewBox="0 0 ([\d.]+) ([\d.]+)"', svg)[0]
    head = f'<svg {names} width="{width}pt" height="{height}pt" '
    used = set(re.findall(r"var\(--([\w-]+)\)", svg)) | {"paper"}
    style = f'<style class="palette">{variables("svg", used)}\nsvg {{ background: var(--paper); }}</style>'
    text = re.sub(r"(?<![\w:])href=", "xlink:href=", svg.replace("<svg ", head, 1))
    return re.sub(r"(<svg [^>]*>)", lambda found: f"{found[0]}\n{style}", text, count=1)
