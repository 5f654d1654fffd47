"""The SHA-256 of every file of a cache entry, written with the entry and compared at each use."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

SEAL = "sha256.json"


def seal(folder: Path) -> None:
    """Write the SHA-256 of every file in a folder that has just been filled."""
    hashes = {path.name: _sha256(path) for path in sorted(folder.iterdir()) if path.name != SEAL}
    (folder / SEAL).write_text(json.dumps(hashes, indent=1) + "\n", encoding="utf-8")


def broken_seal(folder: Path) -> str:
    """Return how a folder differs from its seal; empty if it does not differ."""
    try:
        hashes = json.loads((folder / SEAL).read_bytes())
    except (OSError, ValueError):
        return f"{SEAL} cannot be read"
    if not isinstance(hashes, dict):
        return f"{SEAL} holds no hashes"
    for name, expected in hashes.items():
        try:
            found = _sha256(folder / name)
        except (OSError, ValueError):
            return f"{name!r} cannot be read"
        if found != expected:
            return f"{name} is not as it was written"
    return ""


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
