"""`ordered` on any CPU, in plain Numba.

A block dot of E2M1 values is a multiple of 1/4 of at most 1152, so float32 holds it and all its partial
sums; fused multiply-adds (`contract`) give the same bits as separate ones, in the dots and in the
accumulation, whose products are exact too. A tile of C takes one block of 32 after the other, in order.
"""

# Kernels have no annotations: Numba infers their types.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
from numba import carray  # type: ignore[attr-defined]
from numba.core import types
from numpy.typing import NDArray

from mxref.formats import CANONICAL_NAN, E8M0
from mxref.mxarray import MXArray
from mxref_numba import compiled, memory
from mxref_numba.compiled import bits_of, float_of, kernel, share
from mxref_numba.native import (
    Native,
    address_of,
    bytes_at,
    fields_at,
    floats_at,
    pointer_to,
    run_native,
)
from mxref_numba.scalar.dequantize import code_rows, twice_magnitude
from mxref_numba.scalar.scale import NAN_CODE

_K = 32
_TILE_M, _TILE_N = 128, 256
_PITCH = _TILE_N + 16
"""Floats from row to row of scratch: rows a power of two apart would compete for the same cache sets."""
_TURNED_ROWS = 64
_PRODUCTS_PER_ELEMENT = 32
"""Multiplications that take as long as quantizing an element, roughly."""
_NEUTRAL, _NAN = np.uint8(E8M0.bias), np.uint32(CANONICAL_NAN)

_SIZES = {
    "values": _TURNED_ROWS * _K, "codes": _TILE_M, "a": 4 * _TILE_M * _K, "b": 4 * _K * _PITCH,
    "dots": 4 * 4 * _PITCH, "sums": 4 * _TILE_M * _PITCH, "powers": 4 * _TILE_N, "wide": 8 * _TILE_N,
}  # fmt: skip
_VALUES, _CODES, _A, _B, _DOTS, _SUMS, _POWERS, _WIDE, _SCRATCH = accumulate(_SIZES.values(), initial=0)
"""Where a worker's scratch has decoded rows; scale codes, elements of A and of B; dots; sums; powers of B.

Scratch starts at a cache line; elsewhere a product takes up to half as long again.
"""

# dot * 2^ea * 2^eb in float32: below 2^128 after each product, and a multiple of 2^-149.
_FLOAT32_CODE = 117 + 127
_FLOAT32_SUM = (-147 + 254, 117 + 254)

_signed_at, _halves_at, _words_at, _doubles_at = (
    pointer_to(element) for element in (types.int8, types.uint16, types.uint32, types.float64)
)


@kernel
def _twice_value(code):
    m = twice_magnitude(code)
    return np.int8(np.int32(-m) if np.int32(code & np.int32(8)) else m)


@kernel
def _decode_block(packed, values):
    """Decode a block's elements to 2P, int8; return whether any is not zero."""
    seen = np.int32(0)
    two, one = np.uint64(2), np.uint64(1)
    for i in range(np.uint64(packed.size)):
        byte = np.int32(packed[i])
        seen = np.int32(seen | byte)
        values[two * i] = _twice_value(byte)
        values[two * i + one] = _twice_value(np.int32(byte >> np.int32(4)))
    return np.int32(seen & np.int32(0x77)) != 0


class _Decoding(NamedTuple):
    """The decoding of an operand; places in memory are addresses."""

    packed: int
    scales: int
    rows: int
    blocks: int
    k: int
    """Of the format. As a constant it would make LLVM unroll the loop that turns values, a fifth slower."""
    values: int
    """Where the values go, turned; 0 to leave them."""
    live: int
    scratch: int


class _Product(NamedTuple):
    """A product; places in memory are addresses."""

    packed: int
    live_a: int
    turned: int
    live_b: int
    m: int
    n: int
    blocks: int
    exact32: int
    """Whether float32 holds every product with both scales."""
    factor: np.float32
    out: int
    item: int
    """Bytes of an element of C."""
    scratch: int


_decoding_at, _product_at = fields_at(_Decoding), fields_at(_Product)


