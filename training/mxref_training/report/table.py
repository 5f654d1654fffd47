"""A table of a report: raw values for its CSV file, and how a page writes them."""

from __future__ import annotations

import csv
import io
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from mxref.errors import FileFormatError
from mxref_training.durable import explained, make_folder, replace_text
from mxref_training.report.text import markdown_text


@dataclass(frozen=True)
class Column:
    """A column of a table."""

    key: str
    """Its name in the CSV file."""
    title: str
    form: str = ""
    """Format of its numbers on a page; without one they are written as they are."""
    left: bool = False
    """Whether it is text, which begins at the left."""


@dataclass(frozen=True)
class Table:
    """A table with a name, under which it is written."""

    name: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Any]]

    def shown(self) -> list[list[str]]:
        """Return all cells as a page writes them."""
        return [
            [written(value, column.form) for value, column in zip(row, self.columns, strict=True)]
            for row in self.rows
        ]

    def without(self, *keys: str) -> Table:
        """Return the table without some columns, for a page that says the same elsewhere."""
        kept = [i for i, column in enumerate(self.columns) if column.key not in keys]
        rows = [[row[i] for i in kept] for row in self.rows]
        return Table(self.name, [self.columns[i] for i in kept], rows)

    def csv(self) -> str:
        """Return the table as CSV, its numbers in full."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow([column.key for column in self.columns])
        writer.writerows([_raw(value) for value in row] for row in self.rows)
        return out.getvalue()


def written(value: Any, form: str = "") -> str:
    """Return a value as a page writes it: a dash for nothing, a true minus sign."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    if isinstance(value, bool | str):
        return str(value)
    if form:
        return format(value, form).replace("-", "−")
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def markdown_table(table: Table) -> list[str]:
    """Return a table's lines in Markdown."""
    titles = [markdown_text(column.title.replace("<br>", " ")) for column in table.columns]
    rules = ["---" if column.left else "---:" for column in table.columns]
    rows = [[markdown_text(cell) for cell in row] for row in table.shown()]
    return [f"| {' | '.join(cells)} |" for cells in (titles, rules, *rows)]


def _raw(value: Any) -> Any:
    return "" if value is None else value


def write_csv(tables: Sequence[Table], folder: Path) -> list[Path]:
    """Write each table into a file of its name; FileFormatError where that is not possible."""
    paths = []
    with explained(FileFormatError, f"write to {folder}", "free some space, or choose another --csv"):
        make_folder(folder)
        for table in tables:
            paths.append(folder / f"{table.name}.csv")
            replace_text(paths[-1], table.csv())
    return paths
