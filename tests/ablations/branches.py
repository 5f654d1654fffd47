"""The branch design: what each recipe loses within some updates from one FP8 checkpoint, on the same batches."""

from __future__ import annotations

import io
import tempfile
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from statistics import fmean
from typing import Any

import matplotlib as mpl
from matplotlib.figure import Figure

from ablations.ladders import Results
from bench.plot import STYLE
from bench.records import RECORDS
from mxref_training.lab.collect import collect
from mxref_training.lab.ladder import load_ladder
from mxref_training.report.drawing import COLOURS, GRID, INK, MUTED

FOLDER = RECORDS / "ablation_branches"
SHOWN = (50, 100, 200)
"""Updates after which the protocol has the losses compared."""


@cache
def branches_of(name: str, folder: Path = FOLDER) -> Results:
    """Return what `mxref ablate --collect` makes of the branches' result files."""
    with tempfile.TemporaryDirectory() as out:
        found = collect(load_ladder(name), [folder / name], Path(out), say=lambda _: None).branches
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


def table(results: Results) -> Iterator[tuple[str, ...]]:
    """Yield the head and the rows: the mean after each number of updates, at the end with its interval."""
    (moment,) = results["moments"]
    yield (
        "stage",
        "arm",
        *(f"after {updates}" for updates in SHOWN),
        "95 % after the last",
        "seeds",
        "recipe",
    )
    for arm in moment["arms"][1:]:
        low, high = _ends(arm)
        yield (
            arm["stage"],
            arm["label"],
            *(_signed(fmean(after(moment, arm["name"], updates))) for updates in SHOWN),
            f"{_signed(low)} to {_signed(high)}",
            str(len(arm["runs"])),
            f"``{arm['recipe']}``",
        )


def _ends(arm: dict[str, Any]) -> tuple[float, float]:
    end = arm["validation_last"]
    return end["mean"] - end["half_width"], end["mean"] + end["half_width"]


def figure(results: Results) -> str:
    """Return an SVG of the differences at the end of the branches, with 95 % intervals."""
    (moment,) = results["moments"]
    arms = moment["arms"][1:]
    stages = list(dict.fromkeys(arm["stage"] for arm in arms))
    with mpl.rc_context(STYLE | {"svg.hashsalt": "branches", "grid.color": GRID}):
        drawing = Figure(figsize=(8.4, 0.27 * len(arms) + 1.0), layout="constrained")
        axes = drawing.subplots()
        for y, arm in enumerate(arms):
            colour, end = COLOURS[stages.index(arm["stage"]) % len(COLOURS)], arm["validation_last"]
            axes.errorbar(
                end["mean"], y, xerr=end["half_width"], fmt="o", color=colour, capsize=3, markersize=5
            )
        axes.axvline(0, color=INK, linewidth=0.8)
        axes.set_yticks(range(len(arms)), [f"{arm['stage']}: {arm['label']}" for arm in arms])
        axes.tick_params(axis="y", length=0)
        axes.invert_yaxis()
        axes.grid(axis="x")
        axes.set_axisbelow(True)
        axes.set_xlabel(
            f"validation loss less that of the FP8 branch after {results['design']['updates']} updates, nats per token",
            color=MUTED,
        )
        out = io.StringIO()
        drawing.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()


def _signed(value: float) -> str:
    return f"{value:+.4f}".replace("-", "−")
