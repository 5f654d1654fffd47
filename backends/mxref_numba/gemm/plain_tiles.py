"""`ordered` for every pair of formats and on any CPU, in plain Numba.

Operands are decoded to float32 first. A tile of C then takes one block of k after the other, in order.

The products of a block are multiples of one power of two, so a partial sum is exact, whatever the order, as long as
the bits that the magnitudes of both blocks span, and those that their number adds (five for 32 products), fit the
type. There are two types:

- float32, where these bits, and those of both scales' significands, fit its 24 for any blocks of both formats (all
  pairs of elements with 4 or 6 bits under powers of two, and NVFP4), and all scales are moderate, so that the product
  of a dot and both scales is exact too. Fused multiply-adds (`contract`) then give the same bits as separate ones.
- float64 for all else, under scales that are powers of two. Two blocks of E4M3 span 36 bits together at most, one of
  E4M3 and one of E5M2 50, two of E5M2 64. Where two blocks span more than 48, their dot comes from integers
  (`_split_sum`), by itself.

Adding a dot to a float32 must round only once. A float64 sum rounded to odd, its last bit set where it is inexact,
rounds to float32 as the real sum does: it has more than two bits to spare (Boldo and Melquiond, "Emulation of a FMA and
correctly rounded sums: proved algorithms using rounding to odd", IEEE Transactions on Computers, 2008).

Codes of NaN and Inf are decoded to NaN and Inf, and IEEE arithmetic gives what the definition requires. The sizes of
tiles may be changed: no bit depends on them.
"""

# Kernels have no annotations: Numba infers their types.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from functools import cache
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from numba import carray  # type: ignore[attr-defined]
from numpy.typing import NDArray

from mxref.formats import CANONICAL_NAN, BlockFormat, ScaleFormat
from mxref.mxarray import MXArray
from mxref.steps.scale import scale_exponent
from mxref_numba.gemm.plain_operands import DecodedOperand, decoded_operand, integers_of
from mxref_numba.kernels import (
    Native,
    address_of,
    bits_of,
    bytes_at,
    doubles_at,
    fields_at,
    floats_at,
    halves_at,
    kernel,
    unsigned_at,
)
from mxref_numba.scale import scale_values
from mxref_numba.threads import run

_LONGEST_K = 32
_SPAN = 53 - 5
"""Bits that the magnitudes of two blocks may span together in a dot of 32 products in float64."""
_HALF = 16
"""Bits of an element, in units of its format, that the integers of `_split_sum` take apart."""
_NAN = np.uint32(CANONICAL_NAN)


class _Tiling(NamedTuple):
    """A tile of C, and where the memory of a share has what it is computed from."""

    rows: int
    columns: int
    pitch: int
    """Elements from row to row of that memory: rows a power of two apart would compete for the same cache sets."""
    products_per_element: int
    """Multiplications that take as long as quantizing an element, roughly."""
    a: int
    """Elements of A."""
    b: int
    dots: int
    powers: int
    """The scales of B."""
    sums: int
    size: int


def _tiling(rows: int, columns: int, pitch: int, item: int, products_per_element: int) -> _Tiling:
    k = _LONGEST_K
    sizes = *(item * n for n in (rows * k, k * pitch, 4 * pitch, pitch)), 4 * rows * pitch
    return _Tiling(rows, columns, pitch, products_per_element, *accumulate(sizes, initial=0))


# This memory starts at a cache line; elsewhere a product takes up to half as long again.
_NARROW, _WIDE = _tiling(128, 256, 272, 4, 32), _tiling(64, 128, 136, 8, 16)


# ---- dots and sums ----


