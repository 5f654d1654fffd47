"""The Hadamard transform, fused into panels: the reference's float32 operations in the reference's order."""

# Kernels have no annotations: Numba infers their types.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from numba import carray  # type: ignore[attr-defined]
from numpy.typing import NDArray

from mxref.steps.hadamard import Rotation, norm_factor
from mxref_numba import compiled, memory
from mxref_numba.compiled import kernel, share
from mxref_numba.native import Native, address_of, fields_at, floats_at, run_native
from mxref_numba.scalar.panels import HEIGHT, WIDTH, Strides, load_panel, matrices, unsigned_at

_PANEL_BYTES = 4 * HEIGHT * WIDTH


def panel_signs(rotation: Rotation | None) -> NDArray[np.float32]:
    """Return the signs of a whole panel row, float32 [WIDTH]."""
    return np.resize(rotation.vector(), WIDTH) if rotation else np.ones(WIDTH, np.float32)


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
    n: int
    signs: int
    factor: np.float32
    out: int
    rows: int
    length: int
    panels: int


_transformation_at = fields_at(_Transformation)


@Native
def _transform_share(arguments, worker, workers):
    job = _transformation_at(arguments)
    rows, length = job.rows, job.length
    signs, out = carray(floats_at(job.signs), (WIDTH,)), carray(floats_at(job.out), (rows, length))
    panel_at = job.panels + worker * _PANEL_BYTES
    panel, bits = carray(floats_at(panel_at), (HEIGHT, WIDTH)), carray(unsigned_at(panel_at), (HEIGHT, WIDTH))
    across = -(-length // WIDTH)
    begin, end = share(-(-rows // HEIGHT) * across, worker, workers)
    for task in range(begin, end):
        row, column = task // across * HEIGHT, task % across * WIDTH
        height, width = min(HEIGHT, rows - row), min(WIDTH, length - column)
        load_panel(job.layout, row, column, height, width, bits)
        for r in range(height):
            y = panel[r]
            transform_row(y, width, job.n, signs, job.factor)
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
    signs = panel_signs(rotation)
    for m in matrices(x, axis):
        length = out.shape[-1]
        panels = np.empty(compiled.worker_count(m.rows * length) * _PANEL_BYTES + memory.LINE, np.uint8)
        job = _Transformation(
            layout=m.layout, n=rotation.n, signs=address_of(signs), factor=norm_factor(rotation.n),
            out=address_of(out) + out.itemsize * m.first_row * length, rows=m.rows, length=length,
            panels=memory.aligned(panels),
        )  # fmt: skip
        run_native(_transform_share, job, m.rows * length)
    return np.moveaxis(out, -1, axis)
