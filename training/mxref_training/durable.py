"""Write files so that they survive kills, full disks and power cuts. All files of runs, arms and caches are written
here.

The rules in short; `docs/reference/durability.rst` has all of them:

1. A file or folder that must be whole is written under a temporary name, synced, and renamed. A reader finds its old
   state or its new one, never a part. The temporary name of `NAME` is `.NAME.tmp`. What a killed process left there is
   overwritten or removed by the next process.
2. A log is appended to. A checkpoint records its length. Bytes after that length are cut off.
3. After a name appears or disappears, its folder is synced before anything that relies on the name is written.
4. A process that writes holds a lock. The lock ends with the process.
"""

from __future__ import annotations

import errno
import fcntl
import hashlib
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from mxref.errors import MxrefError


def temporary(path: Path) -> Path:
    """Return the temporary name under which a file or folder is written."""
    return path.with_name(f".{path.name}.tmp")


@contextmanager
def explained(kind: type[MxrefError], action: str, way_out: str) -> Iterator[None]:
    """Turn an OSError of the block into `kind`: `cannot <action>: <reason>; <way_out>`."""
    try:
        yield
    except MxrefError:
        raise
    except OSError as err:
        raise kind(f"cannot {action}: {err.strerror or err}; {way_out}") from err


def write_all(descriptor: int, data: bytes) -> None:
    """Write all bytes; a write that the system cuts short is continued until it fails or is complete."""
    while data:
        data = data[os.write(descriptor, data) :]


def sync(path: Path) -> None:
    """Flush a file's content, or a folder's names, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    except OSError as err:
        # Some network file systems cannot sync a folder; they write its names at once.
        if err.errno not in (errno.EINVAL, errno.ENOSYS, errno.EOPNOTSUPP) or not path.is_dir():
            raise
    finally:
        os.close(descriptor)


def file_sha256(path: Path) -> str:
    """Return the SHA-256 of a file as hexadecimal digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def replace_text(path: Path, text: str) -> None:
    """Replace a file's content atomically."""
    partial = temporary(path)
    partial.write_bytes(text.encode())
    sync(partial)
    partial.replace(path)
    sync(path.parent)


def make_folder(path: Path) -> None:
    """Make a folder and its missing parents; their names are on the disk when this returns."""
    if not path.is_dir():
        make_folder(path.parent)
        path.mkdir(exist_ok=True)
    # A process that was killed may have made the folder and not synced its name.
    with suppress(PermissionError):
        sync(path.parent)


def publish(partial: Path, final: Path) -> None:
    """Sync everything in a folder, then rename it to its final name, which must not exist yet."""
    for folder, _, names in os.walk(partial, topdown=False):
        for name in sorted(names):
            sync(Path(folder, name))
        sync(Path(folder))
    partial.rename(final)
    sync(final.parent)


def remove(path: Path) -> None:
    """Remove a file, a link (its target stays), or a folder. A folder is renamed first, so it disappears at once."""
    if path.is_symlink() or not path.is_dir():
        path.unlink(missing_ok=True)
        return
    doomed = path.with_name(f".{path.name}.deleted.tmp")
    path.rename(doomed)
    sync(path.parent)
    _delete(doomed)
    # Without this, a power cut could bring the renamed folder back, and no later process would remove it.
    sync(path.parent)


def _delete(folder: Path) -> None:
    """Delete a folder and all in it, but for files that a reader on this host has open, as NFS demands.

    NFS renames such a file to `.nfs...` until it is closed. What is left has a temporary name, and goes next time.
    """
    try:
        shutil.rmtree(folder)
    except OSError as err:
        if err.errno not in (errno.EBUSY, errno.ENOTEMPTY):
            raise


def clean(folder: Path, pattern: str) -> None:
    """Remove the matching temporary files and folders of killed processes; the caller holds the lock."""
    for left in list(folder.glob(f".{pattern}.tmp")):
        if left.is_dir() and not left.is_symlink():
            _delete(left)
        else:
            left.unlink()
        sync(folder)


@contextmanager
def locked(path: Path, busy: Callable[[str], MxrefError] | None = None) -> Iterator[None]:
    """Hold a lock file during the block. The file is removed afterwards; the lock of a killed process ends with it.

    Args:
        path: the lock file; its folder exists.
        busy: makes the error to raise if another process holds the lock, from a text that names that process. Without
            it, the call waits for the lock.
    """
    while True:
        with path.open("a+", encoding="utf-8") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | (fcntl.LOCK_NB if busy else 0))
            except BlockingIOError:
                assert busy is not None
                file.seek(0)
                raise busy(file.read() or "another process") from None
            if not (path.exists() and os.path.samefile(path, file.fileno())):
                continue  # the last holder has removed the file in the meantime
            file.truncate(0)
            file.write(f"process {os.getpid()} on {socket.gethostname()}")
            file.flush()
            try:
                yield
            finally:
                # A lock file that stays has no effect. One in a new folder of this name is another process's.
                with suppress(OSError):
                    if os.path.samefile(path, file.fileno()):
                        path.unlink()
            return