@kernel(fastmath={"contract"})
def _fill_dots(a, b, r, k, width, dots):
    """Fill dots[:4, :width] with the dot products of rows r .. r + 3 of a [., k] with columns of b [k, .]."""
    for i in range(4):
        for c in range(width):
            dots[i, c] = 0
    for j in range(0, k, 4):
        a00, a01, a02, a03 = a[r, j], a[r, j + 1], a[r, j + 2], a[r, j + 3]
        a10, a11, a12, a13 = a[r + 1, j], a[r + 1, j + 1], a[r + 1, j + 2], a[r + 1, j + 3]
        a20, a21, a22, a23 = a[r + 2, j], a[r + 2, j + 1], a[r + 2, j + 2], a[r + 2, j + 3]
        a30, a31, a32, a33 = a[r + 3, j], a[r + 3, j + 1], a[r + 3, j + 2], a[r + 3, j + 3]
        for c in range(width):
            b0, b1, b2, b3 = b[j, c], b[j + 1, c], b[j + 2, c], b[j + 3, c]
            dots[0, c] = dots[0, c] + (a00 * b0 + a01 * b1 + a02 * b2 + a03 * b3)
            dots[1, c] = dots[1, c] + (a10 * b0 + a11 * b1 + a12 * b2 + a13 * b3)
            dots[2, c] = dots[2, c] + (a20 * b0 + a21 * b1 + a22 * b2 + a23 * b3)
            dots[3, c] = dots[3, c] + (a30 * b0 + a31 * b1 + a32 * b2 + a33 * b3)


@kernel(fastmath={"contract"})
def _add_narrow(sums, dots, a, b, row, k, width, power, powers, span, spans, widest, units_a, units_b):
    for c in range(width):
        sums[c] = np.float32(sums[c] + dots[c] * power * powers[c])


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
def _split_sum(acc, a, b, row, k, column, units_a, units_b, power):
    """Return acc plus the dot of a row of `a` and a column of `b`, times `power`, rounded once: float32.

    Elements times `units_a` or `units_b` are integers below 2^32. Those of `a` are cut in two halves, whose dots are
    below 2^53.
    """
    high, low = np.int64(0), np.int64(0)
    for i in range(k):
        left, right = np.int64(a[row, i] * units_a), np.int64(b[i, column] * units_b)
        high += (left >> _HALF) * right
        low += (left & ((1 << _HALF) - 1)) * right
    unit = power / (units_a * units_b)
    top, rest = _two_sum(np.float64(high) * (unit * (1 << _HALF)), np.float64(low) * unit)
    total, error = _two_sum(np.float64(acc), top)
    return np.float32(_odd_sum(total, _odd_sum(error, rest)))


@kernel
def _accumulate_split(sums, dots, a, b, row, k, width, power, powers, span, spans, units_a, units_b):
    """Do what `_accumulate` does, with dots of integers where float64 does not hold them."""
    for c in range(width):
        if span + spans[c] > _SPAN and sums[c] - sums[c] == 0 and dots[c] - dots[c] == 0:
            sums[c] = _split_sum(sums[c], a, b, row, k, c, units_a, units_b, power * powers[c])
        else:
            sums[c] = np.float32(_odd_sum(np.float64(sums[c]), dots[c] * (power * powers[c])))


@kernel(inline="always")
def _add_wide(sums, dots, a, b, row, k, width, power, powers, span, spans, widest, units_a, units_b):
    if span + widest > _SPAN:
        _accumulate_split(sums, dots, a, b, row, k, width, power, powers, span, spans, units_a, units_b)
    else:
        _accumulate(sums, dots, width, power, powers)


# ---- the product ----


class _Pair(NamedTuple):
    """What follows from the formats of both operands."""

    lowest: int
    """The least sum of the exponents of two scales with which float32 holds the product of any dot."""
    highest: int
    """The largest such sum; less than `lowest` where float32 does not hold every dot."""
    units_a: np.float32
    """How many of the smallest magnitude are 1."""
    units_b: np.float32


@cache
def _pair(a: BlockFormat, b: BlockFormat) -> _Pair:
    unit = a.element.unit_exponent + b.element.unit_exponent
    bits = (a.k - 1).bit_length()
    for each in (a, b):
        bits += int(integers_of(each.element).max()).bit_length() + each.scale.mantissa_bits
        bits += (
            not each.scale.powers
        )  # a significand is an integer of one bit more than its mantissa, and 1 for these
    # A dot times the significands is a multiple of 2^unit below 2^(unit + bits); what float32 holds, of 2^-149 and
    # below 2^128.
    lowest = -149 - unit
    highest = 128 - unit - bits if bits <= 24 else lowest - 1
    return _Pair(lowest, highest, *(np.float32(2.0**-each.element.unit_exponent) for each in (a, b)))


