"""Weights gathered and gradients added by the copy engines of the GPUs of one host.

NCCL's kernels take multiprocessors, and a GEMM that is planned for all of them then takes up to twice its time. A copy
engine takes none. Each rank reads the others' memory (`torch.distributed._symmetric_memory`, over NVLink).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, ReduceScatter

GATHER, SCATTER = 0, 1
"""Channels of the barriers, which may run beside each other."""

Share = Callable[[Tensor, str], Any]
"""Makes memory readable by all ranks of the group with a name: `rendezvous`."""


class Buffer(NamedTuple):
    """Memory that all ranks of a group can read."""

    memory: Tensor
    handle: Any
    unused: int
    """References to the memory while nobody uses it."""


class Buffers:
    """Such memory, used again as soon as no tensor refers to it, as PyTorch's own allocator does on one stream."""

    def __init__(self, group: Any) -> None:
        """Prepare for the ranks of a process group."""
        self._group = group
        self._held: dict[tuple[int, torch.dtype], list[Buffer]] = {}

    def take(self, count: int, dtype: torch.dtype, device: torch.device) -> Tensor:
        """Return memory for so many elements, without values; collective where none is free."""
        held = self._held.setdefault((count, dtype), [])
        for buffer in held:
            if references(buffer.memory) == buffer.unused:
                return buffer.memory[:]
        memory, handle = shared_memory(count, dtype, device, self._group)
        held.append(Buffer(memory, handle, references(memory)))
        return memory[:]

    def handle(self, taken: Tensor) -> Any:
        """Return what reads the same memory of other ranks."""
        start = taken.data_ptr()
        return next(
            buffer.handle
            for buffer in self._held[taken.numel(), taken.dtype]
            if buffer.memory.data_ptr() == start
        )


def shared_memory(count: int, dtype: torch.dtype, device: torch.device, group: Any) -> tuple[Tensor, Any]:
    """Return memory that all ranks of a group can read, and its handle; collective."""
    import torch.distributed._symmetric_memory as symmetric

    memory = symmetric.empty(count, dtype=dtype, device=device)
    return memory, symmetric.rendezvous(memory, group.group_name)


def references(tensor: Tensor) -> int:
    """Return how many tensors refer to a tensor's memory, and some constant more."""
    storage = tensor.untyped_storage()
    count: int = torch._C._storage_Use_Count(storage._cdata)  # type: ignore[attr-defined]
    return count


class CopiedGather(AllGather):
    """Gathers weights: each rank copies the others' parts."""

    def __init__(self, buffers: Buffers) -> None:
        """Gather into these buffers."""
        self._buffers = buffers

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return memory for the whole weights; FSDP2 puts this rank's part into its place."""
        return self._buffers.take(math.prod(map(int, size)), dtype, device)

    def __call__(
        self, output_tensor: Tensor, input_tensor: Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """Copy the parts [N] of the other ranks into their places in [ranks * N]."""
        handle, size = self._buffers.handle(output_tensor), input_tensor.numel()
        handle.barrier(channel=GATHER)
        for other in others(group):
            part = handle.get_buffer(other, (size,), output_tensor.dtype, other * size)
            output_tensor.narrow(0, other * size, size).copy_(part)
        handle.barrier(channel=GATHER)


class CopiedReduceScatter(ReduceScatter):
    """Adds gradients: each rank copies its part of the others' and adds in the order of ranks."""

    def __init__(self, buffers: Buffers) -> None:
        """Add from these buffers."""
        self._buffers = buffers
        self._has_input = False

    def allocate(
        self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device
    ) -> Tensor:
        """Return memory for whole gradients, which the others read, and at the next call for this rank's part."""
        self._has_input = not self._has_input
        count = math.prod(map(int, size))
        if self._has_input:
            return self._buffers.take(count, dtype, device)
        return torch.empty(count, dtype=dtype, device=device)

    def __call__(
        self,
        output_tensor: Tensor,
        input_tensor: Tensor,
        group: dist.ProcessGroup,
        op: Any,
        async_op: bool = False,
    ) -> None:
        """Add the parts [N] of all ranks' gradients [ranks * N] from the first rank to the last."""
        assert op == dist.ReduceOp.SUM
        handle, size, rank = self._buffers.handle(input_tensor), output_tensor.numel(), group.rank()
        parts = [input_tensor.narrow(0, rank * size, size)] * group.size()
        handle.barrier(channel=SCATTER)
        for other in others(group):
            parts[other] = torch.empty_like(output_tensor)
            parts[other].copy_(handle.get_buffer(other, (size,), input_tensor.dtype, rank * size))
        handle.barrier(channel=SCATTER)
        torch.add(parts[0], parts[1], out=output_tensor)
        for part in parts[2:]:
            output_tensor.add_(part)


def others(group: dist.ProcessGroup) -> list[int]:
    """Return the other ranks of a group from the next one on, so that no two ranks read the same one at once."""
    rank, ranks = group.rank(), group.size()
    return [(rank + step) % ranks for step in range(1, ranks)]
