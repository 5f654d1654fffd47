"""Styles of terminal output, shared by the commands; all printed text has its control codes escaped."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import click
from rich import box
from rich.console import Console, ConsoleOptions, RenderableType
from rich.segment import Segment
from rich.text import Text

from mxref.printable import printable

BOX = box.SIMPLE_HEAD
HEAD = "bold cyan"
QUIET = "dim"


def echo(text: object, err: bool = False) -> None:
    """Print a line on stdout or stderr, with control codes escaped."""
    click.echo(printable(str(text)), err=err)


class _SafeConsole(Console):
    """A console that escapes control codes in all text, but keeps those that rich itself writes."""

    def render_str(self, text: str, *args: Any, **options: Any) -> Text:
        # Escaped before rich measures the text, so that columns fit.
        return super().render_str(printable(text), *args, **options)

    def render(self, renderable: RenderableType, options: ConsoleOptions | None = None) -> Iterable[Segment]:
        for segment in super().render(renderable, options):
            yield segment if segment.control else Segment(printable(segment.text), segment.style)


def console(stderr: bool = False) -> Console:
    """Return a console that prints plain text: no markup, no emoji codes, no highlighting, no control codes."""
    return _SafeConsole(stderr=stderr, markup=False, emoji=False, highlight=False)
