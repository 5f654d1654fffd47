"""Tables of reStructuredText, a line for each row, which the studies write into pages of the documentation."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Sequence


def csv_table(
    head: Sequence[str], rows: Iterable[Iterable[str]], kind: str = "", widths: Sequence[int] = ()
) -> str:
    """Return a table; `kind` is its class for the style sheet, `widths` are those of the columns."""
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([head, *rows] if head else rows)
    options = ["   :header-rows: 1"] * bool(head)
    options += [f"   :class: {kind}"] * bool(kind)
    options += [f"   :widths: {' '.join(map(str, widths))}"] * bool(widths)
    body = [f"   {line}" for line in text.getvalue().splitlines()]
    return "\n".join([".. csv-table::", *options, "", *body]) + "\n"
