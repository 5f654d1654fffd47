"""Memory on the device: allocations that fail say what was asked for, what is free, and what to do."""

from __future__ import annotations

import math
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from mxref.errors import MxrefError


class DeviceMemoryError(MxrefError, MemoryError):
    """An allocation for which the device has no room."""


def empty(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return an uninitialized tensor; DeviceMemoryError if there is no room for it."""
    with asking(math.prod(shape) * dtype.itemsize, device):
        return torch.empty(shape, dtype=dtype, device=device)


@contextmanager
def asking(size: int, device: torch.device) -> Iterator[None]:
    """Turn torch's own error inside the block, which allocates `size` bytes, into DeviceMemoryError."""
    try:
        yield
    except torch.OutOfMemoryError as err:
        free, total = torch.cuda.mem_get_info(device)
        cached = torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
        raise DeviceMemoryError(
            f"{device}: {size:,} bytes asked for, {free:,} of {total:,} free and {cached:,} cached in pieces; take a "
            "smaller micro-batch, or quantize slices of rows with origin= and global_shape=, which changes no bit"
        ) from err
