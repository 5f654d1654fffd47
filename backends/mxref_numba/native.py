"""Kernels of numbers and addresses, which are called as C functions, alone or on threads.

Numba compiles a kernel anew for every type, layout and mutability of an array. These take integers only, so each is
compiled once. A parallel kernel takes far longer to compile than a plain one, so a single one, `run_shares`, serves
all of them.

What a kernel needs is the fields of a `NamedTuple`. Python writes them to memory, eight bytes each, and the kernel,
which gets the address, reads them into a tuple of the same names (`fields_at`). A field is an `int` (64 bits), an
`np.int32`, an `np.float32`, or such a tuple itself.
"""

# Kernels and emitters have no annotations: Numba infers the types of the former, llvmlite has none.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache, cached_property
from inspect import signature
from itertools import count
from operator import attrgetter
from struct import Struct
from threading import Lock
from typing import Any, get_type_hints

import numba
import numpy as np
from llvmlite import ir
from numba.core import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from mxref_numba import compiled
from mxref_numba.compiled import kernel, parallel_kernel

_LOCK = Lock()


def pointer_to(element: types.Type) -> Any:
    """Return the kernel function from an address, int64, to a pointer to elements of a type."""

    @intrinsic
    def pointer(typingctx, address):
        def generate(context, builder, signature, arguments):
            return builder.inttoptr(arguments[0], context.get_value_type(signature.return_type))

        return types.CPointer(element)(types.int64), generate

    return pointer


numbers_at, words_at, bytes_at, floats_at = (
    pointer_to(element) for element in (types.int64, types.int32, types.uint8, types.float32)
)


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


def _packed(fields: tuple[Any, ...]) -> bytes:
    numbers, memory = _memory(type(fields))
    return memory.pack(*numbers(fields))


def written(*rows: tuple[Any, ...]) -> NDArray[np.uint8]:
    """Return NamedTuples of one kind in memory, as kernels read them, one after the other; read-only."""
    return np.frombuffer(b"".join(map(_packed, rows)), np.uint8)


def _type(kind: Any) -> Any:
    """Return Numba's type of a field, or of all fields of a NamedTuple."""
    if number := _NUMBERS.get(kind):
        return number[1]
    return types.NamedTuple([_type(field) for field in get_type_hints(kind).values()], kind)


def fields_at(fields: type) -> Any:
    """Return the kernel function from an address, int64, to the NamedTuple of the fields that lie there."""
    made = _type(fields)

    @intrinsic
    def read(typingctx, address):
        def generate(context, builder, signature, arguments):
            offsets = count(0, FIELD)

            def load(kind: Any) -> Any:
                if isinstance(kind, types.NamedTuple):
                    return context.make_tuple(builder, kind, [load(field) for field in kind.types])
                place = builder.add(arguments[0], ir.IntType(64)(next(offsets)))
                return builder.load(builder.inttoptr(place, context.get_value_type(kind).as_pointer()))

            return load(made)

        return made(types.int64), generate

    return read


def address_of(array: NDArray[Any]) -> int:
    """Return where an array's first element lies."""
    address: int = array.__array_interface__["data"][0]
    return address


class Native:
    """A kernel of int64 arguments that returns nothing and allocates nothing, so it cannot fail."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function
        self._types = (types.int64,) * len(signature(function).parameters)

    @cached_property
    def compiled(self) -> Any:
        """Numba's compiled kernel; the first use compiles it or loads it from the cache."""
        with _LOCK:
            made = self.dispatcher()
        return made.get_compile_result(types.void(*self._types))

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
        return ctypes.CFUNCTYPE(None, ctypes.c_char_p, *(ctypes.c_int64,) * (len(self._types) - 1))(
            self.address
        )


def _call_share(typingctx, function, arguments, worker, workers):
    def generate(context, builder, _, values):
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)] * 3)
        builder.call(builder.inttoptr(values[0], kind.as_pointer()), values[1:])
        return context.get_dummy_value()

    return types.void(*(types.int64,) * 4), generate


_call: Any = intrinsic(_call_share)


@parallel_kernel
def run_shares(function, arguments, workers):
    """Call a `Native` with (address of its arguments, worker, workers) for each worker, on as many threads."""
    for worker in numba.prange(workers):
        _call(function, arguments, worker, workers)


def run_native(native: Native, fields: tuple[Any, ...], elements: int) -> None:
    """Call a kernel with (address of the fields of a NamedTuple, worker, workers), once for each share of the work.

    There are `worker_count(elements)` shares; a single one runs in the calling thread.
    """
    arguments = _packed(fields)
    if compiled.worker_count(elements) == 1:
        native.call(arguments, 0, 1)
        return
    memory = np.frombuffer(arguments, np.uint8)
    with compiled.team(elements) as workers:
        run_shares(native.address, address_of(memory), workers)
