"""`ordered` on CPUs with AVX-512 VNNI: both operands are packed, and tiles of C computed in an order caches like.

`vnni` has the idea, the layout and the inner loops. B's panels are taken in ranges that the outer
cache keeps while all of A passes by, and A's in groups that the inner one keeps while a range of B does.
"""

# Kernels have no annotations: Numba infers their types.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray  # type: ignore[attr-defined]
from numpy.typing import NDArray

from mxref.mxarray import MXArray
from mxref_numba import compiled, memory
from mxref_numba.compiled import float_of, kernel, share
from mxref_numba.gemm.vnni import (
    HIGHEST_SUM,
    LANES,
    LEFT_RECORD,
    LOWEST_SUM,
    RIGHT_RECORD,
    TILE_COLUMNS,
    TILE_ROWS,
    multiply,
    pack_left,
    pack_right,
)
from mxref_numba.vector.jobs import address_of
from mxref_numba.vector.native import Native, bytes_at, numbers_at, run_native

_K = 32
_GROUP_BYTES, _RANGE_BYTES = 1 << 18, 3 << 20
"""Packed bytes of a group of A and of a range of B."""
_PRODUCTS_PER_ELEMENT = 256
"""Multiplications that take as long as quantizing an element, roughly."""


@kernel
def _extremes(found, padded, first, count):
    """Return the lowest and the highest scale code of rows, from the first two of three lines of `found`."""
    low, high = found[first], found[padded + first]
    for r in range(np.uint64(first), np.uint64(first + count)):
        low, high = min(low, found[r]), max(high, found[np.uint64(padded) + r])
    return np.int64(low), np.int64(high)


@Native
def _pack_share(arguments, worker, workers):
    j = carray(numbers_at(arguments), (9,))
    is_right, codes, code_pitch, scales, scale_pitch = j[0], j[1], j[2], j[3], j[4]
    rows, blocks, records, panels = j[5], j[6], j[7], j[8]
    height, step = (TILE_COLUMNS, LANES) if is_right else (TILE_ROWS, 1)
    size = blocks * (RIGHT_RECORD if is_right else LEFT_RECORD)
    found, padded = records + panels * size, panels * height
    begin, end = share(panels, worker, workers)
    for panel in range(begin, end):
        record = records + panel * size
        for r in range(0, height, step):
            first = panel * height + r
            row = min(first, rows - 1)  # rows beyond the last repeat it
            code_row, scale_row, place = codes + row * code_pitch, scales + row * scale_pitch, found + first
            if is_right:
                half, last = record + r * 4, rows - 1 - row
                pack_right(code_row, code_pitch, scale_row, scale_pitch, last, blocks, half, place, padded)
            else:
                pack_left(code_row, scale_row, blocks, record, r, place, padded)


@Native
def _multiply_share(arguments, worker, workers):
    j = carray(numbers_at(arguments), (10,))
    left, right, blocks, group, reach, factor = j[0], j[1], j[2], j[3], j[4], float_of(j[5])
    out, m, n, item = j[6], j[7], j[8], j[9]
    down, across = -(-m // TILE_ROWS), -(-n // TILE_COLUMNS)
    left_size, right_size = blocks * LEFT_RECORD, blocks * RIGHT_RECORD
    left_rows, right_rows = down * TILE_ROWS, across * TILE_COLUMNS
    left_found = carray(bytes_at(left + down * left_size), (3 * left_rows,))
    right_found = carray(bytes_at(right + across * right_size), (3 * right_rows,))
    groups, pitch = -(-down // group), n * item
    begin, end = share(groups * across, worker, workers)
    for task in range(begin, end):
        start = task // (groups * reach) * reach
        place, width = task - start * groups, min(reach, across - start)
        b, top = start + place % width, place // width * group
        column = b * TILE_COLUMNS
        right_low, right_high = _extremes(right_found, right_rows, column, TILE_COLUMNS)
        for a in range(top, min(top + group, down)):
            row = a * TILE_ROWS
            low, high = _extremes(left_found, left_rows, row, TILE_ROWS)
            fits = low + right_low >= LOWEST_SUM and high + right_high <= HIGHEST_SUM
            multiply(
                left + a * left_size, right + b * right_size, blocks, fits, factor,
                out + row * pitch + column * item, pitch, m - row, n - column, item == 2,
            )  # fmt: skip


def packed(q: MXArray, *, is_right: bool) -> NDArray[np.uint8]:
    """Return an operand of at least one row and one block, packed for its side of the product.

    Returns:
        From the start of a cache line, the records, panel by panel, and then three lines with a byte for each
        row of all panels: the lowest scale code in use, the highest one, and whether a block is NaN.
    """
    # A row's bytes must lie side by side; rows may be any distance apart.
    codes, scales = (a if a.strides[-1] == 1 else np.ascontiguousarray(a) for a in (q.codes, q.scales))
    rows, blocks = scales.shape
    height, record = (TILE_COLUMNS, RIGHT_RECORD) if is_right else (TILE_ROWS, LEFT_RECORD)
    panels = -(-rows // height)
    size = panels * (blocks * record + 3 * height)
    out = memory.empty((size,), np.uint8)
    numbers = (
        is_right, address_of(codes), codes.strides[0], address_of(scales), scales.strides[0], rows, blocks,
        address_of(out), panels,
    )  # fmt: skip
    run_native(_pack_share, np.array(numbers, np.int64), rows * q.length)
    return out


def multiply_packed(
    left: NDArray[np.uint8], right: NDArray[np.uint8], blocks: int, factor: np.float32, out: NDArray[Any]
) -> None:
    """Write the product of packed operands, times `factor`, into `out` [M, N], contiguous; NaN rows are not marked."""
    m, n = out.shape
    work = m * n * blocks * _K // _PRODUCTS_PER_ELEMENT
    down = -(-m // TILE_ROWS)
    group = max(1, min(_GROUP_BYTES // (blocks * LEFT_RECORD), -(-down // compiled.worker_count(work))))
    reach = max(1, _RANGE_BYTES // (blocks * RIGHT_RECORD))
    numbers = (
        address_of(left), address_of(right), blocks, group, reach, int(factor.view(np.int32)),
        address_of(out), m, n, out.itemsize,
    )  # fmt: skip
    run_native(_multiply_share, np.array(numbers, np.int64), work)


def nan_rows(operand: NDArray[np.uint8], rows: int, *, is_right: bool) -> NDArray[np.bool_]:
    """Return which of the rows of a packed operand have a NaN block."""
    height = TILE_COLUMNS if is_right else TILE_ROWS
    padded = -(-rows // height) * height
    return operand[len(operand) - padded :][:rows].view(np.bool_)
