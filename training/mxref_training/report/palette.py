"""The colours of pages and figures, each with a value for light pages and one for dark pages.

A figure is drawn with the light values; `painted` puts the page's CSS variables in their place.
"""

from __future__ import annotations

import re
from collections.abc import Container

# The hues are Okabe and Ito's, told apart by readers with any colour vision, and more for long ladders.
_PAIRS = {
    "paper": ("#ffffff", "#171c22"),
    "soft": ("#f1f3f6", "#222932"),
    "line": ("#e6e9ee", "#333c48"),
    "rule": ("#cfd5dc", "#4a5563"),
    "ink": ("#1f2933", "#e4e8ee"),
    "text": ("#3a4552", "#c3cbd5"),
    "muted": ("#5f6b7a", "#9aa5b3"),
    "slate": ("#838d9a", "#94a0ae"),
    "grey": ("#a9b1bb", "#66717f"),
    "blue": ("#0072b2", "#3191d3"),
    "sky": ("#56b4e9", "#a5dcf8"),
    "green": ("#009e73", "#1fb98c"),
    "vermilion": ("#d55e00", "#e8762b"),
    "pink": ("#cc79a7", "#d58db5"),
    "orange": ("#e69f00", "#f0b429"),
    "violet": ("#7b4fb5", "#a586d8"),
    "brown": ("#8c6d31", "#b8954f"),
    "crimson": ("#a50f4f", "#e25e94"),
    "steel": ("#4c78a8", "#7fa3cc"),
    "olive": ("#5f6f1f", "#98aa4a"),
    "azure": ("#3d94c9", "#2a79ab"),
    "tangerine": ("#eb8a3d", "#c4631a"),
    "mint": ("#6fb89e", "#147a5b"),
    "gold": ("#d4a72c", "#a98628"),
    "gold-ink": ("#7c5e0c", "#dcb95a"),
    "good-ink": ("#14663a", "#8fdcae"),
    "good-soft": ("#dff3e6", "#173626"),
    "bad-ink": ("#9b2318", "#f3a59c"),
    "bad-soft": ("#fbe3e1", "#44211e"),
    "open-ink": ("#6f5206", "#e8cb7d"),
    "open-soft": ("#fdf1d3", "#3a3016"),
}
LIGHT = {name: light for name, (light, _) in _PAIRS.items()}
DARK = {name: dark for name, (_, dark) in _PAIRS.items()}

PAPER, INK, MUTED, GRID, BAND, SLATE, GREY, GOLD = (
    LIGHT[name] for name in ("paper", "ink", "muted", "line", "soft", "slate", "grey", "gold")
)
AZURE, TANGERINE, MINT = (LIGHT[name] for name in ("azure", "tangerine", "mint"))
COLOURS = tuple(
    LIGHT[name]
    for name in (
        "blue", "sky", "green", "vermilion", "pink", "orange", "violet", "brown", "crimson", "steel", "olive",
    )
)  # fmt: skip
"""Of the curves and bars of a figure, in this order."""

_NAMES = {colour: name for name, colour in LIGHT.items()}


def painted(text: str) -> str:
    """Return a text with the page's variables in place of the light values of the palette."""
    return re.sub(
        r"#[0-9a-f]{6}\b",
        lambda found: f"var(--{_NAMES[found[0]]})" if found[0] in _NAMES else found[0],
        text,
    )


def variables(selector: str, names: Container[str] = LIGHT) -> str:
    """Return CSS that sets colours of the palette on an element, by the reader's colour scheme; print is light."""
    light, dark = (
        " ".join(f"--{name}: {colour};" for name, colour in colours.items() if name in names)
        for colours in (LIGHT, DARK)
    )
    return (
        f"{selector} {{ color-scheme: light dark; {light} }}\n"
        f"@media screen and (prefers-color-scheme: dark) {{ {selector} {{ {dark} }} }}"
    )
