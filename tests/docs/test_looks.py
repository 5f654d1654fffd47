"""The looks of pages and figures: every text stands out from its ground, light and dark, and figures are legible."""

from __future__ import annotations

import re
from itertools import product
from pathlib import Path

import pytest

pytest.importorskip("matplotlib")

from matplotlib.figure import Figure

from bench.plot import standalone
from mxref_training.report import palette
from mxref_training.report.drawing import LEGIBLE, SMALLEST, name_curves, size_style, styled, svg
from places import ROOT

DOCS = ROOT / "docs"
GROUNDS = {"light": "#ffffff", "dark": "#131416"}
"""The grounds of the documentation's theme."""
SCHEMES = {"light": palette.LIGHT, "dark": palette.DARK}
ON_PAPER = ("ink", "text", "muted", "gold-ink")
"""Colours in which text is written on paper and on soft ground."""
COLUMN, PHONE = 736, 358
"""Widths of a page's text in pixels: on a wide screen, and on a phone of 390 pixels."""
MARKS = [
    name
    for name in palette.LIGHT
    if name not in {"paper", "soft", "line", "rule"} and not name.endswith(("-soft", "-ink"))
]
DRAWN = sorted((DOCS / "_static").glob("*.svg"))


def luminance(colour: str) -> float:
    parts = [int(colour[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    red, green, blue = (
        part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts
    )
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    """Return the contrast ratio of two colours (WCAG 2.1)."""
    low, high = sorted((luminance(one), luminance(other)))
    return (high + 0.05) / (low + 0.05)


def test_the_contrast_is_that_of_the_standard() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21)
    assert contrast("#777777", "#ffffff") == pytest.approx(4.48, abs=0.005)


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_text_stands_out_from_its_ground(scheme: str) -> None:
    colours = SCHEMES[scheme]
    pairs = [*product(ON_PAPER, ("paper", "soft"))]
    pairs += [(f"{chip}-ink", f"{chip}-soft") for chip in ("good", "bad", "open")]
    found = {pair: contrast(*(colours[name] for name in pair)) for pair in pairs}
    found |= {(name, scheme): contrast(colours[name], GROUNDS[scheme]) for name in ON_PAPER}
    assert {pair: ratio for pair, ratio in found.items() if ratio < 4.5} == {}


@pytest.mark.parametrize("scheme", SCHEMES)
def test_every_curve_and_bar_is_seen(scheme: str) -> None:
    """A mark needs less than a letter; the hues for colour-blind readers are lighter than letters may be."""
    colours = SCHEMES[scheme]
    faint = {
        name
        for name in MARKS
        for ground in (colours["paper"], GROUNDS[scheme])
        if contrast(colours[name], ground) < 2
    }
    assert faint == set()


def test_no_two_colours_of_a_figure_are_the_same() -> None:
    """The light value of a colour stands for its name while a figure is drawn."""
    assert len(set(palette.LIGHT.values())) == len(palette.LIGHT)


def figure() -> Figure:
    made = Figure(figsize=(4, 3))
    axes = made.subplots()
    axes.plot([0, 1], [0, 1], color=palette.COLOURS[2], label="a curve")
    axes.set_xlabel("steps", fontsize=SMALLEST)
    name_curves(axes)
    return made


def test_a_figure_has_the_colours_of_its_page() -> None:
    with styled("test"):
        element = svg(figure(), "test")
    assert re.findall(r"#[0-9a-f]{6}\b", element) == []
    text = re.findall(r"<text[^>]*style=\"([^\"]*)\"[^>]*>a curve<", element)
    assert "var(--ink)" in text[0]
    assert "<style" not in element
    assert element.startswith('<svg role="img" viewBox="0 0 288 216"')
    file = standalone(element)
    for colours in SCHEMES.values():
        assert f"--green: {colours['green']};" in file
        assert "--olive" not in file
    assert file.index("prefers-color-scheme: dark") < file.index(palette.DARK["green"])


def test_a_figure_keeps_its_letters_legible() -> None:
    with styled("test"):
        element = svg(figure(), "test")
    (least,) = re.findall(r"min-width: (\d+)px", element)
    assert int(least) == 288 * LEGIBLE / SMALLEST
    assert (
        size_style("<svg viewBox='0 0 100 50'><text font-size='5'>") == "min-width: 200px; max-width: 200px"
    )


@pytest.mark.parametrize("path", DRAWN, ids=lambda path: path.name)
def test_stored_drawings_fit_the_column_and_the_phone(path: Path) -> None:
    text = path.read_text(encoding="utf-8")
    narrow = ".narrow" in path.name
    unit = 4 / 3 if re.search(r'<svg [^>]*width="[\d.]+pt"', text) else 1  # of a pixel
    least, width = map(int, re.findall(r"(\d+)px", size_style(text, unit)))
    assert least <= width <= (PHONE if narrow else COLUMN)
    assert narrow or path.with_suffix(".narrow.svg") in DRAWN


def test_drawings_in_pages_name_no_colour_of_their_own() -> None:
    """White letters on dark boxes are the exception: a box brings its own contrast."""
    for path in DRAWN:
        text = re.sub(
            r"<style class=\"palette\">.*?</style>|<style>.*?</style>",
            "",
            path.read_text(encoding="utf-8"),
            flags=re.DOTALL,
        )
        assert re.findall(r"#[0-9a-fA-F]{3,6}\b(?=[;\"'])", text) == [], path.name


def test_boxes_of_the_data_flow_bring_their_own_contrast() -> None:
    text = (DOCS / "_static" / "dataflow.svg").read_text(encoding="utf-8")
    boxes = re.findall(r"\.(?:step|data|train|side) \{ fill: (#[0-9a-f]{6})", text)
    letters = [
        colour if len(colour) == 7 else "#ffffff"
        for colour in re.findall(r"\.(?:name|file|formula) \{ fill: (#[0-9a-f]+)", text)
    ]
    assert (len(boxes), len(letters)) == (4, 3)
    assert min(contrast(box, letter) for box in boxes for letter in letters) >= 4.5
    colours = dict(zip(SCHEMES, re.findall(r"--muted: (#[0-9a-f]{6})", text), strict=True))
    assert colours == {scheme: named["muted"] for scheme, named in SCHEMES.items()}


def test_a_drawing_becomes_part_of_its_page(monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("sphinx")
    monkeypatch.syspath_prepend(str(DOCS / "_ext"))
    from charts import inline

    with styled("test"):
        drawn = standalone(svg(figure(), "test"))
    for text in (drawn, (DOCS / "_static" / "dataflow.svg").read_text(encoding="utf-8")):
        element = inline(text, 'steps "a" < "b"')
        root, _, rest = element.partition(">")
        assert 'role="img" aria-label="steps &quot;a&quot; &lt; &quot;b&quot;"' in root
        assert root.count("min-width") == root.count("style=") == root.count("role=") == 1
        assert not re.search(r'xmlns|\swidth="|\sheight="', root)
        assert "prefers-color-scheme" not in element
        assert "var(--muted)" in rest
        assert rest.endswith("</svg>\n")
