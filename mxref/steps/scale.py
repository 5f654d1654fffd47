"""Shared scales: the four rules that choose an E8M0 code from a block's amax, and the codes' values.

Exponents come from the integer bit pattern alone. A floating-point log2 is wrong just below powers of
two (for 6,850 of the 32,639 positive bfloat16 values, say), which is how implementations of one rule
come to store different bytes.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Any

import numpy as np
from numpy.typing import NDArray

from mxref.formats import E8M0, ElementFormat

MANTISSA_BITS = 23
MANTISSA_MASK = 0x7FFFFF
MAGNITUDE_MASK = 0x7FFFFFFF
INFINITY_BITS = 0x7F800000


class ScaleRule(StrEnum):
    """How the shared scale X is chosen from a = amax, for elements up to M with the largest power of two 2^emax.

    In brackets the range of a / X that follows for E2M1, where M = 6 and 2^emax = 4.
    """

    FLOOR = "floor"
    """Largest power of two <= a, over 2^emax (OCP MX v1.0, 6.3): [4, 8)."""
    CEIL = "ceil"
    """Smallest power of two >= a, over 2^emax: (2, 4]."""
    RCEIL = "rceil"
    """Smallest power of two >= a / M, so that nothing saturates: (3, 6]."""
    EVEN = "even"
    """FLOOR of a rounded to the element's own precision, one mantissa bit for E2M1: [3.5, 7)."""


def bump_above(rule: ScaleRule, element: ElementFormat) -> int:
    """Return the bound that a rule sets to the 23-bit mantissa of amax: above it, the exponent is FLOOR's plus one.

    The only table of the rules; kernels take the bound from here.

    Implements: scale.rule.floor, scale.rule.ceil, scale.rule.rceil, scale.rule.even
    """
    if rule is ScaleRule.CEIL:
        return 0
    if rule is ScaleRule.RCEIL:
        fraction = np.ldexp(element.max_value, -element.max_exponent) - 1  # of the largest magnitude, exact
        return int(np.ldexp(fraction, MANTISSA_BITS))
    if rule is ScaleRule.EVEN:
        half_a_step = 1 << (MANTISSA_BITS - 1 - element.mantissa_bits)
        return MANTISSA_MASK - half_a_step
    return MANTISSA_MASK


def scale_code(amax_bits: NDArray[np.uint32], rule: ScaleRule, element: ElementFormat) -> NDArray[np.uint8]:
    """Return the E8M0 code of the shared scale for each block's amax.

    Args:
        amax_bits: float32 bits of amax, sign bit clear, uint32 of any shape; finite (below 0x7F800000).
        rule: the scale rule.
        element: the format of the block's elements.

    Returns:
        E8M0 codes, uint8, same shape; never 254 or 255.

    Implements: scale.rule.floor, scale.rule.ceil, scale.rule.rceil, scale.rule.even, scale.clamp
    """
    u = amax_bits.astype(np.int32)
    bump = (u & MANTISSA_MASK) > bump_above(rule, element)
    exponent = (u >> MANTISSA_BITS) - (127 + element.max_exponent) + bump
    clamped = np.minimum(np.maximum(exponent, E8M0.min_exponent), E8M0.max_exponent)
    code: NDArray[np.uint8] = (clamped + E8M0.bias).astype(np.uint8)
    return code


def scale_exponent(code: NDArray[np.uint8]) -> NDArray[np.int32]:
    """Return the exponents e with X = 2^e, int32; meaningless for the NaN code 255.

    Implements: formats.e8m0
    """
    return code.astype(np.int32) - E8M0.bias


def scale_value(code: NDArray[np.uint8]) -> NDArray[np.float64]:
    """Return the values of E8M0 codes, float64, exact; code 255 is NaN, code 0 is 2^-127 and not 0.

    Implements: formats.e8m0
    """
    value = np.ldexp(1.0, scale_exponent(code))
    out: NDArray[np.float64] = np.where(code == E8M0.nan_code, np.nan, value)
    return out


def magnitude_bits(x: NDArray[np.float32]) -> NDArray[np.uint32]:
    """Return the float32 bits of |x|, uint32; ordered as the magnitudes are, with Inf and NaN on top.

    Implements: scale.amax
    """
    bits: NDArray[Any] = x.view(np.uint32)
    return bits & np.uint32(MAGNITUDE_MASK)
