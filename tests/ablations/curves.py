"""The curves of a ladder: the validation loss of each arm less that of the reference, averaged over the seeds."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping
from statistics import fmean

from matplotlib.figure import Figure
from matplotlib.ticker import FixedLocator, NullLocator

from ablations.conclusions import SHOWN
from ablations.ladders import Results, arm_of, reference_of
from bench.plot import WIDE
from mxref_training.report.drawing import MANY, SMALLEST, name_curves
from mxref_training.report.ladder.tables import short_names
from mxref_training.report.palette import BAND, COLOURS, INK, MUTED

_FROM = 0.15
"""Share of the tokens from which the curves are drawn; before it the loss falls too fast to be compared."""
_WINDOW = 5
"""Evaluations over which a curve is averaged."""


STEPS = {"fprop": 0, "wgrad": 3, "dgrad": 2, "h16": 1, "h16-or-rht16": 5}
"""Contrasts whose growth is drawn, with their colours."""


def difference(results: Results, name: str, against: str = "") -> list[tuple[float, float]]:
    """Return tokens and the loss of an arm less that of another, averaged over seeds and neighbours.

    The other is the reference unless it is named.
    """
    arm = arm_of(results, name)
    other = arm_of(results, against) if against else reference_of(results)
    base = {run["pair"]: dict(map(tuple, run["curve"])) for run in other["runs"]}
    own = [(dict(map(tuple, run["curve"])), base[run["pair"]]) for run in arm["runs"] if run["pair"] in base]
    tokens = sorted(set.intersection(*(mine.keys() & theirs.keys() for mine, theirs in own)))
    gaps = [fmean(mine[at] - theirs[at] for mine, theirs in own) for at in tokens]
    return [
        (tokens[i], fmean(gaps[max(0, i - _WINDOW + 1) : i + 1]))
        for i in range(len(tokens))
        if tokens[i] >= _FROM * results["tokens"]
    ]


def figure(results: Results, width: float = WIDE) -> Figure:
    """Return a figure of the curves of the arms that carry a claim, or of all arms if none does."""
    arms = [arm for arm in results["arms"] if arm["paper"]]
    arms = arms or [arm for arm in results["arms"] if arm["role"] == "arm"]
    names = short_names(results["arms"])
    height = 4.8 if width == WIDE else 4.0 + 0.2 * len(arms)
    drawing = Figure(figsize=(width, height), layout="constrained")
    axes = drawing.subplots()
    axes.set_prop_cycle(MANY)
    for arm in arms:
        found = [(tokens / 1e6, nats) for tokens, nats in difference(results, arm["name"])]
        axes.plot(*zip(*found, strict=True), linewidth=1.3, label=names[arm["name"]])
    axes.axhline(0, color=INK, linewidth=0.8)
    axes.grid(axis="y")
    axes.set_axisbelow(True)
    axes.set_xlabel("million tokens")
    axes.set_ylabel(f"validation loss less that of {reference_of(results)['label']}, nats per token")
    name_curves(axes, "outside right upper" if width == WIDE else "outside lower left")
    return drawing


def steps(found: Mapping[str, Results], width: float = WIDE) -> Figure:
    """Return a figure of how the differences of the contrasts grow, a panel for each ladder."""
    shape = (1, len(found)) if width == WIDE else (len(found), 1)
    drawing = Figure(figsize=(width, 3.3 if width == WIDE else 6.4), layout="constrained")
    panels = drawing.subplots(*shape, sharey=True, squeeze=False).ravel()
    for axes, (title, results) in zip(panels, found.items(), strict=True):
        rows = {row["name"]: row for row in results["exploratory"]["contrasts"]}
        for name, colour in STEPS.items():
            row = rows[name]
            curve = difference(results, row["arm"], row["against"])
            points = [(tokens / 1e6, nats) for tokens, nats in curve]
            axes.plot(*zip(*points, strict=True), color=COLOURS[colour], linewidth=1.5, label=SHOWN[name])
        axes.axhline(0, color=INK, linewidth=0.8)
        axes.axvspan(results["tokens"] / 2e6, results["tokens"] / 1e6, color=BAND, zorder=0)
        axes.set_xscale("log")
        axes.xaxis.set_major_locator(FixedLocator([10, 20, 30, 40, 60]))
        axes.xaxis.set_minor_locator(NullLocator())
        axes.xaxis.set_major_formatter("{x:g}")
        axes.set_title(title, fontsize=9, fontweight="normal", loc="center")
        axes.grid(axis="y")
        axes.set_axisbelow(True)
    if width == WIDE:
        panels[0].set_ylabel("difference, nats per token")
    drawing.supxlabel(
        textwrap.fill(
            "million tokens, logarithmic; shaded: the last half, where slopes are taken",
            90 if width == WIDE else 45,
        ),
        fontsize=9,
        color=MUTED,
    )
    handles, labels = panels[0].get_legend_handles_labels()
    columns = 2 if width == WIDE else 1
    drawing.legend(handles, labels, frameon=False, loc="outside upper left", ncols=columns, fontsize=SMALLEST)
    return drawing
