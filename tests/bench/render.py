"""The results as a table in the terminal, and as the tables and the plot of docs/explanation/performance.rst."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from bench.goals import AVX2_MM_RATIO, FIRST_CALL_MS, GOALS, TWO_THREADS, path_of
from bench.records import RECORDS, newest, read
from rst_table import csv_table

Rows = list[dict[str, Any]]

TABLES, FORMATS, PLOT = "performance.inc", "performance_formats.inc", "performance"
MAIN_SIZE = 4096
MS = {"ratio": "min_ms", "cpu_ratio": "cpu_ms"}
"""The milliseconds of a ratio."""
SHOWN = (
    "quantize float32", "quantize bfloat16", "quantize H16", "quantize SR", "quantize axis 0", "quantize 32x32",
    "quantize_dual, twice", "quantize_dual H16, twice", "dequantize float32", "hadamard 16", "quantize MXFP8 E4M3",
    "quantize MXFP8 E5M2",
)  # fmt: skip
"""The operations of the page's table; the plot and the record have all."""
PRODUCT_SIZE = 2048
"""The products of the page; every path was timed at this size."""


def of_kind(results: dict[str, Any], kind: str, **fields: Any) -> Rows:
    """Return the rows of a kind whose fields have these values."""
    return [
        row
        for row in results["rows"]
        if row["kind"] == kind and all(row.get(name) == value for name, value in fields.items())
    ]


def show(results: dict[str, Any]) -> None:
    """Print every row in one table."""
    headings = ("operation", "by", "size", "thr", "min ms", "median", "cpu", "rate", "ratio to", "ratio")
    table = Table(*headings, "in CPU time", "goal", title=_headline(results), title_justify="left", box=None)
    for row in results["rows"]:
        table.add_row(*_line(row))
    console = Console(markup=False, highlight=False)
    Console(markup=False, highlight=False, width=max(console.width, 160)).print(table)
    for row in of_kind(results, "peer"):
        if note := row.get("failed") or row["note"]:
            print(f"{row['backend']}: {note}")


def _line(row: dict[str, Any]) -> tuple[str, ...]:
    if row["kind"] == "overhead":
        return row["operation"], "a call on 32 x 32", "32", "1", f"{row['microseconds'] / 1e3:.4f}"
    if row["kind"] == "first call":
        return row["operation"], "a new process", "64", "1", f"{row['milliseconds']:.1f}"
    head = (row["operation"], row["backend"], str(row["size"]), str(row["threads"]))
    if "failed" in row:
        return *head, "failed"
    rate = f"{row['gflop_per_s']:.0f} GFLOP/s" if row["kind"] == "gemm" else f"{row['gb_per_s']:.2f} GB/s"
    against = {"operation": "copyto", "gemm": "mm bf16", "peer": "mxref"}[row["kind"]]
    ratio = 1 / row["ratio"] if row["kind"] == "peer" else row["ratio"]
    times = (f"{row[name]:.2f}" for name in ("min_ms", "median_ms", "cpu_ms"))
    cpu = f"{row['cpu_ratio']:.2f}" if "cpu_ratio" in row and row["threads"] == 1 else ""
    return *head, *times, rate, against, f"{ratio:.2g}" if ratio < 0.095 else f"{ratio:.2f}", cpu, _goal(row)


def _goal(row: dict[str, Any]) -> str:
    goals = GOALS.get(path_of(row), {}).get(row["kind"], {})
    goal = goals.get(row["operation"]) if row["threads"] == 1 else None
    return "" if goal is None else f"{goal:.2f}"


def _headline(results: dict[str, Any]) -> str:
    machine = results["machine"]
    versions = ", ".join(f"{name} {v}" for name, v in machine["versions"].items())
    noise = "quiet" if machine["quiet"] else f"NOT QUIET: other processes took {machine['busy_share']:.0%}"
    return (
        f"{machine['processor']}, {machine['cores']} cores, {noise}, {machine['date']}; "
        f"Python {machine['python']}, {versions}"
    )


def keep(results: dict[str, Any], records: Path = RECORDS) -> Path:
    """Write the numbers from which `make tables` writes the page, and return the file.

    Raises:
        SystemExit: numbers that lack something that the page shows.
    """
    of_all = results.get("formats") or of_kind(results, "peer")
    if not (of_kind(results, "operation", size=MAIN_SIZE, threads=1) and of_all):
        raise SystemExit(f"the page shows {MAIN_SIZE} x {MAIN_SIZE} and peers: record a whole run")
    hardware = re.sub(r"[^a-z0-9]+", "-", results["machine"]["processor"].partition(";")[0].lower()).strip(
        "-"
    )
    kind = "bench_formats" if results.get("formats") else "bench_cpu"
    path = records / f"{kind}_{hardware}_{results['machine']['date']}.json"
    path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return path


def parts(records: Path = RECORDS) -> dict[str, str]:
    """Return the tables and the plot of the newest numbers, by the names under which the page includes them."""
    from bench.plot import charts, plot

    results = read(newest("bench_cpu", records))
    formats = read(newest("bench_formats", records))
    of_formats = f"{_headline(formats)}.\n\n{_operations(formats)}"
    return {TABLES: tables_text(results), FORMATS: of_formats} | charts(
        PLOT, partial(plot, results, MAIN_SIZE)
    )


def tables_text(results: dict[str, Any]) -> str:
    """Return the tables of the page as reStructuredText."""
    sections = {
        f"Operations, {MAIN_SIZE} x {MAIN_SIZE}, one thread": _operations(results),
        "GEMMs": _gemms(results),
        "Other packages": _peers(results),
        "Calls": _calls(results),
    }
    head = f"{_headline(results)}.\n"
    return "\n".join([head, *(f"{t}\n{'-' * len(t)}\n\n{body}" for t, body in sections.items())])


