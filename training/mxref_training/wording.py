"""Numbers with nouns or prefixes, and times, for messages."""

from __future__ import annotations

_PREFIXES = ("", "k", "M", "G", "T", "P", "E", "Z")


def counted(number: int, noun: str) -> str:
    """Return a number with its noun, in the plural unless the number is 1: `1 document`, `2,000 documents`."""
    return f"{number:,} {noun}{'s' * (number != 1)}"


def si(value: float) -> str:
    """Return a number with three digits, a space and its SI prefix, as in `8.03 G`."""
    power = 0
    while abs(value) >= 999.5 and power < len(_PREFIXES) - 1:
        value, power = value / 1000, power + 1
    return f"{value:.3g} {_PREFIXES[power]}"


def clock(seconds: float) -> str:
    """Return seconds as h:mm:ss, or m:ss below an hour."""
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"
