"""How the appendix of the page of results words its numbers, and the text in which they stand."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from ablations.ladders import results_of

TEXT = (Path(__file__).parents[2] / "docs" / "explanation" / "ablation-appendix.rst").read_text(
    encoding="utf-8"
)
PROSE = re.sub(r"(?ms)^\.\. begin (\S+), .*?^\.\. end of \1$", "", TEXT)
"""The page without the tables that `make tables` writes."""
INTERVAL = re.compile(r"[+−]\d\.\d{3} \([+−]\d\.\d{3} to [+−]\d\.\d{3}\)")
"""A difference in nats and its interval."""


def signed(nats: float) -> str:
    """Return a difference in nats."""
    return f"{nats:+.3f}".replace("-", "−")


def interval(nats: float, low: float, high: float) -> str:
    """Return a difference in nats with its interval."""
    return f"{signed(nats)} ({signed(low)} to {signed(high)})"


def said(row: dict[str, Any]) -> str:
    """Return how the text gives a contrast that has an interval."""
    return interval(*(row["loss"][key] for key in ("nats", "low", "high")))


def contrasts(ladder: str) -> dict[str, dict[str, Any]]:
    """Return the contrasts of a ladder by their names."""
    return {row["name"]: row for row in results_of(ladder)["contrasts"]}


def arms(ladder: str) -> dict[str, dict[str, Any]]:
    """Return the arms of a ladder by their names."""
    return {arm["name"]: arm for arm in results_of(ladder)["arms"]}
