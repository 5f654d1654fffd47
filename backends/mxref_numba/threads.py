"""Kernels on threads: how many, which, and what each works in. No result depends on their number.

Threads are Numba's, from the first threading layer found among tbb, omp and workqueue. On Linux this is omp: calls from
several Python threads are safe, and PyTorch uses the same OpenMP pool, so the two never compete. A forked process
cannot use this pool and gets an error. The layer workqueue has no such limit but aborts on concurrent calls, so these
wait for each other.

A parallel kernel takes far longer to compile than a plain one, so a single one, `_run_shares`, serves all.
"""

# Kernels have no annotations: Numba infers their types.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import ctypes
import os
import sys
import threading
from contextlib import nullcontext
from importlib.util import find_spec
from typing import Any

import numba
import numpy as np
from numba import threading_layer  # type: ignore[attr-defined]

from mxref.errors import BackendError
from mxref_numba.buffers import LINE, aligned
from mxref_numba.kernel_cache import REFUSED
from mxref_numba.kernels import KERNELS, Native, address_of, call, in_memory, kernel, share

_GRAIN = 1 << 15
"""Number of elements for which another thread pays off."""


class _Pool:
    """The state of the threads, which all kernels of this process share."""

    inherited = False
    """Whether the process was forked from one with running OpenMP threads, which a fork does not copy."""
    turns = threading.RLock()
    """A lock for the layer workqueue, which serves one caller at a time."""
    started = False
    """Whether Numba's threads have started, in this process or in one that it was forked from."""


def _after_fork() -> None:
    _Pool.inherited = _Pool.inherited or started_layer() == "omp" or "torch" in sys.modules
    _Pool.turns = threading.RLock()


if sys.platform == "linux":  # only GNU OpenMP cannot be used after a fork
    os.register_at_fork(after_in_child=_after_fork)


def started_layer() -> str:
    """Return the name of Numba's threading layer; empty before the first parallel kernel."""
    try:
        return str(threading_layer())
    except ValueError:
        return ""


def _library(path: str | None) -> Any:
    """Return a library by its file, or without one the process's global symbols; None if it cannot be loaded."""
    try:
        return ctypes.CDLL(path)
    except OSError:  # no OpenMP on this machine: Numba takes another layer
        return None


def thread_count() -> int:
    """Return on how many threads kernels run; the first call starts the threads.

    Numba then sets OpenMP's number of threads to its own, which is the number of cores. PyTorch reads the number of
    OpenMP as its own, so it is put back: it belongs to `OMP_NUM_THREADS` and `torch.set_num_threads`.
    """
    if _Pool.started or sys.platform != "linux":
        return numba.get_num_threads()
    # Where PyTorch was imported first, its library takes the calls in place of the one that Numba was linked with.
    files = None, getattr(find_spec("numba.np.ufunc.omppool"), "origin", None)
    libraries = [lib for lib in map(_library, files) if hasattr(lib, "omp_get_max_threads")]
    before = [lib.omp_get_max_threads() for lib in libraries]
    threads = numba.get_num_threads()
    for lib, number in zip(libraries, before, strict=True):
        lib.omp_set_num_threads(number)
    _Pool.started = True
    return threads


def running() -> str:
    """Return a line for people: the threads, their layer, and the folder of compiled code."""
    threads = thread_count()
    folder = KERNELS[0]._cache.cache_path or "no folder"
    refused = f" (not where others can change it: {'; '.join(REFUSED)})" if REFUSED else ""
    return f"{threads} thread{'s'[: threads != 1]} ({threading_layer()}), compiled code in {folder}{refused}"


def worker_count(elements: int) -> int:
    """Return into how many shares the work on `elements` is divided; no result depends on it."""
    return max(1, min(thread_count(), elements // _GRAIN))


@kernel(parallel=True, no_cpython_wrapper=False)
def _run_shares(function, job, tasks, room, size, workers):
    for worker in numba.prange(workers):
        begin, end = share(tasks, worker, workers)
        call(function, (job, begin, end, room + worker * size))


def run(native: Native, job: tuple[Any, ...], tasks: int, elements: int, room: int = 0) -> None:
    """Do all tasks of a job, on as many threads as the work is worth.

    Args:
        native: a kernel of four arguments: the address of the job, its first task and the end of its tasks, and the
            address of memory of its own, from a cache line on.
        job: a NamedTuple.
        tasks: how many.
        elements: the work, in elements that are quantized; `worker_count` makes the number of shares of it.
        room: bytes of memory that a share needs.

    Raises:
        BackendError: in a process that was forked from one that used OpenMP, where threads would kill it.
    """
    fields, workers = in_memory(job), worker_count(elements)
    memory = np.empty(workers * room + LINE, np.uint8) if room else None
    rooms = 0 if memory is None else aligned(memory)
    if workers == 1:  # in the calling thread
        native.call(fields, 0, tasks, rooms)
        return
    threads, layer = thread_count(), threading_layer()
    if _Pool.inherited and layer == "omp":
        raise BackendError(
            "backend 'numba' cannot run in a process forked after OpenMP threads had started (by Numba or "
            "PyTorch): start workers with multiprocessing.get_context('spawn'), or set "
            "NUMBA_THREADING_LAYER=workqueue"
        )
    kept = np.frombuffer(fields, np.uint8)
    with _Pool.turns if layer == "workqueue" else nullcontext():
        numba.set_num_threads(min(workers, threads))
        try:
            _run_shares(native.address, address_of(kept), tasks, rooms, room, workers)
        finally:
            numba.set_num_threads(threads)
