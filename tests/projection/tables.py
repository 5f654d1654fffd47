"""The tables of a projection, the same for the terminal and for the documentation."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields

from mxref_training.wording import si
from projection.assumptions import Assumption, Assumptions, Level, Machine, Peak
from projection.compare import Projection, compare, sensitivities
from projection.counted import KernelCounts
from projection.roofline import FOLD, bytes_per_element, kernel_time, multiplication, slots
from projection.step import ARMS, QUANTIZATION, Part, Pass, Times, by_part, total

_LARGE = 1e6
_G = 1e9
"""Number of elements for which a kernel's time is given."""
_SHOWN_SHARE = 0.1
"""Shares of a step that are too small are not named."""
_AGAIN = "_ordered_misfits"
"""The kernel that multiplies rows again; the operands decide how many."""
_FLAG = "_flag_scales"
"""The kernel that checks the scale codes of a product, one byte for 32 elements; it converts no element."""


@dataclass(frozen=True)
class Table:
    """A title, a note, and rows of cells; the first columns are text, the others numbers."""

    title: str
    note: str
    headings: Sequence[str]
    rows: Sequence[Sequence[str]]
    text_columns: int = 1


def tables(projection: Projection) -> list[Table]:
    """Return all tables of a projection, in order."""
    return [
        _comparison(projection),
        _steps(projection),
        _sensitivity(projection),
        _kernels(projection),
        _gemms(projection),
        _peaks(projection.machine),
        _assumptions(projection.assumed),
    ]


_GROUPS = {
    "GEMMs": (Part.FPROP, Part.DGRAD, Part.WGRAD, Part.HEAD),
    "attention": (Part.ATTENTION,),
    "quantization": QUANTIZATION,
    "other operations": (Part.LAYERS, Part.REST),
    "communication": (Part.COMMUNICATION,),
}


def of_a_card(projections: Mapping[str, Projection]) -> Table:
    """Return the tokens per second of a card for models by name, beside published ones, and where the time goes."""
    rows = []
    for model, projection in projections.items():
        work = projection.work
        tokens = work.batch * work.seq_len / work.cards
        published = {c.published.key: c.published.value for c in compare(projection)}
        for arm in ARMS:
            times = projection.times(arm)
            parts, seconds = by_part(times), total(times)
            slow, fast = (total(projection.at(end).times(arm)) for end in (Level.LOW, Level.HIGH))
            samples = published.get(f"{arm.key} samples/s")
            shares = sorted(
                ((sum(parts[p] for p in group) / seconds, name) for name, group in _GROUPS.items()),
                reverse=True,
            )
            rows.append(
                (
                    f"{model} on {work.cards}", arm.label,
                    f"{samples * work.seq_len / work.cards:,.0f}" if samples else "",
                    f"{tokens / seconds:,.0f}", f"{tokens / slow:,.0f} to {tokens / fast:,.0f}",
                    ", ".join(f"{name} {share:.0%}" for share, name in shares if share >= _SHOWN_SHARE),
                )
            )  # fmt: skip
    headings = ("model", "recipe", "published", "computed", "bounds", "where the time goes")
    note = (
        "Llama 3.1 with sequences of 8192, 2 at a time on each card. The 70B model computes its layers again in the "
        "backward pass and gathers their weights twice, as its preset does; its cards are eight nodes. No log of a "
        "70B pretraining run was found. Bounds have all assumptions at one end."
    )
    return Table("Tokens per second of one card", note, headings, rows, 2)


def _peaks(machine: Machine) -> Table:
    rows = []
    for f in fields(Machine):
        peak: Peak = getattr(machine, f.name)
        rows.append((f.name.replace("_", " "), _amount(peak), peak.source, peak.confidence))
    derived = machine.lane_operations
    rows.append(
        ("vector ALU", f"{derived / 1e12:.1f} T lane operations/s", "the product of the first four", "")
    )
    return Table("Peaks", "Public numbers.", ("what", "value", "source", "confidence"), rows, 4)


def _amount(peak: Peak) -> str:
    value = f"{peak.value:,.0f} " if peak.value < _LARGE else si(peak.value)
    return f"{value}{peak.unit}".strip()


def _assumptions(assumed: Assumptions) -> Table:
    rows = []
    for f in fields(Assumptions):
        a: Assumption = getattr(assumed, f.name)
        rows.append((f"`{f.name}`", *(f"{v:g}" for v in (a.low, a.nominal, a.high)), a.source))
    note = "Low is the slow end. Shares are fractions of a peak. Numbers after a project's name are its pull requests."
    return Table("Assumptions", note, ("assumption", "low", "nominal", "high", "source"), rows)


