"""Scaled GEMM from packed operands: `ordered`, bit for bit, and `bounded` through BLAS.

A block dot of E2M1 values is a multiple of 1/4 of at most 1152, so float32 holds it and all its partial
sums; fused multiply-adds (`contract`) give the same bits as separate ones, in the dots and in the
accumulation, whose products are exact too. B is first turned into doubled values, int8 [K, N], so that
inner loops run along rows of C. A tile of C then takes one block of 32 after the other, in order.
"""

# Kernels have no annotations: Numba infers their types.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from typing import Any

import ml_dtypes
import numba
import numpy as np
from numpy.typing import NDArray

from mxref.errors import UnsupportedError
from mxref.formats import CANONICAL_NAN, E8M0, MXFP4
from mxref.mxarray import MXArray
from mxref.recipe import GemmProfile
from mxref_numba.compiled import bits_of, float_of, kernel, parallel_kernel, share, team
from mxref_numba.dequantize import code_rows, dequantize, twice_magnitude
from mxref_numba.scale import NAN_CODE

MAX_BOUNDED_SCALE = 252
"""Largest scale code at which every element fits float32: 6 * 2^125."""

_TILE_M, _TILE_N = 128, 256
_PAD = 16
"""Floats between scratch rows: rows a power of two apart would compete for the same cache sets."""
_TURNED_ROWS = 64
_PRODUCTS_PER_ELEMENT = 32
"""Multiplications that take as long as quantizing an element, roughly."""
_NEUTRAL = np.uint8(E8M0.bias)
_NAN_BITS = np.uint32(CANONICAL_NAN)
_UNPRESCALE = (np.float32(1.0), np.float32(4 / 3), np.float32(16 / 9))

# dot * 2^ea * 2^eb in float32: below 2^128 after each product, and a multiple of 2^-149.
_FLOAT32_CODE = 117 + 127
_FLOAT32_SUM = (-147 + 254, 117 + 254)


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


