"""The table of docs/gfx950.rst, from counts: `python -m mxref_triton.aot.page FILE ..` takes what --json wrote."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

DOCS = Path(__file__).parents[3] / "docs"
TABLE = DOCS / "gfx950_table.inc"
_PATTERN = "aot_gfx950_triton-*.json"


def documents(folder: Path = DOCS / "data") -> list[dict[str, Any]]:
    """Return the recorded counts, one document per release of Triton, oldest first."""
    found = [json.loads(path.read_text()) for path in folder.glob(_PATTERN)]
    return sorted(found, key=lambda d: [int(part) for part in d["triton"].split(".")])


def render(recorded: Sequence[Mapping[str, Any]]) -> str:
    """Return the counts as a reStructuredText table, a column per release."""
    dates = ", ".join(f"{d['triton']} on {d['date']}" for d in recorded)
    lines = [f"Counted with Triton {dates}.", "", ".. list-table::", "   :header-rows: 1", ""]
    heads = [f"Triton {d['triton']}: VALU, VGPR, waves" for d in recorded]
    lines += _row(["Case", "Kernel", "LDS", *heads, "Hardware features"])
    tables = [{(r["case"], r["kernel"]): r for r in d["records"]} for d in recorded]
    for key, newest in tables[-1].items():
        features = " ".join(f"`{name}`" for name in newest["notable"])
        cells = [_cell(table.get(key)) for table in tables]
        lines += _row([f"`{key[0]}`", f"`{key[1]}`", f"{newest['shared']:,}", *cells, features])
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
    """Take a JSON of counts into docs/data, in place of an older one of its release of Triton, and write the table."""
    document = json.loads(counts.read_text())
    mine = {**document, "records": [r for r in document["records"] if r["target"] == "gfx950"]}
    path = docs / "data" / _PATTERN.replace("*", document["triton"])
    path.write_text(json.dumps(mine, indent=1, sort_keys=True) + "\n")
    (docs / TABLE.name).write_text(render(documents(docs / "data")))


if __name__ == "__main__":
    for name in sys.argv[1:]:
        record(Path(name))
    print(TABLE)
