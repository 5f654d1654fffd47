"""The two charts of a ladder's report as SVG text that can stand inside a page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter

from mxref_training.report.drawing import WIDTH, label_ends, plot, quiet, styled, svg, token_unit, zoom
from mxref_training.report.palette import BAND, COLOURS, GOLD, GREY, INK, MUTED, PAPER, SLATE
from mxref_training.report.table import written

GREYS = (INK, SLATE, GREY)

Arm = dict[str, Any]


def colours(arms: Sequence[Arm]) -> dict[str, str]:
    """Return a colour for each arm's name: greys for arms without a claim in the first stage, else hues."""
    first = [arm["name"] for arm in arms if arm["stage"] == arms[0]["stage"]]
    others = [arm["name"] for arm in arms if arm["name"] not in first]
    greys = {name: GREYS[i % len(GREYS)] for i, name in enumerate(first)}
    return greys | {name: COLOURS[i % len(COLOURS)] for i, name in enumerate(others)}


def short_names(arms: Sequence[Arm]) -> dict[str, str]:
    """Return each arm's label by its name, with its stage where two arms share the label."""
    labels = [arm["label"] for arm in arms]
    return {
        arm["name"]: f"{arm['stage']}: {arm['label']}" if labels.count(arm["label"]) > 1 else arm["label"]
        for arm in arms
    }


def differences(results: dict[str, Any], arm: Arm) -> list[list[tuple[float, float]]]:
    """Return for each run of an arm the tokens, and its loss less that of the reference's run of the same seed."""
    reference = next(one for one in results["arms"] if one["role"] == "reference")
    base = {run["pair"]: dict(_finite(run["curve"])) for run in reference["runs"]}
    found = []
    for run in arm["runs"]:
        theirs = base.get(run["pair"], {})
        found.append([(t, loss - theirs[t]) for t, loss in _finite(run["curve"]) if t in theirs])
    return found


def curves_svg(results: dict[str, Any]) -> str:
    """Return validation loss over tokens beside the difference from the reference, as one SVG.

    The difference is drawn to the scale of the second half of the budget.
    """
    arms, colour, names = results["arms"], colours(results["arms"]), short_names(results["arms"])
    unit, unit_name = token_unit(results["tokens"])
    with styled("curves"):
        figure = Figure(figsize=(WIDTH, max(4.5, 0.8 + 0.17 * len(arms))), layout="constrained")
        loss, gap = figure.subplots(1, 2)
        ends: list[tuple[float, float, str, str]] = []
        late = [0.0]
        for arm in arms:
            look = {"color": colour[arm["name"]], "ls": "--" if arm["role"] == "noise" else "-"}
            for run, apart in zip(arm["runs"], differences(results, arm), strict=True):
                first = run["pair"] == 0
                for axes, points in ((loss, _finite(run["curve"])), (gap, apart)):
                    plot(axes, [(t / unit, v) for t, v in points], lw=1.8 if first else 0.7, **look)
                if not run["diverged"]:
                    late += [d for t, d in apart if t >= results["tokens"] / 2]
                if apart and first:
                    name = f"{names[arm['name']]}{': DNC' if run['diverged'] else ''}"
                    ends.append((apart[-1][1], apart[-1][0] / unit, name, colour[arm["name"]]))
        target = results["target"]["losses"].get("0")
        if target is not None:
            loss.axhline(target, color=MUTED, lw=1, ls=":")
            loss.annotate(
                f"target {target:.3f}", (1, target), (-3, 3), xycoords=("axes fraction", "data"),
                textcoords="offset points", color=MUTED, fontsize=8.5, ha="right",
            )  # fmt: skip
        loss.set_title("Validation loss, nats per token")
        reference = next(arm["label"] for arm in arms if arm["role"] == "reference")
        gap.set_title(f"Difference from {reference} at equal tokens")
        spread = results["noise"]["loss_spread"]
        if spread is not None:
            gap.axhspan(-spread, spread, color=BAND, zorder=0)
        zoom(loss, [v for arm in arms for run in arm["runs"] for _, v in _finite(run["curve"])])
        if max(late) > min(late):
            # A loss that jumps in one early step would compress the ends, which matter, into one line.
            room = 0.5 * (max(late) - min(late))
            gap.set_ylim(min(late) - room, max(late) + room)
        for axes in (loss, gap):
            axes.set_xlabel(f"{unit_name} tokens")
            axes.set_xlim(0, 1.01 * results["tokens"] / unit)
            quiet(axes)
        bottom, top = gap.get_ylim()
        label_ends(gap, [(min(max(v, bottom), top), x, name, shade) for v, x, name, shade in ends])
        return svg(figure, "curves")


