"""What a bit buys: the loss of every format less that of FP8, against its bits and the time of its matrix products."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from statistics import fmean

from matplotlib.axes import Axes
from matplotlib.figure import Figure

from ablations import raw
from ablations.conclusions import signed, within
from ablations.ladders import Results, interval_of
from bench.plot import WIDE
from mxref.formats import BF16, FP8, MXINT8, BlockFormat, OperandFormat
from mxref.roles import GemmRole
from mxref_training.lab.ladder import Arm, load_ladder
from mxref_training.report.drawing import SMALLEST
from mxref_training.report.palette import COLOURS, GREY, INK, MUTED, PAPER
from projection.assumptions import Machine

LADDER = "formats"
B200 = {"bf16": 2.25, "fp8": 4.5, "fp6": 4.5, "fp4": 9.0}
"""Dense PFLOP/s of an HGX B200 at 1,000 W, by NVIDIA's Blackwell architecture brief."""
_MARKS = {"reference": "D", "plain": "o", "recipe": "s"}
_BY_ARM = (
    "bf16", "fp8", "mxfp8", "mxint8", "mxfp6-e2m3", "mxfp6-e3m2", "mx64", "nvfp4", "nvfp4-recipe", "nvfp4-4over6",
    "mxfp4", "mxfp4-h16",
)  # fmt: skip


def bits(format: OperandFormat) -> float:
    """Return the bits that an element takes with its share of the block's scale."""
    if isinstance(format, BlockFormat):
        return format.element.bits + 8 / format.k
    return {BF16: 16.0, FP8: 8.0}[format]


def mi355x(format: OperandFormat) -> float:
    """Return the time of a product on an MI355X at its peak rate, as a share of BF16's.

    It takes blocks of 32 under E8M0; others are multiplied in BF16, as MXINT8 is.
    """
    machine = Machine()
    fits = format is FP8 or (isinstance(format, BlockFormat) and format.scale.powers and format is not MXINT8)
    return machine.matrix_flops("bf16") / machine.matrix_flops(f"fp{_width(format)}" if fits else "bf16")


def b200(format: OperandFormat) -> float:
    """Return the time of a product on a B200 at its peak rate, as a share of BF16's.

    It takes blocks of 32 under E8M0 and NVFP4; it has no scaled product of integers, so MXINT8 is multiplied in BF16.
    """
    fits = format is not BF16 and format is not MXINT8
    return B200["bf16"] / B200[f"fp{_width(format)}" if fits else "bf16"]


def _width(format: OperandFormat) -> int:
    return format.element.bits if isinstance(format, BlockFormat) else 8


@dataclass(frozen=True)
class Point:
    """An arm on the curve."""

    name: str
    label: str
    stage: str
    nats: float
    """Loss less that of FP8."""
    half: float
    """Half of its 95 % interval, not corrected; 0 for FP8 itself."""
    in_bf16: float
    """The last checkpoint's loss in BF16 less that of FP8's."""
    bits: float
    """Of an element with its share of the scale, the mean over the GEMMs."""
    mi355x: float
    """Time of the matrix products as a share of BF16's, likewise."""
    b200: float


def points(results: Results) -> list[Point]:
    """Return the arms that have a result, from the widest format to the narrowest."""
    ladder = load_ladder(LADDER)
    found = []
    for arm in (ladder.named(name) for name in _BY_ARM):
        known = (0.0, 0.0) if arm is ladder.reference else interval_of(results, arm.name)
        if known is None:
            continue
        formats = _formats(arm)
        found.append(
            Point(
                arm.name, arm.label, arm.stage, *known,
                raw.in_bf16(arm.name, ladder.reference.name, LADDER),
                *(fmean(map(of, formats)) for of in (bits, mi355x, b200)),
            )
        )  # fmt: skip
    return found


def _formats(arm: Arm) -> list[OperandFormat]:
    """Return the format of each GEMM; both operands of one have the same."""
    recipe = load_ladder(LADDER).resolve(arm)
    found = []
    for role in GemmRole:
        (format,) = {spec.format for spec in recipe.operands(role)}
        found.append(format)
    return found


