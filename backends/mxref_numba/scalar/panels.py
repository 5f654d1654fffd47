"""Reading inputs of any type and strides, panel by panel, as float32, without a copy of the whole.

Kernels get an address and two strides, not an array: Numba compiles anew for every type, layout and
mutability of an array, and knows no bfloat16. Values are moved as integers, which keeps every NaN.
A panel is small enough for the first-level cache, so an input whose rows are far apart (a transposed
one, say) is read along its own lines and turned inside the panel.
"""

# Kernels have no annotations: Numba infers their types.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
from numba import carray  # type: ignore[attr-defined]
from numba.core import types
from numpy.typing import NDArray

from mxref.plan import dtype_name
from mxref_numba.compiled import bits_of, float_of, kernel
from mxref_numba.native import pointer_to

HEIGHT = 32
"""Rows of a panel: those of a 32x32 tile."""
WIDTH = 256
"""Columns of a panel: a multiple of 32 and of every Hadamard size."""

FLOAT32, BFLOAT16, FLOAT16 = range(3)

_KINDS = {"float32": FLOAT32, "bfloat16": BFLOAT16, "float16": FLOAT16}
_HALF_REBIAS = np.float32(2.0**112)


class Strides(NamedTuple):
    """Where the elements of a matrix lie."""

    address: int
    row_step: int
    """Bytes between rows."""
    column_step: int
    """Bytes between columns."""
    columns: int
    kind: int
    """Type of an element."""


@dataclass(frozen=True)
class Matrix:
    """A two-dimensional piece of an input, block axis last, whose memory the input keeps alive."""

    first_row: int
    """Index of its first row in the whole."""
    rows: int
    layout: Strides


def matrices(x: NDArray[Any], axis: int) -> Iterator[Matrix]:
    """Yield an array with `axis` moved last as matrices: one if the strides of its rows allow, else several.

    Args:
        x: float32, bfloat16 or float16, any shape and strides; the caller keeps it.
        axis: not negative.
    """
    if x.size == 0:
        return
    shape, strides = (
        (*of_axes[:axis], *of_axes[axis + 1 :], of_axes[axis]) for of_axes in (x.shape, x.strides)
    )
    rows, step, leading = 1, 0, x.ndim - 1
    while leading > 0:
        length, stride = shape[leading - 1], strides[leading - 1]
        if length > 1:
            if rows > 1 and stride != step * rows:
                break
            step = step if rows > 1 else stride
            rows *= length
        leading -= 1
    address, kind = x.__array_interface__["data"][0], _KINDS[dtype_name(x)]
    # `ndindex` is slow, and most inputs are one matrix.
    for i, index in enumerate(np.ndindex(shape[:leading]) if leading else [()]):
        start = address + sum(j * stride for j, stride in zip(index, strides, strict=False))
        yield Matrix(i * rows, rows, Strides(start, step, strides[-1], shape[-1], kind))


unsigned_at = pointer_to(types.uint32)


def _gather(elements_at: Any, size: int) -> Any:
    """Return a kernel that fills a panel from elements of `size` bytes, shifted left."""

    @kernel(inline="always")
    def gather(address, row_step, column_step, height, width, shift, bits):
        if row_step == size and column_step != size:
            for c in range(np.uint64(width)):
                line = carray(elements_at(address + np.int64(c) * column_step), (height,))
                for r in range(np.uint64(height)):
                    bits[r, c] = np.uint32(np.uint32(line[r]) << shift)
        else:
            for r in range(np.uint64(height)):
                start = address + np.int64(r) * row_step
                target = bits[r]
                if column_step == size:
                    row = carray(elements_at(start), (width,))
                    for c in range(np.uint64(width)):
                        target[c] = np.uint32(np.uint32(row[c]) << shift)
                else:
                    for c in range(np.uint64(width)):
                        element = carray(elements_at(start + np.int64(c) * column_step), (1,))[0]
                        target[c] = np.uint32(np.uint32(element) << shift)

    return gather


_gather_words, _gather_halves = _gather(unsigned_at, 4), _gather(pointer_to(types.uint16), 2)


@kernel
def _widen_float16(bits, height, width):
    for r in range(height):
        row = bits[r]
        for c in range(np.uint64(width)):
            half = row[c]
            magnitude = np.uint32((half & np.uint32(0x7FFF)) << np.uint32(13))
            rebiased = np.uint32(bits_of(float_of(magnitude) * _HALF_REBIAS))
            spoiled = np.uint32(magnitude | np.uint32(0x7F800000))
            nonfinite = (half & np.uint32(0x7C00)) == np.uint32(0x7C00)
            value = spoiled if nonfinite else rebiased
            row[c] = np.uint32(value | np.uint32((half & np.uint32(0x8000)) << np.uint32(16)))


@kernel
def load_panel(layout, row, column, height, width, bits):
    """Fill bits[:height, :width], of float32, from (row, column) of a matrix, with +0 past its last column."""
    row_step, column_step, kind = layout.row_step, layout.column_step, layout.kind
    held = max(min(width, layout.columns - column), 0)
    start = layout.address + row * row_step + column * column_step
    if kind == FLOAT32:
        _gather_words(start, row_step, column_step, height, held, np.uint32(0), bits)
    else:
        shift = np.uint32(16) if kind == BFLOAT16 else np.uint32(0)
        _gather_halves(start, row_step, column_step, height, held, shift, bits)
    for r in range(height):
        for c in range(held, width):
            bits[r, c] = np.uint32(0)
    if kind == FLOAT16:
        _widen_float16(bits, height, width)