@kernel
def _prepare_rows(packed, scales, k, turned, live, begin, end):
    values = np.empty((_TURNED_ROWS, k), np.int8)
    for first in range(begin, end, _TURNED_ROWS):
        count = min(_TURNED_ROWS, end - first)
        for b in range(scales.shape[1]):
            for r in range(count):
                any_live = _decode_block(packed[first + r, b * k // 2 : (b + 1) * k // 2], values[r])
                scale = scales[first + r, b]
                live[b, first + r] = scale if any_live and scale != NAN_CODE else _NEUTRAL
            if turned.size:
                top, left = np.uint64(b * k), np.uint64(first)
                for j in range(np.uint64(k)):
                    for r in range(np.uint64(count)):
                        turned[top + j, left + r] = values[r, j]


@parallel_kernel
def _prepare(packed, scales, k, turned, live, workers):
    # `live`: scale codes [K / 32, rows], neutral where a block is all zeros or NaN and its scale is moot.
    for worker in numba.prange(workers):
        begin, end = share(packed.shape[0], worker, workers)
        _prepare_rows(packed, scales, k, turned, live, begin, end)


@kernel
def _half_values(packed, live, k, row, height, block, a, codes_a):
    values = np.empty(k, np.int8)
    for r in range(height):
        _decode_block(packed[row + r, block * k // 2 : (block + 1) * k // 2], values)
        codes_a[r] = live[block, row + r]
        line = a[r]
        for j in range(np.uint64(k)):
            line[j] = np.float32(values[j]) * np.float32(0.5)


@kernel(fastmath={"contract"})
def _dots(a, b, r, width, k, dots):
    """Fill dots[:4, :width] with the dot products of rows r .. r + 3 of a [., k] with columns of b [k, .]."""
    for i in range(4):
        for c in range(width):
            dots[i, c] = np.float32(0)
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


@kernel
def _power(code):
    """Return 2^(code - 127), float32; at code 0 it is subnormal."""
    return float_of(np.uint32(code) << np.uint32(23)) if code else float_of(1 << 22)


@kernel
def _wide_power(code):
    """Return 2^(code - 127), float64."""
    return np.uint64(np.uint64(code + (1023 - 127)) << np.uint64(52)).view(np.float64)


@kernel(fastmath={"contract"})
def _accumulate(acc, dots, width, power_a, powers_b):
    for c in range(width):
        acc[c] = np.float32(acc[c] + dots[c] * power_a * powers_b[c])


@kernel
def _aligned(rows, columns):
    """Return scratch, float32 [rows, columns], that starts at a cache line; where it starts costs up to a third."""
    memory = np.empty(rows * columns + 16, np.float32)
    start = (-memory.ctypes.data % 64) // 4
    return memory[start : start + rows * columns].reshape(rows, columns)


@kernel
def _tile(a_packed, live_a, b_turned, live_b, k, exact32, row, column, height, width, acc):
    """Accumulate acc[:height, :width], float32, over all blocks in order."""
    a = np.zeros((_TILE_M, k), np.float32)
    b = _aligned(k, width + _PAD)
    codes_a = np.full(_TILE_M, _NEUTRAL, np.uint8)
    powers, wide_powers = np.empty(width, np.float32), np.empty(width, np.float64)
    dots = _aligned(4, width + _PAD)
    acc[:] = np.float32(0)
    for block in range(live_a.shape[0]):
        _half_values(a_packed, live_a, k, row, height, block, a, codes_a)
        top, left = np.uint64(block * k), np.uint64(column)
        for j in range(np.uint64(k)):
            for c in range(np.uint64(width)):
                b[j, c] = np.float32(b_turned[top + j, left + c]) * np.float32(0.5)
        for c in range(np.uint64(width)):
            code = np.int64(live_b[block, left + c])
            powers[c], wide_powers[c] = _power(code), _wide_power(code)
        for r in range(0, height, 4):
            _dots(a, b, r, width, k, dots)
            for i in range(4):
                code = np.int64(codes_a[r + i])
                if exact32:
                    _accumulate(acc[r + i], dots[i], width, _power(code), powers)
                else:
                    _accumulate(acc[r + i], dots[i], width, _wide_power(code), wide_powers)


@kernel
def _bfloat16_bits(bits):
    # To nearest, ties to even; no NaN comes here.
    return np.uint16(
        np.uint32(bits + np.uint32(0x7FFF) + np.uint32((bits >> np.uint32(16)) & np.uint32(1)))
        >> np.uint32(16)
    )


@kernel
def _finish(acc, row, column, height, width, factor, nan_a, nan_b, wide, narrow):
    top, left = np.uint64(row), np.uint64(column)
    for r in range(np.uint64(height)):
        for c in range(np.uint64(width)):
            bits = np.uint32(bits_of(acc[r, c] * factor))
            spoiled = nan_a[top + r] | nan_b[left + c]
            if wide.size:
                wide[top + r, left + c] = _NAN_BITS if spoiled else bits
            else:
                narrow[top + r, left + c] = np.uint16(_NAN_BITS >> 16) if spoiled else _bfloat16_bits(bits)


@parallel_kernel
def _gemm(a_packed, live_a, nan_a, b_turned, live_b, nan_b, k, exact32, factor, wide, narrow, workers):
    m, n = nan_a.size, nan_b.size
    across = -(-n // _TILE_N)
    for worker in numba.prange(workers):
        acc = _aligned(_TILE_M, _TILE_N + _PAD)
        begin, end = share(-(-m // _TILE_M) * across, worker, workers)
        for task in range(begin, end):
            row, column = task // across * _TILE_M, task % across * _TILE_N
            height, width = min(_TILE_M, m - row), min(_TILE_N, n - column)
            _tile(a_packed, live_a, b_turned, live_b, k, exact32, row, column, height, width, acc)
            _finish(acc, row, column, height, width, factor, nan_a, nan_b, wide, narrow)


def scaled_gemm(a: MXArray, b: MXArray, profile: GemmProfile, out_dtype: str) -> NDArray[Any]:
    """Return A B^T of A [M, K] and B [N, K], checked operands, under `ordered` or `bounded`.

    Raises:
        UnsupportedError: `bounded` with a scale code of 253 or 254.
    """
    factor = _UNPRESCALE[int(a.prescale) + int(b.prescale)]
    nan_a, nan_b = ((np.asarray(q.scales) == E8M0.nan_code).any(axis=1) for q in (a, b))
    shape = nan_a.size, nan_b.size
    if profile is GemmProfile.BOUNDED:
        return _bounded(a, b, factor, nan_a[:, None] | nan_b, out_dtype)
    wide = np.empty(shape if out_dtype == "float32" else (0, 0), np.float32)
    narrow = np.empty(shape if out_dtype == "bfloat16" else (0, 0), ml_dtypes.bfloat16)
    out = wide if out_dtype == "float32" else narrow
    if out.size:
        a_packed, live_a, _ = _operand(a, turn=False)
        _, live_b, b_turned = _operand(b, turn=True)
        with team(out.size * a.length // _PRODUCTS_PER_ELEMENT) as workers:
            _gemm(
                a_packed, live_a, nan_a, b_turned, live_b, nan_b, MXFP4.k, _fits_float32(live_a, live_b),
                factor, wide.view(np.uint32), narrow.view(np.uint16), workers,
            )  # fmt: skip
    return out


def _operand(q: MXArray, turn: bool) -> tuple[NDArray[np.uint8], NDArray[np.uint8], NDArray[np.int8]]:
    packed, scales = code_rows(q)
    rows, blocks = scales.shape
    turned = np.empty((q.length, rows) if turn else (0, 0), np.int8)
    live = np.empty((blocks, rows), np.uint8)
    with team(rows * q.length) as workers:
        _prepare(packed, scales, MXFP4.k, turned, live, workers)
    return packed, live, turned


def _fits_float32(live_a: NDArray[np.uint8], live_b: NDArray[np.uint8]) -> bool:
    """Return whether every product of a block dot with both scales is exact in float32, step by step."""
    if not live_a.size:
        return True
    lows, tops = zip(*((int(live.min()), int(live.max())) for live in (live_a, live_b)), strict=True)
    lowest, highest = _FLOAT32_SUM
    fits: bool = max(tops) <= _FLOAT32_CODE and lowest <= sum(lows) and sum(tops) <= highest
    return fits


def _bounded(
    a: MXArray, b: MXArray, factor: np.float32, nan: NDArray[np.bool_], out_dtype: str
) -> NDArray[Any]:
    values = []
    for name, q in (("A", a), ("B", b)):
        scales = np.asarray(q.scales)
        top = int(scales[scales != E8M0.nan_code].max(initial=0))
        if top > MAX_BOUNDED_SCALE:
            raise UnsupportedError(
                f"backend 'numba' declares bounded_max_scale = {MAX_BOUNDED_SCALE}, but {name} has a scale code {top}; "
                "use the profile 'ordered'"
            )
        rows = MXArray(q.codes, scales, (scales.shape[0], q.length), 1)
        values.append(dequantize(rows, "float32"))
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        out: NDArray[Any] = values[0] @ values[1].T * factor
    out.view(np.uint32)[nan] = CANONICAL_NAN
    if out_dtype == "bfloat16":
        out = out.astype(ml_dtypes.bfloat16)
    return out