def _operations(results: dict[str, Any]) -> str:
    # Other work on the machine takes time from both, but not at once: processor time leaves it out.
    every, ratio = results.get("formats"), "cpu_ratio" if results.get("formats") else "ratio"

    def of_path(name: str, threads: int = 1) -> dict[str, dict[str, Any]]:
        found = of_kind(results, "operation", size=MAIN_SIZE, threads=threads, backend=name)
        return {row["operation"]: row for row in found}

    main, twice = of_path(results["backend"]), of_path(results["backend"], 2)
    slower = {name: found for name in ("avx2", "portable") if (found := of_path(f"numba-{name}"))}
    rows = [
        (
            label, f"{row[MS[ratio]]:.2f}", f"{row[ratio]:.2f}", _goal(row),
            *([f"{row['min_ms'] / twice[label]['min_ms']:.2f}"] if twice else []),
            *(f"{found[label][ratio]:.2f}" for found in slower.values()),
        )
        for label, row in main.items()
        if every or label in SHOWN
    ]  # fmt: skip
    headings = ["operation", "ms", "x copy", "goal", *["2 threads, x one"] * bool(twice)]
    headings += [f"{name}, x copy" for name in slower]
    return _table(headings, rows) + "\n" + _below(main, twice, slower, ratio)


def _below(
    main: dict[str, dict[str, Any]],
    twice: dict[str, dict[str, Any]],
    slower: dict[str, dict[str, dict[str, Any]]],
    ratio: str,
) -> str:
    """Return sentences that say what stays below a goal."""
    missed = [
        f"{label} ({row[ratio]:.2f} of {_goal(row)}{f', {path}' if path else ''})"
        for path, rows in {"": main, **slower}.items()
        for label, row in rows.items()
        if (goal := _goal(row)) and f"{row[ratio]:.2f}" < goal
    ]
    gains = [row["min_ms"] / twice[label]["min_ms"] for label, row in main.items() if label in twice]
    sentences = [f"Below their goals: {', '.join(missed)}." if missed else "All goals are met."]
    if gains:
        met = sum(gain >= TWO_THREADS for gain in gains)
        goal = f"The goal of two threads is {TWO_THREADS} times the speed of one"
        sentences.append(f"{goal}; {met} of {len(gains)} operations meet it.")
    return "\n".join(sentences) + "\n"


def _gemms(results: dict[str, Any]) -> str:
    body = [
        (
            row["operation"], row["backend"],
            f"{row['gflop_per_s']:.0f}", f"{row['ratio_float32']:.2f}", f"{row['ratio']:.2f}", _goal(row),
        )
        for row in of_kind(results, "gemm", size=PRODUCT_SIZE, threads=1)
        if "prepared" not in row["operation"] and "E5M2" not in row["operation"] and "portable" not in row["backend"]
    ]  # fmt: skip
    headings = ("product", "by", "GFLOP/s", "x mm float32", "x mm bfloat16", "goal")
    head = f"M = N = K = {PRODUCT_SIZE}, one thread. E5M2 has the speed of E4M3.\n\n"
    return head + _table(headings, body) + _beside_avx2(results)


def _beside_avx2(results: dict[str, Any]) -> str:
    """Return sentences that compare the path avx2 with PyTorch's products of a CPU without BF16 instructions."""
    ours = {
        row["size"]: row["min_ms"]
        for row in of_kind(results, "gemm", operation="scaled_gemm ordered", path="avx2")
    }
    theirs = of_kind(results, "gemm", operation="torch.mm bfloat16, AVX2", threads=1)
    ratios = {row["size"]: row["min_ms"] / ours[row["size"]] for row in theirs if row["size"] in ours}
    if not ratios:
        return ""
    found = ", ".join(f"{ratio:.1f} times at {size}" for size, ratio in ratios.items())
    verdict = "met" if min(ratios.values()) >= AVX2_MM_RATIO else "not met"
    return (
        "\nIn the rows with AVX2, PyTorch uses neither AVX-512 nor BF16 instructions.\n"
        f"`scaled_gemm ordered` on the path `avx2` has this multiple of the speed of its bfloat16 product: {found}. "
        f"The goal is {AVX2_MM_RATIO:.1f} times; it is {verdict}.\n"
    )


def _peers(results: dict[str, Any]) -> str:
    same = {True: "yes", False: "no", None: "makes no MXFP4"}
    body = []
    for row in of_kind(results, "peer"):
        head = (row["backend"], row["version"], f"{row['size']}\\ :sup:`2`")
        if "failed" in row:
            body.append((*head, "failed", "", "", f"`{row['failed']}`"))
            continue
        numbers = (f"{row['ns_per_element']:.2f}", f"{row['ratio']:.1f}")
        body.append((*head, *numbers, same[row["same_bits"]], row["note"]))
    body += [(name, "", "", "", "", "", why) for name, why in results["absent_peers"].items()]
    headings = ("package", "version", "size", "ns per element", "times mxref's", "same bits", "")
    return "Quantization of float32 with FLOOR and RNE, on one thread.\n\n" + _table(headings, body)


def _calls(results: dict[str, Any]) -> str:
    times = [row["microseconds"] for row in of_kind(results, "overhead") if row["operation"] != "np.copyto"]
    ms = {row["operation"]: row["milliseconds"] for row in of_kind(results, "first call")}
    first = ms["numba's own tables"] + ms["first quantize"]
    return (
        f"A call on a 32 x 32 array takes {min(times):.0f} to {max(times):.0f} microseconds.\n"
        f"The first quantization of a new process takes {first:.0f} ms, with kernels on disk; the goal is "
        f"{FIRST_CALL_MS:.0f} ms.\n"
    )


def _table(headings: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    return csv_table(headings, rows, "performance")
