"""The ladders that were run: their result files, what `mxref ablate --collect` makes of them, and intervals.

A folder of docs/records/ablations has the name of a shipped ladder, and result files at any depth, as
`mxref ablate --collect` takes them.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from bench.records import RECORDS
from mxref_training.lab.collect import Collected, collect
from mxref_training.lab.comparison import difference
from mxref_training.lab.ladder import load_ladder
from mxref_training.lab.pooling import Pool
from mxref_training.lab.statistics import late_loss

FOLDER = RECORDS / "ablations"

Results = dict[str, Any]


def ladders(folder: Path = FOLDER) -> list[str]:
    """Return the names of the ladders that have results."""
    return sorted(path.name for path in folder.iterdir() if path.is_dir())


@cache
def collected(name: str, folder: Path) -> Collected:
    """Return what `mxref ablate --collect` makes of a ladder's result files in a folder."""
    with tempfile.TemporaryDirectory() as out:
        return collect(load_ladder(name), [folder / name], Path(out), say=lambda _: None)


def results_of(name: str, folder: Path = FOLDER) -> Results:
    """Return the comparison of a ladder's arms."""
    found = collected(name, folder).ladder
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
    spread = results["spread"]["loss"]
    pooled = Pool(spread["nats"] or math.nan, spread["freedom"], tuple(spread["outside"]))
    reference = reference_of(results)
    for arm in results["arms"]:
        if arm["role"] != "arm" or arm["gap_reference"] is None:
            continue
        outside = bool({arm["name"], reference["name"]} & {*pooled.outside})
        losses, against = (
            {run["pair"]: late_loss(run["curve"], results["tokens"]) for run in one["runs"]}
            for one in (arm, reference)
        )
        found = difference(losses, against, pooled, outside)
        if found is not None:
            yield arm, arm["gap_reference"], found.half_width()


def interval_of(results: Results, name: str) -> tuple[float, float] | None:
    """Return an arm's loss less the reference's, and the interval's half; None if it has none."""
    return next(((nats, half) for arm, nats, half in intervals(results) if arm["name"] == name), None)
