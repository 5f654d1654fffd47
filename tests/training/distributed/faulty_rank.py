"""`mxref` with a fault in one rank: `faulty_rank.py FAULT ...`, where the rest is the command's."""

from __future__ import annotations

import errno
import os
import signal
import sys
from pathlib import Path
from typing import Any

from mxref.cli import main
from mxref_training.run import checkpoint_files, eager

RANK, STEP = "1", 4
"""The rank that fails, and the step in which it does."""


def killed() -> None:
    """Have the rank killed in the middle of a step, with no chance to clean up."""
    take = eager.EagerTraining.take

    def last(self: Any, batch: Any, step: int, *rest: Any) -> Any:
        if step == STEP:
            os.kill(os.getpid(), signal.SIGKILL)
        return take(self, batch, step, *rest)

    eager.EagerTraining.take = last  # type: ignore[method-assign]


def disk_full() -> None:
    """Have the disk full when half of a file of the checkpoint is written."""
    write = checkpoint_files.write_parts

    def full(path: Path, parts: Any) -> None:
        write(path, parts)
        if f"step-{STEP}" in path.parent.name and path.name.startswith("optimizer"):
            os.truncate(path, path.stat().st_size // 2)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    checkpoint_files.write_parts = full


FAULTS = {"killed": killed, "disk_full": disk_full, "none": lambda: None}

if __name__ == "__main__":
    fault = FAULTS[sys.argv.pop(1)]
    if os.environ["RANK"] == RANK:
        fault()
    main()
