"""The two charts of a ladder's report as SVG text that can stand inside a page."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, MaxNLocator

from mxref_training.report.drawing import label_ends, label_room, styled, svg, token_unit, zoom
from mxref_training.report.palette import BAND, COLOURS, GOLD, GOLD_INK, GREY, INK, MUTED, PAPER, SLATE

WIDTH = 11.2
"""Of every figure, in inches."""
GREYS = (INK, SLATE, GREY)


def colours(arms: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Return a colour for each arm's name: greys for arms without a claim in the first stage, else hues."""
    found: dict[str, str] = {}
    baseline = arms[0]["stage"] if arms else ""
    greys, hues = 0, 0
    for arm in arms:
        if arm["stage"] == baseline:
            found[arm["name"]] = GREYS[greys % len(GREYS)]
            greys += 1
        else:
            found[arm["name"]] = COLOURS[hues % len(COLOURS)]
            hues += 1
    return found


def curves_svg(results: dict[str, Any]) -> str:
    """Return validation loss over tokens beside the difference from the reference, as one SVG.

    The difference is drawn to the scale of the second half of the budget.
    """
    with styled("curves"):
        figure = Figure(figsize=(WIDTH, max(4.5, 0.8 + 0.17 * len(results["arms"]))))
        loss, gap = figure.subplots(1, 2, width_ratios=(1, 1.08))
        colour, names = colours(results["arms"]), short_names(results["arms"])
        reference = next(arm for arm in results["arms"] if arm["role"] == "reference")
        base = {run["pair"]: _finite(run["curve"]) for run in reference["runs"]}
        unit, unit_name = token_unit(results["tokens"])
        ends: list[tuple[float, float, str, str]] = []
        late = [0.0]
        for arm in results["arms"]:
            look = {"color": colour[arm["name"]], "zorder": 3}
            text = {"color": INK, "fontsize": 8.5}
            for run in arm["runs"]:
                points = _finite(run["curve"])
                width = 1.8 if run["pair"] == 0 else 0.7
                style = {"ls": "--" if arm["role"] == "noise" else "-", "lw": width, **look}
                loss.plot([t / unit for t, _ in points], [v for _, v in points], **style)
                theirs = dict(base.get(run["pair"], ()))
                shared = [(t, v - theirs[t]) for t, v in points if t in theirs]
                gap.plot([t / unit for t, _ in shared], [v for _, v in shared], **style)
                if not run["diverged"]:
                    late += [d for t, d in shared if t >= results["tokens"] / 2]
                if not shared or run["pair"] != 0:
                    continue
                last, name = shared[-1], names[arm["name"]]
                if run["diverged"]:
                    gap.plot(last[0] / unit, last[1], marker="x", mew=2, ms=7, **look)
                    gap.annotate(
                        f"{name}: DNC", (last[0] / unit, last[1]), (7, 7), textcoords="offset points", **text
                    )
                else:
                    ends.append((last[1], last[0] / unit, name, colour[arm["name"]]))
        target = results["target"]["losses"].get("0")
        if target is not None:
            loss.axhline(target, color=MUTED, lw=1, ls=":")
            loss.annotate(
                f"target {target:.3f}",
                (0.005, target),
                xycoords=("axes fraction", "data"),
                xytext=(3, 3),
                textcoords="offset points",
                color=MUTED,
                fontsize=8.5,
            )
        loss.set_title("Validation loss")
        loss.set_ylabel("nats per token")
        gap.set_title(f"Difference from {reference['label']} at equal tokens")
        spread = results["noise"]["loss_spread"]
        if spread is not None:
            gap.axhspan(-spread, spread, color=BAND, zorder=0)
        zoom(loss, [v for arm in results["arms"] for run in arm["runs"] for _, v in _finite(run["curve"])])
        if max(late) > min(late):
            # A loss that jumps in one early step would compress the ends, which matter, into one line.
            room = 0.5 * (max(late) - min(late))
            gap.set_ylim(min(late) - room, max(late) + room)
        for axes in (loss, gap):
            axes.set_xlabel(f"{unit_name} tokens")
            axes.grid(axis="y")
            axes.set_axisbelow(True)
            axes.xaxis.set_major_locator(MaxNLocator(6))
            axes.set_xlim(0, results["tokens"] / unit)
        figure.tight_layout(
            w_pad=2.5, rect=(0, 0, 1 - label_room((name for _, _, name, _ in ends), WIDTH), 1)
        )
        label_ends(gap, ends)
        return svg(figure, "curves")


