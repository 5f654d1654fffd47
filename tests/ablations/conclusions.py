"""The steps from FP8 to MXFP4, and the stabilisers: the paper's claim beside each size, and both sizes together.

What is exploratory here is said on the page: both sizes together, and H16 less RHT16.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from statistics import fmean
from typing import Any

from ablations.front import SHORT
from ablations.ladders import Results, arm_of, pooled
from mxref_training.lab.answers import combined

SHOWN = {
    "fprop": "F less FP8",
    "dgrad": "F+D less F",
    "wgrad": "F+D+W less F+D",
    "h16": "H16 less plain",
    "rht16-step": "RHT16 less plain",
    "h16-or-rht16": "H16 less RHT16",
    "sr-all": "SR everywhere less plain",
}
"""The contrasts of the table, and how the page calls them."""


def together(found: Iterable[Results]) -> dict[str, dict[str, Any]]:
    """Return the contrasts over the pairs of all ladders by their names."""
    return {row["name"]: row for row in combined(list(found))}


def claim(results: Results, arm: str, against: str) -> float | None:
    """Return the difference that the paper's percentages are worth in nats, by the middles of their ranges.

    At the slope of FP8's own curve. None where one of the two does not converge.
    """
    logs = []
    for one in (arm_of(results, arm), arm_of(results, against)):
        if one["role"] == "reference":
            logs.append(0.0)
        elif one["paper"]["range"] is None:
            return None
        else:
            logs.append(math.log1p(fmean(one["paper"]["range"]) / 100))
    return float(-results["exploratory"]["reference_slope"]) * (logs[0] - logs[1])


def table(found: dict[str, Results]) -> Iterator[tuple[str, ...]]:
    """Yield the head and the rows."""
    heads = (head for name in found for head in (f"paper, {SHORT[name]}", SHORT[name]))
    yield "nats per token", "verdicts", *heads, "both sizes", "p"
    both = together(found.values())
    for name, label in SHOWN.items():
        row = both[name]
        cells = [", ".join(verdict(results, name) for results in found.values())]
        for results in found.values():
            said = claim(results, row["arm"], row["against"])
            own = pooled(results, arm_of(results, row["arm"]), arm_of(results, row["against"]))
            assert own is not None
            cells += ["DNC" if said is None else signed(said), within(own.estimate, own.low, own.high)]
        loss = row["loss"]
        whole = within(*(loss[key] for key in ("nats", "low", "high")))
        p = "<\N{NO-BREAK SPACE}0.001" if loss["corrected_p"] < 0.001 else f"{loss['corrected_p']:.3f}"
        yield label, *cells, whole, p


def verdict(results: Results, name: str) -> str:
    """Return the registered outcome of a contrast, or that none was registered."""
    return next((str(row["outcome"]) for row in results["contrasts"] if row["name"] == name), "undeclared")


def signed(nats: float, digits: int = 3) -> str:
    """Return a difference in nats."""
    return f"{nats:+.{digits}f}".replace("-", "−")


def within(nats: float, low: float, high: float) -> str:
    """Return a difference with half of its interval."""
    return f"{signed(nats)} ± {(high - low) / 2:.3f}"
