"""The ladders that were run: their result files, what `mxref ablate --collect` makes of them, and intervals.

docs/records/LADDER.jsonl has the results of a shipped ladder, as `mxref ablate --collect` takes them.
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from bench.records import RECORDS
from mxref_training.lab.collect import Collected, collect
from mxref_training.lab.contrasts import Difference, Pool, difference
from mxref_training.lab.ladder import load_ladder
from mxref_training.lab.measures import late_loss

LADDERS = "readings", "paper_50m", "tseng"
"""The ladders of the page."""

Results = dict[str, Any]


def lines(archive: str) -> list[dict[str, Any]]:
    """Return the content of an archive's results."""
    text = (RECORDS / f"{archive}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


@cache
def collected(name: str, archive: str) -> Collected:
    """Return what `mxref ablate --collect` makes of an archive of a ladder."""
    with tempfile.TemporaryDirectory() as out:
        return collect(load_ladder(name), [RECORDS / f"{archive}.jsonl"], Path(out), say=lambda _: None)


def results_of(name: str) -> Results:
    """Return the comparison of a ladder's arms."""
    found = collected(name, name).ladder
    assert found is not None
    return found


def reference_of(results: Results) -> dict[str, Any]:
    """Return the arm with which the others are compared."""
    return next(arm for arm in results["arms"] if arm["role"] == "reference")


def intervals(results: Results) -> Iterator[tuple[dict[str, Any], float, float]]:
    """Yield each arm that was held against the reference, its loss less the reference's, and the interval's half.

    That is infinite where no spread is known.
    The spread is the one that a contrast of the two has: that of their own pairs if one of them left the pool.
    """
    reference = reference_of(results)
    for arm in results["arms"]:
        if arm["role"] != "arm" or arm["gap_reference"] is None:
            continue
        found = pooled(results, arm, reference)
        if found is not None:
            yield arm, arm["gap_reference"], found.half_width()


def pooled(results: Results, arm: dict[str, Any], against: dict[str, Any]) -> Difference | None:
    """Return the difference of any two arms by the registered pool of their ladder; None without a pair."""
    spread = results["spread"]["loss"]
    pool = Pool(spread["nats"] or math.nan, spread["freedom"], tuple(spread["outside"]))
    outside = bool({arm["name"], against["name"]} & {*pool.outside})
    losses = [
        {run["pair"]: late_loss(run["curve"], results["tokens"]) for run in one["runs"]}
        for one in (arm, against)
    ]
    return difference(losses[0], losses[1], pool, outside)


def arm_of(results: Results, name: str) -> dict[str, Any]:
    """Return an arm by its name."""
    return next(arm for arm in results["arms"] if arm["name"] == name)


def claimed(results: Results, arm: dict[str, Any]) -> tuple[float, float] | None:
    """Return the paper's range for an arm in nats above FP8, at the local slope of FP8's own curve.

    That of FP8 itself is nothing. None where the paper gives no percentage.
    """
    if arm["role"] == "reference":
        return 0.0, 0.0
    if not arm["paper"] or not arm["paper"]["range"]:
        return None
    slope = -results["exploratory"]["reference_slope"]
    low, high = (slope * math.log1p(percent / 100) for percent in arm["paper"]["range"])
    return low, high


def interval_of(results: Results, name: str) -> tuple[float, float] | None:
    """Return an arm's loss less the reference's, and the interval's half; None if it has none."""
    return next(((nats, half) for arm, nats, half in intervals(results) if arm["name"] == name), None)
