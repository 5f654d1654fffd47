"""How an error on one rank ends all of them, with one error to show."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch.distributed as dist

from mxref_training.distributed.ranks import Ranks
from mxref_training.errors import AgreedStop, PeerStopped

_FAILED = "mxref/failed"
"""The key in the store of all ranks under which the first one that fails puts its number."""


@contextmanager
def one_error(ranks: Ranks) -> Iterator[None]:
    """Stop all ranks if the block raises on one, and show one error.

    The rank that fails first raises its own error and ends. The others get an error from gloo or NCCL in the collective
    in which they wait for it, and raise PeerStopped. One process raises what the block raises.

    Raises:
        PeerStopped: another rank failed before.
    """
    try:
        yield
    except (PeerStopped, AgreedStop):
        raise
    except Exception as err:
        if (first := _claim(ranks) if ranks.several else ranks.rank) != ranks.rank:
            raise PeerStopped(f"rank {first} has failed") from err
        raise


def _claim(ranks: Ranks) -> int:
    """Return the number of the rank that failed first, which is this one if none did before."""
    try:
        # Not a collective: other ranks may be in another one, or gone.
        store = dist.distributed_c10d._get_default_store()
        return int(store.compare_set(_FAILED, "", str(ranks.rank)))
    except RuntimeError:
        return ranks.rank  # the process that holds the store has ended
