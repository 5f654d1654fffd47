"""The attempt that ranks belong to: a launcher that restarts ranks gives them the store of those that were killed.

`torchrun --max-restarts` keeps one store for all attempts. It still holds the addresses that the processes of the last
attempt wrote there, under the same keys. A rank that reads one before it is overwritten calls a process that has ended.
"""

from __future__ import annotations

import time
from datetime import timedelta
from typing import TYPE_CHECKING
from uuid import uuid4

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store


_PAUSE = 0.01
"""Seconds between two looks into the store."""


def of_this_attempt(store: Store, rank: int, world: int, timeout: timedelta) -> Store:
    """Return the part of a store that the ranks of this attempt alone use; collective.

    The first rank invents a name. Every other rank answers to the name that it finds with a word of its own, and goes
    on when the first rank has repeated that word. Entries of an earlier attempt are therefore never used.

    Args:
        store: shared by all ranks of all attempts.
        rank: of this process.
        world: number of ranks.
        timeout: how long a rank waits for the others.

    Raises:
        TimeoutError: another rank did not come.
    """
    until = time.monotonic() + timeout.total_seconds()
    if rank == 0:
        name = uuid4().hex
        store.set("mxref/attempt", name)
        missing = set(range(1, world))
        while missing:
            for other in sorted(missing):
                if store.check([f"mxref/{name}/{other}"]):
                    store.set(f"mxref/{name}/{other}/heard", store.get(f"mxref/{name}/{other}").decode())
                    missing.remove(other)
            _pause(until, f"ranks {', '.join(map(str, sorted(missing)))} did not come")
    else:
        name, word = "", uuid4().hex
        while not name or not _says(store, f"mxref/{name}/{rank}/heard", word):
            if store.check(["mxref/attempt"]) and (found := store.get("mxref/attempt").decode()) != name:
                name = found
                store.set(f"mxref/{name}/{rank}", word)
            _pause(until, "rank 0 did not come")
    from torch.distributed.distributed_c10d import PrefixStore

    return PrefixStore(f"mxref/{name}", store)


def _says(store: Store, key: str, value: str) -> bool:
    return store.check([key]) and store.get(key).decode() == value


def _pause(until: float, problem: str) -> None:
    if time.monotonic() > until:
        raise TimeoutError(problem)
    time.sleep(_PAUSE)
