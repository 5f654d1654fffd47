"""A contrast: two arms of a ladder that are compared to answer one question, declared before they run."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Says(StrEnum):
    """What a source says about a contrast."""

    LOWER = "lower"
    """The arm's loss is lower than that of the arm it is held against."""
    HIGHER = "higher"
    EQUAL = "equal"
    """The difference of the losses is too small to be measured."""
    DIVERGES = "diverges"
    """The arm diverges."""


@dataclass(frozen=True)
class Prediction:
    """What a source says about a contrast, before it is measured."""

    says: Says
    source: str
    """The citation, as text."""


@dataclass(frozen=True)
class Contrast:
    """Two arms that are compared at equal seeds to answer one question; declared before they run."""

    name: str
    arm: str
    """Name of the arm."""
    against: str
    """Name of the arm that it is held against."""
    question: str
    """The question that the difference answers, in plain words."""
    prediction: tuple[Prediction, ...] = ()
