"""A table of a report: raw values for its CSV file, and how a page, Markdown and a terminal write them."""

from __future__ import annotations

import csv
import io
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import TYPE_CHECKING, Any

from mxref.errors import FileFormatError
from mxref.printable import printable
from mxref_training.durable import explained, make_folder, replace_text

if TYPE_CHECKING:
    from rich.table import Table as Screen

# An underscore inside a word is no markup in CommonMark.
_MARKUP = re.compile(r"[\\`*\[\]|]|(?<!\w)_|_(?!\w)")
_STYLES = {"reproduced": "green", "not reproduced": "red", "underpowered": "yellow"}
"""Of verdicts in a terminal; style.css has those of a page."""


@dataclass(frozen=True)
class Column:
    """A column of a table."""

    key: str
    """Its name in the CSV file."""
    title: str = ""
    """Default: the key. A line feed breaks it in a page."""
    form: str = ""
    """Format of its numbers on a page; without one they are written as they are."""
    of: str | Callable[[Any], Any] = ""
    """Its value in a record: keys as `overhead.percent`, None where one is absent; or a function. Default: `key`."""
    left: bool = False
    """Whether it is text, which begins at the left."""

    @property
    def head(self) -> str:
        """What stands above the column."""
        return self.title or self.key

    def value(self, record: Any) -> Any:
        """Return the column's value in a record."""
        if callable(self.of):
            return self.of(record)
        found: Any = record
        for key in (self.of or self.key).split("."):
            found = None if found is None else found.get(key)
        return found


@dataclass(frozen=True)
class Table:
    """A table with a name, under which it is written."""

    name: str
    columns: Sequence[Column]
    rows: Sequence[Sequence[Any]]

    @classmethod
    def of(cls, name: str, columns: Sequence[Column], records: Iterable[Any]) -> Table:
        """Return a table with a row for each record."""
        return cls(name, columns, [tuple(column.value(one) for column in columns) for one in records])

    def shown(self) -> list[list[str]]:
        """Return all cells as a page writes them."""
        forms = [column.form for column in self.columns]
        return [[written(value, form) for value, form in zip(row, forms, strict=True)] for row in self.rows]

    def without(self, *keys: str) -> Table:
        """Return the table without some columns, for a page that says the same elsewhere."""
        kept = [i for i, column in enumerate(self.columns) if column.key not in keys]
        return Table(
            self.name, [self.columns[i] for i in kept], [[row[i] for i in kept] for row in self.rows]
        )

    def csv(self) -> str:
        """Return the table as CSV, its numbers in full."""
        out = io.StringIO()
        writer = csv.writer(out, lineterminator="\n")
        writer.writerow([column.key for column in self.columns])
        writer.writerows(self.rows)
        return out.getvalue()

    def markdown(self) -> str:
        """Return the table in Markdown."""
        rules = ["---" if column.left else "---:" for column in self.columns]
        head, *rows = ([markdown_text(text) for text in row] for row in (self._heads(), *self.shown()))
        return "\n".join(f"| {' | '.join(row)} |" for row in (head, rules, *rows))

    def _heads(self) -> list[str]:
        return [column.head for column in self.columns]

    def screen(self, title: str = "", caption: str = "") -> Screen:
        """Return the table for a terminal."""
        from rich.table import Table as Screen
        from rich.text import Text

        from mxref.terminal import BOX, HEAD

        screen = Screen(
            title=title, title_justify="left", title_style="bold", box=BOX, header_style=HEAD, padding=(0, 1, 0, 0),
            caption=caption, caption_justify="left", caption_style="",
        )  # fmt: skip
        for column in self.columns:
            screen.add_column(column.head, justify="left" if column.left else "right", no_wrap=True)
        for row in self.shown():
            screen.add_row(*(Text(text, _STYLES.get(text, "")) for text in row))
        return screen


def plain(name: str, columns: str, records: Iterable[Mapping[str, Any]]) -> Table:
    """Return a table for a CSV file alone.

    Args:
        name: of the table.
        columns: names separated by blanks, and the keys in a record where they differ, as in `reach=overhead.reach`.
        records: one for each row.
    """
    split = [part.partition("=") for part in columns.split()]
    return Table.of(name, [Column(key, of=of) for key, _, of in split], records)


def written(value: Any, form: str = "") -> str:
    """Return a value as a page writes it: a dash for nothing, a true minus sign."""
    if value is None or (isinstance(value, float) and math.isnan(value)):
        return "–"
    if isinstance(value, bool | str):
        return str(value)
    if form:
        return format(value, form).replace("-", "−")
    return f"{value:,}" if isinstance(value, int) else f"{value:g}"


def middle(values: Iterable[float | None]) -> float | None:
    """Return the median of the numbers that are known; None where none is."""
    known = [value for value in values if value is not None]
    return median(known) if known else None


def facts_of(found: Mapping[str, Any]) -> str:
    """Return names with their values in one line."""
    return ", ".join(f"{name} {value}" for name, value in found.items())


def markdown_text(text: str) -> str:
    """Return a text that Markdown shows as it is, in a line of its own or in a cell of a table."""
    line = " ".join(printable(text).split("\n"))
    return _MARKUP.sub(r"\\\g<0>", line.replace("&", "&amp;").replace("<", "&lt;"))


def write_csv(tables: Sequence[Table], folder: Path) -> list[Path]:
    """Write each table into a file of its name; FileFormatError where that is not possible."""
    paths = []
    with explained(FileFormatError, f"write to {folder}", "free some space, or choose another folder"):
        make_folder(folder)
        for table in tables:
            paths.append(folder / f"{table.name}.csv")
            replace_text(paths[-1], table.csv())
    return paths
