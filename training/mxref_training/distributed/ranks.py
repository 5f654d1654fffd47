"""The ranks of a run: processes that `torchrun` started and that train one model together.

`SOLE` is the only rank of a process that was started alone. It has no process group, and its methods return at once.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
import torch.distributed as dist

from mxref_training.environment import differences
from mxref_training.errors import ConfigError

T = TypeVar("T")

TIMEOUT = timedelta(hours=1)
"""How long a rank waits for another one in a collective."""
_HOWEVER_LONG = timedelta(days=365)


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

    def broadcast(self, value: T) -> T:
        """Return the first rank's value; those of other ranks are not used."""
        return self.gather(value)[0]

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

    def any(self, flag: bool) -> bool:
        """Return whether the flag is true on any rank."""
        return any(row[0] for row in self.gather_numbers([float(flag)]))

    def agree(self, what: str, value: Mapping[str, Any]) -> None:
        """Raise ConfigError, naming the first rank and entry that differ, unless all ranks have the same table."""
        first, *others = self.gather(value)
        for rank, other in enumerate(others, 1):
            for key, wanted, found in differences(first, other):
                raise ConfigError(
                    f"{what}: {key} is {wanted!r} on rank 0 and {found!r} on rank {rank}: start every rank with the "
                    "same command, files and environment"
                )

    @contextmanager
    def first_alone(self) -> Iterator[None]:
        """Run the block on the first rank, and then on all others at the same time, which find its files.

        However long the block takes, no time limit ends the wait for it.
        """
        if not self.several:
            yield
            return
        patient = dist.new_group(backend="gloo", timeout=_HOWEVER_LONG)
        if not self.first:
            dist.barrier(patient)
        yield
        if self.first:
            dist.barrier(patient)
        dist.barrier(patient)


SOLE = Ranks()
"""One process without a process group."""
