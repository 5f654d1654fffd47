"""The arms of the paper's table at each size: the table beside ours, and the figure on the README's front.

`python -m ablations` draws the figure again, from the result files, into docs/_static.
"""

from __future__ import annotations

import io
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import matplotlib as mpl
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ablations.ladders import Results, interval_of
from ablations.strip import mark
from bench.plot import STYLE
from mxref_training.report.drawing import COLOURS, GRID, INK, MUTED
from mxref_training.report.ladder.page import rows

SIZES = {"readings": "21.5M parameters, 60.3M tokens", "paper_50m": "46.9M parameters, 65.5M tokens"}
"""The ladders with arms of the paper's table, and what they train."""
_SHORT = {"readings": "20M", "paper_50m": "50M"}


@dataclass(frozen=True)
class Cell:
    """An arm of the paper's table at one size."""

    nats: float
    """Loss less that of FP8."""
    half: float
    """Half of its 95 % interval; infinite of one seed."""
    tokens: str
    """Tokens to target beyond FP8's, with interval or as a bound."""
    reached: tuple[int, int]
    """Runs that reached the target, and all of them."""
    verdict: str

    @property
    def loss(self) -> str:
        """Estimate and interval."""
        if math.isinf(self.half):
            return _signed(self.nats)
        return f"{_signed(self.nats)} ({_signed(self.nats - self.half)} to {_signed(self.nats + self.half)})"

    @property
    def short(self) -> str:
        """Estimate and half of the interval, as the figure writes it."""
        return _signed(self.nats) + ("" if math.isinf(self.half) else f" ± {self.half:.3f}")


@dataclass(frozen=True)
class Line:
    """A cell of the paper's table in one of its readings."""

    name: str
    stage: str
    label: str
    claim: str
    sizes: dict[str, Cell]
    """By ladder."""


def lines(found: dict[str, Results]) -> list[Line]:
    """Return the arms that carry a claim, in the order of the first ladder."""
    first = next(iter(found.values()))
    claimed = [arm for arm in first["arms"] if arm["paper"]]
    return [
        Line(
            arm["name"], arm["stage"], arm["label"], arm["paper"]["overhead"],
            {name: cell for name, results in found.items() if (cell := _cell(results, arm["name"]))},
        )
        for arm in claimed
    ]  # fmt: skip


def _cell(results: Results, name: str) -> Cell | None:
    row = next((row for row in rows(results) if row.arm["name"] == name), None)
    known = interval_of(results, name)
    if row is None or known is None:
        return None
    crossings = [run["crossing"] for run in row.arm["runs"]]
    reached = sum(crossing is not None and crossing["reach"] == "crossed" for crossing in crossings)
    return Cell(
        *known,
        f"{row.overhead} {row.interval.replace('± ?', '')}".strip(),
        (reached, len(crossings)),
        row.verdict,
    )


def table(found: dict[str, Results]) -> Iterator[tuple[str, ...]]:
    """Yield the head and the rows of the paper's table beside ours."""
    yield (
        "MXFP4 in", "stabiliser", "paper: tokens",
        *(f"{_SHORT[name]}: {what}" for name, of in found.items() for what in _columns(of)),
    )  # fmt: skip
    for line in lines(found):
        cells = [(line.sizes.get(name), len(_columns(of))) for name, of in found.items()]
        yield (
            line.stage, line.label, line.claim,
            *(text for cell, count in cells for text in (_texts(cell) if cell else ("–",) * 3)[:count]),
        )  # fmt: skip


def _columns(results: Results) -> tuple[str, ...]:
    """Return what is shown of a size: a verdict only where a spread is known."""
    columns = "tokens", "loss less FP8's, nats", "verdict"
    return columns if results["spread"]["loss"]["freedom"] else columns[:2]


def _texts(cell: Cell) -> tuple[str, str, str]:
    some = "" if cell.reached[0] == cell.reached[1] else f"; {cell.reached[0]} of {cell.reached[1]} reach it"
    return cell.tokens + some, cell.loss, cell.verdict


def figure(found: dict[str, Results]) -> str:
    """Return an SVG of the loss of every arm of the paper's table less that of FP8, a panel for each size."""
    shown = lines(found)
    stages = list(dict.fromkeys(line.stage for line in shown))
    with mpl.rc_context(
        STYLE | {"svg.hashsalt": "ablations", "grid.color": GRID, "figure.facecolor": "white"}
    ):
        drawing = Figure(figsize=(10.4, 0.32 * len(shown) + 1.1), layout="constrained")
        panels = drawing.subplots(1, len(found), sharey=True, sharex=True, squeeze=False)[0]
        for axes, name in zip(panels, found, strict=True):
            _panel(axes, name, shown, stages)
        panels[0].set_yticks(range(len(shown)), [f"{line.stage}: {line.label}" for line in shown])
        panels[0].invert_yaxis()
        drawing.supxlabel(
            "validation loss less that of FP8, nats per token, 95 % intervals; "
            "beside each panel the paper's claim in tokens",
            fontsize=9, color=MUTED,
        )  # fmt: skip
        out = io.StringIO()
        drawing.savefig(out, format="svg", metadata={"Date": None})
    return out.getvalue()


def _panel(axes: Axes, name: str, shown: Sequence[Line], stages: Sequence[str]) -> None:
    for y, line in enumerate(shown):
        cell = line.sizes.get(name)
        colour = COLOURS[stages.index(line.stage) * 2 % len(COLOURS)]
        if cell:
            mark(axes, cell.nats, y, cell.half, colour)
            axes.text(cell.nats, y - 0.38, cell.short, ha="center", color=MUTED, fontsize=7)
        axes.text(
            1.02, y, line.claim, transform=axes.get_yaxis_transform(), color=MUTED, fontsize=8, va="center"
        )
    axes.axvline(0, color=INK, linewidth=0.8)
    seeds = max(cell.reached[1] for line in shown if (cell := line.sizes.get(name)))
    axes.set_title(SIZES[name] + (", one seed" if seeds == 1 else ""), fontsize=9.5)
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x")
    axes.set_axisbelow(True)
    axes.margins(x=0.16)


def _signed(value: float) -> str:
    return f"{value:+.3f}".replace("-", "−")
