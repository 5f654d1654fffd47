"""Results made safe for a page, a Markdown file and a terminal: their texts come from files that anybody may write."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

from mxref.printable import printable

# An underscore inside a word is no markup in CommonMark.
_MARKUP = re.compile(r"[\\`*\[\]|]|(?<!\w)_|_(?!\w)")


def escaped(value: Any, escape: Callable[[str], str]) -> Any:
    """Return tables and lists with every string in them escaped, the keys too."""
    if isinstance(value, str):
        return escape(value)
    if isinstance(value, dict):
        return {escape(key): escaped(item, escape) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [escaped(item, escape) for item in value]
    return value


def markdown_text(text: str) -> str:
    """Return a text that Markdown shows as it is, in a line of its own or in a cell of a table."""
    line = " ".join(printable(text).split("\n"))
    return _MARKUP.sub(r"\\\g<0>", line.replace("&", "&amp;").replace("<", "&lt;"))
