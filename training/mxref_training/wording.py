"""Numbers with nouns, for messages."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless the number is 1: `1 document`, `2,000 documents`."""
    return f"{number:,} {noun}{'s' * (number != 1)}"
