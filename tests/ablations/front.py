"""The arms of the paper's table at each size: the table beside ours, and the figure of the page of results.

`python -m ablations` draws the figure again, from the result files, into docs/_static.
"""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ablations.ladders import Results, claimed, interval_of
from ablations.strip import mark, name_lines
from bench.plot import WIDE
from mxref_training.report.drawing import SMALLEST
from mxref_training.report.ladder.tables import half_width, overhead, verdict
from mxref_training.report.palette import COLOURS, GOLD, INK, MUTED

SIZES = {"readings": "21.5M parameters, 60.3M tokens", "paper_50m": "46.9M parameters, 65.5M tokens"}
"""The ladders with arms of the paper's table, and what they train."""
SHORT = {"readings": "20M", "paper_50m": "50M"}
"""How the tables call them."""
COLUMNS = "tokens, verdict", "loss less FP8's, nats"
"""What the table shows of a size."""

BAND = 0.004
"""Width of a drawn claim in nats, at least."""


@dataclass(frozen=True)
class Cell:
    """An arm of the paper's table at one size."""

    nats: float
    """Loss less that of FP8."""
    half: float
    """Half of its 95 % interval."""
    tokens: str
    """Tokens to target beyond FP8's, with interval or as a bound."""
    reached: tuple[int, int]
    """Runs that reached the target, and all of them."""
    verdict: str
    noisy: bool
    """Whether this arm is of those that round Fprop stochastically and may scatter more than the pool."""
    claim: tuple[float, float] | None
    """The paper's range in nats, at the slope of FP8's curve; None for DNC."""

    @property
    def loss(self) -> str:
        """Estimate and interval."""
        return f"{_signed(self.nats)} ({_signed(self.nats - self.half)} to {_signed(self.nats + self.half)})"

    @property
    def short(self) -> str:
        """Estimate and half of the interval, as the figure writes it."""
        return f"{_signed(self.nats)} ± {self.half:.3f}{'*' if self.noisy else ''}"


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
    arm = next((arm for arm in results["arms"] if arm["name"] == name), None)
    known = interval_of(results, name)
    if arm is None or known is None:
        return None
    crossings = [run["crossing"] for run in arm["runs"]]
    reached = sum(crossing is not None and crossing["reach"] == "crossed" for crossing in crossings)
    return Cell(
        *known,
        overhead(arm) + (f" ± {width}" if (width := half_width(arm).strip("?")) else ""),
        (reached, len(crossings)),
        verdict(arm),
        name in results["exploratory"]["noisy"],
        claimed(results, arm),
    )


def table(found: dict[str, Results]) -> Iterator[tuple[str, ...]]:
    """Yield the head and the rows of the paper's table beside ours."""
    yield (
        "MXFP4 in", "stabiliser", "paper: tokens",
        *(f"{SHORT[name]}: {what}" for name in found for what in COLUMNS),
    )  # fmt: skip
    for line in lines(found):
        cells = [line.sizes.get(name) for name in found]
        yield (
            line.stage, line.label, line.claim,
            *(text for cell in cells for text in (_texts(cell) if cell else ("–",) * len(COLUMNS))),
        )  # fmt: skip


def _texts(cell: Cell) -> tuple[str, str]:
    some = "" if cell.reached[0] == cell.reached[1] else f"; {cell.reached[0]} of {cell.reached[1]} reach it"
    return f"{cell.tokens}{some}; {cell.verdict}", cell.loss


def figure(found: dict[str, Results], width: float = WIDE) -> Figure:
    """Return a figure of the loss of every arm of the paper's table less that of FP8, a panel for each size."""
    shown = lines(found)
    stages = list(dict.fromkeys(line.stage for line in shown))
    if width == WIDE:
        shape, height = (1, len(found)), 0.4 * len(shown) + 1.1
    else:
        shape, height = (len(found), 1), len(found) * (0.5 * len(shown) + 0.4) + 1.0
    drawing = Figure(figsize=(width, height), layout="constrained")
    panels = drawing.subplots(*shape, sharey=True, sharex=True, squeeze=False).ravel()
    for axes, name in zip(panels, found, strict=True):
        _panel(axes, name, shown, stages, width)
    said = (
        "validation loss less that of FP8, nats per token, 95 % intervals; yellow: the paper's claim in nats,",
        "at the slope of FP8's curve; at the right edge of each panel the claim in tokens",
        "* SR arms scatter more than the pooled interval says: from their own pairs in all three ± 0.022 and ± 0.049",
    )
    text = "\n".join(said) if width == WIDE else textwrap.fill(" ".join(said), 45)
    drawing.supxlabel(text, fontsize=9, color=MUTED)
    return drawing


def _panel(axes: Axes, name: str, shown: Sequence[Line], stages: Sequence[str], width: float) -> None:
    names = []
    highest = max(cell.nats for line in shown for cell in line.sizes.values())
    for y, line in enumerate(shown):
        cell = line.sizes.get(name)
        names.append(f"{line.stage}: {line.label}")
        colour = COLOURS[stages.index(line.stage) * 2 % len(COLOURS)]
        if cell:
            if cell.claim:
                low, high = cell.claim
                # No narrower than can be seen.
                room = max(0.0, BAND - (high - low)) / 2
                axes.barh(y + 0.09, high - low + 2 * room, left=low - room, height=0.4, color=GOLD, zorder=1)
            mark(axes, cell.nats, y, cell.half, colour)
            if width == WIDE:
                _write_above(axes, cell, y, highest)
            else:
                names[-1] += f"   {cell.short}"
        elif width == WIDE:
            axes.text(BAND, y, "not run", color=MUTED, fontsize=SMALLEST, va="center")
        else:
            names[-1] += "   not run"
        axes.text(
            1.02,
            y,
            line.claim,
            transform=axes.get_yaxis_transform(),
            color=MUTED,
            fontsize=SMALLEST,
            va="center",
        )
    axes.axvline(0, color=INK, linewidth=0.8)
    axes.set_title(
        SIZES[name].replace(", ", "\n") if width == WIDE else SIZES[name],
        fontsize=9,
        fontweight="normal",
        loc="center",
    )
    axes.grid(axis="x")
    axes.set_axisbelow(True)
    axes.margins(x=0.16)
    name_lines(axes, names, width)


def _write_above(axes: Axes, cell: Cell, y: float, highest: float) -> None:
    """Write a cell's numbers above its interval, on the side where the panel has room."""
    share = cell.nats / highest
    x, side = (
        (cell.nats - cell.half, "left") if share < 0.45
        else (cell.nats, "center") if share < 0.8
        else (cell.nats + cell.half, "right")
    )  # fmt: skip
    axes.text(x, y - 0.14, cell.short, ha=side, va="bottom", color=MUTED, fontsize=SMALLEST)


def _signed(value: float) -> str:
    return f"{value:+.3f}".replace("-", "−")
