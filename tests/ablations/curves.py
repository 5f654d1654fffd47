"""The curves of a ladder: the validation loss of each arm less that of the reference, averaged over the seeds."""

from __future__ import annotations

from statistics import fmean

from matplotlib.figure import Figure

from ablations.ladders import Results, reference_of
from bench.plot import WIDE
from mxref_training.report.drawing import SMALLEST, label_ends
from mxref_training.report.ladder.plots import short_names
from mxref_training.report.palette import COLOURS, INK

_FROM = 0.15
"""Share of the tokens from which the curves are drawn; before it the loss falls too fast to be compared."""
_WINDOW = 5
"""Evaluations over which a curve is averaged."""


def difference(results: Results, name: str) -> list[tuple[float, float]]:
    """Return tokens and the loss of an arm less that of the reference, averaged over seeds and neighbours."""
    arm = next(arm for arm in results["arms"] if arm["name"] == name)
    base = {run["pair"]: dict(map(tuple, run["curve"])) for run in reference_of(results)["runs"]}
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
    rows = 0 if width == WIDE else 0.2 * len(arms)
    drawing = Figure(figsize=(width, 4.8 - (0.8 if rows else 0) + rows))
    axes = drawing.subplots()
    ends = []
    for i, arm in enumerate(arms):
        found = [(tokens / 1e6, nats) for tokens, nats in difference(results, arm["name"])]
        look = {
            "color": COLOURS[i % len(COLOURS)],
            "linestyle": ("-", (0, (4, 2)))[i // len(COLOURS) % 2],
        }
        axes.plot(*zip(*found, strict=True), linewidth=1.3, label=names[arm["name"]], **look)
        ends.append((found[-1][1], found[-1][0], names[arm["name"]], look["color"]))
    axes.axhline(0, color=INK, linewidth=0.8)
    axes.grid(axis="y")
    axes.set_axisbelow(True)
    axes.set_xlabel("million tokens")
    axes.set_ylabel(f"validation loss less that of {reference_of(results)['label']}, nats per token")
    if width == WIDE:
        drawing.subplots_adjust(left=0.09, right=0.66, top=0.97, bottom=0.11)
        label_ends(axes, ends)
    else:
        drawing.set_layout_engine("constrained")
        drawing.legend(frameon=False, loc="outside lower left", fontsize=SMALLEST, labelspacing=0.3)
    return drawing
