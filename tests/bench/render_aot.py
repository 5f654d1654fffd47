"""The table of docs/explanation/gfx950.rst, from counts of instructions in compiled kernels.

`PYTHONPATH=tests python -m bench.render_aot FILE.json ...` keeps what `python -m aot --json` wrote.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.records import RECORDS, read

TABLE = "gfx950.inc"
_NAME = "aot_{target}_triton-{triton}.json"


def documents(target: str, records: Path = RECORDS) -> list[dict[str, Any]]:
    """Return the recorded counts for a machine, one document per release of Triton, oldest first."""
    found = [read(path) for path in records.glob(_NAME.format(target=target, triton="*"))]
    return sorted(found, key=lambda d: [int(part) for part in d["triton"].split(".")])


def render(recorded: Sequence[Mapping[str, Any]]) -> str:
    """Return the counts as a reStructuredText table, a column per release."""
    dates = ", ".join(f"{d['triton']} on {d['date']}" for d in recorded)
    tables = [{(r["case"], r["kernel"]): r for r in d["records"]} for d in recorded]
    # A case that was added after a release has an empty cell there.
    kernels = {key: record for table in tables for key, record in table.items()}
    launched = max(len(d["records"]) for d in recorded)
    size = f"{len({case for case, _ in kernels})} cases, {launched} kernels"
    lines = [f"{size}, counted with Triton {dates}.", "", ".. list-table::", "   :header-rows: 1", ""]
    heads = [f"Triton {d['triton']}: VALU, VGPR, waves" for d in recorded]
    lines += _row(["Case", "Kernel", "LDS", *heads, "Hardware features"])
    for key, kernel in kernels.items():
        features = " ".join(f"`{name}`" for name in kernel["notable"])
        cells = [_cell(table.get(key)) for table in tables]
        lines += _row([f"`{key[0]}`", f"`{key[1]}`", f"{kernel['shared']:,}", *cells, features])
    return "\n".join(lines) + "\n"


def _cell(record: Mapping[str, Any] | None) -> str:
    if record is None:
        return ""
    vgpr = record["registers"]["vgpr"] + record["registers"]["agpr"]
    alu = f"{record['alu_per_element']:.1f}"
    if record["loop_matrix"]:
        alu = f"{record['loop_alu'] / record['loop_matrix']:.1f} a matrix instruction"
    return f"{alu}, {vgpr}, {record['occupancy']}"


def _row(cells: Sequence[str]) -> list[str]:
    return [f"   {'*' if i == 0 else ' '} - {cell}".rstrip() for i, cell in enumerate(cells)]


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
