"""The look of terminal output, shared by the commands."""

from __future__ import annotations

from rich import box
from rich.console import Console

BOX = box.SIMPLE_HEAD
HEAD = "bold cyan"
QUIET = "dim"


def console() -> Console:
    """Return a console on stdout that prints text as it is: no markup, no emoji codes, no highlighting."""
    return Console(markup=False, emoji=False, highlight=False)
