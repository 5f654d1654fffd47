"""`result.json`: the result of one run in one file, which needs no other file to be compared, checked or reported.

It holds the fingerprint with the resolved recipe, the configuration, the hashes of the tokens, the validation curve, a
thinned training curve, times, device and versions. Its own SHA-256 reveals damage and edits by hand.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from pathlib import Path
from statistics import fmean
from typing import Any

from mxref_training.durable import explained, file_sha256, make_folder, replace_text
from mxref_training.errors import ConfigError
from mxref_training.log_files import read_lines

NAME = "result.json"
FORMAT = "mxref-result/1"
TRAIN_POINTS = 200
"""Points of a training curve, at most; each is the mean over the steps since the point before."""

Record = dict[str, Any]
"""What a run has given: its part of a result file."""
Table = dict[str, Any]


def sealed(facts: Mapping[str, Any]) -> Table:
    """Return the content of a result file with its digest."""
    table: Table = plain({"format": FORMAT, **facts})
    return {**table, "sha256": digest(table)}


def read(path: Path) -> Table | None:
    """Return the content of a result file; None if there is none, it is damaged, edited, or of another format."""
    return _checked(read_json(path))


def parsed(line: bytes) -> Table | None:
    """Return a result from its line in an archive; None as in `read`."""
    return _checked(_table(line))


def _checked(table: Table | None) -> Table | None:
    if table is None or table.get("format") != FORMAT or not isinstance(table.get("record"), dict):
        return None
    return table if table.get("sha256") == digest({k: v for k, v in table.items() if k != "sha256"}) else None


def metrics_digest(folder: Path) -> str:
    """Return the SHA-256 of a run's log of losses; empty if there is none."""
    metrics = folder / "metrics.jsonl"
    return file_sha256(metrics) if metrics.exists() else ""


def train_curve(folder: Path) -> list[list[float]]:
    """Return step and mean training loss at `TRAIN_POINTS` points at most; skipped steps do not count."""
    lines = read_lines(folder / "metrics.jsonl")
    found = [(x["step"], x["loss"]) for x in lines if "lr" in x and x.get("loss") is not None]
    width = max(1, math.ceil(len(found) / TRAIN_POINTS))
    parts = (found[i : i + width] for i in range(0, len(found), width))
    return [[part[-1][0], fmean(loss for _, loss in part)] for part in parts]


def evaluation_seconds(folder: Path) -> float:
    """Return the time that a run spent in evaluations."""
    seconds: float = sum(line.get("eval_seconds", 0.0) for line in read_lines(folder / "timing.jsonl"))
    return seconds


def read_json(path: Path) -> Table | None:
    """Return the table in a JSON file; None if there is none, or it cannot be read."""
    try:
        return _table(path.read_bytes())
    except OSError:
        return None


def _table(text: bytes) -> Table | None:
    try:
        value = json.loads(text)
    except ValueError:
        return None
    return value if isinstance(value, dict) else None


def write_json(path: Path, value: Any) -> Any:
    """Write a value atomically as JSON, and return it as `plain` does; ConfigError if it cannot be written."""
    written = plain(value)
    with explained(ConfigError, f"write {path}", "free some space, or choose another --out"):
        make_folder(path.parent)
        replace_text(path, json.dumps(written, indent=1) + "\n")
    return written


def plain(value: Any) -> Any:
    """Return the value as JSON gives it back, with null for numbers that JSON lacks."""
    return json.loads(json.dumps(value), parse_constant=lambda _: None)


def digest(value: Any) -> str:
    """Return the SHA-256 of a value as JSON, independent of the order of its keys."""
    return hashlib.sha256(json.dumps(plain(value), sort_keys=True).encode()).hexdigest()
