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
    from rich.console import Console
    from rich.progress import track

    console = Console(stderr=True)
    yield from track(
        items, title, total=total, console=console, transient=True, disable=not console.is_terminal
    )
