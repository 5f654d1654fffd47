"""`ordered` of MXFP4 in vector code: operands are packed, and tiles of C are computed in a cache-friendly order.

`layout` has the idea and the layout. B's panels are divided into ranges that fit the outer cache, and A's into groups
that fit the inner cache. All of A is multiplied by one range of B before the next range begins.
"""

# Kernels have no annotations: Numba infers their types.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray  # type: ignore[attr-defined]
from numba.core import types
from numpy.typing import NDArray

from mxref.mxarray import MXArray
from mxref_numba import compiled, memory
from mxref_numba.compiled import float_of, kernel, share
from mxref_numba.gemm import packing, tile
from mxref_numba.gemm.layout import HIGHEST_SUM, LOWEST_SUM, tiling_of
from mxref_numba.native import address_of, bytes_at, numbers_at, run_native
from mxref_numba.vector.lanes import vector_code
from mxref_numba.vector.native import VectorNative, copy_bytes
from mxref_numba.vector.target import Target, target_of

_K = 32
_GROUP_BYTES, _RANGE_BYTES = 1 << 18, 3 << 20
"""Packed bytes of a group of A and of a range of B."""
_PRODUCTS_PER_ELEMENT = 256
"""Multiplications that take as long as quantizing an element, roughly."""


_INT = types.int64


@vector_code(*[_INT] * 7)
def _pack_left(builder, *arguments):
    packing.pack_left(tiling_of(target_of(builder)), builder, arguments)


@vector_code(*[_INT] * 9)
def _pack_right(builder, *arguments):
    packing.pack_right(tiling_of(target_of(builder)), builder, arguments)


@vector_code(_INT, _INT, _INT, types.boolean, types.float32, _INT, _INT, _INT, _INT, types.boolean)
def _multiply(builder, *arguments):
    tile.multiply(tiling_of(target_of(builder)), builder, arguments)


@kernel
def _extremes(found, padded, first, count):
    """Return the lowest and the highest scale code of rows, from the first two of three lines of `found`."""
    low, high = found[first], found[padded + first]
    for r in range(np.uint64(first), np.uint64(first + count)):
        low, high = min(low, found[r]), max(high, found[np.uint64(padded) + r])
    return np.int64(low), np.int64(high)


@VectorNative
def _pack_share(arguments, worker, workers):
    j = carray(numbers_at(arguments), (12,))
    is_right, codes, code_pitch, scales, scale_pitch = j[0], j[1], j[2], j[3], j[4]
    rows, blocks, records, panels, height, step, size = j[5], j[6], j[7], j[8], j[9], j[10], j[11]
    found, padded = records + panels * size, panels * height
    begin, end = share(panels, worker, workers)
    for panel in range(begin, end):
        record = records + panel * size
        for r in range(0, height, step):
            first = panel * height + r
            row = min(first, rows - 1)  # rows beyond the last repeat it
            code_row, scale_row, place = codes + row * code_pitch, scales + row * scale_pitch, found + first
            if is_right:
                part, last = record + r * 4, rows - 1 - row
                _pack_right(code_row, code_pitch, scale_row, scale_pitch, last, blocks, part, place, padded)
            else:
                _pack_left(code_row, scale_row, blocks, record, r, place, padded)


