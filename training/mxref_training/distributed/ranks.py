"""The ranks of a run: processes that `torchrun` started and that train one model together.

`SOLE` is the only rank of a process that was started alone. It has no process group, and its methods return at once.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import timedelta
from itertools import count
from typing import TYPE_CHECKING, Any, TypeVar
from uuid import uuid4

import torch
import torch.distributed as dist

from mxref.errors import MxrefError
from mxref.raised import raised_text
from mxref.terminal import echo
from mxref_training.errors import AgreedStop, ConfigError, RunError
from mxref_training.wording import clock

if TYPE_CHECKING:
    from torch.distributed.distributed_c10d import Store

T = TypeVar("T")

TIMEOUT = timedelta(hours=1)
"""How long a rank waits for another one in a collective. `first_alone` has no limit."""

FIRST_WORD = 60.0
"""Seconds until a rank says that it waits in `first_alone`, and then after twice, four times as many, and so on."""
_PATIENCE = timedelta(seconds=1)
_TURNS = count()
"""Numbers the blocks of `first_alone`, which all ranks reach in the same order."""
_CONNECTING = timedelta(minutes=10)
"""How long a rank tries to reach the others at first. They start together, but may import slowly."""
_LOST = (
    "connection closed by peer", "connection reset by peer", "broken pipe", "connection timed out", "no route to host",
    "timed out waiting", "remote process exiting prematurely", "remote process has terminated",
)  # fmt: skip
"""What gloo and NCCL say, in lower case, when another process or its host has gone."""
_FAILED = "mxref/failed"
"""The key under which the first rank that fails puts its number."""


class PeerStopped(MxrefError):
    """Another rank has failed and shows its error; this rank stops without one."""


class PeerLost(RunError):
    """Another rank has gone without an error of its own, most often because it was killed."""


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
        rank raises, `one_error` around the block stops the others.

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
        _store().set(f"{turn}/{self.rank}", "done")
        self._wait_for([f"{turn}/{rank}" for rank in range(self.world)], f"the other ranks: each {doing}")

    def _wait_for(self, keys: Sequence[str], whom: str) -> None:
        """Wait until all keys are in the store, however long that takes; one of the ranks that wait says so."""
        store, began, next_word = _store(), time.monotonic(), FIRST_WORD
        while not store.check(list(keys)):
            if store.check([_FAILED]):
                raise PeerStopped(f"rank {store.get(_FAILED).decode()} has failed")
            waited = time.monotonic() - began
            if waited >= next_word:
                next_word *= 2
                if self.rank <= 1:
                    with suppress(OSError):  # nobody reads it any more
                        echo(f"rank {self.rank} has waited {clock(waited)} for {whom}", err=True)
            time.sleep(0.1)

    @contextmanager
    def one_error(self) -> Iterator[None]:
        """Stop all ranks if the block raises on one, and show one error.

        The rank that fails first raises its own error, with its number in front if it is not the first rank. The
        others raise PeerStopped, whatever they were doing. An error that all have is the first rank's. A rank that
        waits for one that has ended gets an error from gloo at once, and is stopped by `torchrun` in any case. One
        process raises what the block raises.

        Raises:
            PeerStopped: another rank failed before.
            PeerLost: this rank lost the connection to another one, which ended without an error of its own.
        """
        if not self.several:
            yield
            return
        try:
            yield
        except (PeerStopped, AgreedStop):
            raise
        except Exception as err:
            first = self._claim_failure(err)
            if first != self.rank:
                raise PeerStopped(f"rank {first} has failed") from err
            if not isinstance(err, MxrefError) and (lost := _lost_connection(err)):
                # `torchrun` shows how the other process ended, so this error is not reported to it.
                raise PeerLost(
                    f"rank {self.rank}: another rank ended without an error of its own (was it killed?): {lost}; "
                    "the same command goes on from the newest checkpoint"
                ) from err
            if (
                isinstance(err, MxrefError)
                and not self.first
                and not str(err).startswith(f"rank {self.rank}: ")
            ):
                err.args = (f"rank {self.rank}: {err}",)
            if not isinstance(err, MxrefError) or (
                isinstance(err, RunError) and not isinstance(err, PeerLost)
            ):
                _tell_launcher(err)
            raise

    def _claim_failure(self, err: Exception) -> int:
        """Return the number of the rank that failed first, which is this one if none did before."""
        # Not a collective: other ranks may be in another one, or gone.
        store = _store()
        if isinstance(err, MxrefError) and not self.first:
            # The first rank reports an error that all ranks have, such as a wrong setting.
            with suppress(RuntimeError):
                store.wait([_FAILED], _PATIENCE)
        try:
            return int(store.compare_set(_FAILED, "", str(self.rank)))
        except (RuntimeError, ValueError):
            return self.rank  # the process that holds the store has ended


def _store() -> Store:
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


def _between_hosts(ranks: Ranks, environment: Mapping[str, str] = os.environ) -> str:
    """Return what several hosts need to reach each other; nothing if there is one."""
    if ranks.world == ranks.local_world:
        return ""
    address, port = (environment.get(name, "not set") for name in ("MASTER_ADDR", "MASTER_PORT"))
    return (
        f"; every host must reach MASTER_ADDR = {address}, MASTER_PORT = {port}; if a host's name leads to another "
        "network, as to 127.0.1.1, name the network interface in GLOO_SOCKET_IFNAME and NCCL_SOCKET_IFNAME"
    )


SOLE = Ranks()
"""One process without a process group."""


def started_ranks(environment: Mapping[str, str] = os.environ) -> Ranks:
    """Return the ranks that `torchrun` started, from its environment variables; `SOLE` if it did not start this.

    Nothing is connected yet.

    Raises:
        ConfigError: a variable is missing, is no number, or does not fit the others.
    """
    if "RANK" not in environment and "WORLD_SIZE" not in environment:
        return SOLE
    found: dict[str, int] = {}
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        text = environment.get(name, "")
        if not text.isdecimal():
            raise ConfigError(
                f"the environment variable {name} is {text!r}, and ranks need a number there: start them by torchrun, "
                "or unset RANK and WORLD_SIZE for one process"
            )
        found[name] = int(text)
    rank, world, local, local_world = found.values()
    if not (rank < world and local < local_world <= world):
        raise ConfigError(
            f"RANK = {rank} of WORLD_SIZE = {world} and LOCAL_RANK = {local} of LOCAL_WORLD_SIZE = {local_world} in "
            "the environment do not fit: start the ranks by torchrun"
        )
    return Ranks(rank, world, local, local_world)


def restarted(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether `torchrun` has started this process in place of one that failed (`--max-restarts`)."""
    text = environment.get("TORCHELASTIC_RESTART_COUNT", "")
    return text.isdecimal() and int(text) > 0