def overheads_svg(results: dict[str, Any]) -> str:
    """Return the overhead of every arm with its interval, beside the paper's range, as one SVG."""
    arms = [arm for arm in results["arms"] if arm["role"] != "reference"]
    colour, names = colours(results["arms"]), short_names(results["arms"])
    low, high = _limits(arms)
    with styled("overheads"):
        figure = Figure(figsize=(WIDTH, 0.7 + 0.3 * max(len(arms), 1)), layout="constrained")
        axes = figure.subplots()
        axes.axvline(0, color=MUTED, lw=1)
        for y, arm in enumerate(arms):
            if arm["paper"] and arm["paper"]["range"]:
                left, right = arm["paper"]["range"]
                axes.barh(y, max(right - left, 0.008 * (high - low)), left=left, height=0.86, color=GOLD)
            _bar(axes, arm["overhead"], y, colour[arm["name"]], low, high)
        axes.set_ylim(len(arms) - 0.4, -0.6)
        axes.set_xlim(low, high)
        axes.set_yticks(range(len(arms)), [names[arm["name"]] for arm in arms])
        axes.tick_params(axis="y", length=0, labelcolor=INK)
        axes.xaxis.set_major_formatter(
            FuncFormatter(lambda v, _: written(round(v), "+d" if v else "") + " %")
        )
        axes.spines["left"].set_visible(False)
        quiet(axes, "x", 8)
        return svg(figure, "overheads")


def _bar(axes: Any, found: dict[str, Any] | None, y: int, colour: str, low: float, high: float) -> None:
    if found is None:
        return
    if found["reach"] == "diverged":
        axes.barh(y, high, height=0.46, color=PAPER, edgecolor=colour, hatch="////")
        return
    percent = min(max(found["percent"], low), high)
    axes.barh(y, percent, height=0.46, color=colour)
    if found["reach"] == "never":
        axes.plot([percent], [y], marker=">", ms=8, color=colour, clip_on=False)
    elif _fits(found, low, high):  # a line that is cut off would look like an interval
        ends = [[percent - found["low"]], [found["high"] - percent]]
        axes.errorbar([percent], [y], xerr=ends, color=INK, elinewidth=1.1, capsize=3)


def _limits(arms: Sequence[Arm]) -> tuple[float, float]:
    """Return the range of the axis: all measured and claimed values, and the intervals that leave them readable."""
    found = [arm["overhead"] for arm in arms if arm["overhead"]]
    values = [one["percent"] for one in found if one["percent"] is not None]
    values += [end for arm in arms if arm["paper"] and arm["paper"]["range"] for end in arm["paper"]["range"]]
    low, high = min([0.0, *values]), max([10.0, *values])
    room = 0.6 * (high - low)
    fitting = [one for one in found if _fits(one, low - room, high + room)]
    edge = 0.03 * (high - low)
    return (
        min([low, *(one["low"] for one in fitting)]) - edge,
        max([high, *(one["high"] for one in fitting)]) + edge,
    )


def _fits(found: dict[str, Any], low: float, high: float) -> bool:
    ends = found["low"], found["high"]
    return None not in ends and low <= ends[0] and ends[1] <= high


def _finite(curve: list[list[float | None]]) -> list[tuple[float, float]]:
    """Return a curve up to its first loss that is not finite."""
    points: list[tuple[float, float]] = []
    for tokens, loss in curve:
        if tokens is None or loss is None or not math.isfinite(loss):
            break
        points.append((tokens, loss))
    return points
