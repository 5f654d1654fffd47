"""Derived data on disk, under `$XDG_CACHE_HOME/mxref` or `~/.cache/mxref`: built once, complete or absent."""

from __future__ import annotations

import hashlib
import os
import shutil
import tempfile
from collections.abc import Callable
from pathlib import Path

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

    The folder appears by one rename after `build` has returned, so an interrupted build leaves nothing behind
    and of two processes that build at once the first one wins.

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
    try:
        parent.mkdir(parents=True, exist_ok=True)
        partial = Path(tempfile.mkdtemp(prefix=".partial-", dir=parent))
    except OSError as error:
        raise DataError(
            f"cannot write the cache folder {parent} ({error.strerror}): set XDG_CACHE_HOME to a writable folder"
        ) from error
    try:
        build(partial)
        partial.chmod(0o755)
        try:
            partial.rename(final)
        except OSError as error:
            if not final.is_dir():
                raise DataError(f"cannot move {partial} to {final} ({error.strerror})") from error
    except OSError as error:
        raise DataError(
            f"cannot fill the cache folder {parent} ({error.strerror}): free some space, or set XDG_CACHE_HOME"
        ) from error
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    return final
