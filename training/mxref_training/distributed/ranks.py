"""The ranks of a run: processes that `torchrun` started and that train one model together.

`SOLE` is the only rank of a process that was started alone. It has no process group, and its methods return at once.
"""

from __future__ import annotations

import math
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from typing import TYPE_CHECKING, Any, TypeVar

import torch
import torch.distributed as dist

from mxref.terminal import echo
from mxref_training.errors import ConfigError, PeerStopped
from mxref_training.wording import clock

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

T = TypeVar("T")

TIMEOUT = timedelta(hours=1)
"""How long a rank waits for another one in a collective. `first_alone` has no limit."""

FIRST_WORD = 60.0
"""Seconds until a rank says that it waits in `first_alone`, and then after twice, four times as many, and so on."""
FAILED = "mxref/failed"
"""The key in the store under which the first rank that fails puts its number."""
_TURNS = count()
"""Numbers the blocks of `first_alone`, which all ranks reach in the same order."""


@dataclass(frozen=True)
class Ranks:
    """Which of the processes of a run this one is. Collective methods are called on every rank in the same order."""

    rank: int = 0
    """Number of this process in the run."""
    world: int = 1
    """How many there are."""
    local_rank: int = 0
    """Number of this process on its host, which chooses its GPU."""
    local_world: int = 1
    """How many there are on this host."""

    @property
    def first(self) -> bool:
        """Whether this rank writes the files of the run and reports its progress."""
        return self.rank == 0

    @property
    def several(self) -> bool:
        """Whether there are other ranks."""
        return self.world > 1

    def barrier(self) -> None:
        """Wait until every rank is here."""
        if self.several:
            self.gather_numbers([0.0])  # on the CPU: NCCL's own barrier needs a GPU of each rank

    def broadcast(self, value: T) -> T:
        """Return the first rank's value, which is pickled; those of other ranks are not read."""
        if not self.several:
            return value
        held: list[Any] = [value if self.first else None]
        dist.broadcast_object_list(held, src=0)
        found: T = held[0]
        return found

    def gather(self, value: T) -> list[T]:
        """Return the values of all ranks, pickled, in the order of ranks; every rank gets them."""
        if not self.several:
            return [value]
        held: list[Any] = [None] * self.world
        dist.all_gather_object(held, value)
        return held

    def gather_numbers(self, values: Sequence[float]) -> list[list[float]]:
        """Return the numbers of all ranks, in the order of ranks; cheaper than `gather`. Every rank gives as many."""
        if not self.several:
            return [list(values)]
        own = torch.tensor(values, dtype=torch.float64)
        found = [torch.empty_like(own) for _ in range(self.world)]
        dist.all_gather(found, own)
        return [row.tolist() for row in found]

    def total(self, value: float) -> float:
        """Return the sum over ranks. It is rounded once, so that it depends neither on order nor on topology."""
        return math.fsum(row[0] for row in self.gather_numbers([value])) if self.several else value

    def any(self, flag: bool) -> bool:
        """Return whether the flag is true on any rank."""
        return any(row[0] for row in self.gather_numbers([float(flag)]))

    def agree(self, what: str, value: Any) -> None:
        """Raise ConfigError, naming the first differing rank, unless all ranks have the same value.

        Of tables it names the first entry that differs.
        """
        values = self.gather(value)
        for rank, other in enumerate(values):
            if other != values[0]:
                where, first, own = _first_difference(what, values[0], other)
                raise ConfigError(
                    f"{where} is {first!r} on rank 0 and {own!r} on rank {rank}: start every rank with the same "
                    "command, files and environment"
                )

    @contextmanager
    def first_alone(self, doing: str) -> Iterator[None]:
        """Run the block on the first rank, and then on all others at the same time, which find its files.

        However long the block takes, no time limit ends the wait for it; a rank that waits long says so. If the first
        rank raises, `failing.one_error` around the block stops the others.

        Args:
            doing: what the block does, as in `prepares the data`.

        Raises:
            PeerStopped: another rank has failed meanwhile.
        """
        if not self.several:
            yield
            return
        turn = f"mxref/turn-{next(_TURNS)}"
        if not self.first:
            self._wait_for([f"{turn}/0"], f"rank 0, which {doing}")
        yield
        shared_store().set(f"{turn}/{self.rank}", "done")
        self._wait_for([f"{turn}/{rank}" for rank in range(self.world)], f"the other ranks: each {doing}")

    def _wait_for(self, keys: Sequence[str], whom: str) -> None:
        """Wait until all keys are in the store, however long that takes; one of the ranks that wait says so."""
        store, began, next_word = shared_store(), time.monotonic(), FIRST_WORD
        while not store.check(list(keys)):
            if store.check([FAILED]):
                raise PeerStopped(f"rank {store.get(FAILED).decode()} has failed")
            waited = time.monotonic() - began
            if waited >= next_word:
                next_word *= 2
                if self.rank <= 1:
                    with suppress(OSError):  # nobody reads it any more
                        echo(f"rank {self.rank} has waited {clock(waited)} for {whom}", err=True)
            time.sleep(0.1)


def shared_store() -> Store:
    """Return the store of all connected ranks."""
    store: Store = dist.distributed_c10d._get_default_store()
    return store


def _first_difference(what: str, first: Any, other: Any) -> tuple[str, Any, Any]:
    """Return the name of the first entry in which two values differ, and both values of it."""
    if isinstance(first, Mapping) and isinstance(other, Mapping):
        for key in dict.fromkeys([*first, *other]):
            pair = first.get(key), other.get(key)
            if pair[0] != pair[1]:
                return _first_difference(f"{what}: {key}" if ": " not in what else f"{what}.{key}", *pair)
    return what, first, other


SOLE = Ranks()
"""One process without a process group."""
