"""Numbers with nouns, and times, for messages."""

from __future__ import annotations


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless the number is 1: `1 document`, `2,000 documents`."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def clock(seconds: float) -> str:
    """Return seconds as h:mm:ss, or m:ss below an hour."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
