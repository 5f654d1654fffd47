"""Kernels for a target's vectors, and kernels that call each other by address.

Numba compiles a kernel again into every kernel that calls it. A `Native` that is called as a C function is compiled
once.
"""

# Kernels and emitters have no annotations: Numba infers the types of the former, llvmlite has none.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable
from types import FunctionType
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray  # type: ignore[attr-defined]
from numba.core import types

from mxref_numba.compiled import kernel
from mxref_numba.native import Native, bytes_at
from mxref_numba.vector.lanes import I64, vector_code
from mxref_numba.vector.target import Target, compiler_for


class VectorNative(Native):
    """A `Native` that may use vectors: each target has its own."""

    def __init__(self, function: Callable[..., None], target: Target | None = None) -> None:
        """Wrap a function; without a target it is compiled as Numba compiles anything, and may not use vectors."""
        super().__init__(function)
        self._target = target
        self._on: dict[str, VectorNative] = {}

    def on(self, target: Target) -> VectorNative:
        """Return the kernel for a target."""
        found = self._on.get(target.name)
        return found or self._on.setdefault(target.name, VectorNative(self._function, target))

    def dispatcher(self) -> Any:
        """Return a new Numba dispatcher of the kernel, which has compiled nothing yet."""
        if self._target is None:
            return super().dispatcher()
        f, target = self._function, self._target
        # A name of its own: names of machine code and of files in the cache are made of it.
        own = FunctionType(
            f.__code__, f.__globals__, f"{f.__name__}_{target.name}", f.__defaults__, f.__closure__
        )
        own.__qualname__, own.__module__ = f"{f.__qualname__}_{target.name}", f.__module__
        compiler = compiler_for(target, own.__name__)
        return kernel(no_cfunc_wrapper=False, pipeline_class=compiler, codegen=target.codegen())(own)


def _caller(count: int) -> Any:
    @vector_code(*(types.int64,) * (1 + count))
    def call(builder, address, *arguments):
        function = ir.FunctionType(ir.VoidType(), [I64] * count)
        builder.call(builder.inttoptr(address, function.as_pointer()), arguments)

    return call


call_5, call_7, call_9, call_14 = map(_caller, (5, 7, 9, 14))


@kernel(inline="always")
def copy_bytes(source, target, count):
    """Copy memory from address to address."""
    data, out = carray(bytes_at(source), (count,)), carray(bytes_at(target), (count,))
    for i in range(np.uint64(count)):
        out[i] = data[i]
