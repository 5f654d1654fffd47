"""What all ranks of a run must have in common beside its settings: versions, code, and the weights that they draw.

A host with another version would train with other bits, without an error. Ranks that each hold the whole model would
then have different weights.
"""

from __future__ import annotations

import hashlib
import socket

import torch

from mxref_training.distributed.ranks import Ranks
from mxref_training.errors import ConfigError
from mxref_training.run.backend_code import code_digest
from mxref_training.run.environment import versions

_DRAWS = 4096
"""Numbers that are compared; PyTorch draws so many with the vector instructions of the processor."""


def require_same_software(ranks: Ranks) -> None:
    """Raise ConfigError, which names the first difference, unless all ranks have the same versions and code."""
    if ranks.several:
        own = {name: version for name, version in versions().items() if name != "python"}
        ranks.agree("the software", own | {"code of mxref": code_digest()})


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
