"""Whether all ranks of a run see one folder: without it no checkpoint can be written or read."""

from __future__ import annotations

import socket
import time
from pathlib import Path

from mxref_training.distributed.ranks import Ranks
from mxref_training.durable import file_sha256
from mxref_training.errors import CheckpointError

PATIENCE = 90.0
"""Seconds in which a network file system shows a new file on all hosts. NFS looks again after 60 at most (nfs(5))."""
_PAUSE = 0.2


def require_shared(record: Path, ranks: Ranks) -> None:
    """Wait until every rank reads a file as the first rank has written it; collective.

    Args:
        record: `run.json`, which tells runs apart by its time.
        ranks: of the run.

    Raises:
        CheckpointError: a rank does not see that file; all ranks raise it.
    """
    if not ranks.several:
        return
    wanted = ranks.broadcast((file_sha256(record), socket.gethostname()) if ranks.first else ("", ""))
    mine = "" if ranks.first or _shows(record, wanted[0]) else socket.gethostname()
    for rank, host in enumerate(ranks.gather(mine)):
        if host:
            raise CheckpointError(
                f"rank {rank} on {host} does not find {record} as rank 0 on {wanted[1]} wrote it: --out must be a "
                "folder that all hosts share, under the same path"
            )


def _shows(path: Path, sha256: str) -> bool:
    """Return whether a file has this SHA-256, or has it in time."""
    until = time.monotonic() + PATIENCE
    while True:
        try:
            if file_sha256(path) == sha256:
                return True
        except OSError:
            pass  # not there yet, or replaced on another host
        if time.monotonic() >= until:
            return False
        time.sleep(_PAUSE)
