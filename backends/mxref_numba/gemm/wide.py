"""`ordered` for every pair of formats but two of MXFP4: block dots in float64, in plain Numba.

The products of a block are multiples of one power of two, so that float64 holds every partial sum, whatever the
order, as long as the bits that the magnitudes of both blocks span, and five for the 32 products, are no more than 53.
Two blocks of E4M3 span 36 bits together at most, one of E4M3 and one of E5M2 50, two of E5M2 64. Where two blocks
span more than 48, their dot comes from integers (`_split_sum`), by itself. Elements of 4 and 6 bits span 4 (E2M1), 3
(E1M2), 6 (E2M3) and 9 bits (E3M2), so that any pair of these is far below.

Adding a dot to a float32 must round only once. A float64 sum rounded to odd, its last bit set where it is inexact,
rounds
to float32 as the real sum does: it has more than two bits to spare (Boldo and Melquiond, "Emulation of a FMA and
correctly rounded sums: proved algorithms using rounding to odd", IEEE Transactions on Computers, 2008).

Codes of NaN and Inf are decoded to NaN and Inf, and IEEE arithmetic gives what the definition requires.
"""

# Kernels have no annotations: Numba infers their types.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from numba import carray  # type: ignore[attr-defined]
from numba.core import types
from numpy.typing import NDArray

from mxref.formats import BlockFormat, ElementFormat
from mxref.mxarray import MXArray
from mxref_numba import compiled, memory
from mxref_numba.compiled import kernel, share
from mxref_numba.elements import decoded, held_bits
from mxref_numba.gemm.portable import fill_dots, store_tile, wide_power
from mxref_numba.native import (
    Native,
    address_of,
    bytes_at,
    fields_at,
    floats_at,
    pointer_to,
    run_native,
)
from mxref_numba.scalar.dequantize import code_rows

_K = 32
_TILE_M, _TILE_N = 64, 128
_PITCH = _TILE_N + 8
"""Elements from row to row of scratch: rows a power of two apart would compete for the same cache sets."""
_TURNED_ROWS = 32
_PRODUCTS_PER_ELEMENT = 16
"""Multiplications that take as long as quantizing an element, roughly."""
_SPAN = 53 - 5
"""Bits that the magnitudes of two blocks may span together in a dot of 32 products in float64."""
_HALF = 16
"""Bits of an element, in units of its format, that the integers of `_split_sum` take apart."""

_ROOM = 4 * _TURNED_ROWS * _K
"""Bytes of a worker that decodes rows to turn them."""
_SIZES = {
    "a": 8 * _TILE_M * _K, "b": 8 * _K * _PITCH, "dots": 8 * 4 * _PITCH,
    "sums": 4 * _TILE_M * _PITCH, "powers": 8 * _PITCH, "mended": 4 * _PITCH,
}  # fmt: skip
_A, _B, _DOTS, _SUMS, _POWERS, _MENDED, _SCRATCH = accumulate(_SIZES.values(), initial=0)
"""Where a worker's scratch has elements of A and of B; dots; sums; powers of B; single sums."""

_doubles_at, _integers_at = pointer_to(types.float64), pointer_to(types.uint64)


class DecodedOperand(NamedTuple):
    """An operand of at least one row and one block, decoded."""

    values: NDArray[np.float32]
    """Element values [rows, K]; [K, rows] for the right side, so that inner loops run along rows of C."""
    found: NDArray[np.uint8]
    """What is known of blocks, [2, K / 32, rows]: the bits from the lowest to the highest that their finite
    magnitudes have, and their scale codes."""


@cache
def _integers(element: ElementFormat) -> NDArray[np.uint64]:
    """Return the magnitudes of held codes in units of the smallest one, uint64; 0 for NaN and Inf."""
    magnitudes = np.abs(decoded(element).astype(np.float64))
    units = np.ldexp(np.where(np.isfinite(magnitudes), magnitudes, 0), -element.unit_exponent)
    integers = units.astype(np.uint64)
    integers.flags.writeable = False
    return integers


