"""A progress bar on standard error, shown only at a terminal."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")


def progress(items: Iterable[T], title: str, total: int | None = None) -> Iterable[T]:
    """Return the items, to be iterated once; show a progress bar if standard error is a terminal.

    Args:
        items: anything that can be iterated once.
        title: what is being done, in a few words.
        total: number of items, if `items` has no length.
    """
    from rich.markup import escape
    from rich.progress import track

    from mxref.printable import printable
    from mxref.terminal import console

    err = console(stderr=True)
    # The title may hold the name of a file, which is no markup.
    name = escape(printable(title))
    return track(items, name, total, console=err, transient=True, disable=not err.is_terminal)
