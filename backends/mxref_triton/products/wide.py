"""`ordered` where float32 does not hold a block's dot: with an element of E4M3 or E5M2 it has up to 69 bits.

It is computed in float64, for E5M2 in two parts. The sum with the accumulator is rounded to odd in float64, and then to
float32, which gives the bits of one rounding (Boldo and Melquiond, "Emulation of a FMA and correctly rounded sums:
proved algorithms using rounding to odd", IEEE Transactions on Computers, 2008).
"""

# Triton infers the types of kernels.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl

_ON_AMD = tl.constexpr(torch.version.hip is not None)


@triton.jit
def _two_sum(x, y):
    """Return the float64 x + y, rounded, and its error, exact (Knuth)."""
    total = x + y
    other = total - x
    return total, (x - (total - other)) + (y - other)


@triton.jit
def _to_odd(total, error):
    """Return total + error rounded to odd: a float64 that is not exact becomes the neighbour whose last bit is set."""
    bits = total.to(tl.int64, bitcast=True)
    # Bits grow with the magnitude. Neither comparison holds for an error of 0 or NaN.
    inexact, grows = (error < 0) | (error > 0), (error > 0) == (total > 0)
    step = tl.where(inexact & ((bits & 1) == 0), tl.where(grows, 1, -1), 0)
    return (bits + step).to(tl.float64, bitcast=True)


@triton.jit
def _wide_part(half, E: tl.constexpr, SMALL: tl.constexpr):
    """Return finite elements in float64, 0 for NaN and Inf; of E5M2 the small ones or the large ones, 0 for others."""
    value = tl.where(half - half == 0, half.to(tl.float32), 0.0)
    if E.max_exponent + 1 - E.unit_exponent > 24:
        LARGE: tl.constexpr = 2.0 ** (E.unit_exponent + 12 + E.bias - 15)
        value = tl.where((tl.abs(value) < LARGE) == SMALL, value, 0.0)
    value = value.to(tl.float64)
    # On NVIDIA's GPUs Triton chooses how a product reads float64 by the bytes of the codes, and finds no way. A sum of
    # one number hides the codes from it.
    return value if _ON_AMD else tl.sum(value[:, :, None], 2)


@triton.jit
def _wide_dot(
    a_even, a_odd, b_even, b_odd, dot, A: tl.constexpr, B: tl.constexpr, SMALL_A: tl.constexpr, SMALL_B: tl.constexpr
):  # fmt: skip
    """Return a float64 dot plus that of the named parts of a block, exact."""
    dot = tl.dot(_wide_part(a_even, A, SMALL_A), _wide_part(b_even, B, SMALL_B), dot, out_dtype=tl.float64)
    return tl.dot(_wide_part(a_odd, A, SMALL_A), _wide_part(b_odd, B, SMALL_B), dot, out_dtype=tl.float64)


@triton.jit
def add_wide(acc, special, a_even, a_odd, b_even, b_odd, power, A: tl.constexpr, B: tl.constexpr):
    """Return acc plus the dots of a block times powers of two, the real sum rounded once to float32.

    Two blocks of E4M3 have dots of 41 bits. Large and small elements of E5M2 are multiplied apart: dots of two large
    parts have 49 bits, the sum of the other dots 50.

    Args:
        acc: float32.
        special: what is added where it is infinite or NaN; an infinite `acc` stays otherwise.
        a_even: elements of A with even index, float16 [rows, K / 2]; so are the others.
        a_odd: of A, odd index.
        b_even: of B, [K / 2, columns].
        b_odd: of B, odd index.
        power: float64.
        A: the element format of A.
        B: that of B.
    """
    SPLIT_A: tl.constexpr = A.max_exponent + 1 - A.unit_exponent > 24
    SPLIT_B: tl.constexpr = B.max_exponent + 1 - B.unit_exponent > 24
    wide = acc.to(tl.float64)
    none = tl.zeros_like(wide)
    total = _wide_dot(a_even, a_odd, b_even, b_odd, none, A, B, False, False) * power
    if SPLIT_A or SPLIT_B:
        low = none
        if SPLIT_A:
            low = _wide_dot(a_even, a_odd, b_even, b_odd, low, A, B, True, False)
        if SPLIT_B:
            low = _wide_dot(a_even, a_odd, b_even, b_odd, low, A, B, False, True)
        if SPLIT_A and SPLIT_B:
            low = _wide_dot(a_even, a_odd, b_even, b_odd, low, A, B, True, True)
        high, low = _two_sum(total, low * power)
        total, error = _two_sum(wide, high)
        rest, lost = _two_sum(error, low)
        total, error = _two_sum(total, _to_odd(rest, lost))
    else:
        total, error = _two_sum(wide, total)
    finite = tl.where(acc - acc == 0, _to_odd(total, error).to(tl.float32), acc)
    return tl.where(special - special == 0, finite, acc + special)
