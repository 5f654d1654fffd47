"""Quotients by scales with a mantissa, without a division: on the same side of every step of a grid as the real ones.

A divisor is an integer of few bits, a power of two and the tensor's scale, whose product has up to 31 bits: it is held
exactly as the sum of two float32, `high` and `low`, times a power of two. The product with an approximate reciprocal is
a few units in the last place from the quotient. A fused multiply-add gives what the quotient lacks, and a second
product with the reciprocal corrects it: it is one of the two float32 beside the real quotient then, or the quotient
itself. What is left says which, exactly: `quotient` takes it as the sum of fused multiply-adds, of which only the last
may round, and no rounding changes a sign.
"""

# Triton infers the types of kernels.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from mxref_triton.lane.registers import bits_of, float_of, fused

_MANTISSA = tl.constexpr(0x7FFFFF)
_ONE = tl.constexpr(0x3F800000)
_LEAST = tl.constexpr(-100)
"""Exponent of the smallest power of two that is multiplied with the dividend; a smaller rest stays in the divisor."""
_SLACK = tl.constexpr(1 + 2.0**-10)
"""Where dividends are cut off, over the largest quotient that is needed: no grid rounds it beyond its largest point."""


@triton.jit
def _power(exponent):
    """Return 2^exponent for exponents of normal float32."""
    return float_of((exponent + 127).to(tl.uint32) << 23)


@triton.jit
def _reciprocal(one):
    """Return 1 / one for numbers from 1 to 2, but for a few units in the last place."""
    found = 24 / 17 - one * (8 / 17)  # errs by 1/17 at most
    for _ in tl.static_range(3):
        found = found + (1.0 - one * found) * found
    return found


@triton.jit
def divisor(significand, exponent, t, largest: tl.constexpr):
    """Return what `quotient` needs to divide by significand * 2^exponent * t.

    Args:
        significand: integers from 0 to 127, int32; quotients by 0 are 0.
        exponent: int32.
        t: a positive float32, subnormal ones included.
        largest: the largest quotient that is needed.

    Returns:
        The power of two to multiply the dividend with, 0 for a divisor of 0; the divisor times it in two parts; the
        reciprocal of that; and where to cut the dividend off, all float32.
    """
    field = tl.maximum(bits_of(t) >> 23, 1)
    whole = (bits_of(t) & _MANTISSA) + tl.where(bits_of(t) > _MANTISSA, _MANTISSA + 1, 0).to(tl.uint32)
    product = significand * whole.to(tl.int32)  # 31 bits
    some = tl.maximum(product, 1)
    near = some.to(tl.float32)
    rest = (some - near.to(tl.int32)).to(tl.float32)
    one = float_of((bits_of(near) & _MANTISSA) | _ONE)
    above = (bits_of(near) >> 23).to(tl.int32) - 127
    power = exponent + field.to(tl.int32) - 150 + above
    least = tl.maximum(power, _LEAST)
    unit = _power(power - least)
    high = one * unit
    low = rest * _power(-above) * unit
    factor = tl.where(product == 0, 0.0, _power(-least))
    return factor, high, low, _reciprocal(one) * _power(least - power), high * (largest * _SLACK)


@triton.jit
def quotient(magnitude, by, STICKY: tl.constexpr):
    """Return magnitude / divisor rounded toward zero, with its last bit set if STICKY and it was not exact.

    Args:
        magnitude: float32 [B], not negative.
        by: from `divisor`.
        STICKY: for a rounding to nearest that follows.
    """
    factor, high, low, reciprocal, top = by
    x = tl.minimum(magnitude * factor, top)
    near = x * reciprocal
    left = fused(-near, low, fused(-near, high, x))
    near = fused(left, reciprocal, near)
    left = fused(-near, low, fused(-near, high, x))
    down = bits_of(near) - (bits_of(left) >> 31)
    if STICKY:
        down = down | tl.where(left != 0, 1, 0).to(tl.uint32)
    return float_of(down)
