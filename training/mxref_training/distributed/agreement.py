"""What all ranks of a run have in common: the command, versions and code, the folder, and the weights that they draw.

A host with another version would train with other bits, without an error. Ranks that each hold the whole model would
then have different weights.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from mxref_training.distributed.ranks import Ranks
from mxref_training.durable import file_sha256
from mxref_training.environment import versions
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
    """Raise ConfigError unless the CPUs of all ranks draw the same weights from the same seed; collective.

    The last bits of PyTorch's normal numbers depend on the vector instructions of the processor.
    """
    if ranks.several:
        drawn = torch.empty(_DRAWS).normal_(generator=torch.Generator().manual_seed(0))
        digest = hashlib.sha256(drawn.numpy().tobytes()).hexdigest()
        vectors = torch.backends.cpu.get_cpu_capability()
        ranks.agree(
            "the weights that PyTorch draws (set ATEN_CPU_CAPABILITY=default for all ranks, or begin with the weights "
            "of a folder by run.init_from)",
            {"their SHA-256": f"{digest} ({vectors})"},
        )


def require_shared(record: Path, ranks: Ranks) -> None:
    """Wait until every rank reads a file as the first rank has written it; collective.

    Args:
        record: `run.json`, which tells runs apart by its time.
        ranks: of the run.

    Raises:
        ConfigError: a rank does not see that file.
    """
    if ranks.several:
        wanted, until = ranks.broadcast(_digest(record)), time.monotonic() + PATIENCE
        while (found := _digest(record)) != wanted and time.monotonic() < until:
            time.sleep(_PAUSE)
        ranks.agree("--out must be a folder that all hosts share, under the same path", {record.name: found})


def _digest(path: Path) -> str:
    """Return the SHA-256 of a file, or why it cannot be read: on another host it may not be there yet."""
    try:
        return file_sha256(path)
    except OSError as err:
        return err.strerror or "unreadable"
