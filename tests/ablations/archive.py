"""Put the results of folders into archives, one JSON line a run: `PYTHONPATH=tests python -m ablations.archive FOLDER`.

The archive of FOLDER is `FOLDER.jsonl`. Results that it has stay.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

from mxref_training.lab import result_file


def _order(table: dict[str, Any]) -> tuple[int, str, int]:
    """Sort by the step of a branch, the arm and the seed; whole runs and trunks first."""
    design = table["key"].get("design") or {}
    return design.get("step", 0), table["record"]["arm"], table["record"]["pair"]


def archive(folder: Path) -> Path:
    """Write the archive of a folder, and return its path; SystemExit if a result is damaged."""
    path = folder.with_name(f"{folder.name}.jsonl")
    found = [result_file.parsed(line) for line in path.read_bytes().splitlines()] if path.exists() else []
    found += [result_file.read(file) for file in sorted(folder.rglob(result_file.NAME))]
    tables = [table for table in found if table]
    if len(tables) < len(found):
        raise SystemExit(f"{len(found) - len(tables)} results of {folder} or {path} are damaged")
    lines = [
        json.dumps(table, ensure_ascii=False, separators=(",", ":")) for table in sorted(tables, key=_order)
    ]
    path.write_text("".join(f"{line}\n" for line in dict.fromkeys(lines)), encoding="utf-8")
    return path


if __name__ == "__main__":
    for name in sys.argv[1:]:
        print(archive(Path(name)))
