"""The tables and bars of docs/performance_gpu.rst, from what `make bench-gpu` and `make test-gpu` recorded.

`PYTHONPATH=tests python -m bench.render_gpu [RECORD.json ...]` copies records into docs/data and writes the page's
parts from the newest ones of each kind there.
"""

from __future__ import annotations

import json
import re
import shutil
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from bench import render_gpu_step

DOCS = Path(__file__).parents[2] / "docs"
TABLES = "performance_gpu_tables.inc"
KINDS = {"bench_gpu": "gemm", "test_gpu": "counts", "step_gpu": "steps"}
"""Records by the entry that only they have."""

Record = dict[str, Any]


def keep(kind: str, source: Path, docs: Path = DOCS) -> Path:
    """Copy a record into docs/data under the name of its GPU and date; return the copy."""
    record = json.loads(source.read_text(encoding="utf-8"))
    machine = record.get("machine", record)
    gpu = re.sub(r"[^a-z0-9]+", "-", machine["gpu"].lower()).strip("-")
    target = docs / "data" / f"{kind}_{gpu}_{machine['date']}.json"
    target.parent.mkdir(parents=True, exist_ok=True)
    shutil.copyfile(source, target)
    return target


def newest(kind: str, docs: Path = DOCS) -> Path:
    """Return the record of the latest date; SystemExit if there is none."""
    found = sorted(docs.glob(f"data/{kind}_*.json"), key=lambda path: path.stem.rpartition("_")[2])
    if not found:
        raise SystemExit(
            f"docs/data has no {kind}_*.json; run make bench-gpu and make test-gpu on a GPU first"
        )
    return found[-1]


def kind_of(record: Record) -> str:
    """Return the kind of a record; SystemExit if it is none."""
    found = [kind for kind, entry in KINDS.items() if entry in record]
    if not found:
        raise SystemExit(f"no record of {', '.join(KINDS)}: it has none of {', '.join(KINDS.values())}")
    return found[0]


def tables_text(
    bench: Record, tests: Record | None, sources: Iterable[str], step: Record | None = None
) -> str:
    """Return the tables of the page as reStructuredText; no section about what was not recorded.

    Errors of FP8 products are of Hopper alone.
    """
    machine = bench["machine"]
    driver = f", driver {machine['driver']}" if machine["driver"] else ""
    head = (
        f".. Written by `python -m bench.render_gpu` from {' and '.join(sources)}; never by hand.\n\n"
        f"{machine['gpu']}{driver}, PyTorch {machine['torch']}, Triton {machine['triton']}, {machine['date']}.\n"
        f"A copy of memory moves {bench['copy_tb_per_s']:.2f} TB/s there, read and written.\n"
    )
    sections = {
        "Quantization": _quantization(bench["quantize"]),
        "Matrix products": _products(bench["gemm"]),
    }
    if bench["error"]:
        sections["Errors of FP8 products"] = _errors(bench["error"])
    if step:
        sections[render_gpu_step.SECTION] = render_gpu_step.section(step, _table)
    if tests:
        sections["What is proved there"] = _tests(tests)
    return head + "".join(f"\n{title}\n{'-' * len(title)}\n\n{text}" for title, text in sections.items())


def _table(headings: Iterable[str], rows: Iterable[Iterable[str]]) -> str:
    lines = [".. list-table::", "   :header-rows: 1", ""]
    for row in (headings, *rows):
        cells = [f"- {cell}".rstrip() for cell in row]
        lines += [f"   * {cells[0]}", *(f"     {cell}" for cell in cells[1:])]
    return "\n".join(lines) + "\n"


def _by_name(rows: list[Record]) -> Iterator[tuple[str, dict[int, Record]]]:
    for name in dict.fromkeys(row["name"] for row in rows):
        yield name, {row["size"]: row for row in rows if row["name"] == name}


def _sizes(rows: list[Record]) -> list[int]:
    return sorted({row["size"] for row in rows})


def _quantization(rows: list[Record]) -> str:
    sizes = _sizes(rows)
    table = _table(
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
    return (
        f"From bfloat16; bytes read and written, against those that a copy moves in the same time.\n\n{table}"
    )


def _products(rows: list[Record]) -> str:
    sizes = _sizes(rows)
    return _table(
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
    return _table(
        ("operands", "FP8, as `bounded` uses it", "FP8, fast accumulation", "`ordered`", "BF16"),
        (
            (pattern, *(worst([row for row in rows if row["pattern"] == pattern], way) for way in ways))
            for pattern in patterns
        ),
    )


def _tests(tests: Record) -> str:
    counts = ", ".join(f"{number} {outcome}" for outcome, number in tests["counts"].items())
    text = f"`make test-gpu` on {tests['gpu']}, {tests['date']}: {counts}, in {tests['seconds']:.0f} s.\n\n"
    rows = ((_in_words(name), f"{number:,}") for name, number in tests["cases"].items())
    return text + _table(("test", "cases compared"), rows)


def _in_words(test: str) -> str:
    """Return the name of a test as it reads; whole names leave no room for the numbers."""
    return test.rpartition("::")[2].removeprefix("test_").replace("_", " ")


def shown(docs: Path = DOCS) -> dict[str, str]:
    """Return the parts of the page by file, made from the newest records in docs/data; only times must be there."""
    kinds = [kind for kind in KINDS if kind == "bench_gpu" or any(docs.glob(f"data/{kind}_*.json"))]
    kept = {kind: newest(kind, docs) for kind in kinds}
    records = {kind: json.loads(path.read_text(encoding="utf-8")) for kind, path in kept.items()}
    sources, step = (f"data/{path.name}" for path in kept.values()), records.get("step_gpu")
    parts = {TABLES: tables_text(records["bench_gpu"], records.get("test_gpu"), sources, step)}
    return parts | ({render_gpu_step.PLOT: render_gpu_step.plot(step)} if step else {})


def main(arguments: list[str]) -> None:
    """Keep the records and write the parts of the page."""
    for source in map(Path, arguments):
        keep(kind_of(json.loads(source.read_text(encoding="utf-8"))), source)
    for name, text in shown().items():
        (DOCS / name).write_text(text, encoding="utf-8")
        print(DOCS / name)


if __name__ == "__main__":
    main(sys.argv[1:])
