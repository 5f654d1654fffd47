"""Rounding to the E2M1 grid and packing, eight elements to a word, without a comparison per element.

RNE lets the adder round. Between 2^23 - 2 and 2^23 float32 has steps of 1/2, and above 2^23 steps of 1; so the bits of
v + (2^23 - 2) count the grid's points 0, .5, 1, 1.5, 2, 3, 4 in order, with ties to even codes, and those of
v / 2 + 2^23 count 4, 6 and one above with the same bits. The smaller of both is the code, less 4.

SR, RNA and RTZ add an integer to the position between grid points. The bits of v * 2^-126 are that position: the code
above bit 22 and the fraction of the gap below, because E2M1's subnormals then are float32's.

Codes gather in a word by funnel shifts, and so do signs: the top nibble of every element, of which one bit stays.
"""

# Triton infers the types of kernels.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from mxref_triton.lane.random import random_fraction
from mxref_triton.lane.registers import bits_of, float_of

_BELOW = tl.constexpr(2.0**23 - 2.0)
_ABOVE = tl.constexpr(2.0**23)
_TO_SUBNORMAL = tl.constexpr(2.0**-126)
_TO_INTEGER = tl.constexpr(2.0**23)


@triton.jit
def _to_even(v):
    """Return codes less 4 in the low nibble, uint32; 8 - 4 for v > 7."""
    upto_four = bits_of(v + _BELOW)
    from_four = bits_of(tl.fma(v, 0.5, _ABOVE))
    return tl.minimum(upto_four, from_four)


@triton.jit
def _by_fraction(v, r):
    """Return codes from magnitudes and from integers r of 22 bits that are added to the fraction, uint32."""
    v = float_of(tl.minimum(bits_of(v), 0x40C00000))  # 6, also for a NaN, whose block is overwritten later
    # The product with 2^-126 may round a small v up; the conversion truncates, and is not smaller from 1 on.
    position = tl.minimum(bits_of(v * _TO_SUBNORMAL), (v * _TO_INTEGER).to(tl.int32).to(tl.uint32))
    return (position + r) >> 22


@triton.jit
def encode_word(values, factor, keep, words, P: tl.constexpr):
    """Return eight elements as packed codes, uint32 [B].

    Args:
        values: tuple of eight float32 [B].
        factor: 2^-e, times a Hadamard norm that was not applied yet, float32 [B].
        keep: all bits set for a block that is finite, none for one that is not, uint32 [B].
        words: random words for SR, else empty.
        P: the treatment.
    """
    BITS: tl.constexpr = P.random_bits
    CONSTANT: tl.constexpr = P.constant
    PRESCALE: tl.constexpr = P.prescale
    codes = tl.zeros_like(bits_of(factor))
    signs = codes
    for i in tl.static_range(8):
        v = tl.abs(values[i]) * factor
        if PRESCALE != 1.0:
            v = v * PRESCALE
        if BITS:
            code = _by_fraction(v, random_fraction(words, i, BITS))
        elif CONSTANT < 0:
            code = _to_even(v)
        else:
            code = _by_fraction(v, CONSTANT)
        codes = (codes >> 4) | (code << 28)
        signs = (signs << 4) | (bits_of(values[7 - i]) >> 28)
    if CONSTANT < 0:
        if P.saturates:
            codes = codes - ((codes & ((codes >> 1) ^ 0x44444444) & 0x44444444) >> 2)
        less = 0x44444444
    else:
        less = 0
    return (((codes & 0x77777777) | (signs & 0x88888888)) ^ less) & keep


@triton.jit
def decode_element(word, i: tl.constexpr, scale):
    """Return the bits of element i of a word times its scale, uint32 [B]; the sign of a zero is kept."""
    if i < 6:
        magnitude = (word << (22 - 4 * i)) & 0x01C00000
    else:
        magnitude = (word >> (4 * i - 22)) & 0x01C00000
    value = float_of(magnitude) * 8.507059173023462e37 * scale  # 2^126, which undoes the subnormals
    return bits_of(value) | ((word << (28 - 4 * i)) & 0x80000000)
