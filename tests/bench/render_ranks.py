"""The tables of docs/explanation/ranks.rst, from what `bench.bench_gpu_ranks` measured.

`PYTHONPATH=tests python -m bench.render_ranks FILE.json ...` keeps the rows of such files as one record.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from bench.records import RECORDS, newest, read
from rst_table import csv_table

KIND = "ranks_gpu"
PART = "ranks_gpu.inc"

Row = dict[str, Any]


def keep(sources: Iterable[Path], records: Path = RECORDS) -> Path:
    """Write the rows of several files as one record under the name of their GPU and date; return its path."""
    found = [read(source) for source in sources]
    machine = found[0]["machine"]
    gpu = re.sub(r"[^a-z0-9]+", "-", machine["gpu"].lower()).strip("-")
    target = records / f"{KIND}_{gpu}_{machine['date']}.json"
    record = {"machine": machine, "ranks": [row for one in found for row in one["ranks"]]}
    target.write_text(json.dumps(record, indent=1) + "\n", encoding="utf-8")
    return target


def text_of(record: Row) -> str:
    """Return the tables; a label without rows has none."""
    machine, rows = record["machine"], record["ranks"]
    text = f"{machine['gpu']}, NCCL, PyTorch {machine['torch']}, Triton {machine['triton']}, {machine['date']}.\n"
    for label, write in (("losses", _losses), ("weak", _weak), ("full", _full)):
        if own := [row for row in rows if row["label"] == label]:
            text += "\n" + write(own)
    if len(ways := {_ways(row) for row in rows}) == 1:  # said once
        way = ways.pop()
        text = text.replace(f"`{way}", "`") + f"\nAll steps are{way.replace(',', '', 1) or ' eager'}.\n"
    return text


def _name(row: Row) -> str:
    return f"`{row['recipe']}`{_ways(row)}"


def _ways(row: Row) -> str:
    return ", compiled by block" * (row["compile"] == "block") + ", captured" * row.get("captured", False)


def _table(head: Sequence[str], rows: Iterable[Iterable[str]]) -> str:
    return csv_table(head, rows, "performance")


def _form(row: Row) -> str:
    """Return how the ranks of a row hold the model."""
    layout = row["layout"]
    if row["ranks"] == 1:
        return "one GPU"
    if layout["shard"] == layout["tensor"] == 1:
        return "whole"
    form = "split" if layout["replicate"] == 1 else f"{layout['replicate']} groups that split"
    return form + ", kept" * row.get("kept", False)


def _groups(rows: list[Row]) -> list[list[Row]]:
    """Return the rows of each recipe and way, by their number of ranks; the last of those that are measured twice."""
    groups: dict[str, dict[tuple[int, str], Row]] = {}
    for row in rows:
        groups.setdefault(_name(row), {})[row["ranks"], _form(row)] = row
    return [[held[key] for key in sorted(held)] for held in groups.values()]


def _losses(rows: list[Row]) -> str:
    lines = []
    for group in _groups(rows):
        alone = group[0]
        for row in group[1:]:
            same = [a == b for a, b in zip(row["losses"], alone["losses"], strict=True)]
            first = "none" if all(same) else f"step {same.index(False) + 1}"
            weights = "equal" if row["weights"] == alone["weights"] else "not equal"
            lines.append(
                (_name(row), str(row["ranks"]), _form(row), f"{sum(same)} of {len(same)}", first, weights)
            )
    return (
        "Losses of each step and all weights after the last, compared bit for bit with those of one GPU that takes the "
        "parts of a batch in turns, without clipping:\n\n"
        + _table(("recipe", "GPUs", "model", "losses equal", "first difference", "weights"), lines)
    )


def _lost(row: Row) -> tuple[str, str]:
    """Return the milliseconds in which only NCCL's kernels ran, and those in which none did."""
    return tuple(f"{row[key]:.1f}" if key in row else "" for key in ("nccl_alone_ms", "idle_ms"))  # type: ignore[return-value]


def _weak(rows: list[Row]) -> str:
    lines = []
    for group in _groups(rows):
        alone = [row for row in rows if row["ranks"] == 1 and row["recipe"] == group[0]["recipe"]]
        base = group[0] if group[0]["ranks"] == 1 else next(iter(alone), group[0])
        lines += [
            (
                _name(row), str(row["ranks"]), _form(row), f"{row['ms']:.1f}", f"{row['tokens_per_s_per_gpu']:,.0f}",
                f"{row['tokens_per_s_per_gpu'] / base['tokens_per_s_per_gpu']:.3f}",
                f"{row['peak_gib']:.1f}" if "peak_gib" in row else "", *_lost(row),
            )
            for row in group
        ]  # fmt: skip
    shape = rows[0]["shape"]
    return (
        f"Weak scaling of a Llama of {shape['parameters'] / 1e9:.2f} billion parameters, "
        f"{rows[0]['sequences'] * shape['seq_len']:,} tokens on each GPU and step. The last two "
        "columns are of one step under the profiler: the time in which only NCCL's kernels ran, and in which none "
        "did:\n\n"
        + _table(
            (
                "recipe", "GPUs", "model", "ms", "tokens/s per GPU", "of one GPU", "peak, GiB", "NCCL alone, ms",
                "idle, ms",
            ),
            lines,
        )
    )  # fmt: skip


def _full(rows: list[Row]) -> str:
    bases = {row["ranks"]: row["tokens_per_s"] for row in rows if row["recipe"] == "bf16"}
    lines = [
        (
            _name(row), str(row["ranks"]), _form(row), f"{row['ms']:,.0f}",
            f"{row['tokens_per_s_per_gpu']:,.0f}",
            f"{row['tokens_per_s'] / bases[row['ranks']]:.2f}" if row["ranks"] in bases else "",
            f"{row['tflops_per_gpu']:.0f}", f"{row['peak_gib']:.1f}", *_lost(row),
        )
        for row in rows
    ]  # fmt: skip
    shape = rows[0]["shape"]
    (recompute,) = {row.get("recompute", "none") for row in rows}
    return (
        f"Llama 3.1 8B: all {shape['layers']} layers, {shape['parameters']:,} parameters, split over the GPUs, "
        f"sequences of {shape['seq_len']:,} tokens, {rows[0]['sequences']} on each GPU and step, "
        f'`run.recompute = "{recompute}"`:\n\n'
        + _table(
            (
                "recipe", "GPUs", "model", "ms", "tokens/s per GPU", "of `bf16`",
                "model TFLOP/s per GPU", "peak, GiB", "NCCL alone, ms", "idle, ms",
            ),
            lines,
        )
    )  # fmt: skip


def parts(records: Path = RECORDS) -> dict[str, str]:
    """Return what the page includes, from the newest record; a sentence where there is none."""
    if not any(records.glob(f"{KIND}_*.json")):
        return {PART: "There is no record of many GPUs yet.\n"}
    return {PART: text_of(read(newest(KIND, records)))}


if __name__ == "__main__":
    print(keep(map(Path, sys.argv[1:])))
