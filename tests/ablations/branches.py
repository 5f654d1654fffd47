"""The branch design: what each recipe loses within some updates from one FP8 checkpoint, on the same batches."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from ablations.ladders import Results, collected
from ablations.strip import strip
from bench.plot import WIDE

ARCHIVE = "readings_branches"


def branches_of(name: str) -> Results:
    """Return what `mxref ablate --collect` makes of the branches' results."""
    found = collected(name, f"{name}_branches").branches
    assert found is not None
    return found


def after(moment: Results, name: str, updates: int) -> list[float]:
    """Return the loss of an arm's branches less that of the trunk's own after some updates, by seed, in nats.

    The trunk's own is the first arm of a moment.
    """
    at = moment["step"] + updates
    losses = [
        {run["pair"]: dict(map(tuple, run["losses"])).get(at) for run in arm["runs"]}
        for arm in (_arm(moment, name), moment["arms"][0])
    ]
    return [losses[0][pair] - losses[1][pair] for pair in sorted(losses[0])]


def _arm(moment: Results, name: str) -> dict[str, Any]:
    return next(arm for arm in moment["arms"] if arm["name"] == name)


def figure(results: Results, width: float = WIDE) -> Figure:
    """Return a figure of the differences at the end of the branches, with 95 % intervals."""
    (moment,) = results["moments"]
    updates = results["design"]["updates"]
    ends = (
        (arm, arm["validation_last"]["mean"], arm["validation_last"]["half_width"])
        for arm in moment["arms"][1:]
    )
    return strip(
        ends,
        f"validation loss less that of the FP8 branch after {updates} updates, nats per token",
        width,
    )