class _Product(NamedTuple):
    """A product of decoded operands; places in memory are addresses."""

    a_values: int
    a_found: int
    b_values: int
    b_found: int
    a_powers: int
    """Values of A's scales, [256] of the type of the dots."""
    b_powers: int
    m: int
    n: int
    k: int
    blocks: int
    units_a: np.float32
    """How many of the smallest magnitude of A's element are 1."""
    units_b: np.float32
    factor: np.float32
    """Undoes prescales."""
    tensor_a: np.float32
    """The scale of A's tensor."""
    tensor_b: np.float32
    out: int
    item: int
    """Bytes of an element of C."""


@kernel
def _bfloat16_bits(bits):
    """Return the upper half of a float32, rounded to nearest, ties to even; of NaNs only the canonical one is kept."""
    odd = np.uint32((bits >> np.uint32(16)) & np.uint32(1))
    return np.uint16(np.uint32(bits + np.uint32(0x7FFF) + odd) >> np.uint32(16))


@kernel(inline="always")
def _store(sums, row, column, height, width, job):
    """Store sums[:height, :width] times the factor and the tensors' scales as a tile of C, float32 or bfloat16."""
    wide, narrow = carray(unsigned_at(job.out), (job.m, job.n)), carray(halves_at(job.out), (job.m, job.n))
    top, left, factor, item = np.uint64(row), np.uint64(column), job.factor, job.item
    tensor_a, tensor_b = job.tensor_a, job.tensor_b
    for r in range(np.uint64(height)):
        for c in range(np.uint64(width)):
            value = sums[r, c] * factor * tensor_a * tensor_b
            bits = np.uint32(bits_of(value)) if value == value else _NAN
            if item == 4:
                wide[top + r, left + c] = bits
            else:
                narrow[top + r, left + c] = _bfloat16_bits(bits)


