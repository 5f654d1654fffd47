"""The records of the sweeps as rows of text, and as the tables of docs/explanation/exhaustive.rst."""

from __future__ import annotations

import csv
import io
import textwrap
from pathlib import Path
from typing import Any

from bench.records import RECORDS, newest, read

COLUMNS = ("part", "function", "domain", "cases", "faults", "seconds")
DIRECTIVE = """\
.. csv-table::
   :header: part, function, sweeps, cases, faults
   :widths: 8 40 14 24 14
   :class: exhaustive

"""


def cells(row: dict[str, Any]) -> list[str]:
    """The row of the table, as text."""
    return [
        f"{row[c]:,}" if c in ("cases", "faults") else f"{row[c]:.0f}" if c == "seconds" else row[c]
        for c in COLUMNS
    ]


def as_csv(rows: list[dict[str, Any]]) -> str:
    """The table as comma-separated values."""
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows([COLUMNS, *map(cells, rows)])
    return out.getvalue()


def as_page(rows: list[dict[str, Any]]) -> str:
    """Return the table of the documentation: the sweeps of one function in one part are one row."""
    found: dict[tuple[str, str], list[int]] = {}
    for row in rows:
        sums = found.setdefault((row["part"], row["function"]), [0, 0, 0])
        sums[:] = sums[0] + 1, sums[1] + row["cases"], sums[2] + row["faults"]
    out = io.StringIO()
    csv.writer(out, lineterminator="\n").writerows(
        [*key, sweeps, f"{cases:,}", faults] for key, (sweeps, cases, faults) in found.items()
    )
    return DIRECTIVE + textwrap.indent(out.getvalue(), "   ")


def parts(records: Path = RECORDS) -> dict[str, str]:
    """Return the table of each family's newest record by the name under which the page has it."""
    families = sorted({path.stem.split("_")[1] for path in records.glob("exhaustive_*_*.json")})
    return {
        f"exhaustive_{family}.inc": as_page(read(newest(f"exhaustive_{family}", records))["rows"])
        for family in families
    }
