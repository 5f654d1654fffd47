"""How an error on one rank ends all of them, with one error to show."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta

import torch.distributed as dist

from mxref.errors import MxrefError
from mxref.raised import raised_text
from mxref_training.distributed.ranks import FAILED, Ranks, shared_store
from mxref_training.errors import AgreedStop, PeerLost, PeerStopped, RunError

_PATIENCE = timedelta(seconds=1)
_LOST = (
    "connection closed by peer", "connection reset by peer", "broken pipe", "connection timed out", "no route to host",
    "timed out waiting", "remote process exiting prematurely", "remote process has terminated",
)  # fmt: skip
"""What gloo and NCCL say, in lower case, when another process or its host has gone."""


@contextmanager
def one_error(ranks: Ranks) -> Iterator[None]:
    """Stop all ranks if the block raises on one, and show one error.

    The rank that fails first raises its own error, with its number in front if it is not the first rank. The
    others raise PeerStopped, whatever they were doing. An error that all have is the first rank's. A rank that
    waits for one that has ended gets an error from gloo at once, and is stopped by `torchrun` in any case. One
    process raises what the block raises.

    Raises:
        PeerStopped: another rank failed before.
        PeerLost: this rank lost the connection to another one, which ended without an error of its own.
    """
    if not ranks.several:
        yield
        return
    try:
        yield
    except (PeerStopped, AgreedStop):
        raise
    except Exception as err:
        first = _claim(ranks, err)
        if first != ranks.rank:
            raise PeerStopped(f"rank {first} has failed") from err
        if not isinstance(err, MxrefError) and (lost := _lost_connection(err)):
            # `torchrun` shows how the other process ended, so this error is not reported to it.
            raise PeerLost(
                f"rank {ranks.rank}: another rank ended without an error of its own (was it killed?): {lost}; "
                "the same command goes on from the newest checkpoint"
            ) from err
        if (
            isinstance(err, MxrefError)
            and not ranks.first
            and not str(err).startswith(f"rank {ranks.rank}: ")
        ):
            err.args = (f"rank {ranks.rank}: {err}",)
        if not isinstance(err, MxrefError) or (isinstance(err, RunError) and not isinstance(err, PeerLost)):
            _tell_launcher(err)
        raise


def _claim(ranks: Ranks, err: Exception) -> int:
    """Return the number of the rank that failed first, which is this one if none did before."""
    # Not a collective: other ranks may be in another one, or gone.
    store = shared_store()
    if isinstance(err, MxrefError) and not ranks.first:
        # The first rank reports an error that all ranks have, such as a wrong setting.
        with suppress(RuntimeError):
            store.wait([FAILED], _PATIENCE)
    try:
        return int(store.compare_set(FAILED, "", str(ranks.rank)))
    except (RuntimeError, ValueError):
        return ranks.rank  # the process that holds the store has ended


def _tell_launcher(err: Exception) -> None:
    """Have `torchrun` show the traceback of an unexpected exception, which is being handled, at its end."""
    from torch.distributed.elastic.multiprocessing.errors import get_error_handler

    if "TORCHELASTIC_ERROR_FILE" in os.environ:
        get_error_handler().record_exception(err)


def _lost_connection(err: Exception) -> str:
    """Return how a collective failed because another process has ended; empty if it failed for another reason."""
    text = str(err).lower()
    for said in _LOST:
        if isinstance(err, RuntimeError) and said in text:
            return said
    return raised_text(err) if isinstance(err, dist.DistNetworkError | dist.DistStoreError) else ""
