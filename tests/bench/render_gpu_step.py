"""The section "A training step" of docs/explanation/performance_gpu.rst, from the record of `bench_gpu_step`."""

from __future__ import annotations

from typing import Any

from matplotlib.figure import Figure

from bench.plot import WIDE, label_below
from mxref_training.report.drawing import SMALLEST
from mxref_training.report.palette import COLOURS, GREY, INK, MUTED, PAPER

SECTION = "A training step"
PLOT = "training_step_gpu"
LABELS = {
    "gemm": "matrix products", "quantize": "quantization", "optimizer": "optimizer",
    "rest": "attention, norms, casts, loss", "waiting": "waiting for Python",
}  # fmt: skip

Record = dict[str, Any]


def section(record: Record, table: Any) -> str:
    """Return the section's text; `table` makes one from headings and rows."""
    m, machine, rows = record["model"], record["machine"], fastest(record)
    tokens = m["micro_batch"] * m["micro_batches"] * m["seq_len"]
    base = rows[0]
    text = (
        f"A Llama of {m['parameters'] / 1e9:.2f} billion parameters ({m['layers']} layers of {m['width']}, "
        f"{m['heads']} heads over {m['kv_heads']}, SwiGLU {m['ffn']}, vocabulary {m['vocab']}), "
        f"{tokens:,} tokens in each optimizer step, random weights and tokens; {machine['gpu']}, "
        f"PyTorch {machine['torch']}, {machine['date']}.\n"
        f"{_modes(rows)}\n"
        "`busy` is the time of all kernels divided by that of the step; in the rest the GPU waits for Python.\n\n"
    )
    headings = ["recipe", "tokens/s", f"of {base['recipe']}", "ms", "deterministic, ms"]
    headings += ["busy", "peak, GiB"]
    if "activations_gib" in base:
        headings.append("activations, GiB")
        text += "`activations` is the peak of the memory without weights, moments and gradients.\n\n"
    with_floor = any("floor" in row for row in rows)
    if with_floor:
        headings[4:4] = ["floor, ms", "of floor"]
        text += (
            "`floor` is the sum of the step's products at the rate of cuBLAS, in FP8 where operands fit it and else in "
            "BF16, of the bytes of making operands at the speed of a copy, and of everything else as it was measured "
            "in the step. `bench/step_floor.py` says which bytes count.\n\n"
        )
    text += table(
        headings,
        (
            (
                _name(row), f"{row['tokens_per_s']:,.0f}", f"{row['tokens_per_s'] / base['tokens_per_s']:.2f}",
                f"{row['ms']:.1f}", *(_floor(row) if with_floor else ()),
                f"{row['deterministic_ms']:.1f}" if "deterministic_ms" in row else "–",
                f"{row['busy']:.2f}",
                *(f"{row[key]:.1f}" for key in ("peak_gib", "activations_gib") if key in row),
            )
            for row in rows
        ),
    )  # fmt: skip
    text += f"\n.. image:: /_measured/{PLOT}.svg\n"
    text += "   :alt: Milliseconds of a step by what the GPU does, for each recipe\n\n"
    if any(row["recipe"] == "fp8" and "mode" not in row for row in rows):
        text += (
            "\n`fp8` is a baseline of accuracy, not of speed: plain PyTorch makes its operands, "
            "and they are decoded to BF16 before the product.\n"
        )
    repeated = [_name(row) for row in rows if row["repeated"]]
    if repeated:
        text += (
            f"\nTraining would have repeated steps under {', '.join(repeated)}: "
            "an operand left the range of the fast product.\n"
        )
    return text


def fastest(record: Record) -> list[Record]:
    """Return the fastest row of each recipe, in the order of the recipes."""
    best: dict[str, Record] = {}
    for row in record["steps"]:
        name = row["recipe"]
        best[name] = min(best.get(name, row), row, key=lambda one: one["ms"])
    return list(best.values())


def _modes(rows: list[Record]) -> str:
    """Return how the steps were run, in sentences."""
    of_peers = "`plain` is `nn.Linear` in BF16, as fast as PyTorch runs it, without deterministic kernels."
    ours = "Recipes contain everything that `mxref train` does in a step; it uses deterministic kernels."
    known = {
        "compiled": "`torch.compile` of each decoder layer",
        "whole": "`torch.compile` of the whole model",
        "captured": "`torch.compile` of each decoder layer, and the whole step as one CUDA graph",
        "captured-whole": "`torch.compile` of the whole model, and the whole step as one CUDA graph",
    }
    modes = dict.fromkeys(row.get("mode", "eager") for row in rows)
    said = "; ".join(f"`{mode}` is {known[mode]}" for mode in modes if mode in known)
    return "\n".join([of_peers, ours, *([f"{said}."] if said else [])])


def plot(record: Record, width: float = WIDE) -> Figure:
    """Return a figure of the milliseconds of a step by what the GPU does."""
    rows = fastest(record)
    colours = dict(zip(LABELS, (*COLOURS[:3], GREY, PAPER), strict=True))
    figure = Figure(figsize=(width, 0.5 * len(rows) + (1.2 if width == WIDE else 1.6)), layout="constrained")
    axes = figure.subplots()
    left = [0.0] * len(rows)
    for part, label in LABELS.items():
        widths = [_ms(row, part) for row in rows]
        edge = {"edgecolor": MUTED, "linewidth": 0.6} if part == "waiting" else {}
        bars = axes.barh(range(len(rows)), widths, 0.62, left=left, color=colours[part], label=label, **edge)
        left = [start + ms for start, ms in zip(left, widths, strict=True)]
    axes.bar_label(bars, [f"{row['ms']:.0f}" for row in rows], padding=4, fontsize=SMALLEST, color=MUTED)
    axes.set_yticks(range(len(rows)), [_name(row).replace("`", "") for row in rows])
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0, labelcolor=INK)
    axes.margins(x=0.08)
    label_below(axes, "milliseconds of an optimizer step", width)
    figure.legend(
        frameon=False, loc="outside upper left", ncols=len(LABELS) if width == WIDE else 2, fontsize=SMALLEST,
        handlelength=1.2, columnspacing=1,
    )  # fmt: skip
    return figure


def _floor(row: Record) -> tuple[str, str]:
    return (f"{row['floor']['ms']:.1f}", f"{row['of_floor']:.2f}") if "floor" in row else ("–", "–")


def _ms(row: Record, part: str) -> float:
    return max(0.0, row["ms"] - row["kernel_ms"]) if part == "waiting" else row["parts"][part]


def _name(row: Record) -> str:
    mode = row.get("mode", "eager")
    return f"`{row['recipe']}`" + ("" if mode == "eager" else f" {mode}")
