"""Recorded measurements: JSON files in docs/records, named KIND_MACHINE_DATE.json or KIND_DATE.json."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

RECORDS = Path(__file__).parents[2] / "docs" / "records"


def newest(kind: str, records: Path = RECORDS) -> Path:
    """Return the record of the latest date; SystemExit if there is none."""
    found = sorted(records.glob(f"{kind}_*.json"), key=lambda path: path.stem.rpartition("_")[2])
    if not found:
        raise SystemExit(f"{records} has no {kind}_*.json; run the benchmark that records it first")
    return found[-1]


def read(path: Path) -> dict[str, Any]:
    """Return the content of a record."""
    content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return content
