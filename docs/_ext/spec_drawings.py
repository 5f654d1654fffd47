"""Drawings of the specification, made as SVG while the pages are built: bit fields, the element grid, a butterfly."""

from __future__ import annotations

import math
from html import escape
from itertools import pairwise
from typing import ClassVar

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.util.docutils import SphinxDirective

from mxref.formats import E2M1

WIDTH = 720
LEGIBLE = 10 / 11
"""No drawing is shown smaller than this share of its width, or its letters of 11 pixels become too small to read.

A small screen scrolls it instead.
"""
FONT = "font-family='inherit' font-size='13'"


def _figure(svg: str, caption: str) -> list[nodes.Node]:
    box = nodes.container(classes=["spec-figure"])
    box += nodes.raw("", svg, format="html")
    if caption:
        box += nodes.paragraph("", caption, classes=["spec-caption"])
    return [box]


def _svg(height: float, label: str, body: list[str], width: float = WIDTH) -> str:
    return (
        f"<svg viewBox='0 0 {width:g} {height:g}' role='img' aria-label='{escape(label)}'"
        f" style='max-width:{width:g}px; min-width:{math.ceil(width * LEGIBLE)}px'"
        f" {FONT}>{''.join(body)}</svg>"
    )


def _text(x: float, y: float, text: str, anchor: str = "middle", kind: str = "") -> str:
    return f"<text x='{x:.1f}' y='{y:.1f}' text-anchor='{anchor}' class='d-text {kind}'>{escape(text)}</text>"


def bitfield_svg(bits: int, fields: list[tuple[int, int, str]], label: str) -> str:
    """Return a row of fields, the highest bit on the left: (high, low, name) each.

    Raises:
        ValueError: the fields do not cover the bits from the highest down to 0 without gap or overlap.
    """
    expected = bits - 1
    for high, low, name in fields:
        if high != expected or low > high:
            raise ValueError(f"field {name!r} is bits {high}-{low}, but bit {expected} comes next")
        expected = low - 1
    if expected != -1:
        raise ValueError(f"bits {expected} to 0 have no field")
    widest = max(high - low + 1 for high, low, _ in fields)
    # Wide enough for each name, and otherwise proportional to the number of bits.
    share = [
        max(high - low + 1, 0.09 * widest * len(name) ** 0.9, 0.06 * widest) for high, low, name in fields
    ]
    scale = (WIDTH - 2) / sum(share)
    scale = min(scale, 46.0) if bits <= 8 else scale
    if bits <= 8:
        share = [max(high - low + 1, len(name) * 9 / scale) for high, low, name in fields]
    x, body = 1.0, []
    for (high, low, name), part in zip(fields, share, strict=True):
        width = part * scale
        body.append(f"<rect x='{x:.1f}' y='20' width='{width:.1f}' height='34' class='d-box'/>")
        body.append(_text(x + width / 2, 42, name))
        body.append(_text(x + 4, 14, str(high), "start", "d-small"))
        if high != low:
            body.append(_text(x + width - 4, 14, str(low), "end", "d-small"))
        x += width
    return _svg(58, label, body, x + 1)


def grid_svg() -> str:
    """Return the magnitudes of the element on a line, the ties between them, and the codes."""
    left, right = 24.0, WIDTH - 60.0

    def at(value: float) -> float:
        return left + (right - left) * value / 8

    body = [f"<line x1='{left}' y1='46' x2='{right + 30}' y2='46' class='d-line'/>"]
    body.append(f"<line x1='{at(6):.1f}' y1='46' x2='{right + 30}' y2='46' class='d-strong'/>")
    body.append(_text(at(7.2), 36, "saturates to 6", kind="d-small"))
    for code, value in enumerate(E2M1.magnitudes):
        x = at(value)
        body.append(f"<circle cx='{x:.1f}' cy='46' r='5' class='d-dot'/>")
        body.append(_text(x, 30, f"{value:g}"))
        body.append(_text(x, 84, f"{code:03b}", kind="d-small"))
    for low, high in pairwise(E2M1.magnitudes):
        x = at((low + high) / 2)
        body.append(f"<line x1='{x:.1f}' y1='39' x2='{x:.1f}' y2='53' class='d-tie'/>")
        body.append(_text(x, 67, f"{(low + high) / 2:g}", kind="d-small"))
    body.append(_text(right + 32, 88, "code", "end", "d-small"))
    body.append(_text(right + 32, 68, "ties", "end", "d-small"))
    return _svg(94, "The grid of E2M1, 0, 0.5, 1, 1.5, 2, 3, 4, 6, with its ties", body)


def butterfly_svg(n: int = 8) -> str:
    """Return the data flow of a transform of size n, stage by stage."""
    row, column = 26.0, 170.0
    stages = n.bit_length() - 1
    top, left = 34.0, 60.0
    body = []
    for stage in range(stages):
        h = 1 << stage
        x0, x1 = left + stage * column, left + (stage + 1) * column - 30
        body.append(_text((x0 + x1) / 2, 16, f"h = {h}", kind="d-small"))
        for i in range(n):
            y = top + i * row
            partner = top + (i ^ h) * row
            kind = "d-minus" if i & h else "d-line"
            body.append(f"<line x1='{x0}' y1='{y}' x2='{x1}' y2='{y}' class='{kind}'/>")
            body.append(f"<line x1='{x0}' y1='{partner}' x2='{x1}' y2='{y}' class='d-line'/>")
            body.append(f"<circle cx='{x1}' cy='{y}' r='3' class='d-dot'/>")
            body.append(f"<line x1='{x1}' y1='{y}' x2='{x1 + 30}' y2='{y}' class='d-line'/>")
    end = left + stages * column
    for i in range(n):
        body.append(_text(left - 8, top + i * row + 4, f"z[{i}]", "end"))
        body.append(_text(end + 6, top + i * row + 4, f"· c = y[{i}]", "start"))
    label = f"Butterfly of a transform of size {n}: stages at distance 1, 2, 4"
    return _svg(top + n * row, label, body, end + 90)


class Bitfield(SphinxDirective):
    """A row of bit fields: the argument is the caption, each line of the content `high-low name`."""

    optional_arguments = 1
    final_argument_whitespace = True
    has_content = True
    option_spec: ClassVar = {"bits": directives.positive_int}

    def run(self) -> list[nodes.Node]:
        fields = []
        for line in filter(None, self.content):
            span, _, name = line.partition(" ")
            high, _, low = span.partition("-")
            fields.append((int(high), int(low or high), name.strip()))
        caption = self.arguments[0] if self.arguments else ""
        try:
            return _figure(bitfield_svg(self.options["bits"], fields, caption), caption)
        except ValueError as err:
            raise self.error(str(err)) from err


class Drawing(SphinxDirective):
    """One of the drawings by name: `grid` or `butterfly`."""

    required_arguments = 1
    has_content = True

    def run(self) -> list[nodes.Node]:
        captions = {
            "grid": "The grid of E2M1: magnitudes above, ties and codes below.",
            "butterfly": "A group of 8: every dot is one fl32 addition, or one fl32 subtraction where a dashed line "
            "enters; the dashed line carries the subtrahend.",
        }
        if self.arguments[0] not in captions:
            raise self.error(f"no drawing {self.arguments[0]!r}; known: {', '.join(captions)}")
        svg = {"grid": grid_svg, "butterfly": butterfly_svg}[self.arguments[0]]()
        return _figure(svg, captions[self.arguments[0]])
