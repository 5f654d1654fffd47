"""The table of docs/explanation/gfx950.rst, from counts of instructions in compiled kernels.

`PYTHONPATH=tests python -m bench.render_aot FILE.json ...` keeps what `python -m aot --json` wrote.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from aot.budgets import read_budgets
from bench.records import RECORDS, read
from rst_table import csv_table

TABLE = "gfx950.inc"
SHOWN = (
    "row.rne", "row.rne.h16", "row.sr16.h16", "native.row.rne", "native.row.rne.h16", "column.rne", "column.rne.h16",
    "dual.rne+rne", "dual.rne.h16+rne.h16", "native.dual.rne+rne.h16", "mxfp8.row.rne.e4m3", "dequantize.bfloat16",
    "gemm.bounded.float32", "gemm.ordered.float32", "gemm.mxfp8.e4m3.mxfp4", "short.row.rne.e2m3",
    "short.native.row.rne.e2m3", "short.native.dual.rne+rne.h16.e2m3", "gemm.sixes.e3m2.e2m3",
)  # fmt: skip
"""The cases of the page; the records have all."""
_NAME = "aot_{target}_triton-{triton}.json"


def documents(target: str, records: Path = RECORDS) -> list[dict[str, Any]]:
    """Return the recorded counts for a machine, one document per release of Triton, oldest first."""
    found = [read(path) for path in records.glob(_NAME.format(target=target, triton="*"))]
    return sorted(found, key=lambda d: [int(part) for part in d["triton"].split(".")])


def render(recorded: Sequence[Mapping[str, Any]]) -> str:
    """Return a reStructuredText table, a kernel of each kind: by the release of the budgets, or else the last one."""
    pinned = [d for d in recorded if d["triton"] == read_budgets().counted_with]
    shown = (pinned or recorded)[-1]
    dates = ", ".join(f"{d['triton']} on {d['date']}" for d in recorded)
    size = f"{len({r['case'] for r in shown['records']})} cases, {len(shown['records'])} kernels"
    lines = [
        f"{size}, counted with Triton {dates}.",
        f"The table has a kernel of each kind, by Triton {shown['triton']}.",
    ]
    rows = [
        (f"`{r['case']}`", f"`{r['kernel']}`", *_cells(r), " ".join(f"`{name}`" for name in r["notable"]))
        for r in shown["records"]
        if r["case"] in SHOWN
    ]
    head = ("Case", "Kernel", "VALU", "VGPR", "Waves", "Instructions of gfx950")
    return "\n".join([*lines, "", csv_table(head, rows, "performance")])


def _cells(record: Mapping[str, Any]) -> tuple[str, str, str]:
    vgpr = record["registers"]["vgpr"] + record["registers"]["agpr"]
    alu = f"{record['alu_per_element']:.1f}"
    if record["loop_matrix"]:
        alu = f"{record['loop_alu'] / record['loop_matrix']:.1f} a matrix instruction"
    return alu, str(vgpr), str(record["occupancy"])


def parts(records: Path = RECORDS) -> dict[str, str]:
    """Return the table by the name under which the page includes it."""
    return {TABLE: render(documents("gfx950", records))}


def keep(counts: Path, records: Path = RECORDS) -> list[Path]:
    """Write a record for each machine of the counts, in place of the older one of this release of Triton."""
    document = read(counts)
    kept = []
    for target in sorted({r["target"] for r in document["records"]}):
        mine = {**document, "records": [r for r in document["records"] if r["target"] == target]}
        kept.append(records / _NAME.format(target=target, triton=document["triton"]))
        kept[-1].write_text(json.dumps(mine, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    return kept


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(*keep(Path(name)), sep="\n")
