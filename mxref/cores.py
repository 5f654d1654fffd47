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


def wait_passively() -> None:
    """Have threads of OpenMP sleep while they wait, unless OMP_WAIT_POLICY is set; call it before PyTorch is loaded.

    By default they spin for milliseconds after each operation of PyTorch, and so take cores from the kernels of a
    backend and from other processes. No bit of a result depends on it.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "passive")


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