def _multiplier(tiling: _Tiling, elements_at: Any, add: Any) -> Any:
    """Return a kernel that computes some tiles of C with numbers of one type."""
    tile_rows, tile_columns, pitch, _, a_at, b_at, dots_at, powers_at, sums_at, _ = tiling

    @kernel(inline="always")
    def multiply(job, begin, end, room):
        m, n, k, blocks = job.m, job.n, job.k, job.blocks
        units_a, units_b = np.float64(job.units_a), np.float64(job.units_b)
        a_values = carray(floats_at(job.a_values), (m, blocks * k))
        b_values = carray(floats_at(job.b_values), (blocks * k, n))
        a_spans, a_scales = (
            carray(bytes_at(job.a_found), (blocks, m)), carray(bytes_at(job.a_found + blocks * m), (blocks, m))
        )  # fmt: skip
        b_spans, b_scales = (
            carray(bytes_at(job.b_found), (blocks, n)), carray(bytes_at(job.b_found + blocks * n), (blocks, n))
        )  # fmt: skip
        a, b = (
            carray(elements_at(room + a_at), (tile_rows, _LONGEST_K)),
            carray(elements_at(room + b_at), (_LONGEST_K, pitch)),
        )  # fmt: skip
        powers_a, powers_b = (
            carray(elements_at(job.a_powers), (256,)), carray(elements_at(job.b_powers), (256,))
        )  # fmt: skip
        dots, powers = (
            carray(elements_at(room + dots_at), (4, pitch)), carray(elements_at(room + powers_at), (pitch,))
        )  # fmt: skip
        sums = carray(floats_at(room + sums_at), (tile_rows, pitch))
        across = -(-n // tile_columns)
        for task in range(begin, end):
            row, column = task // across * tile_rows, task % across * tile_columns
            height, width = min(tile_rows, m - row), min(tile_columns, n - column)
            for r in range(height):
                for c in range(np.uint64(width)):
                    sums[r, c] = np.float32(0)
            for block in range(blocks):
                top, left = np.uint64(block * k), np.uint64(column)
                for r in range(height):
                    for i in range(np.uint64(k)):
                        a[r, i] = a_values[np.uint64(row + r), top + i]
                for i in range(np.uint64(k)):
                    for c in range(np.uint64(width)):
                        b[i, c] = b_values[top + i, left + c]
                widest: Any = 0
                for c in range(np.uint64(width)):
                    powers[c] = powers_b[b_scales[block, left + c]]
                    widest = max(widest, np.int64(b_spans[block, left + c]))
                spans = b_spans[block, column : column + width]
                for r in range(0, height, 4):
                    _fill_dots(a, b, r, k, width, dots)
                    for i in range(min(4, height - r)):
                        power = powers_a[a_scales[block, row + r + i]]
                        span = np.int64(a_spans[block, row + r + i])
                        add(
                            sums[r + i], dots[i], a, b, r + i, k, width, power, powers, span, spans, widest,
                            units_a, units_b,
                        )  # fmt: skip
            _store(sums, row, column, height, width, job)

    return multiply


_multiply_narrow = _multiplier(_NARROW, floats_at, _add_narrow)
_multiply_wide = _multiplier(_WIDE, doubles_at, _add_wide)


@Native
def _multiply_in_float32(address, begin, end, room):
    _multiply_narrow(fields_at(address, _Product), begin, end, room)


@Native
def _multiply_in_float64(address, begin, end, room):
    _multiply_wide(fields_at(address, _Product), begin, end, room)


def multiplies(a: BlockFormat, b: BlockFormat) -> bool:
    """Return whether the kernels are right for two formats: float64 is not, for significands of scales."""
    pair = _pair(a, b)
    return (a.scale.powers and b.scale.powers) or pair.lowest <= pair.highest


def _float32_holds(
    left: DecodedOperand, right: DecodedOperand, scales: tuple[ScaleFormat, ScaleFormat], pair: _Pair
) -> bool:
    """Return whether float32 holds every dot after each multiplication by its scales."""
    if pair.highest < pair.lowest:
        return False
    exponents: list[list[int]] = [
        scale_exponent(np.array([operand.found[1].min(), operand.found[1].max()]), scale).tolist()
        for operand, scale in zip((left, right), scales, strict=True)
    ]
    (low_a, high_a), (low_b, high_b) = exponents
    top = max(high_a, high_b)  # that of a dot and one scale
    return low_a + low_b >= pair.lowest and max(high_a + high_b, top) <= pair.highest


def multiply(a: MXArray, b: MXArray, right: DecodedOperand, factor: np.float32, out: NDArray[Any]) -> None:
    """Write the product, times `factor`, into `out` [M, N], contiguous; rows with NaN blocks are not marked.

    Args:
        a: [M, K].
        b: [N, K], for its format and the scale of its tensor.
        right: B, decoded for the right side.
        factor: what undoes prescales.
        out: float32 or bfloat16.
    """
    left, pair = decoded_operand(a, turn=False), _pair(a.format, b.format)
    scales = a.format.scale, b.format.scale
    in_float32 = _float32_holds(left, right, scales, pair)
    kernel, tiling, dtype = (
        (_multiply_in_float32, _NARROW, np.float32)
        if in_float32
        else (_multiply_in_float64, _WIDE, np.float64)
    )
    m, n = out.shape
    powers_a, powers_b = (scale_values(scale, dtype) for scale in scales)
    tensor_a, tensor_b = (np.float32(1 if q.tensor_scale is None else q.tensor_scale[0]) for q in (a, b))
    job = _Product(
        a_values=address_of(left.values), a_found=address_of(left.found), b_values=address_of(right.values),
        b_found=address_of(right.found), a_powers=address_of(powers_a), b_powers=address_of(powers_b),
        m=m, n=n, k=a.format.k, blocks=len(left.found[0]), units_a=pair.units_a, units_b=pair.units_b,
        factor=factor, tensor_a=tensor_a, tensor_b=tensor_b, out=address_of(out), item=out.itemsize,
    )  # fmt: skip
    tiles = -(-m // tiling.rows) * -(-n // tiling.columns)
    run(kernel, job, tiles, out.size * a.length // tiling.products_per_element, room=tiling.size)