def overheads_svg(results: dict[str, Any]) -> str:
    """Return the overhead of every arm with its interval, beside the paper's range, as one SVG."""
    arms = [arm for arm in results["arms"] if arm["role"] != "reference"]
    with styled("overheads"):
        figure = Figure(figsize=(WIDTH, 0.95 + 0.36 * max(len(arms), 1)))
        axes = figure.subplots()
        low, high = _limits(arms)
        colour, names = colours(results["arms"]), short_names(results["arms"])
        noise = results["noise"]["half_width"]
        if noise is not None and low <= -noise and noise <= high:
            axes.axvspan(-noise, noise, color=BAND, zorder=0)
        axes.axvline(0, color=MUTED, lw=1, zorder=2)
        axes.set_ylim(len(arms) - 0.4, -0.6)
        axes.set_xlim(low, high)
        for x, head in ((1.02, "measured"), (1.175, "paper")):
            _cell(axes, x, -0.95, head, MUTED)
        for y, arm in enumerate(arms):
            _claim(axes, arm, y, high - low)
            _bar(axes, arm["overhead"], y, colour[arm["name"]], low, high)
            _cell(axes, 1.02, y, _measured(arm["overhead"]), INK)
            _cell(axes, 1.175, y, arm["paper"]["overhead"] if arm["paper"] else "", GOLD_INK)
        axes.set_yticks(range(len(arms)), [names[arm["name"]] for arm in arms])
        axes.tick_params(axis="y", length=0, labelcolor=INK)
        axes.xaxis.set_major_formatter(
            FuncFormatter(lambda v, _: f"{v:+.0f} %".replace("-", "−") if v else "0")
        )
        axes.xaxis.set_major_locator(MaxNLocator(8, steps=[1, 2, 5, 10]))
        axes.grid(axis="x")
        axes.set_axisbelow(True)
        axes.spines["left"].set_visible(False)
        figure.tight_layout(rect=(0, 0, 1, 1))
        return svg(figure, "overheads")


def _cell(axes: Axes, x: float, y: float, text: str, colour: str) -> None:
    """Write a cell of the columns that stand right of the chart."""
    axes.text(x, y, text, transform=axes.get_yaxis_transform(), va="center", fontsize=9, color=colour)


def _measured(found: dict[str, Any] | None) -> str:
    if found is None:
        return "no target"
    text = str(found["text"]).replace("-", "−")
    if found["reach"] != "crossed":
        return text
    return text + (" ± ?" if found["half_width"] is None else f" ± {found['half_width']:.1f}")


def _claim(axes: Axes, arm: dict[str, Any], y: int, span: float) -> None:
    """Draw the paper's range as a wide mark behind the bar."""
    if arm["paper"] and arm["paper"]["range"]:
        left, right = arm["paper"]["range"]
        axes.barh(y, max(right - left, 0.008 * span), left=left, height=0.86, color=GOLD, zorder=1)


def _bar(axes: Axes, found: dict[str, Any] | None, y: int, colour: str, low: float, high: float) -> None:
    if found is None:
        return
    if found["reach"] == "diverged":
        axes.barh(y, high, height=0.46, color=PAPER, edgecolor=colour, hatch="////", lw=1, zorder=3)
        return
    percent = min(max(found["percent"], low), high)
    axes.barh(y, percent, height=0.46, color=colour, zorder=3)
    if found["reach"] == "never":
        axes.plot([percent], [y], marker=">", ms=8, color=colour, zorder=4, clip_on=False)
        return
    left, right = found["low"], found["high"]
    if left is None or right is None or left < low or right > high:
        return  # a line that is cut off would look like an interval
    axes.plot([left, right], [y, y], color=INK, lw=1.1, zorder=4, solid_capstyle="butt")
    for end in (left, right):
        axes.plot([end, end], [y - 0.16, y + 0.16], color=INK, lw=1.1, zorder=4)


def _limits(arms: Sequence[dict[str, Any]]) -> tuple[float, float]:
    """Return the range of the axis: all measured and claimed values, and the intervals that leave them readable."""
    found = [arm["overhead"] for arm in arms if arm["overhead"]]
    values = [f["percent"] for f in found if f["percent"] is not None]
    values += [
        bound for arm in arms if arm["paper"] and arm["paper"]["range"] for bound in arm["paper"]["range"]
    ]
    low, high = min([0.0, *values]), max([10.0, *values])
    room = 0.6 * (high - low)
    fitting = [
        (f["low"], f["high"])
        for f in found
        if f["low"] is not None
        and f["high"] is not None
        and low - room <= f["low"]
        and f["high"] <= high + room
    ]
    return (
        min([low, *(left for left, _ in fitting)]) - 0.03 * (high - low),
        max([high, *(right for _, right in fitting)]) + 0.03 * (high - low),
    )


def _finite(curve: list[list[float | None]]) -> list[tuple[float, float]]:
    points: list[tuple[float, float]] = []
    for tokens, loss in curve:
        if tokens is None or loss is None or not math.isfinite(loss):
            break
        points.append((tokens, loss))
    return points


def short_names(arms: Sequence[dict[str, Any]]) -> dict[str, str]:
    """Return each arm's label by its name, with its stage where two arms share the label."""
    labels = [arm["label"] for arm in arms]
    return {
        arm["name"]: f"{arm['stage']}: {arm['label']}" if labels.count(arm["label"]) > 1 else arm["label"]
        for arm in arms
    }
