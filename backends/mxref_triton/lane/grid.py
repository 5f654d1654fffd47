"""Rounding to the grid of any element format, or of a scale format with a mantissa.

The format is a constant of the kernel: M mantissa bits, a bias, and codes that grow with the magnitudes they stand for.
E2M1 has arithmetic of its own in `rounding`, which is faster.

RNE lets the adder round. A power of two that is 2^23 steps of the grid at v is added to v; float32 has steps of the
same size there, so the sum's bits less those of the power count the steps in v, with ties to even ones. The grid has
one step below the smallest normal number, and there as well as above the count completes the exponent to a code.

SR, RNA and RTZ add an integer to the position between grid points, in units of 2^-22 of a gap. The bits of a normal v,
less the difference of the biases, are that position; a v below the smallest normal number is one product away from it.
"""

# Triton infers the types of kernels.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from mxref_triton.lane.registers import bits_of, float_of

_EXPONENT = tl.constexpr(0x7F800000)


@triton.jit
def to_even(v, F: tl.constexpr):
    """Return codes of format F rounded to nearest even, uint32; above the largest where v is."""
    M: tl.constexpr = F.mantissa_bits
    SMALLEST: tl.constexpr = 128 - F.bias
    exponent = tl.maximum(bits_of(v) & _EXPONENT, SMALLEST << 23)
    power = exponent + ((23 - M) << 23)
    steps = bits_of(v + float_of(power)) - power
    return steps + (exponent >> (23 - M)) - (SMALLEST << M)


@triton.jit
def by_fraction(v, r, F: tl.constexpr):
    """Return codes from magnitudes and from integers r of 22 bits that are added to the fraction, uint32."""
    M: tl.constexpr = F.mantissa_bits
    P: tl.constexpr = F.precision
    SMALLEST: tl.constexpr = (128 - F.bias) << 23
    LARGEST: tl.constexpr = ((127 + F.max_exponent) << 23) + ((F.max_code & ((1 << P) - 1)) << (23 - P))
    STEPS: tl.constexpr = 2.0 ** (22 - F.unit_exponent)
    bits = tl.minimum(bits_of(v), LARGEST)  # also for a NaN, whose block is overwritten later
    below = (float_of(tl.minimum(bits, SMALLEST)) * STEPS).to(tl.int32).to(tl.uint32)
    above = (bits - ((127 - F.bias) << 23)) << (M - 1)
    return (tl.where(bits < SMALLEST, below, above) + r) >> 22
