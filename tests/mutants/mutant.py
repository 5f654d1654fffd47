"""A planted fault: the backend that has it, and the clause that it breaks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from mxref.reference import ReferenceBackend


@dataclass(frozen=True)
class Mutant:
    name: str
    clause: str
    """The clause that the fault breaks."""
    source: str
    make: Callable[[], ReferenceBackend]
    ops: tuple[str, ...] = ("quantize",)
    first: bool = True
    """Whether that clause must also be the first to be reported."""
    level: str = "quick"
    """The level that must catch it."""
    formats: tuple[str, ...] = ("mxfp4",)
    """The block formats that must show it."""
