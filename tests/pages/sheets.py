"""Contact sheets: the screenshots of many pages side by side in a few images."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from PIL import Image, ImageDraw

TALL = 2.4
"""Height of a picture over its width: the head of a long page stands for it."""
_TITLE = 16


def write(
    shots: Iterable[tuple[str, Path]], folder: Path, name: str, width: int, across: int, down: int
) -> list[Path]:
    """Write sheets NAME-1.png, NAME-2.png and so on, and return their paths.

    Args:
        shots: titles and screenshots.
        folder: the sheets' own.
        name: of the sheets.
        width: of each picture, in pixels.
        across: pictures in a row.
        down: rows of a sheet.
    """
    paths = []
    height = round(TALL * width)
    for number, group in enumerate(_groups(list(shots), across * down), 1):
        sheet = Image.new("RGB", (across * (width + 8), down * (height + _TITLE + 8)), "#7f7f7f")
        draw = ImageDraw.Draw(sheet)
        for i, (title, path) in enumerate(group):
            x, y = i % across * (width + 8), i // across * (height + _TITLE + 8)
            draw.text((x + 2, y + 2), title, fill="white")
            with Image.open(path) as shot:
                small = shot.convert("RGB").resize((width, round(shot.height * width / shot.width)))
                sheet.paste(small, (x, y + _TITLE))
        paths.append(folder / f"{name}-{number}.png")
        sheet.save(paths[-1])
    return paths


def _groups(shots: list[tuple[str, Path]], size: int) -> Iterable[list[tuple[str, Path]]]:
    return (shots[i : i + size] for i in range(0, len(shots), size))
