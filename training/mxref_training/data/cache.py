"""Derived data on disk, under `$XDG_CACHE_HOME/mxref` or `~/.cache/mxref`: built once, complete or absent.

An entry is named by a hash of everything that decides its content. Its record holds these inputs, the SHA-256 of every
file, and some facts. An entry is used only if all of them are as they were recorded and no other user can change it. A
damaged entry is refused and not rebuilt: the user should learn of a faulty disk, and another process may be reading it.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from mxref.trust import why_untrusted
from mxref_training.durable import explained, file_sha256, locked, make_folder, publish, temporary
from mxref_training.errors import DataError

RECORD = "entry.json"
_LAYOUT = 3  # of an entry: with a record

Facts = dict[str, Any]
"""What the maker of an entry tells about it, as JSON values."""


def cache_root() -> Path:
    """Return the folder of all derived data.

    A relative `XDG_CACHE_HOME` is ignored, as the XDG Base Directory Specification 0.8 demands.

    Raises:
        DataError: there is neither an `XDG_CACHE_HOME` nor a home folder.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    try:
        return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "mxref"
    except RuntimeError as error:
        raise DataError(
            "there is no home folder for the cache: set XDG_CACHE_HOME to an absolute path"
        ) from error


def cached(kind: str, inputs: Mapping[str, Any], build: Callable[[Path], Facts]) -> tuple[Path, Facts]:
    """Return an entry of the cache and its facts; `build` makes it if it does not exist.

    The folder appears by one rename after its files have reached the disk, so an interrupted build leaves no incomplete
    entry. If two processes want the same entry, one builds it and the other waits.

    Args:
        kind: name of the kind of data, a folder.
        inputs: everything that decides the content, as JSON values.
        build: writes the entry's files into the empty folder that it is given, and returns facts about them.

    Raises:
        DataError: the cache cannot be written, other users can change it, or the entry is damaged.
    """
    named = {"layout": _LAYOUT, **inputs}
    final = cache_root() / kind / _digest(named)[:32]
    if not final.is_dir():
        _fill(final, named, build)
    _require_trust(final)
    try:
        return final, _checked(final)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise DataError(
            f"the cache folder {final} is damaged ({error}): delete this folder, and the same command fills it again"
        ) from error


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _checked(folder: Path) -> Facts:
    """Return the facts of an entry; ValueError or what reading raises if it is not as it was recorded."""
    record = json.loads((folder / RECORD).read_bytes())
    if record.pop("sha256") != _digest(record):
        raise ValueError(f"{RECORD} is not as it was written")
    for name, expected in record["files"].items():
        if file_sha256(folder / name) != expected:
            raise ValueError(f"{name} is not as it was written")
    facts: Facts = record["facts"]
    return facts


def _require_trust(folder: Path) -> None:
    try:
        reason = why_untrusted(folder)
    except OSError as error:
        reason = str(error.strerror)
    if reason:
        raise DataError(
            f"the cache folder {folder} cannot be trusted ({reason}): set XDG_CACHE_HOME to a folder that you alone "
            "can write"
        )


def _fill(final: Path, inputs: Mapping[str, Any], build: Callable[[Path], Facts]) -> None:
    parent, partial = final.parent, temporary(final)
    with explained(
        DataError,
        f"fill the cache folder {parent}",
        "free some space, or set XDG_CACHE_HOME to another folder",
    ):
        make_folder(parent)
        _require_trust(parent)
        with locked(final.with_name(f".{final.name}.lock")):
            if final.is_dir():  # another process built it while this one waited
                return
            shutil.rmtree(partial, ignore_errors=True)  # of a builder that was killed
            partial.mkdir()
            try:
                facts = build(partial)
                files = {path.name: file_sha256(path) for path in sorted(partial.iterdir())}
                record = {"inputs": inputs, "facts": facts, "files": files}
                text = json.dumps({**record, "sha256": _digest(record)}, indent=1)
                (partial / RECORD).write_text(text + "\n", encoding="utf-8")
                publish(partial, final)
            except BaseException:
                shutil.rmtree(partial, ignore_errors=True)
                raise
