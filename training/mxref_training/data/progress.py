"""A progress bar on standard error, for a person at a terminal and for nobody else."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import TypeVar

T = TypeVar("T")


def progress(items: Iterable[T], title: str, total: int | None = None) -> Iterator[T]:
    """Yield the items; where standard error is a terminal, show how far they have come.

    Args:
        items: anything that can be iterated once.
        title: what is being done, in a few words.
        total: number of items, where `items` has no length.
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
