"""Recorded counts and docs/gfx950.rst's table: `python -m mxref_triton.aot.page FILE ..` takes what --json wrote."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[3] / "docs"
TABLE = DOCS / "gfx950_table.inc"
_NAME = "aot_{target}_triton-{triton}.json"


def documents(target: str, folder: Path = DOCS / "data") -> list[dict[str, Any]]:
    """Return the recorded counts for a machine, one document per release of Triton, oldest first."""
    found = [json.loads(p.read_text()) for p in folder.glob(_NAME.format(target=target, triton="*"))]
    return sorted(found, key=lambda d: [int(part) for part in d["triton"].split(".")])


def render(recorded: Sequence[Mapping[str, Any]]) -> str:
    """Return the counts as a reStructuredText table, a column per release."""
    dates = ", ".join(f"{d['triton']} on {d['date']}" for d in recorded)
    tables = [{(r["case"], r["kernel"]): r for r in d["records"]} for d in recorded]
    # A case that is younger than a release has an empty cell there.
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


def record(counts: Path, docs: Path = DOCS) -> None:
    """Take a JSON of counts into docs/data, in place of older ones of its release of Triton, and write the table."""
    document = json.loads(counts.read_text())
    for target in sorted({r["target"] for r in document["records"]}):
        mine = {**document, "records": [r for r in document["records"] if r["target"] == target]}
        path = docs / "data" / _NAME.format(target=target, triton=document["triton"])
        path.write_text(json.dumps(mine, indent=1, sort_keys=True) + "\n")
    (docs / TABLE.name).write_text(render(documents("gfx950", docs / "data")))


if __name__ == "__main__":
    for name in sys.argv[1:]:
        record(Path(name))
    print(TABLE)
