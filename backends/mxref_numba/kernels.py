"""How a function becomes a kernel: how it is compiled and kept on disk, and how it gets what it works on.

No `fastmath`: float32 operations happen one by one, in the written order, and are not contracted. The bits depend on
it. `gemm/plain_tiles.py` alone says otherwise, where all products and sums are exact and contraction changes nothing.

Indices of inner loops are unsigned: a signed one that is not known to be positive may count from the end
of the axis, and that test keeps a loop from being vectorised.

Numba compiles a kernel anew for every type, layout and mutability of an array. A `Native` takes integers only, numbers
and addresses, so each is compiled once, and is called as a C function. What it needs is a *job*: the fields of a
`NamedTuple`. Python writes them to memory, eight bytes each, and the kernel, which gets the address, reads them into a
tuple of the same names (`fields_at`). A field is an `int` (64 bits), an `np.int32`, an `np.float32`, or such a tuple
itself. `threads.run` divides a job's tasks among threads.
"""

# Kernels and emitters have no annotations: Numba infers the types of the former, llvmlite has none.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import ctypes
import gc
from collections.abc import Callable
from functools import cache, cached_property
from inspect import signature
from itertools import count
from operator import attrgetter
from struct import Struct
from threading import RLock
from typing import Any, get_type_hints

import numba
import numpy as np
from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic
from numpy.typing import NDArray

from mxref_numba.kernel_cache import kernel_cache

KERNELS: list[Any] = []
"""Every kernel of the package that is imported, in order."""

_OPTIONS: dict[str, Any] = {
    "nogil": True, "error_model": "numpy", "no_cpython_wrapper": True, "no_cfunc_wrapper": True,
}  # fmt: skip
"""The wrappers by which Python or C calls a kernel take a sixth of its compilation, and most kernels need none."""


def kernel(function: Callable[..., Any] | None = None, /, *, codegen: Any = None, **options: Any) -> Any:
    """Compile a function that is called from kernels; Python cannot call it, unless `no_cpython_wrapper=False`.

    `options` are those of `numba.njit`, and `codegen` is the code generator that stands in the key of the cache.
    """

    def decorate(function: Callable[..., Any]) -> Any:
        dispatcher = numba.njit(**_OPTIONS | options)(function)
        # What cache=True does, with Numba's own class of cache.
        dispatcher._cache = kernel_cache(function, codegen)
        KERNELS.append(dispatcher)
        return dispatcher

    return decorate(function) if function else decorate


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


# ---- memory ----


def pointer_to(element: Any) -> Any:
    """Return the kernel function from an address, int64, to a pointer to elements of a type."""

    @intrinsic
    def pointer(typingctx, address):
        def generate(context, builder, signature, arguments):
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return types.CPointer(element)(types.int64), generate

    return pointer


numbers_at, words_at, bytes_at, floats_at = map(
    pointer_to, (types.int64, types.int32, types.uint8, types.float32)
)
unsigned_at, halves_at, doubles_at = map(pointer_to, (types.uint32, types.uint16, types.float64))
unsigned_numbers_at = pointer_to(types.uint64)


def address_of(array: NDArray[Any]) -> int:
    """Return where an array's first element lies."""
    address: int = array.__array_interface__["data"][0]
    return address


# ---- jobs ----


FIELD = 8
"""Bytes of a field."""
_NUMBERS: dict[Any, tuple[str, Any]] = {
    int: ("q", types.int64), np.int32: ("i4x", types.int32), np.float32: ("f4x", types.float32)
}  # fmt: skip
"""The format of a field in memory, and Numba's type."""


@cache
def _memory(fields: type) -> tuple[attrgetter[Any], Struct]:
    """Return what gets all numbers from a NamedTuple, in order, and their format."""

    def numbers(kind: type, before: str) -> list[tuple[str, str]]:
        found = []
        for name, hint in get_type_hints(kind).items():
            number = _NUMBERS.get(hint)
            found += [(before + name, number[0])] if number else numbers(hint, f"{before}{name}.")
        return found

    names, formats = zip(*numbers(fields, ""), strict=True)
    return attrgetter(*names), Struct("=" + "".join(formats))


def in_memory(fields: tuple[Any, ...]) -> bytes:
    """Return a NamedTuple as kernels read it."""
    numbers, memory = _memory(type(fields))
    return memory.pack(*numbers(fields))


def written(*rows: tuple[Any, ...]) -> NDArray[np.uint8]:
    """Return NamedTuples of one kind in memory, as kernels read them, one after the other; read-only."""
    return np.frombuffer(b"".join(map(in_memory, rows)), np.uint8)


def _type(kind: Any) -> Any:
    """Return Numba's type of a field, or of all fields of a NamedTuple."""
    if number := _NUMBERS.get(kind):
        return number[1]
    return types.NamedTuple([_type(field) for field in get_type_hints(kind).values()], kind)


def _fields_at(typingctx, address, kind):
    """Return the fields that lie at an address, int64, as a NamedTuple of a kind."""
    made = _type(kind.instance_class)

    def generate(context, builder, signature, arguments):
        offsets = count(0, FIELD)

        def load(kind: Any) -> Any:
            if isinstance(kind, types.NamedTuple):
                return context.make_tuple(builder, kind, [load(field) for field in kind.types])
            place = builder.add(arguments[0], ir.IntType(64)(next(offsets)))
            return builder.load(builder.inttoptr(place, context.get_value_type(kind).as_pointer()))

        return load(made)

    return made(types.int64, kind), generate


fields_at: Any = intrinsic(_fields_at)


# ---- kernels as C functions ----


class Native:
    """A kernel of int64 arguments that returns nothing and allocates nothing, so it cannot fail."""

    _lock = RLock()

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function
        self.types = (types.int64,) * len(signature(function).parameters)

    @cached_property
    def compiled(self) -> Any:
        """Numba's compiled kernel; the first use compiles it or loads it from the cache."""
        with self._lock:
            # A compiler makes millions of objects that live until it is done. The search for garbage among them takes
            # a fifth of the time.
            collecting = gc.isenabled()
            gc.disable()
            try:
                return self.dispatcher().get_compile_result(types.void(*self.types))
            finally:
                if collecting:
                    gc.enable()

    def dispatcher(self) -> Any:
        """Return a new Numba dispatcher of the kernel, which has compiled nothing yet."""
        return kernel(no_cfunc_wrapper=False)(self._function)

    @cached_property
    def address(self) -> int:
        """Where its C function lies."""
        name = self.compiled.fndesc.llvm_cfunc_wrapper_name
        address: int = self.compiled.library.get_pointer_to_function(name)
        return address

    @cached_property
    def call(self) -> Any:
        """The C function for Python: its first argument is bytes, passed by their address. It releases the GIL."""
        return ctypes.CFUNCTYPE(None, ctypes.c_char_p, *(ctypes.c_int64,) * (len(self.types) - 1))(
            self.address
        )


def _call(typingctx, address, arguments):
    """Call the C function of a `Native` by its address with a tuple of integers."""

    def generate(context, builder, signature, values):
        kinds, parts = signature.args[1], cgutils.unpack_tuple(builder, values[1])
        numbers = [
            context.cast(builder, value, kind, types.int64) for value, kind in zip(parts, kinds, strict=True)
        ]
        function = ir.FunctionType(ir.VoidType(), [value.type for value in numbers])
        builder.call(builder.inttoptr(values[0], function.as_pointer()), numbers)
        return context.get_dummy_value()

    return types.void(types.int64, arguments), generate


call: Any = intrinsic(_call)