@kernel
def _bit_span(seen):
    """Return the bits from the lowest set one to the highest set one: 0 for none."""
    if seen == np.uint64(0):
        return np.uint8(0)
    span = 0
    while seen & np.uint64(1) == np.uint64(0):
        seen = np.uint64(seen >> np.uint64(1))
    while seen:
        seen = np.uint64(seen >> np.uint64(1))
        span += 1
    return np.uint8(span)


@kernel(inline="always")
def _decode_block(codes, bits, table, integers, values):
    seen = np.uint64(0)
    if bits == 8:
        for i in range(np.uint64(_K)):
            values[i] = table[codes[i]]
            seen = np.uint64(seen | integers[codes[i]])
    else:
        two, one = np.uint64(2), np.uint64(1)
        for i in range(np.uint64(_K // 2)):
            low, high = np.uint8(codes[i] & np.uint8(15)), np.uint8(codes[i] >> np.uint8(4))
            values[two * i], values[two * i + one] = table[low], table[high]
            seen = np.uint64(seen | np.uint64(integers[low] | integers[high]))
    return _bit_span(seen)


class _Decoding(NamedTuple):
    """The decoding of an operand; places in memory are addresses."""

    codes: int
    scales: int
    rows: int
    blocks: int
    bits: int
    """Of a held code."""
    turn: int
    table: int
    integers: int
    values: int
    found: int
    room: int


class _Product(NamedTuple):
    """A product of decoded operands; places in memory are addresses."""

    a_values: int
    a_found: int
    b_values: int
    b_found: int
    m: int
    n: int
    blocks: int
    factor: np.float32
    units_a: np.float32
    """How many of the smallest magnitude are 1."""
    units_b: np.float32
    out: int
    item: int
    """Bytes of an element of C."""
    scratch: int


_decoding_at, _product_at = fields_at(_Decoding), fields_at(_Product)


@Native
def _decode_share(arguments, worker, workers):
    job = _decoding_at(arguments)
    rows, blocks, bits, turn = job.rows, job.blocks, job.bits, job.turn
    size = _K * bits // 8
    codes, scales = (
        carray(bytes_at(job.codes), (rows, blocks * size)),
        carray(bytes_at(job.scales), (rows, blocks)),
    )
    table, integers = carray(floats_at(job.table), (256,)), carray(_integers_at(job.integers), (256,))
    by_row = carray(floats_at(job.values), (rows, blocks * _K))
    by_column = carray(floats_at(job.values), (blocks * _K, rows))
    spans = carray(bytes_at(job.found), (blocks, rows))
    turned_scales = carray(bytes_at(job.found + blocks * rows), (blocks, rows))
    room = carray(floats_at(job.room + worker * _ROOM), (_TURNED_ROWS, _K))
    begin, end = share(rows, worker, workers)
    for first in range(begin, end, _TURNED_ROWS):
        count = min(_TURNED_ROWS, end - first)
        for b in range(blocks):
            for r in range(count):
                block = codes[first + r, b * size : (b + 1) * size]
                target = room[r] if turn else by_row[first + r, b * _K : (b + 1) * _K]
                spans[b, first + r] = _decode_block(block, bits, table, integers, target)
                turned_scales[b, first + r] = scales[first + r, b]
            if turn:
                top, left = np.uint64(b * _K), np.uint64(first)
                for i in range(np.uint64(_K)):
                    for r in range(np.uint64(count)):
                        by_column[top + i, left + r] = room[r, i]


def decoded_operand(q: MXArray, *, turn: bool) -> DecodedOperand:
    """Return an operand of at least one row and one block, decoded for the right side of the product if `turn`."""
    codes, scales = code_rows(q)
    rows, blocks = scales.shape
    values = memory.empty((q.length, rows) if turn else (rows, q.length), np.float32)
    found = np.empty((2, blocks, rows), np.uint8)
    element, work = q.format.element, rows * q.length
    room = np.empty(compiled.worker_count(work) * _ROOM, np.uint8)
    table, integers = decoded(element), _integers(element)
    job = _Decoding(
        codes=address_of(codes), scales=address_of(scales), rows=rows, blocks=blocks, bits=held_bits(element),
        turn=turn, table=address_of(table), integers=address_of(integers), values=address_of(values),
        found=address_of(found), room=address_of(room),
    )  # fmt: skip
    run_native(_decode_share, job, work)
    return DecodedOperand(values, found)


@kernel
def _two_sum(x, y):
    """Return x + y rounded, and the error, exactly."""
    total = x + y
    other = total - x
    return total, (x - (total - other)) + (y - other)


@kernel
def _odd_sum(x, y):
    """Return x + y rounded to odd: the sum if it is a float64, else the neighbour of it whose last bit is set."""
    total, error = _two_sum(x, y)
    bits = np.float64(total).view(np.int64)
    # One step toward the error if the error is not 0 (nor NaN) and the last bit is 0; negative numbers step up.
    step = np.int64(np.int64(error > 0) - np.int64(error < 0)) & np.int64((bits & np.int64(1)) - np.int64(1))
    negative = np.int64(bits >> np.int64(63))
    odd = np.int64(bits + np.int64(np.int64(step ^ negative) - negative))
    return np.uint64(odd).view(np.float64)


@kernel
def _accumulate(sums, dots, width, power_a, powers_b):
    for c in range(width):
        sums[c] = np.float32(_odd_sum(np.float64(sums[c]), dots[c] * (power_a * powers_b[c])))


@kernel
def _split_sum(acc, a, b, row, column, units_a, units_b, power):
    """Return acc plus the dot of a row of `a` and a column of `b`, times `power`, rounded once: float32.

    Elements times `units_a` or `units_b` are integers below 2^32. Those of `a` are cut in two halves, whose dots are
    below 2^53.
    """
    high, low = np.int64(0), np.int64(0)
    for i in range(_K):
        left, right = np.int64(a[row, i] * units_a), np.int64(b[i, column] * units_b)
        high += (left >> _HALF) * right
        low += (left & ((1 << _HALF) - 1)) * right
    unit = power / (units_a * units_b)
    top, rest = _two_sum(np.float64(high) * (unit * (1 << _HALF)), np.float64(low) * unit)
    total, error = _two_sum(np.float64(acc), top)
    return np.float32(_odd_sum(total, _odd_sum(error, rest)))


@kernel
def _mend(row, sums, dots, a, b, width, span, spans, power_a, powers, units_a, units_b, mended):
    """Fill mended[:width] with the sums of a row, as they are to be, where its dots are not exact."""
    for c in range(width):
        if span + spans[c] > _SPAN and sums[c] - sums[c] == 0 and dots[c] - dots[c] == 0:
            mended[c] = _split_sum(sums[c], a, b, row, c, units_a, units_b, power_a * powers[c])


@kernel(inline="always")
def _tile(
    a_values, a_spans, a_scales, b_values, b_spans, b_scales, units_a, units_b,
    row, column, height, width, scratch,
):  # fmt: skip
    """Accumulate the sums of a tile, float32, over all blocks in order."""
    a, b = carray(_doubles_at(scratch + _A), (_TILE_M, _K)), carray(_doubles_at(scratch + _B), (_K, _PITCH))
    dots = carray(_doubles_at(scratch + _DOTS), (4, _PITCH))
    powers = carray(_doubles_at(scratch + _POWERS), (_PITCH,))
    sums = carray(floats_at(scratch + _SUMS), (_TILE_M, _PITCH))
    mended = carray(floats_at(scratch + _MENDED), (_PITCH,))
    for r in range(height):
        for c in range(np.uint64(width)):
            sums[r, c] = np.float32(0)
    for block in range(a_spans.shape[0]):
        top, left = np.uint64(block * _K), np.uint64(column)
        for r in range(height):
            for i in range(np.uint64(_K)):
                a[r, i] = a_values[np.uint64(row + r), top + i]
        for i in range(np.uint64(_K)):
            for c in range(np.uint64(width)):
                b[i, c] = b_values[top + i, left + c]
        widest: Any = 0
        for c in range(np.uint64(width)):
            powers[c] = wide_power(np.int64(b_scales[block, left + c]))
            widest = max(widest, np.int64(b_spans[block, left + c]))
        spans = b_spans[block, column : column + width]
        for r in range(0, height, 4):
            fill_dots(a, b, r, width, dots)
            for i in range(min(4, height - r)):
                power = wide_power(np.int64(a_scales[block, row + r + i]))
                span = np.int64(a_spans[block, row + r + i])
                wide = span + widest > _SPAN
                if wide:
                    for c in range(width):
                        mended[c] = np.float32(np.nan)
                    _mend(
                        r + i, sums[r + i], dots[i], a, b, width, span, spans, power, powers, units_a, units_b,
                        mended,
                    )  # fmt: skip
                _accumulate(sums[r + i], dots[i], width, power, powers)
                if wide:
                    for c in range(width):
                        if mended[c] == mended[c]:
                            sums[r + i, c] = mended[c]


@Native
def _multiply_share(arguments, worker, workers):
    job = _product_at(arguments)
    m, n, blocks, a_found, b_found = job.m, job.n, job.blocks, job.a_found, job.b_found
    units_a, units_b = np.float64(job.units_a), np.float64(job.units_b)
    scratch = job.scratch + worker * _SCRATCH
    a_values = carray(floats_at(job.a_values), (m, blocks * _K))
    b_values = carray(floats_at(job.b_values), (blocks * _K, n))
    a_spans, a_scales = (
        carray(bytes_at(a_found), (blocks, m)),
        carray(bytes_at(a_found + blocks * m), (blocks, m)),
    )
    b_spans, b_scales = (
        carray(bytes_at(b_found), (blocks, n)),
        carray(bytes_at(b_found + blocks * n), (blocks, n)),
    )
    sums = carray(floats_at(scratch + _SUMS), (_TILE_M, _PITCH))
    across = -(-n // _TILE_N)
    begin, end = share(-(-m // _TILE_M) * across, worker, workers)
    for task in range(begin, end):
        row, column = task // across * _TILE_M, task % across * _TILE_N
        height, width = min(_TILE_M, m - row), min(_TILE_N, n - column)
        _tile(
            a_values, a_spans, a_scales, b_values, b_spans, b_scales, units_a, units_b,
            row, column, height, width, scratch,
        )  # fmt: skip
        store_tile(sums, job.factor, row, column, height, width, job.out, m, n, job.item)


def multiply(
    a: MXArray, right: DecodedOperand, format_b: BlockFormat, factor: np.float32, out: NDArray[Any]
) -> None:
    """Write the product, times `factor`, into `out` [M, N], contiguous; rows with NaN blocks are not marked.

    Args:
        a: [M, K].
        right: B, decoded for the right side.
        format_b: the format of B.
        factor: what undoes prescales.
        out: float32 or bfloat16.
    """
    left = decoded_operand(a, turn=False)
    work = out.size * a.length // _PRODUCTS_PER_ELEMENT
    scratch = np.empty(compiled.worker_count(work) * _SCRATCH + memory.LINE, np.uint8)
    (m, n), unit = out.shape, [np.float32(2.0**-f.element.unit_exponent) for f in (a.format, format_b)]
    job = _Product(
        a_values=address_of(left.values), a_found=address_of(left.found), b_values=address_of(right.values),
        b_found=address_of(right.found), m=m, n=n, blocks=len(left.found[0]), factor=factor, units_a=unit[0],
        units_b=unit[1], out=address_of(out), item=out.itemsize, scratch=memory.aligned(scratch),
    )  # fmt: skip
    run_native(_multiply_share, job, work)