def frontier(found: Iterable[Point], along: str) -> list[tuple[float, float]]:
    """Return the arms that no other beats in loss with as few bits, or as little time, from the cheapest on."""
    best, kept = math.inf, []
    for point in sorted(found, key=lambda point: (getattr(point, along), point.nats)):
        if point.nats < best:
            best = point.nats
            kept.append((getattr(point, along), best))
    return kept


def arms_table(results: Results) -> Iterator[tuple[str, ...]]:
    """Yield the head and a row for each arm."""
    yield "arm", "bits", "loss less FP8's", "in BF16", "time, MI355X", "time, B200"
    for point in points(results):
        yield (
            point.label, f"{point.bits:.3g}",
            f"{signed(point.nats)} ± {point.half:.3f}" if point.half else "0",
            signed(point.in_bf16) if point.half else "0",
            f"{point.mi355x:.2f}", f"{point.b200:.2f}",
        )  # fmt: skip


def answers_table(results: Results) -> Iterator[tuple[str, ...]]:
    """Yield the head and a row for each registered contrast."""
    yield "question", "nats", "p", "answer"
    questions = {contrast.name: contrast.question for contrast in load_ladder(LADDER).contrast}
    for row in results["contrasts"]:
        loss = row["loss"]
        p = "<\N{NO-BREAK SPACE}0.001" if loss["corrected_p"] < 0.001 else f"{loss['corrected_p']:.3f}"
        yield questions[row["name"]], within(loss["nats"], loss["low"], loss["high"]), p, row["outcome"]


def figure(results: Results, width: float = WIDE) -> Figure:
    """Return a figure of the loss less that of FP8 against bits, and against the time on two devices."""
    found = points(results)
    wide = width == WIDE
    drawing = Figure(figsize=(width, 4.6 if wide else 9.6), layout="constrained")
    panels = drawing.subplots(
        *((1, 3) if wide else (3, 1)), sharey=True, width_ratios=(1.6, 1, 1) if wide else None
    )
    titles = {
        "bits": "bits of an element, with its scale",
        "mi355x": "matrix time on an MI355X",
        "b200": "matrix time on a B200",
    }
    for axes, (along, title) in zip(panels, titles.items(), strict=True):
        _panel(axes, [point for point in found if along != "bits" or point.name != "bf16"], along)
        axes.set_title(title, fontsize=9, fontweight="normal", loc="center")
    if wide:
        panels[0].set_ylabel("validation loss less that of FP8, nats per token")
    else:
        drawing.supylabel("validation loss less that of FP8, nats per token", fontsize=9, color=MUTED)
    handles, labels = panels[1].get_legend_handles_labels()
    drawing.legend(handles, labels, loc="outside lower left", ncols=3 if wide else 1, fontsize=SMALLEST)
    return drawing


def _panel(axes: Axes, found: list[Point], along: str) -> None:
    axes.step(*zip(*frontier(found, along), strict=True), where="post", color=GREY, linewidth=1, zorder=1)
    for at, group in _grouped(found, along).items():
        for i, point in enumerate(group):
            # Marks at the same place stand beside each other.
            shift = (i - (len(group) - 1) / 2) * (0.1 if along == "bits" else 0.012)
            axes.errorbar(
                at + shift, point.nats, yerr=point.half or None, fmt=_MARKS[point.stage], markersize=5, capsize=2,
                color=COLOURS[_BY_ARM.index(point.name) % len(COLOURS)], label=point.label,
                markerfacecolor=PAPER if point.stage == "recipe" else None,
            )  # fmt: skip
    if along != "bits":
        axes.set_xticks((0.25, 0.5, 0.75, 1))
        axes.set_xlim(0.15, 1.1)
    axes.axhline(0, color=INK, linewidth=0.8)
    axes.grid(axis="y")
    axes.set_axisbelow(True)


def _grouped(found: Iterable[Point], along: str) -> dict[float, list[Point]]:
    groups: dict[float, list[Point]] = {}
    for point in found:
        groups.setdefault(getattr(point, along), []).append(point)
    return groups
