"""Derived data on disk, under `$XDG_CACHE_HOME/mxref` or `~/.cache/mxref`: built once, complete or absent.

An entry is used only if no other user can change it and every file has the SHA-256 that was recorded. A damaged entry
is refused and not rebuilt: the user should learn of a faulty disk, and another process may be reading the entry.
"""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Callable
from contextlib import nullcontext, suppress
from pathlib import Path

from mxref.trust import why_untrusted
from mxref_training.data.seal import broken_seal, seal
from mxref_training.durable import explained, locked, make_folder, publish, temporary
from mxref_training.errors import DataError

_LAYOUT = "2"  # version of an entry: with a seal, named by hashes that include the length of every document


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


def cache_key(*parts: str) -> str:
    """Return 32 hexadecimal digits that name the given parts; no two lists of parts share a name."""
    joined = "".join(f"{len(part)}:{part}" for part in (_LAYOUT, *parts))
    return hashlib.sha256(joined.encode()).hexdigest()[:32]


def cached(kind: str, key: str, build: Callable[[Path], None]) -> Path:
    """Return the folder `kind/key` of the cache; `build` fills it if it does not exist.

    The folder appears by one rename after `build` has returned and its files have reached the disk, so an interrupted
    build leaves no incomplete entry. If two processes want the same entry, one builds it and the other waits.

    Args:
        kind: name of the kind of data, a folder.
        key: name of this entry, from `cache_key`.
        build: writes the entry's files into the empty folder that it is given.

    Returns:
        The finished folder.

    Raises:
        DataError: the cache cannot be written, other users can change it, or the entry is damaged.
    """
    parent = cache_root() / kind
    final = parent / key
    if not os.path.isdir(final):
        _fill(parent, final, build)
    _check_trust(final)
    if damage := broken_seal(final):
        raise DataError(
            f"the cache folder {final} is damaged ({damage}): delete this folder, and the same command fills it again"
        )
    return final


def _check_trust(folder: Path) -> None:
    try:
        reason = why_untrusted(folder)
    except OSError as error:
        reason = str(error.strerror)
    if reason:
        raise DataError(
            f"the cache folder {folder} cannot be trusted ({reason}): set XDG_CACHE_HOME to a folder that you alone "
            "can write"
        )


def _fill(parent: Path, final: Path, build: Callable[[Path], None]) -> None:
    with explained(DataError, f"write the cache folder {parent}", "set XDG_CACHE_HOME to a writable folder"):
        make_folder(parent)
    _check_trust(parent)
    partial = temporary(final)
    with (
        explained(DataError, f"fill the cache folder {parent}", "free some space, or set XDG_CACHE_HOME"),
        locked(_lock(final)),
    ):
        if final.is_dir():  # another process built it while this one waited
            return
        _sweep(parent, final)
        partial.mkdir()
        try:
            build(partial)
            seal(partial)
            publish(partial, final)
        except BaseException:
            shutil.rmtree(partial, ignore_errors=True)
            raise


def _lock(final: Path) -> Path:
    return final.with_name(f".{final.name}.lock")


def _sweep(parent: Path, own: Path) -> None:
    """Remove the temporary folders of killed builders; the caller holds the lock of `own`."""
    for left in parent.glob(".*.tmp"):
        final = left.with_name(left.name[1 : -len(".tmp")])
        with suppress(_Busy), nullcontext() if final == own else locked(_lock(final), _Busy):
            shutil.rmtree(left)


class _Busy(DataError):
    """Another process is building an entry."""
