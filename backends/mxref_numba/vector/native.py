"""Kernels that call each other by address.

Numba compiles a kernel again into every kernel that calls it. Those here take integers only, numbers and
addresses, and are called as C functions, so that each is compiled once.
"""

# Kernels and emitters have no annotations: Numba infers the types of the former, llvmlite has none.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cached_property
from inspect import signature
from threading import Lock
from types import FunctionType
from typing import Any

import numba
import numpy as np
from llvmlite import ir
from numba import carray  # type: ignore[attr-defined]
from numba.core import types
from numpy.typing import NDArray

from mxref_numba import compiled
from mxref_numba.compiled import kernel, parallel_kernel
from mxref_numba.scalar.panels import pointer_to
from mxref_numba.vector.lanes import I64, vector_code
from mxref_numba.vector.target import Target, compiler_for

_LOCK = Lock()

numbers_at, words_at, bytes_at, floats_at = (
    pointer_to(element) for element in (types.int64, types.int32, types.uint8, types.float32)
)


class Native:
    """A kernel of int64 arguments that returns nothing and allocates nothing, so it cannot fail."""

    def __init__(self, function: Callable[..., None], target: Target | None = None) -> None:
        """Wrap a function; without a target it is compiled as Numba compiles anything, and may not use vectors."""
        self._function, self._target = function, target
        self._types = (types.int64,) * len(signature(function).parameters)
        self._on: dict[str, Native] = {}

    def on(self, target: Target) -> Native:
        """Return the kernel for a target."""
        found = self._on.get(target.name)
        return found or self._on.setdefault(target.name, Native(self._function, target))

    @cached_property
    def compiled(self) -> Any:
        """Numba's compiled kernel; the first use compiles it or loads it from the cache."""
        with _LOCK:
            made = self.dispatcher()
        return made.get_compile_result(types.void(*self._types))

    def dispatcher(self) -> Any:
        """Return a new Numba dispatcher of the kernel, which has compiled nothing yet."""
        if self._target is None:
            return kernel(self._function)
        f, target = self._function, self._target
        # A name of its own: names of machine code and of files in the cache are made of it.
        own = FunctionType(
            f.__code__, f.__globals__, f"{f.__name__}_{target.name}", f.__defaults__, f.__closure__
        )
        own.__qualname__, own.__module__ = f"{f.__qualname__}_{target.name}", f.__module__
        return kernel(pipeline_class=compiler_for(target, own.__name__), codegen=target.codegen())(own)

    @cached_property
    def address(self) -> int:
        """Where its C function lies."""
        name = self.compiled.fndesc.llvm_cfunc_wrapper_name
        address: int = self.compiled.library.get_pointer_to_function(name)
        return address

    @cached_property
    def call(self) -> Any:
        """The C function for Python; it releases the GIL."""
        return ctypes.CFUNCTYPE(None, *(ctypes.c_int64,) * len(self._types))(self.address)


def _caller(count: int) -> Any:
    @vector_code(*(types.int64,) * (1 + count))
    def call(builder, address, *arguments):
        function = ir.FunctionType(ir.VoidType(), [I64] * count)
        builder.call(builder.inttoptr(address, function.as_pointer()), arguments)

    return call


call_3, call_5, call_7, call_9, call_14 = map(_caller, (3, 5, 7, 9, 14))


@kernel(inline="always")
def copy_bytes(source, target, count):
    """Copy memory from address to address."""
    data, out = carray(bytes_at(source), (count,)), carray(bytes_at(target), (count,))
    for i in range(np.uint64(count)):
        out[i] = data[i]


@parallel_kernel
def run_shares(function, arguments, workers):
    """Call a `Native` with (address of its arguments, worker, workers) for each worker, on as many threads."""
    for worker in numba.prange(workers):
        call_3(function, arguments, worker, workers)


def run_native(native: Native, arguments: NDArray[np.int64], elements: int) -> None:
    """Call a kernel with (address of its arguments, worker, workers), once for each share of the work.

    There are `worker_count(elements)` shares; a single one runs in the calling thread.
    """
    address: int = arguments.__array_interface__["data"][0]
    if compiled.worker_count(elements) == 1:
        native.call(address, 0, 1)
        return
    with compiled.team(elements) as workers:
        run_shares(native.address, address, workers)
