"""Ranks as `torchrun` starts them: what the environment says of them, and how they find each other."""

from __future__ import annotations

import atexit
import os
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from datetime import timedelta
from typing import TYPE_CHECKING
from uuid import uuid4

import torch
import torch.distributed as dist

from mxref.errors import MxrefError
from mxref.raised import raised_text
from mxref_training.distributed.failing import one_error
from mxref_training.distributed.ranks import SOLE, TIMEOUT, Ranks
from mxref_training.errors import ConfigError, PeerStopped

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

_LET_IT_SPEAK = 5
"""Seconds that a rank stays after another one has failed, whose error then is the first that `torchrun` finds.

`torchrun` ends all ranks when the first one has ended, and calls that one the root cause.
"""
_FREEING = 0.5
"""Seconds that gloo's threads have at the end of a process to free the tensors of their last collectives.

They need the interpreter for that. PyTorch keeps the threads of a group that is destroyed, and one that asks for the
interpreter when it is ending aborts a process whose run is complete.
"""
_CONNECTING = timedelta(minutes=10)
"""How long a rank tries to reach the others at first. They start together, but may import slowly."""
_ATTEMPT = "mxref/attempt"
"""The key under which the first rank names an attempt that ranks may join; empty when all have."""


def started_ranks(environment: Mapping[str, str] = os.environ) -> Ranks:
    """Return the ranks that `torchrun` started, from its environment variables; `SOLE` if it did not start this.

    Nothing is connected yet.

    Raises:
        ConfigError: a variable is missing or is no number.
    """
    if "RANK" not in environment and "WORLD_SIZE" not in environment:
        return SOLE
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    found = {name: environment.get(name, "") for name in names}
    if wrong := [f"{name}={text}" for name, text in found.items() if not text.isdecimal()]:
        raise ConfigError(
            f"the environment variables of ranks need a number each, and there is {' '.join(wrong)}: start ranks by "
            "torchrun, or unset RANK and WORLD_SIZE for one process"
        )
    return Ranks(*map(int, found.values()))


def restarted(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether `torchrun` has started this process in place of one that failed (`--max-restarts`)."""
    return environment.get("TORCHELASTIC_RESTART_COUNT", "0") != "0"


@contextmanager
def connected(ranks: Ranks) -> Iterator[Ranks]:
    """Connect the ranks to each other for the block: by gloo on the CPU, by NCCL on GPUs. One process stays alone.

    If the block raises on one rank, all stop with one error, as of `one_error`. The message of a rank other than the
    first begins with its number. Under `torchrun` the other ranks end without a word.

    Args:
        ranks: from `started_ranks`.

    Raises:
        PeerStopped: as of `one_error`.
        ConfigError: they cannot reach each other.
    """
    if not ranks.several:
        yield ranks
        return
    from torch.distributed.rendezvous import rendezvous

    on_gpus = torch.cuda.is_available() and dist.is_nccl_available()
    try:
        store, rank, world = next(rendezvous("env://", ranks.rank, ranks.world, timeout=_CONNECTING))
        own = _of_this_attempt(store, rank, world)
        own.set_timeout(TIMEOUT)
        backends = "cpu:gloo,cuda:nccl" if on_gpus else "gloo"
        dist.init_process_group(backends, store=own, rank=rank, world_size=world, timeout=TIMEOUT)
    except (RuntimeError, ValueError) as err:
        raise ConfigError(
            f"the ranks cannot connect to each other: {raised_text(err)}; every host must reach MASTER_ADDR and "
            "MASTER_PORT; if a host's name leads to another network, as to 127.0.1.1, name the network interface in "
            "GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
        ) from err
    atexit.register(time.sleep, _FREEING)
    try:
        with one_error(ranks):
            yield ranks
    except BaseException as err:
        # Others may wait in a collective that this rank will never join, so nothing here may wait for them.
        if on_gpus:
            dist.distributed_c10d._abort_process_group()
        else:
            dist.destroy_process_group()
        if isinstance(err, PeerStopped):
            if "TORCHELASTIC_RUN_ID" in os.environ:
                time.sleep(_LET_IT_SPEAK)
                raise SystemExit(2) from None
        elif isinstance(err, MxrefError) and not ranks.first:
            err.args = (f"rank {ranks.rank}: {err}",)
        raise
    dist.destroy_process_group()


def _of_this_attempt(store: Store, rank: int, world: int) -> Store:
    """Return the part of a store that the ranks of this attempt alone use; collective.

    `torchrun --max-restarts` keeps one store for all attempts. It still holds the addresses that the processes of the
    last attempt wrote there, under the same keys, and a rank that reads one of these calls a process that has ended.
    Its number of restarts names no attempt, because each host counts its own.
    So the first rank invents a name, under which all others report. It then withdraws the name, and only after that
    lets them go: a name that is found and that nobody will let go is of an attempt that has ended.
    """
    name, until = uuid4().hex, time.monotonic() + _CONNECTING.total_seconds()
    if rank == 0:
        store.set(_ATTEMPT, name)
        store.wait([f"mxref/{name}/{other}" for other in range(1, world)], _CONNECTING)
        store.set(_ATTEMPT, "")
        store.set(f"mxref/{name}/go", "")
    else:
        while not store.check([f"mxref/{name}/go"]):
            if time.monotonic() > until:
                raise RuntimeError("rank 0 did not come")
            time.sleep(0.01)
            if store.check([_ATTEMPT]) and (found := store.get(_ATTEMPT).decode()):
                name = found
                store.set(f"mxref/{name}/{rank}", "")
    return dist.distributed_c10d.PrefixStore(f"mxref/{name}", store)
