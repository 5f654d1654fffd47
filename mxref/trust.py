"""Checks that only the user and root can change a folder or a file.

A user who can write to a cache decides what later processes read from it. Processes execute cached kernels and
train on cached tokens, so every cache of the project uses these checks before it reads or writes.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

ROOT = 0


def why_untrusted(folder: str | os.PathLike[str]) -> str:
    """Return why other users could change the content of a folder; an empty text if they cannot.

    Links are resolved first. The folder must belong to the user or to root, and nobody else may write to it.
    The same holds for every folder above it, because a user who can write there can replace it. Folders above it
    may have the sticky bit, like `/tmp`, which prevents this. A group with the user as its only member counts as
    the user.

    On systems without user ids every folder is trusted.

    Raises:
        OSError: the folder does not exist or cannot be read.
    """
    if not hasattr(os, "geteuid"):
        return ""
    path = Path(folder).resolve(strict=True)
    for part in (path, *path.parents):
        found = part.stat()
        sticky = part != path and bool(found.st_mode & stat.S_ISVTX)
        # In a container `/` can belong to an unknown user, who then counts as root.
        above = {Path(part.anchor).stat().st_uid} if part != path else set()
        if reason := _reason(found, above, sticky):
            return f"{part} {reason}"
    return ""


def read_trusted(file: Path) -> bytes:
    """Return the content of a file that belongs to the user or to root and that nobody else can write.

    Raises:
        PermissionError: another user owns the file or can write it.
        OSError: the file cannot be read.
    """
    with file.open("rb") as f:
        if hasattr(os, "geteuid") and (reason := _reason(os.fstat(f.fileno()), set(), False)):
            raise PermissionError(f"{file} {reason}")
        return f.read()


def _reason(found: os.stat_result, also: set[int], sticky: bool) -> str:
    if found.st_uid not in {ROOT, os.geteuid(), *also}:
        return f"belongs to {_user(found.st_uid)}"
    if sticky:
        return ""
    if found.st_mode & stat.S_IWOTH:
        return "can be written by every user"
    if found.st_mode & stat.S_IWGRP and not _is_private(found.st_gid):
        return f"can be written by group {found.st_gid}"
    return ""


def _user(uid: int) -> str:
    import pwd

    try:
        return f"user {pwd.getpwuid(uid).pw_name}"
    except KeyError:
        return f"user {uid}"


def _is_private(gid: int) -> bool:
    """Return whether a group has the user's name and no other member."""
    import grp
    import pwd

    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    return gid == user.pw_gid and group.gr_name == user.pw_name and set(group.gr_mem) <= {user.pw_name}
