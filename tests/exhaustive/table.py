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
   :header-rows: 1
   :widths: 4 20 46 13 7 10
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
    """The table as the documentation has it."""
    return DIRECTIVE + textwrap.indent(as_csv(rows), "   ")


def parts(records: Path = RECORDS) -> dict[str, str]:
    """Return the table of each family's newest record by the name under which the page has it."""
    families = sorted({path.stem.split("_")[1] for path in records.glob("exhaustive_*_*.json")})
    return {
        f"exhaustive_{family}.inc": as_page(read(newest(f"exhaustive_{family}", records))["rows"])
        for family in families
    }
