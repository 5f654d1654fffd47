"""What the papers predict of each contrast, and the verdict at each size by the rules of the protocol."""

from __future__ import annotations

from collections import Counter

from ablations.ladders import Results

Key = tuple[str, str, str]
"""Contrast, what is predicted of it, and by whom."""


def verdicts(results: Results) -> dict[Key, str]:
    """Return the verdict on each prediction."""
    return {
        (row["name"], one["says"], one["source"]): str(one["verdict"])
        for row in results["contrasts"]
        for one in row["predictions"]
    }


def counts(results: Results) -> Counter[str]:
    """Return how many predictions have which verdict."""
    return Counter(verdicts(results).values())