def _kernels(projection: Projection) -> Table:
    rows = []
    for record in projection.records:
        if record["loop_matrix"] or record["kernel"] == _FLAG:
            continue
        times = [
            kernel_time(record, _G, projection.machine, projection.at(level).assumed)
            for level in (Level.HIGH, Level.NOMINAL, Level.LOW)
        ]
        nominal = times[1]
        rows.append(
            (
                _name(record), f"{bytes_per_element(record['case'], record['kernel']):.2f}",
                f"{slots(record, projection.assumed):.2f}", str(record["vgpr"]), str(record["occupancy"]),
                f"{nominal.memory * 1e3:.3f}", f"{nominal.vector * 1e3:.3f}",
                f"{times[0].seconds * 1e3:.3f} to {times[2].seconds * 1e3:.3f}", nominal.bound,
            )
        )  # fmt: skip
    headings = (
        "case", "bytes", "VALU slots", "VGPR", "waves", "memory, ms", "vector, ms", "bounds, ms", "binds",
    )  # fmt: skip
    note = (
        "Bytes and issue slots of the vector ALU are per element, times per 10^9 elements. "
        "`train.x` and `train.w` are what the linear layer launches: both orientations of a BF16 activation or "
        "gradient, and of a float32 weight. "
        "Counts of a fold include both branches; if a row's scales lie close together, less than half is executed."
    )
    return Table("Kernels", note, headings, rows)


def _name(record: KernelCounts) -> str:
    """Return the name of a case, with that of the kernel if it is one of several."""
    return f"{record['case']}, fold" if record["kernel"] == FOLD else str(record["case"])


def _gemms(projection: Projection) -> Table:
    rows = []
    for record in projection.records:
        if record["loop_matrix"] and record["kernel"] != _AGAIN:
            found = multiplication(record, projection.machine)
            (instruction,) = (m for m in record["notable"] if m.startswith("v_mfma"))
            rows.append(
                (
                    record["case"], f"`{instruction}`", f"{record['loop_alu'] / record['loop_matrix']:.2f}",
                    str(record["vgpr"]), str(record["occupancy"]), f"{found.matrix * 1e3:.3f}",
                    f"{found.vector * 1e3:.3f}", found.bound,
                )
            )  # fmt: skip
    headings = ("case", "instruction", "VALU per MFMA", "VGPR", "waves", "matrix, ms", "vector, ms", "binds")
    note = (
        "Times of the inner loop for 2^40 multiply-adds at the peaks, without waiting for memory. "
        "`ordered` multiplies a block of 32 at a time, at BF16's rate, and adds it by the vector ALU; folding is among "
        "the kernels, and rows that do not fit are left out. "
        "The step uses the shares of peak that other GEMMs reached, not these times."
    )
    return Table("GEMM loops", note, headings, rows, 2)


def _steps(projection: Projection) -> Table:
    columns = [projection.times(arm) for arm in ARMS]
    parts = [by_part(times) for times in columns]

    def row(name: str, values: Iterator[float]) -> tuple[str, ...]:
        return name, *(f"{v * 1e3:.1f}" for v in values)

    rows = [row(part.value, (p[part] for p in parts)) for part in Part]
    rows.append(row("**all quantization**", (sum(p[q] for q in QUANTIZATION) for p in parts)))
    rows += [row(f"**{when.value}**", (total(t, when=when) for t in columns)) for when in Pass]
    rows.append(row("**step**", (total(t) for t in columns)))
    rows.append(("step, bounds", *(_range(projection, arm.key) for arm in ARMS)))
    work = projection.work
    rows.append(("**samples/s**", *(f"{work.batch / total(t):.2f}" for t in columns)))
    note = (
        f"Milliseconds of one optimizer step of Llama 3.1 8B, computed: {work.batch} sequences of {work.seq_len} over "
        f"{work.cards} cards, {work.micro_batch} at a time, nominal. The bounds have all assumptions at one end."
    )
    return Table("One step", note, ("part", *(arm.label for arm in ARMS)), rows)


def _range(projection: Projection, key: str) -> str:
    low, high = (projection.at(level).quantities()[f"{key} samples/s"] for level in (Level.HIGH, Level.LOW))
    batch = projection.work.batch
    return f"{batch / low * 1e3:.0f} to {batch / high * 1e3:.0f}"


def _comparison(projection: Projection) -> Table:
    rows = []
    for c in compare(projection):
        bound = "> " if c.published.bound == ">" else ""
        rows.append(
            (
                c.published.what, c.published.source, f"{bound}{c.published.value:g}", f"{c.nominal:.3g}",
                f"{c.low:.3g} to {c.high:.3g}", f"{c.deviation:+.1%}", c.verdict,
            )
        )  # fmt: skip
    headings = ("what", "source", "published", "computed", "bounds", "deviation", "verdict")
    note = "Bounds cover all assumptions at one end, and each assumption alone at either end."
    return Table("Beside what was published", note, headings, rows, 2)


def _sensitivity(projection: Projection) -> Table:
    rows = [
        (
            f"`{s.name}`", *(f"{v:.2f}" for v in s.rate), *(f"{v:.3f}" for v in s.ratio),
        )
        for s in sensitivities(projection)
    ]  # fmt: skip
    headings = ("assumption", "samples/s, low", "samples/s, high", "over FP8, low", "over FP8, high")
    note = (
        "MXFP4 + H16 with one assumption at its low or high end and the others nominal; the strongest first."
    )
    return Table("What moves the result", note, headings, rows)


def totals(times: Times) -> dict[str, float]:
    """Return the seconds of a step by part and pass and in all, under the names of the tables."""
    named = {part.value: seconds for part, seconds in by_part(times).items()}
    return named | {when.value: total(times, when=when) for when in Pass} | {"step": total(times)}
