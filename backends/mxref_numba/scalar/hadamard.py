"""The Hadamard transform, fused into panels: the reference's float32 operations in the reference's order."""

# Kernels have no annotations: Numba infers their types.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from typing import Any

import numba
import numpy as np
from numpy.typing import NDArray

from mxref.steps.hadamard import Rotation, norm_factor
from mxref_numba.compiled import kernel, parallel_kernel, share, team
from mxref_numba.scalar.panels import HEIGHT, WIDTH, load_panel, matrices


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


@kernel
def _transform_share(layout, n, signs, factor, out, worker, workers):
    rows, length = out.shape
    across = -(-length // WIDTH)
    panel = np.empty((HEIGHT, WIDTH), np.float32)
    begin, end = share(-(-rows // HEIGHT) * across, worker, workers)
    for task in range(begin, end):
        row, column = task // across * HEIGHT, task % across * WIDTH
        height, width = min(HEIGHT, rows - row), min(WIDTH, length - column)
        load_panel(layout, row, column, height, width, panel)
        for r in range(height):
            y = panel[r]
            transform_row(y, width, n, signs, factor)
            line, left = out[row + r], np.uint64(column)
            for c in range(np.uint64(width)):
                line[left + c] = y[c]


@parallel_kernel
def _transform(layout, n, signs, factor, out, workers):
    for worker in numba.prange(workers):
        _transform_share(layout, n, signs, factor, out, np.int64(worker), workers)


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
    rows = out.reshape(-1, out.shape[-1]) if out.size else out
    signs, factor = panel_signs(rotation), norm_factor(rotation.n)
    for m in matrices(x, axis):
        part = rows[m.first_row : m.first_row + m.rows]
        with team(part.size) as workers:
            _transform(m.layout, rotation.n, signs, factor, part, workers)
    return np.moveaxis(out, -1, axis)
