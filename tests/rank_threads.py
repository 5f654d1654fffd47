"""Threads that act as the ranks of a run, and tensors of which each thread has a part; no process group is needed."""

from __future__ import annotations

import pickle
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType

from mxref.errors import MxrefError
from mxref_training.distributed.ranks import Ranks

T = TypeVar("T")


class Meeting:
    """Where the threads of one run exchange values."""

    def __init__(self, world: int) -> None:
        self.barrier = threading.Barrier(world, timeout=20)
        self.values: list[Any] = [None] * world


@dataclass(frozen=True)
class ThreadRanks(Ranks):
    """A rank whose peers are threads."""

    meeting: Meeting = field(default_factory=lambda: Meeting(1))

    def gather(self, value: T) -> list[T]:
        self.meeting.values[self.rank] = pickle.dumps(value)
        self.meeting.barrier.wait()
        found = [pickle.loads(held) for held in self.meeting.values]
        self.meeting.barrier.wait()
        return found

    def gather_numbers(self, values: Sequence[float]) -> list[list[float]]:
        return self.gather(list(values))

    def broadcast(self, value: T) -> T:
        return self.gather(value)[0]


def on_ranks(world: int, work: Callable[[ThreadRanks], Any]) -> list[Any]:
    """Do work on each of several ranks, and return by rank what it returned or raised."""
    meeting = Meeting(world)
    found: list[Any] = [None] * world

    def run(rank: int) -> None:
        try:
            found[rank] = work(ThreadRanks(rank, world, rank, world, meeting=meeting))
        except BaseException as err:
            found[rank] = err
            # If all ranks raise an error of mxref, no rank waits, and each needs the time to raise it.
            threading.Timer(0.5 if isinstance(err, MxrefError) else 0, meeting.barrier.abort).start()

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


class Cut(Tensor):
    """A tensor of which this rank has a box, told to DCP as a DTensor tells it."""

    box: Tensor
    offset: tuple[int, ...]

    @staticmethod
    def __new__(cls, box: Tensor, offset: Sequence[int], whole: Sequence[int]) -> Cut:
        made: Cut = torch.Tensor._make_wrapper_subclass(cls, tuple(whole), dtype=box.dtype)  # type: ignore[attr-defined]
        made.box, made.offset = box, tuple(offset)
        return made

    def __repr__(self) -> str:  # type: ignore[override]
        return f"Cut({list(self.box.shape)} at {self.offset} of {list(self.shape)})"

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return Cut(args[0].box, args[0].offset, args[0].shape)
        raise NotImplementedError(f"{func} on a part of a tensor")

    def _chunk(self) -> ChunkStorageMetadata:
        return ChunkStorageMetadata(torch.Size(self.offset), self.box.size())

    def __create_write_items__(self, name: str, _: object) -> list[WriteItem]:
        data = TensorWriteData(self._chunk(), TensorProperties.create_from_tensor(self.box), self.size())
        return [WriteItem(MetadataIndex(name, self._chunk().offsets), WriteItemType.SHARD, tensor_data=data)]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [self._chunk()]

    def __get_tensor_shard__(self, _: MetadataIndex) -> Tensor:
        return self.box


def cut(whole: Tensor, dimension: int, rank: int, world: int) -> Cut:
    """Return a rank's part of a tensor as `Shard(dimension)` of a DTensor cuts it: the last parts may be empty."""
    length = -(-whole.shape[dimension] // world)
    first = min(rank * length, whole.shape[dimension])
    box = whole.narrow(dimension, first, min(length, whole.shape[dimension] - first)).clone()
    offset = [0] * whole.ndim
    offset[dimension] = first
    return Cut(box, offset, whole.shape)
