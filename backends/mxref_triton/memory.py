"""Memory on the device: allocations that fail say what was asked for, what is free, and what to do."""

from __future__ import annotations

import math

import torch

from mxref.errors import MxrefError


class DeviceMemoryError(MxrefError, MemoryError):
    """An allocation for which the device has no room."""


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return an uninitialized tensor; DeviceMemoryError if there is no room for it."""
    try:
        return torch.empty(shape, dtype=dtype, device=device)
    except torch.OutOfMemoryError as err:
        raise _no_room(math.prod(shape) * dtype.itemsize, device) from err


# A class: entering a generator's context takes longer than allocating does.
class asking:
    """A context that turns torch's own error inside the block, which allocates `size` bytes, into DeviceMemoryError."""

    def __init__(self, size: int, device: torch.device) -> None:
        self._asked = size, device

    def __enter__(self) -> None:
        pass

    def __exit__(self, _kind: object, err: BaseException | None, _trace: object) -> None:
        if isinstance(err, torch.OutOfMemoryError):
            raise _no_room(*self._asked) from err


def _no_room(size: int, device: torch.device) -> DeviceMemoryError:
    free, total = torch.cuda.mem_get_info(device)
    cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    return DeviceMemoryError(
        f"{device}: {size:,} bytes asked for, {free:,} of {total:,} free and {cached:,} cached in pieces; take a "
        "smaller micro-batch, or quantize slices of rows, each with its Placement, which changes no bit"
    )
