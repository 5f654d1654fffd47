"""The two charts of a ladder's report as SVG text that can stand inside a page."""

from __future__ import annotations

from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from mxref_training.lab.measures import finite_part
from mxref_training.report.drawing import (
    MANY,
    WIDTH,
    count_tokens,
    name_curves,
    plot,
    quiet,
    styled,
    svg,
    zoom,
)
from mxref_training.report.ladder.tables import label_of, short_names
from mxref_training.report.palette import BAND, COLOURS, GOLD, INK, MUTED, PAPER
from mxref_training.report.table import written

Arm = dict[str, Any]


def differences(results: dict[str, Any], arm: Arm) -> list[list[tuple[float, float]]]:
    """Return for each run of an arm the tokens, and its loss less that of the reference's run of the same seed."""
    reference = next(one for one in results["arms"] if one["role"] == "reference")
    base = {run["pair"]: dict(finite_part(run["curve"])) for run in reference["runs"]}
    found = []
    for run in arm["runs"]:
        theirs = base.get(run["pair"], {})
        found.append([(t, loss - theirs[t]) for t, loss in finite_part(run["curve"]) if t in theirs])
    return found


def curves_svg(results: dict[str, Any]) -> str:
    """Return validation loss over tokens beside the difference from the reference, as one SVG.

    The difference is drawn to the scale of the second half of the budget.
    """
    names = short_names(results["arms"])
    with styled("curves"):
        height = max(4.5, 0.8 + 0.19 * len(names))
        figure = Figure(figsize=(WIDTH, height), layout="constrained")
        loss, gap = figure.subplots(1, 2)
        late = [0.0]
        for arm, look in zip(results["arms"], MANY(), strict=False):
            label = names[arm["name"]]
            for run, apart in zip(arm["runs"], differences(results, arm), strict=True):
                width = 1.8 if run["pair"] == 0 else 0.7
                plot(loss, finite_part(run["curve"]), lw=width, **look)
                named = f"{label}: DNC" if run["diverged"] else label
                plot(gap, apart, lw=width, label=named if apart and run["pair"] == 0 else None, **look)
                if not run["diverged"]:
                    late += [d for t, d in apart if t >= results["tokens"] / 2]
        target = results["target"]["losses"].get("0")
        if target is not None:
            loss.axhline(target, color=MUTED, lw=1, ls=":")
            loss.annotate(
                f"target {target:.3f}", (1, target), (-3, 3), xycoords=("axes fraction", "data"),
                textcoords="offset points", color=MUTED, fontsize=8.5, ha="right",
            )  # fmt: skip
        loss.set_title("Validation loss, nats per token")
        gap.set_title(f"Difference from {label_of(results, 'reference')} at equal tokens")
        if (spread := results["noise"]["loss_spread"]) is not None:
            gap.axhspan(-spread, spread, color=BAND, zorder=0)
        zoom(
            loss, [v for arm in results["arms"] for run in arm["runs"] for _, v in finite_part(run["curve"])]
        )
        if max(late) > min(late):
            # A loss that jumps in one early step would compress the ends, which matter, into one line.
            room = 0.5 * (max(late) - min(late))
            gap.set_ylim(min(late) - room, max(late) + room)
        for axes in (loss, gap):
            quiet(axes)
            count_tokens(axes, results["tokens"])
        name_curves(gap)
        return svg(figure, "curves")


def overheads_svg(results: dict[str, Any]) -> str:
    """Return the overhead of every arm with its interval, beside the paper's range, as one SVG."""
    arms = [arm for arm in results["arms"] if arm["role"] != "reference"]
    names = short_names(results["arms"])
    claims = [arm["paper"] and arm["paper"]["range"] for arm in arms]
    known = [arm["overhead"]["percent"] for arm in arms if arm["overhead"]]
    ends = [0.0, 10.0, *(v for v in known if v is not None), *(v for claim in claims for v in claim or ())]
    room = 0.1 * (max(ends) - min(ends))
    with styled("overheads"):
        figure = Figure(figsize=(WIDTH, 0.7 + 0.3 * max(len(arms), 1)), layout="constrained")
        axes = figure.subplots()
        axes.axvline(0, color=MUTED, lw=1)
        axes.set_xlim(min(ends) - room, max(ends) + room)
        for y, (arm, claim) in enumerate(zip(arms, claims, strict=True)):
            if claim:
                axes.barh(y, max(claim[1] - claim[0], room / 12), left=claim[0], height=0.86, color=GOLD)
            if arm["overhead"]:
                _bar(axes, y, arm["overhead"])
        axes.set_ylim(len(arms) - 0.4, -0.6)
        axes.set_yticks(range(len(arms)), [names[arm["name"]] for arm in arms])
        axes.tick_params(axis="y", length=0, labelcolor=INK)
        axes.xaxis.set_major_formatter(
            FuncFormatter(lambda v, _: written(round(v), "+d" if v else "") + " %")
        )
        axes.spines["left"].set_visible(False)
        quiet(axes, "x", 8)
        return svg(figure, "overheads")


def _bar(axes: Axes, y: int, found: dict[str, Any]) -> None:
    if found["reach"] == "diverged":
        axes.barh(y, axes.get_xlim()[1], height=0.46, color=PAPER, edgecolor=COLOURS[0], hatch="////")
        return
    percent = found["percent"]
    axes.barh(y, percent, height=0.46, color=COLOURS[0])
    if found["reach"] == "never":
        axes.plot([percent], [y], marker=">", ms=8, color=COLOURS[0], clip_on=False)
    elif None not in (found["low"], found["high"]):
        ends = [[percent - found["low"]], [found["high"] - percent]]
        axes.errorbar([percent], [y], xerr=ends, color=INK, elinewidth=1.1, capsize=3)