@Native
def _decode_share(arguments, worker, workers):
    job = _decoding_at(arguments)
    rows, blocks, k = job.rows, job.blocks, job.k
    packed = carray(bytes_at(job.packed), (rows, blocks * k // 2))
    scales = carray(bytes_at(job.scales), (rows, blocks))
    turned = carray(_signed_at(job.values), (blocks * k, rows))
    live = carray(bytes_at(job.live), (blocks, rows))
    values = carray(_signed_at(job.scratch + worker * _SCRATCH + _VALUES), (_TURNED_ROWS, k))
    begin, end = share(rows, worker, workers)
    for first in range(begin, end, _TURNED_ROWS):
        count = min(_TURNED_ROWS, end - first)
        for b in range(blocks):
            for r in range(count):
                any_live = _decode_block(packed[first + r, b * k // 2 : (b + 1) * k // 2], values[r])
                scale = scales[first + r, b]
                live[b, first + r] = scale if any_live and scale != NAN_CODE else _NEUTRAL
            if job.values:
                top, left = np.uint64(b * k), np.uint64(first)
                for i in range(np.uint64(k)):
                    for r in range(np.uint64(count)):
                        turned[top + i, left + r] = values[r, i]


@kernel(fastmath={"contract"})
def fill_dots(a, b, r, width, dots):
    """Fill dots[:4, :width] with the dot products of rows r .. r + 3 of a [., 32] with columns of b [32, .]."""
    for i in range(4):
        for c in range(width):
            dots[i, c] = np.float32(0)
    for j in range(0, _K, 4):
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


@kernel
def _power(code):
    """Return 2^(code - 127), float32; at code 0 it is subnormal."""
    return float_of(np.uint32(code) << np.uint32(23)) if code else float_of(1 << 22)


@kernel
def wide_power(code):
    """Return 2^(code - 127), float64."""
    return np.uint64(np.uint64(code + (1023 - 127)) << np.uint64(52)).view(np.float64)


@kernel(fastmath={"contract"})
def _accumulate(sums, dots, width, power_a, powers_b):
    for c in range(width):
        sums[c] = np.float32(sums[c] + dots[c] * power_a * powers_b[c])


@kernel(inline="always")
def _tile(a_packed, live_a, b_turned, live_b, exact32, row, column, height, width, scratch):
    """Accumulate the sums of a tile, float32, over all blocks in order."""
    values = carray(_signed_at(scratch + _VALUES), (_K,))
    codes = carray(bytes_at(scratch + _CODES), (_TILE_M,))
    a, b = carray(floats_at(scratch + _A), (_TILE_M, _K)), carray(floats_at(scratch + _B), (_K, _PITCH))
    dots = carray(floats_at(scratch + _DOTS), (4, _PITCH))
    sums = carray(floats_at(scratch + _SUMS), (_TILE_M, _PITCH))
    powers = carray(floats_at(scratch + _POWERS), (_TILE_N,))
    wide_powers = carray(_doubles_at(scratch + _WIDE), (_TILE_N,))
    for r in range(height):
        for c in range(np.uint64(width)):
            sums[r, c] = np.float32(0)
    for block in range(live_a.shape[0]):
        for r in range(height):
            _decode_block(a_packed[row + r, block * _K // 2 : (block + 1) * _K // 2], values)
            codes[r] = live_a[block, row + r]
            for i in range(np.uint64(_K)):
                a[r, i] = np.float32(values[i]) * np.float32(0.5)
        top, left = np.uint64(block * _K), np.uint64(column)
        for i in range(np.uint64(_K)):
            for c in range(np.uint64(width)):
                b[i, c] = np.float32(b_turned[top + i, left + c]) * np.float32(0.5)
        for c in range(np.uint64(width)):
            code = np.int64(live_b[block, left + c])
            powers[c], wide_powers[c] = _power(code), wide_power(code)
        for r in range(0, height, 4):
            fill_dots(a, b, r, width, dots)
            for i in range(min(4, height - r)):
                code = np.int64(codes[r + i])
                if exact32:
                    _accumulate(sums[r + i], dots[i], width, _power(code), powers)
                else:
                    _accumulate(sums[r + i], dots[i], width, wide_power(code), wide_powers)


@kernel
def _bfloat16_bits(bits):
    """Return the upper half of a float32, rounded to nearest, ties to even; of NaNs only the canonical one is kept."""
    return np.uint16(
        np.uint32(bits + np.uint32(0x7FFF) + np.uint32((bits >> np.uint32(16)) & np.uint32(1)))
        >> np.uint32(16)
    )


@kernel(inline="always")
def store_tile(sums, factor, row, column, height, width, out, m, n, item):
    """Store sums[:height, :width] times `factor` as a tile of C, float32 or bfloat16 by the bytes of an element."""
    wide, narrow = carray(_words_at(out), (m, n)), carray(_halves_at(out), (m, n))
    top, left = np.uint64(row), np.uint64(column)
    for r in range(np.uint64(height)):
        for c in range(np.uint64(width)):
            value = sums[r, c] * factor
            bits = np.uint32(bits_of(value)) if value == value else _NAN
            if item == 4:
                wide[top + r, left + c] = bits
            else:
                narrow[top + r, left + c] = _bfloat16_bits(bits)


@Native
def _multiply_share(arguments, worker, workers):
    job = _product_at(arguments)
    m, n, blocks, scratch = job.m, job.n, job.blocks, job.scratch + worker * _SCRATCH
    a_packed, live_a = (
        carray(bytes_at(job.packed), (m, blocks * _K // 2)), carray(bytes_at(job.live_a), (blocks, m))
    )  # fmt: skip
    b_turned, live_b = (
        carray(_signed_at(job.turned), (blocks * _K, n)), carray(bytes_at(job.live_b), (blocks, n))
    )  # fmt: skip
    sums = carray(floats_at(scratch + _SUMS), (_TILE_M, _PITCH))
    across = -(-n // _TILE_N)
    begin, end = share(-(-m // _TILE_M) * across, worker, workers)
    for task in range(begin, end):
        row, column = task // across * _TILE_M, task % across * _TILE_N
        height, width = min(_TILE_M, m - row), min(_TILE_N, n - column)
        _tile(a_packed, live_a, b_turned, live_b, job.exact32, row, column, height, width, scratch)
        store_tile(sums, job.factor, row, column, height, width, job.out, m, n, job.item)


class Turned(NamedTuple):
    """An operand for the right side: B."""

    live: NDArray[np.uint8]
    """Scale codes [K / 32, N]; 127 (2^0) for blocks that are NaN or all zeros."""
    values: NDArray[np.int8]
    """Doubled element values [K, N], so that inner loops run along rows of C."""


def turned(q: MXArray) -> Turned:
    """Return an operand of at least one row and one block, decoded for the right side of the product."""
    _, live, values = _operand(q, turn=True)
    return Turned(live, values)


def multiply_turned(a: MXArray, right: Turned, factor: np.float32, out: NDArray[Any]) -> None:
    """Write the product, times `factor`, into `out` [M, N], contiguous; NaN rows are not marked."""
    packed, live, _ = _operand(a, turn=False)
    work = out.size * a.length // _PRODUCTS_PER_ELEMENT
    scratch = np.empty(compiled.worker_count(work) * _SCRATCH + memory.LINE, np.uint8)
    (m, n), exact32 = out.shape, _fits_float32(live, right.live)
    job = _Product(
        packed=address_of(packed), live_a=address_of(live), turned=address_of(right.values),
        live_b=address_of(right.live), m=m, n=n, blocks=len(live), exact32=exact32, factor=factor,
        out=address_of(out), item=out.itemsize, scratch=memory.aligned(scratch),
    )  # fmt: skip
    run_native(_multiply_share, job, work)


def _operand(q: MXArray, turn: bool) -> tuple[NDArray[np.uint8], NDArray[np.uint8], NDArray[np.int8]]:
    packed, scales = code_rows(q)
    rows, blocks = scales.shape
    values = np.empty((q.length, rows) if turn else (0, 0), np.int8)
    live = np.empty((blocks, rows), np.uint8)
    work = rows * q.length
    scratch = np.empty(compiled.worker_count(work) * _SCRATCH, np.uint8)
    job = _Decoding(
        packed=address_of(packed), scales=address_of(scales), rows=rows, blocks=blocks, k=_K,
        values=address_of(values) if turn else 0, live=address_of(live), scratch=address_of(scratch),
    )  # fmt: skip
    run_native(_decode_share, job, work)
    return packed, live, values


def _fits_float32(live_a: NDArray[np.uint8], live_b: NDArray[np.uint8]) -> bool:
    """Return whether every product of a block dot with both scales is exact in float32, step by step."""
    lows, tops = zip(*((int(live.min()), int(live.max())) for live in (live_a, live_b)), strict=True)
    lowest, highest = _FLOAT32_SUM
    fits: bool = max(tops) <= _FLOAT32_CODE and lowest <= sum(lows) and sum(tops) <= highest
    return fits
