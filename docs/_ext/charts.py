"""Sphinx extension: SVG images become part of the page, so that they follow its colours, light or dark.

An image `x.svg` may have a sibling `x.narrow.svg`, which takes its place on narrow screens.
Either scrolls within its frame where the screen is too narrow for its letters.
"""

from __future__ import annotations

import re
from html import escape
from pathlib import Path
from typing import Any, ClassVar

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.transforms.post_transforms import SphinxPostTransform

from mxref_training.report.drawing import size_style
from mxref_training.report.palette import DARK, LIGHT


def inline(text: str, alt: str) -> str:
    """Return the SVG element of a file as it stands in a page: without the style that it brings for pages of others."""
    text = text[text.index("<svg") :]
    text = re.sub(r'<style class="palette">.*?</style>\s*', "", text, count=1, flags=re.DOTALL)
    text = re.sub(r"xlink:href=", "href=", text)
    root, rest = text.split(">", 1)
    root = re.sub(r'\s(?:xmlns(?::\w+)?|width|height|role|aria-\w+)="[^"]*"', "", root)
    if "min-width" not in root:
        root += f' style="{size_style(text)}"'
    return f'{root} role="img" aria-label="{escape(alt)}">{rest}'


class InlineCharts(SphinxPostTransform):
    """Puts the content of SVG files in the place of images."""

    default_priority = 100
    formats: ClassVar = ("html",)

    def run(self, **_: Any) -> None:
        """Replace the images of a page."""
        for image in list(self.document.findall(nodes.image)):
            path = Path(self.app.srcdir) / image["uri"]
            if path.suffix != ".svg":
                continue
            narrow = path.with_suffix(".narrow.svg")
            variants = {"wide" if narrow.exists() else "": path} | (
                {"narrow": narrow} if narrow.exists() else {}
            )
            image.replace_self(
                [
                    nodes.raw(
                        "",
                        f'<div class="chart {kind}" tabindex="0">'
                        f"{inline(file.read_text(encoding='utf-8'), image.get('alt', ''))}</div>",
                        format="html",
                    )
                    for kind, file in variants.items()
                ]
            )


def colours(app: Sphinx, config: Any) -> None:
    """Give the theme the palette of the charts, light and dark."""
    options = config.html_theme_options
    for scheme, palette in (("light", LIGHT), ("dark", DARK)):
        options[f"{scheme}_css_variables"] = palette | options.get(f"{scheme}_css_variables", {})


def setup(app: Sphinx) -> dict[str, bool]:
    """Replace the images once the pages are read."""
    app.connect("config-inited", colours)
    app.add_post_transform(InlineCharts)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
