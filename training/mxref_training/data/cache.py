"""Derived data on disk, under `$XDG_CACHE_HOME/mxref` or `~/.cache/mxref`: built once, complete or absent."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path

from mxref_training.durable import explained, locked, make_folder, publish, temporary
from mxref_training.errors import DataError


def cache_root() -> Path:
    """Return the folder of all derived data.

    A relative `XDG_CACHE_HOME` is ignored, as the XDG Base Directory Specification 0.8 demands.
    """
    base = os.environ.get("XDG_CACHE_HOME", "")
    return (Path(base) if os.path.isabs(base) else Path.home() / ".cache") / "mxref"


def cache_key(*parts: str) -> str:
    """Return 32 hexadecimal digits that name the given parts; no two lists of parts share a name."""
    joined = "".join(f"{len(part)}:{part}" for part in parts)
    return hashlib.sha256(joined.encode()).hexdigest()[:32]


def cached(kind: str, key: str, build: Callable[[Path], None]) -> Path:
    """Return the folder `kind/key` of the cache, and let `build` fill it where it does not exist.

    The folder appears by one rename after `build` has returned and its files have reached the disk, so an interrupted
    build leaves nothing to mistake for an entry. Of two processes that want one entry, one builds it and the other
    waits.

    Args:
        kind: name of the kind of data, a folder.
        key: name of this entry, from `cache_key`.
        build: writes the entry's files into the empty folder that it is given.

    Returns:
        The finished folder.

    Raises:
        DataError: the cache cannot be written.
    """
    parent = cache_root() / kind
    final = parent / key
    if final.is_dir():
        return final
    with explained(DataError, f"write the cache folder {parent}", "set XDG_CACHE_HOME to a writable folder"):
        make_folder(parent)
    partial = temporary(final)
    with (
        explained(DataError, f"fill the cache folder {parent}", "free some space, or set XDG_CACHE_HOME"),
        locked(_lock(final)),
    ):
        if final.is_dir():  # another process built it while this one waited
            return final
        _sweep(parent, final)
        partial.mkdir()
        try:
            build(partial)
            publish(partial, final)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise
    return final


def _lock(final: Path) -> Path:
    return final.with_name(f".{final.name}.lock")


def _sweep(parent: Path, own: Path) -> None:
    """Remove what builders that died left; who builds `own` holds its lock."""
    for left in parent.glob(".*.tmp"):
        final = left.with_name(left.name[1 : -len(".tmp")])
        with suppress(_Busy), nullcontext() if final == own else locked(_lock(final), _Busy):
            shutil.rmtree(left)


class _Busy(DataError):
    """Another process is building an entry."""
