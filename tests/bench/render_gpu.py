"""The tables and bars of docs/explanation/performance_gpu.rst, from what `make bench-gpu` and `make test-gpu` measured.

`PYTHONPATH=tests python -m bench.render_gpu FILE.json ...` keeps such files in docs/records.
The page shows the newest record of each kind.
"""

from __future__ import annotations

import re
import shutil
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from bench import render_gpu_step
from bench.records import RECORDS, newest, read
from rst_table import csv_table

TABLES = "performance_gpu.inc"
KINDS = {"bench_gpu": "gemm", "test_gpu": "counts", "step_gpu": "steps"}
"""The kinds of records, each with an entry that only this kind has."""

Record = dict[str, Any]


def keep(kind: str, source: Path, records: Path = RECORDS) -> Path:
    """Copy a record under the name of its GPU and date; return the copy."""
    record = read(source)
    machine = record.get("machine", record)
    gpu = re.sub(r"[^a-z0-9]+", "-", machine["gpu"].lower()).strip("-")
    target = records / f"{kind}_{gpu}_{machine['date']}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    return target


def kind_of(record: Record) -> str:
    """Return the kind of a record; SystemExit if it is none."""
    found = [kind for kind, entry in KINDS.items() if entry in record]
    if not found:
        raise SystemExit(f"no record of {', '.join(KINDS)}: it has none of {', '.join(KINDS.values())}")
    return found[0]


def tables_text(bench: Record, tests: Record | None, step: Record | None = None) -> str:
    """Return the tables of the page as reStructuredText; parts that were not recorded have no section.

    Only Hopper has errors of FP8 products.
    """
    machine = bench["machine"]
    driver = f", driver {machine['driver']}" if machine["driver"] else ""
    head = (
        f"{machine['gpu']}{driver}, PyTorch {machine['torch']}, Triton {machine['triton']}, {machine['date']}.\n"
        f"A copy of memory moves {bench['copy_tb_per_s']:.2f} TB/s there, reads and writes together.\n"
    )
    sections = {
        "Quantization": _quantization(bench["quantize"]),
        "Matrix products": _products(bench["gemm"]),
    }
    if bench["error"]:
        sections["Errors of FP8 products"] = _errors(bench["error"])
    if step:
        sections[render_gpu_step.SECTION] = render_gpu_step.section(step, csv_table)
    if tests:
        sections["What is proved there"] = _tests(tests)
    return head + "".join(f"\n{title}\n{'-' * len(title)}\n\n{text}" for title, text in sections.items())


def _by_name(rows: list[Record]) -> Iterator[tuple[str, dict[int, Record]]]:
    for name in dict.fromkeys(row["name"] for row in rows):
        yield name, {row["size"]: row for row in rows if row["name"] == name}


def _sizes(rows: list[Record]) -> list[int]:
    return sorted({row["size"] for row in rows})


def _quantization(rows: list[Record]) -> str:
    sizes = _sizes(rows)
    table = csv_table(
        ("operation", *(f"{n} x {n}, µs" for n in sizes), f"share of a copy, {sizes[-1]} x {sizes[-1]}"),
        (
            (
                name,
                *(f"{at[n]['ms'] * 1e3:.0f}" if n in at else "" for n in sizes),
                f"{at[sizes[-1]]['share']:.2f}",
            )
            for name, at in _by_name(rows)
            if sizes[-1] in at
        ),
    )
    return f"From bfloat16. The share compares bytes read and written with those of a copy in the same time.\n\n{table}"


def _products(rows: list[Record]) -> str:
    sizes = _sizes(rows)
    return csv_table(
        ("product, bfloat16 out", *(f"{n} cubed, TFLOP/s" for n in sizes), f"of BF16, {sizes[-1]} cubed"),
        (
            (name, *(f"{at[n]['per_second'] / 1e12:.0f}" for n in sizes), f"{at[sizes[-1]]['share']:.2f}")
            for name, at in _by_name(rows)
        ),
    )


def _errors(rows: list[Record]) -> str:
    def worst(found: list[Record], way: str) -> str:
        logs = [(row["log2"][way], row["k"]) for row in found if row["log2"][way] is not None]
        return f"2^{max(logs)[0]} (K = {max(logs)[1]})" if logs else "0"

    ways = ("fp8", "fp8 fast", "ordered", "bf16")
    patterns = dict.fromkeys(row["pattern"] for row in rows)
    return csv_table(
        ("operands", "FP8, as `bounded` uses it", "FP8, fast accumulation", "`ordered`", "BF16"),
        (
            (pattern, *(worst([row for row in rows if row["pattern"] == pattern], way) for way in ways))
            for pattern in patterns
        ),
    )


def _tests(tests: Record) -> str:
    counts = ", ".join(f"{number} {outcome}" for outcome, number in tests["counts"].items())
    text = f"`make test-gpu` on {tests['gpu']}, {tests['date']}: {counts}, in {tests['seconds']:.0f} s.\n"
    cases = sum(tests["cases"].values())
    return text + f"These tests compared {cases:,} cases bit for bit; the record has the number of each.\n"


def parts(records: Path = RECORDS) -> dict[str, str]:
    """Return what the page includes, by name, made from the newest records; only the times are required."""
    from bench.plot import charts

    kinds = [kind for kind in KINDS if kind == "bench_gpu" or any(records.glob(f"{kind}_*.json"))]
    newest_of = {kind: read(newest(kind, records)) for kind in kinds}
    step = newest_of.get("step_gpu")
    tables = {TABLES: tables_text(newest_of["bench_gpu"], newest_of.get("test_gpu"), step)}
    return tables | (charts(render_gpu_step.PLOT, partial(render_gpu_step.plot, step)) if step else {})


if __name__ == "__main__":
    for source in map(Path, sys.argv[1:]):
        print(keep(kind_of(read(source)), source))
