"""The number of cores, and limits for child processes that share them."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

THREAD_VARIABLES = ("OMP_NUM_THREADS", "NUMBA_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
"""Environment variables for the number of threads of libraries that start one thread per core."""


def cores() -> int:
    """Return the number of cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextmanager
def on_a_share(jobs: int) -> Iterator[None]:
    """Limit child processes to 1/`jobs` of the cores, except where the environment sets a number of threads."""
    unset = [name for name in THREAD_VARIABLES if name not in os.environ]
    os.environ.update(dict.fromkeys(unset, str(max(1, cores() // jobs))))
    try:
        yield
    finally:
        for name in unset:
            del os.environ[name]
