"""What the papers predict of each contrast, and the verdict at each size by the rules of the protocol."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator

from ablations.front import SHORT
from ablations.ladders import Results
from mxref_training.report.ladder.plots import short_names

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


def table(found: dict[str, Results]) -> Iterator[tuple[str, ...]]:
    """Yield the head and the rows: the predictions of the first ladder, with the verdicts of all."""
    yield "contrast", "prediction", "source", *(SHORT[name] for name in found)
    first = next(iter(found.values()))
    names = short_names(first["arms"])
    rows = {row["name"]: row for row in first["contrasts"]}
    by_ladder = {name: verdicts(results) for name, results in found.items()}
    for key in verdicts(first):
        contrast, says, source = key
        arm, against = (names[rows[contrast][end]] for end in ("arm", "against"))
        yield f"{arm} less {against}", says, source, *(of.get(key, "–") for of in by_ladder.values())
