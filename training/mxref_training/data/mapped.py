"""Watches a file that is mapped into memory: reading beyond the end of a shortened file kills the process (SIGBUS)."""

from __future__ import annotations

import mmap
import os
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from mxref_training.errors import DataError

if TYPE_CHECKING:
    from numpy.typing import NDArray

Mark = tuple[int, int, int]
"""Device, inode, and time of the last change in ns."""


@dataclass(frozen=True)
class MappedFile:
    """The file of an array, as it was when this was made."""

    path: Path
    memory: mmap.mmap
    size: int
    mark: Mark | None
    """None: there is no file at the path any more; its content stays mapped."""

    @classmethod
    def of(cls, ids: NDArray[Any]) -> MappedFile | None:
        """Return the file of an array, None if it lies in memory alone; DataError if the file is too short for it."""
        if not isinstance(ids, np.memmap) or ids.filename is None:
            return None
        memory: Any = ids
        while isinstance(memory, np.ndarray):
            memory = memory.base
        path = Path(ids.filename)
        file = cls(path, memory, ids.offset + ids.nbytes, _mark(path))
        file.require_unchanged()
        return file

    def require_unchanged(self) -> None:
        """Raise DataError if the file was cut or changed in place; one that was deleted or replaced is read on."""
        found, mark = self.memory.size(), _mark(self.path)
        changed = (
            mark is not None and self.mark is not None and mark[:2] == self.mark[:2] and mark != self.mark
        )
        if found < self.size or changed:
            how = "it was written again in place"
            if found < self.size:
                how = f"it had {self.size:,} bytes, and has {found:,}"
            raise DataError(
                f"{self.path} was changed while a run read it: {how}: delete the folder {self.path.parent}, and give "
                "the same command, which goes on from the newest checkpoint"
            )


def _mark(path: Path) -> Mark | None:
    try:
        status = os.stat(path)
    except OSError:
        return None
    return status.st_dev, status.st_ino, status.st_mtime_ns
