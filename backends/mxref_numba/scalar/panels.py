"""Inputs of any type and strides, panel by panel as float32, without a copy of the whole; and their transform there.

A panel is small enough for the first-level cache, so an input whose rows are far apart (a transposed one, say) is read
along its own lines and turned inside the panel. Values are moved as integers, which keeps every NaN. The Hadamard
transform has the reference's float32 operations in the reference's order: the bits depend on it.
"""

# Kernels have no annotations: Numba infers their types.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import carray  # type: ignore[attr-defined]
from numpy.typing import NDArray

from mxref.steps.hadamard import Rotation
from mxref_numba.kernels import (
    Native,
    address_of,
    bits_of,
    fields_at,
    float_of,
    floats_at,
    halves_at,
    kernel,
    unsigned_at,
)
from mxref_numba.quantize_job import (
    BFLOAT16,
    FLOAT16,
    FLOAT32,
    WIDTH,
    HadamardNumbers,
    Strides,
    matrices,
    transform_of,
)
from mxref_numba.threads import run

HEIGHT = 32
"""Rows of a panel: those of a 32x32 tile."""
PANEL_BYTES = 4 * HEIGHT * WIDTH
_HALF_REBIAS = np.float32(2.0**112)


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


_gather_words, _gather_halves = _gather(unsigned_at, 4), _gather(halves_at, 2)


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


def panel_count(rows: int, length: int) -> int:
    """Return how many panels a matrix has."""
    return -(-rows // HEIGHT) * -(-length // WIDTH)


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


@kernel
def _first_stages(y, width, n):
    # Neighbours first, in registers: n = 2 needs h = 1; n = 4 needs 1, 2; larger n take 1, 2, 4 here.
    if n == 2:
        for i in range(0, width, 2):
            a, b = y[i], y[i + 1]
            y[i], y[i + 1] = a + b, a - b
    elif n == 4:
        for i in range(0, width, 4):
            a, b, c, d = y[i], y[i + 1], y[i + 2], y[i + 3]
            a, b, c, d = a + b, a - b, c + d, c - d
            y[i], y[i + 1], y[i + 2], y[i + 3] = a + c, b + d, a - c, b - d
    else:
        for i in range(0, width, 8):
            a, b, c, d = y[i], y[i + 1], y[i + 2], y[i + 3]
            e, f, g, h = y[i + 4], y[i + 5], y[i + 6], y[i + 7]
            a, b, c, d = a + b, a - b, c + d, c - d
            e, f, g, h = e + f, e - f, g + h, g - h
            a, b, c, d = a + c, b + d, a - c, b - d
            e, f, g, h = e + g, f + h, e - g, f - h
            y[i], y[i + 1], y[i + 2], y[i + 3] = a + e, b + f, c + g, d + h
            y[i + 4], y[i + 5], y[i + 6], y[i + 7] = a - e, b - f, c - g, d - h


@kernel
def transform_row(y, width, n, signs, factor):
    """Transform y[:width], float32, in place, in groups of n that divide `width`."""
    for i in range(width):
        y[i] = y[i] * signs[i]
    _first_stages(y, width, n)
    h = 8
    while h < n:
        for base in range(0, width, 2 * h):
            low, high = np.uint64(base), np.uint64(base + h)
            for j in range(np.uint64(h)):
                s, t = y[low + j], y[high + j]
                y[low + j] = s + t
                y[high + j] = s - t
        h *= 2
    for i in range(width):
        y[i] = y[i] * factor


class _Transformation(NamedTuple):
    layout: Strides
    transform: HadamardNumbers
    out: int
    rows: int
    length: int


@Native
def _transform_panels(address, begin, end, room):
    job = fields_at(address, _Transformation)
    rows, length, (n, signs_at, factor) = job.rows, job.length, job.transform
    signs, out = carray(floats_at(signs_at), (WIDTH,)), carray(floats_at(job.out), (rows, length))
    panel, bits = carray(floats_at(room), (HEIGHT, WIDTH)), carray(unsigned_at(room), (HEIGHT, WIDTH))
    across = -(-length // WIDTH)
    for task in range(begin, end):
        row, column = task // across * HEIGHT, task % across * WIDTH
        height, width = min(HEIGHT, rows - row), min(WIDTH, length - column)
        load_panel(job.layout, row, column, height, width, bits)
        for r in range(height):
            y = panel[r]
            transform_row(y, width, n, signs, factor)
            line, left = out[row + r], np.uint64(column)
            for c in range(np.uint64(width)):
                line[left + c] = y[c]


def hadamard(x: NDArray[Any], rotation: Rotation, axis: int) -> NDArray[np.float32]:
    """Return x with each group of n elements along `axis` multiplied by d and H_n.

    Args:
        x: float32, bfloat16 or float16, any shape and strides; the axis length is a multiple of n.
        rotation: size and signs.
        axis: not negative.

    Returns:
        float32 in the shape of x; in memory the transformed axis is the last.
    """
    out = np.empty((*x.shape[:axis], *x.shape[axis + 1 :], x.shape[axis]), np.float32)
    transform, _signs = transform_of(rotation)  # whose address the transform holds
    for m in matrices(x, axis):
        length = out.shape[-1]
        job = _Transformation(
            layout=m.layout, transform=transform, out=address_of(out) + out.itemsize * m.first_row * length,
            rows=m.rows, length=length,
        )  # fmt: skip
        run(_transform_panels, job, panel_count(m.rows, length), m.rows * length, room=PANEL_BYTES)
    return np.moveaxis(out, -1, axis)
