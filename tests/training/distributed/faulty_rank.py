"""`mxref` with a fault in one rank: `faulty_rank.py FAULT ...`, where the rest is the command's."""

from __future__ import annotations

import errno
import os
import signal
import sys
from pathlib import Path
from typing import Any

from mxref.cli import main
from mxref_training import checkpoint, steps
from mxref_training.distributed import agreement

STEP = 4
"""The step in which a rank fails."""


def killed() -> None:
    """Have the rank killed in the middle of a step, with no chance to clean up."""
    take = steps.EagerSteps.take

    def last(self: Any, batch: Any, step: int, *rest: Any) -> Any:
        if step == STEP:
            os.kill(os.getpid(), signal.SIGKILL)
        return take(self, batch, step, *rest)

    steps.EagerSteps.take = last  # type: ignore[method-assign]


def disk_full() -> None:
    """Have the disk full when half of a file of the checkpoint is written."""
    write = checkpoint.write_boxes

    def full(path: Path, parts: Any) -> None:
        write(path, parts)
        if f"step-{STEP}" in path.parent.name and path.name.startswith("optimizer"):
            os.truncate(path, path.stat().st_size // 2)
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    checkpoint.write_boxes = full


def elsewhere() -> None:
    """Have the rank started with another folder."""
    sys.argv[sys.argv.index("--out") + 1] += "-elsewhere"


def unshared() -> None:
    """Have the rank on a host that does not share the folder of the run."""
    agreement.PATIENCE = 0.5
    agreement.file_sha256 = lambda path: ""


def older() -> None:
    """Have the rank on a host with another version of PyTorch."""
    agreement.versions = lambda: {"torch": "1.0"}


FAULTS = {
    "killed": (1, killed), "disk_full": (1, disk_full), "elsewhere": (1, elsewhere),
    "unshared": (1, unshared), "older": (1, older), "none": (0, lambda: None),
}  # fmt: skip
"""The rank that has the fault, and what gives it to this process."""

if __name__ == "__main__":
    rank, fault = FAULTS[sys.argv.pop(1)]
    if os.environ["RANK"] == str(rank):
        fault()
    main()
