"""The results of a probe as plain values, in the file `probe.json`."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import mxref
from mxref.backend import Backend
from mxref.errors import FileFormatError
from mxref.tomlio import to_table
from mxref_training.durable import explained, make_folder, replace_text
from mxref_training.probe.arms import NamedRecipe
from mxref_training.probe.batch import Batch
from mxref_training.probe.layer import Row
from mxref_training.probe.measure import ProbeRows
from mxref_training.probe.moments import Moment
from mxref_training.treatment import describe

FORMAT = "mxref-probe/1"
JSON = "probe.json"
DIGITS = 6
"""Significant digits of the numbers in the file."""
TABLES = ("products", "operands", "variances", "unbiased", "growth")

Results = dict[str, Any]


def assemble(
    moments: Sequence[tuple[Moment, ProbeRows]],
    arms: Sequence[NamedRecipe],
    batch: Batch,
    *,
    backend: Backend,
    data: Mapping[str, Any],
    draws: int,
    environment: Mapping[str, Any],
) -> Results:
    """Return everything that a probe found, as plain values.

    Args:
        moments: the checkpoints in their order, each with its rows.
        arms: the recipes.
        batch: the tokens.
        backend: that computed the block formats.
        data: hashes of the tokens, and whether they are those of the runs.
        draws: draws of the random bits; 0 is none.
        environment: versions and hardware, as `mxref_training.identity` gives them.
    """
    return {
        "format": FORMAT,
        "mxref": mxref.__version__,
        "backend": {"name": backend.name, "details": backend.details()},
        **environment,
        "data": dict(data),
        "batch": batch.facts(),
        "draws": draws,
        "recipes": [
            {
                "name": arm.name,
                "label": arm.label,
                "digest": arm.recipe.digest,
                "gemm": arm.recipe.gemm.value,
                "treatment": describe(arm.recipe),
                "table": to_table(arm.recipe),
            }
            for arm in arms
        ],
        "moments": [moment.facts() | {"loss": found.loss} for moment, found in moments],
    } | {
        name: _table(
            [{"moment": moment.name} | row for moment, found in moments for row in getattr(found, name)]
        )
        for name in TABLES
    }


def _table(rows: Sequence[Row]) -> dict[str, Any]:
    """Return rows as the columns that any of them has, and their values."""
    columns = list(dict.fromkeys(key for row in rows for key in row))
    return {"columns": columns, "rows": [[_short(row.get(key)) for key in columns] for row in rows]}


def _short(value: Any) -> Any:
    return float(f"{value:.{DIGITS}g}") if isinstance(value, float) else value


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
