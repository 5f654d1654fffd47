"""What all ranks of a run have in common: the command, versions and code, the folder, and the weights that they draw.

A host with another version would train with other bits, without an error. Ranks that each hold the whole model would
then have different weights.
"""

from __future__ import annotations

import hashlib
import os
import socket
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from mxref_training.distributed.ranks import Ranks
from mxref_training.durable import file_sha256
from mxref_training.environment import versions
from mxref_training.errors import CheckpointError, ConfigError
from mxref_training.sources import code_digest

PATIENCE = 90.0
"""Seconds in which a network file system shows a new file on all hosts. NFS looks again after 60 at most (nfs(5))."""
_PAUSE = 0.2
_DRAWS = 4096
"""Numbers that are compared; PyTorch draws so many with the vector instructions of the processor."""


def require_agreement(ranks: Ranks, out: Path, identity: Mapping[str, Any]) -> None:
    """Raise ConfigError, which names the first difference, unless all ranks are to train the same run; collective.

    Args:
        ranks: of the run.
        out: folder of the run.
        identity: everything that determines its numbers.
    """
    if ranks.several:
        own = {name: version for name, version in versions().items() if name != "python"}
        ranks.agree("the command", {"--out": os.path.abspath(out)})
        ranks.agree("the software", own | {"code of mxref": code_digest()})
        ranks.agree("what determines the run's numbers", identity)


def require_same_draws(ranks: Ranks) -> None:
    """Raise ConfigError unless the CPUs of all ranks draw the same weights from the same seed.

    The last bits of PyTorch's normal numbers depend on the vector instructions of the processor.
    """
    if not ranks.several:
        return
    drawn = torch.empty(_DRAWS).normal_(generator=torch.Generator().manual_seed(0))
    own = hashlib.sha256(drawn.numpy().tobytes()).hexdigest()
    capability = torch.backends.cpu.get_cpu_capability()
    found = ranks.gather((own, capability, socket.gethostname()))
    for rank, (digest, vectors, host) in enumerate(found):
        if digest != found[0][0]:
            raise ConfigError(
                f"PyTorch draws other weights on rank {rank} ({host}, {vectors}) than on rank 0 ({found[0][2]}, "
                f"{found[0][1]}): set ATEN_CPU_CAPABILITY=default for all ranks, or begin with the weights of a folder "
                "(run.init_from)"
            )


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