@contextmanager
def connected(ranks: Ranks) -> Iterator[Ranks]:
    """Connect the ranks to each other for the block: by gloo on the CPU, by NCCL on GPUs. One process stays alone.

    Args:
        ranks: from `started_ranks`.

    Raises:
        ConfigError: PyTorch cannot connect ranks, or they cannot reach each other.
    """
    if not ranks.several:
        yield ranks
        return
    if not dist.is_available():
        raise ConfigError(f"{ranks.world} ranks, but this PyTorch was built without torch.distributed")
    if dist.is_initialized():
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
            f"the ranks cannot connect to each other: {raised_text(err)}{_between_hosts(ranks)}"
        ) from err
    try:
        yield ranks
    except BaseException:
        # Others may wait in a collective that this rank will never join, so nothing here may wait for them.
        if on_gpus:
            dist.distributed_c10d._abort_process_group()
        else:
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()


_ATTEMPT = "mxref/attempt"
"""The key under which the first rank names the attempt."""


def _of_this_attempt(store: Store, rank: int, world: int) -> Store:
    """Return the part of a store that the ranks of this attempt alone use; collective.

    `torchrun --max-restarts` keeps one store for all attempts. It still holds the addresses that the processes of the
    last attempt wrote there, under the same keys, and a rank that reads one of these calls a process that has ended.
    Its number of restarts names no attempt, because each host counts its own.
    So the first rank invents a name. Every other rank answers under the name that it finds with a word of its own, and
    goes on when the first rank has repeated that word: entries of an earlier attempt are never used.
    """
    word, until = uuid4().hex, time.monotonic() + _CONNECTING.total_seconds()
    if rank == 0:
        name, answers = word, [f"mxref/{word}/{other}" for other in range(1, world)]
        store.set(_ATTEMPT, name)
        store.wait(answers, _CONNECTING)
        for answer in answers:
            store.set(f"{answer}/heard", store.get(answer).decode())
    else:
        name, heard = "", b""
        while heard != word.encode():
            if time.monotonic() > until:
                raise RuntimeError("rank 0 did not come")
            time.sleep(0.01)
            if store.check([_ATTEMPT]):
                name = store.get(_ATTEMPT).decode()
                store.set(f"mxref/{name}/{rank}", word)
                repeated = f"mxref/{name}/{rank}/heard"
                heard = store.get(repeated) if store.check([repeated]) else b""
    from torch.distributed.distributed_c10d import PrefixStore

    return PrefixStore(f"mxref/{name}", store)
