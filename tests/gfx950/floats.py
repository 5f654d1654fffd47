"""Floating-point arithmetic on arrays as the ISA defines it: RNE, one rounding, its own NaN and zero rules.

NumPy's float16, float32 and float64 additions, multiplications and conversions are IEEE RNE with subnormals.
The payload and the sign of a NaN that an operation makes are NOT modelled (NumPy's are used).
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from gfx950.errors import Gfx950Error

MANTISSA = {np.dtype(np.float16): 10, np.dtype(np.float32): 23, np.dtype(np.float64): 52}


def bits_of(x: np.ndarray) -> np.ndarray:
    """Return the patterns of a float array."""
    return x.view(f"u{x.dtype.itemsize}")


def quiet_bit(dtype: np.dtype) -> np.unsignedinteger:
    """Return the mantissa bit that tells a quiet NaN from a signalling one."""
    kind = np.dtype(f"u{dtype.itemsize}").type
    return kind(1 << (MANTISSA[dtype] - 1))


def is_signalling(x: np.ndarray) -> np.ndarray:
    """Return where x is a signalling NaN."""
    return np.isnan(x) & ((bits_of(x) & quiet_bit(x.dtype)) == 0)


def quieted(x: np.ndarray) -> np.ndarray:
    """Return x with the quiet bit set."""
    return (bits_of(x) | quiet_bit(x.dtype)).view(x.dtype)


def flush(x: np.ndarray) -> np.ndarray:
    """Return x with subnormals as zeros of their sign."""
    tiny = (np.abs(x) < np.finfo(x.dtype).tiny) & (x != 0)
    return np.where(tiny, np.copysign(x.dtype.type(0), x), x)


def to_odd(exact_high: np.ndarray, error: np.ndarray) -> np.ndarray:
    """Return float64 sums rounded to odd, from a rounded sum and its exact error; a later RNE is then right."""
    patterns = exact_high.view(np.int64)
    # Of the two neighbours of the real sum the odd one carries "inexact" into the next rounding.
    inexact = (error != 0) & np.isfinite(exact_high) & ((patterns & 1) == 0)
    outward = (error > 0) == (exact_high > 0)
    return np.where(inexact, patterns + np.where(outward, 1, -1), patterns).view(np.float64)


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Return a * b + c rounded once; float16 and float32 only."""
    if a.dtype == np.float64:
        raise Gfx950Error("a float64 fma is not modelled")
    x, y, z = (np.asarray(v, np.float64) for v in (a, b, c))
    product = x * y
    total = product + z
    # Knuth's two-sum: the error of the addition is a float64, for no exponent here is near the limits.
    part = total - product
    error = (product - (total - part)) + (z - part)
    with_nan = total.astype(a.dtype)
    return np.where(np.isfinite(total), to_odd(total, error).astype(a.dtype), with_nan)