@VectorNative
def _multiply_share(arguments, worker, workers):
    j = carray(numbers_at(arguments), (15,))
    left, right, blocks, group, reach, factor = j[0], j[1], j[2], j[3], j[4], float_of(j[5])
    out, m, n, item, tile_rows, tile_columns = j[6], j[7], j[8], j[9], j[10], j[11]
    left_size, right_size, spare = j[12], j[13], j[14]
    down, across = -(-m // tile_rows), -(-n // tile_columns)
    left_rows, right_rows = down * tile_rows, across * tile_columns
    left_found = carray(bytes_at(left + down * left_size), (3 * left_rows,))
    right_found = carray(bytes_at(right + across * right_size), (3 * right_rows,))
    groups, pitch, short = -(-down // group), n * item, tile_columns * item
    spare += worker * tile_rows * short if spare else 0
    begin, end = share(groups * across, worker, workers)
    for task in range(begin, end):
        start = task // (groups * reach) * reach
        place, width = task - start * groups, min(reach, across - start)
        b, top = start + place % width, place // width * group
        column = b * tile_columns
        right_low, right_high = _extremes(right_found, right_rows, column, tile_columns)
        for a in range(top, min(top + group, down)):
            row = a * tile_rows
            low, high = _extremes(left_found, left_rows, row, tile_rows)
            fits = low + right_low >= LOWEST_SUM and high + right_high <= HIGHEST_SUM
            target, height, wide = out + row * pitch + column * item, m - row, n - column
            part = spare and (height < tile_rows or wide < tile_columns)
            _multiply(
                left + a * left_size, right + b * right_size, blocks, fits, factor,
                spare if part else target, short if part else pitch, height, wide, item == 2,
            )  # fmt: skip
            if part:
                for r in range(min(height, tile_rows)):
                    copy_bytes(spare + r * short, target + r * pitch, min(wide, tile_columns) * item)


def packed(target: Target, q: MXArray, *, is_right: bool) -> NDArray[np.uint8]:
    """Return an operand of at least one row and one block, packed for its side of the product.

    Returns:
        From the start of a cache line, the records, panel by panel, and then three lines with a byte for each
        row of all panels: the lowest scale code in use, the highest one, and whether a block is NaN.
    """
    # A row's bytes must lie side by side; rows may be any distance apart.
    codes, scales = (a if a.strides[-1] == 1 else np.ascontiguousarray(a) for a in (q.codes, q.scales))
    rows, blocks = scales.shape
    t = tiling_of(target)
    height, step, record = (t.columns, t.lanes, t.right_record) if is_right else (t.rows, 1, t.left_record)
    panels = -(-rows // height)
    out = memory.empty((panels * (blocks * record + 3 * height),), np.uint8)
    numbers = (
        is_right, address_of(codes), codes.strides[0], address_of(scales), scales.strides[0], rows, blocks,
        address_of(out), panels, height, step, blocks * record,
    )  # fmt: skip
    run_native(_pack_share.on(target), np.array(numbers, np.int64), rows * q.length)
    return out


def multiply_packed(
    target: Target,
    left: NDArray[np.uint8],
    right: NDArray[np.uint8],
    blocks: int,
    factor: np.float32,
    out: NDArray[Any],
) -> None:
    """Write the product of packed operands, times `factor`, into `out` [M, N], contiguous; NaN rows are not marked."""
    (m, n), t = out.shape, tiling_of(target)
    work = m * n * blocks * _K // _PRODUCTS_PER_ELEMENT
    workers, down = compiled.worker_count(work), -(-m // t.rows)
    left_size, right_size = blocks * t.left_record, blocks * t.right_record
    group = max(1, min(_GROUP_BYTES // left_size, -(-down // workers)))
    reach = max(1, _RANGE_BYTES // right_size)
    # If only whole tiles can be written, tiles at the edges of C go through scratch memory.
    spare = np.empty(0 if t.masks else workers * t.rows * t.columns * out.itemsize, np.uint8)
    numbers = (
        address_of(left), address_of(right), blocks, group, reach, int(factor.view(np.int32)),
        address_of(out), m, n, out.itemsize, t.rows, t.columns, left_size, right_size,
        address_of(spare) if spare.size else 0,
    )  # fmt: skip
    run_native(_multiply_share.on(target), np.array(numbers, np.int64), work)


def nan_rows(target: Target, operand: NDArray[np.uint8], rows: int, *, is_right: bool) -> NDArray[np.bool_]:
    """Return which of the rows of a packed operand have a NaN block."""
    height = tiling_of(target).columns if is_right else tiling_of(target).rows
    padded = -(-rows // height) * height
    return operand[len(operand) - padded :][:rows].view(np.bool_)
