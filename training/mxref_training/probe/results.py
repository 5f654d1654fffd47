"""The results of a probe as plain values, in the file `probe.json`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from mxref.errors import FileFormatError
from mxref_training.durable import explained, make_folder, replace_text

FORMAT = "mxref-probe/1"
JSON = "probe.json"
TABLES = ("products", "operands", "variances", "unbiased", "growth")
CAUSES = ("scale", "dead", "clip", "grid")
"""Of an operand's error: scale bias, dead zone, clipping and grid noise, in the order of all tables and figures."""

Results = dict[str, Any]
Row = dict[str, Any]


def rows(results: Results, table: str) -> list[Row]:
    """Return the rows of a table as dictionaries."""
    columns = results[table]["columns"]
    return [dict(zip(columns, row, strict=True)) for row in results[table]["rows"]]


def save(results: Results, folder: Path) -> Path:
    """Write `probe.json` into a folder, in one piece; FileFormatError if it cannot be written."""
    text = json.dumps(results, separators=(",", ":"), allow_nan=False)
    # One row a line: the file is compact, and a difference of two files can be read.
    text = text.replace("],[", "],\n[")
    with explained(FileFormatError, f"write to {folder}", "free some space, or choose another --out"):
        make_folder(folder)
        replace_text(folder / JSON, text + "\n")
    return folder / JSON


def load(folder: Path) -> Results:
    """Return the results in a folder; FileFormatError if there are none, or damaged ones."""
    path = folder / JSON
    again = f"'mxref probe CHECKPOINT --out {folder}' makes it"
    try:
        found = json.loads(path.read_text(encoding="utf-8"))
    except OSError as err:
        raise FileFormatError(f"cannot read {path}: {err.strerror or err}; {again}") from err
    except ValueError as err:
        raise FileFormatError(f"{path} is damaged ({err}); {again} anew") from err
    if not isinstance(found, dict) or found.get("format") != FORMAT:
        raise FileFormatError(f"{path} holds no results of this version's 'mxref probe'; {again} anew")
    try:
        for name in TABLES:
            rows(found, name)
    except (KeyError, TypeError, ValueError) as err:
        raise FileFormatError(f"{path} is damaged ({err!r}); {again} anew") from err
    return found
