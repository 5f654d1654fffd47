"""How kernels are compiled, cached on disk, and run on threads.

No `fastmath`: float32 operations happen one by one, in the written order, and are not contracted.
`gemm/portable.py` alone says otherwise, where all products and sums are exact and contraction changes nothing.

Indices of inner loops are unsigned: a signed one that is not known to be positive may count from the end
of the axis, and that test keeps a loop from being vectorised.

Threads are Numba's, from the first threading layer found among tbb, omp and workqueue. On Linux this is omp: calls from
several Python threads are safe, and PyTorch uses the same OpenMP pool, so the two never compete. A forked process
cannot use this pool and gets an error. The layer workqueue has no such limit but aborts on concurrent calls, so these
wait for each other.
"""

# Kernels have no annotations: Numba infers their types.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import ctypes
import gc
import os
import sys
import threading
from collections.abc import Callable
from importlib.util import find_spec
from typing import Any

import numba
import numpy as np
from numba import threading_layer  # type: ignore[attr-defined]
from numba.core import event

from mxref.errors import BackendError
from mxref_numba.cache import REFUSED, kernel_cache

KERNELS: list[Any] = []
"""Every kernel of the package that is imported, in order."""

_GRAIN = 1 << 15
"""Number of elements for which another thread pays off."""


class _WithoutCollector(event.Listener):
    """Pauses the collection of garbage while a kernel is compiled.

    A compiler makes millions of objects, most of which live until the kernel is done: the search for garbage among them
    took a fifth of the time. Numba tells of compilations under its own lock, so one thread at a time is here.
    """

    def __init__(self) -> None:
        self._depth, self._paused = 0, False

    def on_start(self, event: Any) -> None:
        if _is_kernel(event):
            if not self._depth:
                self._paused = gc.isenabled()
                gc.disable()
            self._depth += 1

    def on_end(self, event: Any) -> None:
        if _is_kernel(event):
            self._depth -= 1
            if not self._depth and self._paused:
                gc.enable()


def _is_kernel(event: Any) -> bool:
    return any(event.data["dispatcher"] is kernel for kernel in KERNELS)


event.register("numba:compile", _WithoutCollector())


_OPTIONS: dict[str, Any] = {
    "nogil": True, "error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True,
}  # fmt: skip
"""The wrappers by which Python or C calls a kernel take a sixth of its compilation, and most kernels need none."""


def _compiled(codegen: Any = None, **options: Any) -> Callable[[Callable[..., Any]], Any]:
    def decorate(function: Callable[..., Any]) -> Any:
        dispatcher = numba.njit(**_OPTIONS | options)(function)
        # What cache=True does, with Numba's own class of cache.
        dispatcher._cache = kernel_cache(function, codegen)
        KERNELS.append(dispatcher)
        return dispatcher

    return decorate


def kernel(function: Callable[..., Any] | None = None, /, **options: Any) -> Any:
    """Compile a function that is called from kernels; Python cannot call it, unless `no_cpython_wrapper=False`.

    `options` are those of `numba.njit`, and `codegen`, the code generator that stands in the key of the cache.
    """
    return _compiled(**options)(function) if function else _compiled(**options)


def parallel_kernel(function: Callable[..., Any] | None = None, /, **options: Any) -> Any:
    """Compile an entry point, to be called within `team`: thin, since parallel functions take long to compile."""
    return kernel(function, parallel=True, no_cpython_wrapper=False, **options)


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


class _Team:
    """A class, because entering it is faster than entering a generator's context, and small arrays are common."""

    __slots__ = ("_alone", "_threads", "_workers")

    def __init__(self, elements: int) -> None:
        self._threads = thread_count()
        self._workers = worker_count(elements)
        layer = threading_layer()
        self._alone = layer == "workqueue"
        if _Pool.inherited and layer == "omp":
            raise BackendError(
                "backend 'numba' cannot run in a process forked after OpenMP threads had started (by Numba or "
                "PyTorch): start workers with multiprocessing.get_context('spawn'), or set "
                "NUMBA_THREADING_LAYER=workqueue"
            )

    def __enter__(self) -> int:
        if self._alone:
            _Pool.turns.acquire()
        numba.set_num_threads(min(self._workers, self._threads))
        return self._workers

    def __exit__(self, *_: object) -> None:
        numba.set_num_threads(self._threads)
        if self._alone:
            _Pool.turns.release()


def team(elements: int) -> _Team:
    """Return a context that gives the number of shares, and runs parallel kernels on no more threads than that.

    Raises:
        BackendError: in a process that was forked from one that used OpenMP, where the kernel would kill it.
    """
    return _Team(elements)


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
