"""A progress bar on standard error, shown only at a terminal."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def progress(items: Iterable[T], title: str, total: int | None = None) -> Iterator[T]:
    """Yield the items; show a progress bar if standard error is a terminal.

    Args:
        items: anything that can be iterated once.
        title: what is being done, in a few words.
        total: number of items, if `items` has no length.
    """
    from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeRemainingColumn

    from mxref.printable import printable
    from mxref.terminal import console

    err = console(stderr=True)
    # Without markup: the title may hold the name of a file.
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=err, transient=True, disable=not err.is_terminal) as bar:
        yield from bar.track(items, total, description=printable(title))
