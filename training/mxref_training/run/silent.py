"""Replaces the journal and the observer on ranks other than the first, which write nothing."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any


class SilentJournal:
    """Takes what `mxref_training.run.journal.Journal` takes, and writes none of it."""

    def start_clock(self) -> None:
        """Do nothing."""

    def add_step(self, *values: Any) -> None:
        """Do nothing."""

    def add_evaluation(self, *values: Any) -> None:
        """Do nothing."""

    def marks(self) -> dict[str, Any]:
        """Return nothing: a checkpoint has the marks of the first rank."""
        return {}

    def close(self) -> None:
        """Do nothing."""


class SilentObserver:
    """Takes what `mxref_training.run.observe.Observer` takes, and shows none of it."""

    @contextmanager
    def step(self, step: int) -> Iterator[None]:
        """Run the block."""
        yield

    @contextmanager
    def measuring(self, step: int) -> Iterator[None]:
        """Run the block."""
        yield

    def log(self, line: Mapping[str, Any]) -> None:
        """Do nothing."""

    def marks(self) -> dict[str, Any]:
        """Return nothing."""
        return {}

    def close(self) -> None:
        """Do nothing."""