def min_or_max(smaller: bool) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """Return v_min or v_max of two operands, with IEEE mode on."""

    def pick(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        a, b = np.broadcast_arrays(a, b)
        less = (a < b) if smaller else (a >= b)
        # Zeros of both signs are equal to a comparison, but ordered here: -0 below +0.
        zeros = (a == 0) & (b == 0)
        first = np.where(zeros, np.signbit(a) == smaller, less)
        result = np.where(first, bits_of(a), bits_of(b))
        result = np.where(np.isnan(b), bits_of(a), result)
        result = np.where(np.isnan(a), bits_of(b), result)
        result = np.where(is_signalling(b), bits_of(quieted(b)), result)
        return np.where(is_signalling(a), bits_of(quieted(a)), result).view(a.dtype)

    return pick


minimum, maximum = min_or_max(True), min_or_max(False)


def keeping_nan(
    pick: Callable[[np.ndarray, np.ndarray], np.ndarray],
) -> Callable[[np.ndarray, np.ndarray], np.ndarray]:
    """Return v_minimum or v_maximum: as v_min or v_max, but a NaN operand, made quiet, is the result."""

    def pick_or_nan(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        a, b = np.broadcast_arrays(a, b)
        result = np.where(np.isnan(b), bits_of(quieted(b)), bits_of(pick(a, b)))
        return np.where(np.isnan(a), bits_of(quieted(a)), result).view(a.dtype)

    return pick_or_nan


minimum_with_nan, maximum_with_nan = keeping_nan(minimum), keeping_nan(maximum)


def median(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """Return v_med3: the minimum of all if one is NaN, otherwise the larger of those that are not the largest."""
    a, b, c = np.broadcast_arrays(a, b, c)
    largest = maximum(maximum(a, b), c)
    rest = np.where(
        largest == a,
        bits_of(maximum(b, c)),
        np.where(largest == b, bits_of(maximum(a, c)), bits_of(maximum(a, b))),
    )
    nan = np.isnan(a) | np.isnan(b) | np.isnan(c)
    return np.where(nan, bits_of(minimum(minimum(a, b), c)), rest).view(a.dtype)


def to_integer(dtype: type[np.integer]) -> Callable[[np.ndarray], np.ndarray]:
    """Return the conversion to an integer type: toward zero, saturating, NaN to 0."""
    low, high = np.iinfo(dtype).min, np.iinfo(dtype).max

    def convert(x: np.ndarray) -> np.ndarray:
        whole = np.trunc(x.astype(np.float64))
        clamped = np.clip(np.where(np.isnan(whole), 0, whole), low, high)
        return clamped.astype(np.int64).astype(dtype)

    return convert


def bfloat16_bits(x: np.ndarray) -> np.ndarray:
    """Return float32 rounded to bfloat16, RNE, as uint32 in 0..0xFFFF; NaNs stay NaN, quiet."""
    u = x.view(np.uint32).astype(np.uint64)
    rounded = (u + np.uint64(0x7FFF) + ((u >> np.uint64(16)) & np.uint64(1))) >> np.uint64(16)
    return np.where(np.isnan(x), (u >> np.uint64(16)) | np.uint64(0x40), rounded).astype(np.uint32)


def ldexp(x: np.ndarray, e: np.ndarray) -> np.ndarray:
    """Return x * 2^e rounded once."""
    exact = np.ldexp(x.astype(np.float64), np.clip(e, -400, 400).astype(np.int32))
    return exact.astype(x.dtype)


def exactly(name: str, approximate: Callable[[np.ndarray], np.ndarray]) -> Callable[[np.ndarray], np.ndarray]:
    """Return a unary operation of unspecified last bits that is executed only where its result is exact.

    `approximate` works in float64; a result counts as exact if it is a power of two, a zero, Inf or NaN, for
    which the ISA's error bound leaves nothing else. Subnormal sources and results are refused.
    """

    def compute(x: np.ndarray) -> np.ndarray:
        wide = approximate(x.astype(np.float64))
        fraction, _ = np.frexp(wide)
        tiny = np.finfo(x.dtype).tiny
        known = (np.abs(fraction) == 0.5) | ~np.isfinite(wide) | (wide == 0)
        known &= ((np.abs(wide) >= tiny) | (wide == 0)) & ~((np.abs(x) < tiny) & (x != 0))
        if not known.all():
            raise Gfx950Error(f"{name} of {x[~known].ravel()[0]!r}: only exact results are modelled")
        return wide.astype(x.dtype)

    return compute


def reciprocal(x: np.ndarray, side: int, flushes: bool) -> np.ndarray:
    """Return v_rcp_f32, whose error is at most one ulp: the nearest float32, or that on one side of the exact result.

    The nearest one moved by a whole ulp may be further away than that: LLVM's divisions of integers would be wrong.

    Args:
        x: float32.
        side: 0 for the nearest, 1 for the next of larger magnitude where the nearest has a smaller one than the exact
            result, -1 for the next of smaller magnitude where it has a larger one.
        flushes: whether a subnormal result is a zero of its sign, whatever the mode says: public models disagree.
    """
    if ((np.abs(x) < np.finfo(np.float32).tiny) & (x != 0)).any():
        raise Gfx950Error("v_rcp_f32 of a subnormal is not modelled")
    nearest = (1 / x.astype(np.float64)).astype(np.float32)
    # The product of two float32 is exact in float64.
    product = np.abs(nearest.astype(np.float64) * x)
    wrong = (product < 1) if side > 0 else (product > 1)
    moved = np.isfinite(nearest) & (nearest != 0) & wrong
    bits = np.where(moved, nearest.view(np.int32) + np.int32(side), nearest.view(np.int32))
    return flush(bits.view(np.float32)) if flushes else bits.view(np.float32)


def power_of_two(x: np.ndarray) -> np.ndarray:
    """Return 2^x in float64 where x is whole, elsewhere a number that is no power of two."""
    return np.where(np.isfinite(x) & (np.rint(x) != x), 1.5, np.exp2(x))


def clamp(x: np.ndarray) -> np.ndarray:
    """Return x in 0..1, NaN as 0 (DX10_CLAMP is on)."""
    return np.where(np.isnan(x), x.dtype.type(0), np.clip(x, x.dtype.type(0), x.dtype.type(1)))
