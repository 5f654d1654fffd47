"""Memory for large results: aligned to cache lines, and reused when no array uses it any more.

Fresh memory costs more than the work: the system clears it page by page while a kernel writes it, at twice
the price of the writing. So results of some size live in buffers that come back here when their last array
is gone, and a bounded number of bytes waits for the next result of the same size.
"""

from __future__ import annotations

import math
import threading
import weakref
from typing import Any

import numpy as np
from numpy.typing import DTypeLike, NDArray

LINE = 64
"""Bytes of a cache line, and of the longest vector."""
KEPT_BYTES = 256 << 20
"""Most bytes that wait for the next result."""
_LENT_FROM = 4 << 20
"""Smaller results come from the allocator, which keeps memory of that size by itself."""

_waiting: list[NDArray[np.uint8]] = []
_lock = threading.RLock()  # a buffer may come back while the same thread takes one


def empty(shape: tuple[int, ...], dtype: DTypeLike) -> NDArray[Any]:
    """Return an array with arbitrary content; from 4 MiB on, it starts at a cache line.

    Args:
        shape: its shape.
        dtype: its type.
    """
    size = math.prod(shape) * np.dtype(dtype).itemsize
    if size < _LENT_FROM:
        return np.empty(shape, dtype)
    buffer = _lend(size + LINE)
    skipped = aligned(buffer) - buffer.__array_interface__["data"][0]
    return buffer[skipped : skipped + size].view(dtype).reshape(shape)


def aligned(buffer: NDArray[np.uint8]) -> int:
    """Return the address of the first cache line that starts in a buffer."""
    address: int = buffer.__array_interface__["data"][0]
    return -(-address // LINE) * LINE


def _lend(size: int) -> NDArray[np.uint8]:
    with _lock:
        found = [i for i, buffer in enumerate(_waiting) if buffer.size == size]
        buffer = _waiting.pop(found[-1]) if found else np.empty(size, np.uint8)
    # The base of every view of the result: NumPy's search for the base ends at the array that wraps foreign memory.
    owner = np.frombuffer(buffer.data, np.uint8)
    weakref.finalize(owner, _take_back, buffer).atexit = False
    return owner


def _take_back(buffer: NDArray[np.uint8]) -> None:
    with _lock:
        _waiting.append(buffer)
        while sum(kept.size for kept in _waiting) > KEPT_BYTES:
            _waiting.pop(0)
