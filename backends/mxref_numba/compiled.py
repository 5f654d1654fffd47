"""How every kernel here is compiled.

No `fastmath`: float32 operations happen one by one, in the written order, and are not contracted.
`gemm.py` alone says otherwise, where all products and sums are exact and contraction changes nothing.

Indices of inner loops are unsigned: a signed one that is not known to be positive may count from the end
of the axis, and that test keeps a loop from being vectorised.
"""

# Kernels have no annotations: Numba infers their types.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import numba
import numpy as np

kernel: Any = partial(numba.njit, cache=True, nogil=True, error_model="numpy")
"""Decorator of functions that are called from kernels."""

parallel_kernel: Any = partial(numba.njit, cache=True, nogil=True, error_model="numpy", parallel=True)
"""Decorator of entry points: thin, since parallel functions take long to compile."""

_GRAIN = 1 << 15
"""Elements that are worth waking another thread."""


def worker_count(elements: int) -> int:
    """Return into how many shares work on so many elements is cut; no result depends on it."""
    return max(1, min(numba.get_num_threads(), elements // _GRAIN))


@contextmanager
def team(elements: int) -> Iterator[int]:
    """Give the number of shares, and run parallel kernels on no more threads than that within the context."""
    workers, threads = worker_count(elements), numba.get_num_threads()
    numba.set_num_threads(min(workers, threads))
    try:
        yield workers
    finally:
        numba.set_num_threads(threads)


@kernel
def share(tasks, worker, workers):
    """Return the range of tasks that one of `workers` does: contiguous, and all of them once."""
    return tasks * worker // workers, tasks * (worker + 1) // workers


@kernel
def bits_of(value):
    """Return the bits of a float32, int32."""
    return np.float32(value).view(np.int32)


@kernel
def float_of(bits):
    """Return the float32 of 32 bits."""
    return np.uint32(bits).view(np.float32)
