"""Elements of 8 bits: rounding to their grid, four codes to a word, and back.

The element format is a constant of the kernel. E is an `ElementFormat`: M mantissa bits, a bias, and codes that grow
with the magnitudes they stand for.

RNE lets the adder round. A power of two that is 2^23 steps of the grid at v is added to v; float32 has steps of the
same size there, so the sum's bits less those of the power count the steps in v, with ties to even ones. The grid has
one step below the smallest normal number, and there as well as above the count completes the exponent to a code.

SR, RNA and RTZ add an integer to the position between grid points, in units of 2^-22 of a gap. The bits of a normal v,
less the difference of the biases, are that position; a v below the smallest normal number is one product away from it.
"""

# Triton infers the types of kernels; their tuples grow.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="assignment"

from __future__ import annotations

import triton
import triton.language as tl

from mxref.formats import CANONICAL_NAN, Specials
from mxref_triton.lane.random import random_fraction
from mxref_triton.lane.registers import bits_of, float_of

_EXPONENT = tl.constexpr(0x7F800000)
_NAN = tl.constexpr(CANONICAL_NAN)
_IEEE = tl.constexpr(Specials.IEEE.value)
_NAN_ONLY = tl.constexpr(Specials.NAN.value)


@triton.jit
def _to_even(v, E: tl.constexpr):
    """Return codes rounded to nearest even, uint32; above the largest where v is."""
    M: tl.constexpr = E.mantissa_bits
    SMALLEST: tl.constexpr = 128 - E.bias
    exponent = tl.maximum(bits_of(v) & _EXPONENT, SMALLEST << 23)
    power = exponent + ((23 - M) << 23)
    steps = bits_of(v + float_of(power)) - power
    return steps + (exponent >> (23 - M)) - (SMALLEST << M)


@triton.jit
def _by_fraction(v, r, E: tl.constexpr):
    """Return codes from magnitudes and from integers r of 22 bits that are added to the fraction, uint32."""
    M: tl.constexpr = E.mantissa_bits
    SMALLEST: tl.constexpr = (128 - E.bias) << 23
    LARGEST: tl.constexpr = (E.max_code << (23 - M)) + ((127 - E.bias) << 23)
    STEPS: tl.constexpr = 2.0 ** (22 - E.unit_exponent)
    bits = tl.minimum(bits_of(v), LARGEST)  # also for a NaN, whose block is overwritten later
    below = (float_of(tl.minimum(bits, SMALLEST)) * STEPS).to(tl.int32).to(tl.uint32)
    above = (bits - ((127 - E.bias) << 23)) << (M - 1)
    return (tl.where(bits < SMALLEST, below, above) + r) >> 22


@triton.jit
def encode_bytes(values, factor, keep, words, P: tl.constexpr):
    """Return eight elements as two words of four codes each, a tuple of uint32 [B].

    Args:
        values: tuple of eight float32 [B].
        factor: 2^-e, times a Hadamard norm that was not applied yet, float32 [B].
        keep: all bits set for a block that is finite, none for one that is not, uint32 [B].
        words: random words for SR, else empty.
        P: the treatment.
    """
    E: tl.constexpr = P.element
    BITS: tl.constexpr = P.random_bits
    CONSTANT: tl.constexpr = P.constant
    PRESCALE: tl.constexpr = P.prescale
    out = ()
    for half in tl.static_range(2):
        word = tl.zeros_like(keep)
        for i in tl.static_range(4):
            v = tl.abs(values[4 * half + i]) * factor
            if PRESCALE != 1.0:
                v = v * PRESCALE
            if BITS:
                code = _by_fraction(v, random_fraction(words, 4 * half + i, BITS), E)
            elif CONSTANT < 0:
                code = _to_even(v, E)
                if P.saturates:
                    code = tl.minimum(code, E.max_code)
            else:
                code = _by_fraction(v, CONSTANT, E)
            sign = (bits_of(values[4 * half + i]) >> 24) & 0x80
            word = word | ((code | sign) << (8 * i))
        out = out + (word & keep,)
    return out


@triton.jit
def decode_byte(word, i: tl.constexpr, scale, E: tl.constexpr):
    """Return the float32 bits of element i of a word times its scale, uint32 [B]; every NaN is the canonical one.

    Args:
        word: four codes.
        i: 0 to 3.
        scale: a power of two, or NaN, float32 [B].
        E: the element format.
    """
    M: tl.constexpr = E.mantissa_bits
    NORMAL: tl.constexpr = 2.0 ** (127 - E.bias)
    code = (word >> (8 * i)) & 0xFF
    magnitude = code & 0x7F
    value = float_of(magnitude << (23 - M)) * NORMAL
    if E.specials == _IEEE:
        special = tl.where(magnitude == E.max_code + 1, _EXPONENT, _NAN)
    else:
        special = tl.full(magnitude.shape, _NAN, tl.uint32)
    value = float_of(tl.where(magnitude > E.max_code, special.to(tl.uint32), bits_of(value)))
    product = value * scale
    return tl.where(product != product, _NAN, bits_of(product) | ((code & 0x80) << 24)).to(tl.uint32)


@triton.jit
def to_half(bits):
    """Return float32 bits rounded to bfloat16, to nearest even, in the lower half of uint32."""
    return tl.where((bits & 0x7FFFFFFF) > _EXPONENT, bits, bits + 0x7FFF + ((bits >> 16) & 1)) >> 16


@triton.jit
def decode_pairs(words, scale, E: tl.constexpr):
    """Return the eight elements of two words as four words of two bfloat16 values, tuples of uint32 [B]."""
    out = ()
    for k in tl.static_range(2):
        for i in tl.static_range(2):
            low = to_half(decode_byte(words[k], 2 * i, scale, E))
            high = to_half(decode_byte(words[k], 2 * i + 1, scale, E))
            out = out + (low | (high << 16),)
    return out


@triton.jit
def half_element(codes, E: tl.constexpr):
    """Return elements as float16, divided by 2^(15 - bias): a code is the top of a float16 that has their exponent.

    Args:
        codes: uint8 of any shape, one code in each, of an element format of up to 8 bits.
        E: the element format; NaN and Inf are float16's.
    """
    M: tl.constexpr = E.mantissa_bits
    MASK: tl.constexpr = E.sign - 1
    magnitude = (codes & MASK).to(tl.int16) << (10 - M)
    if E.specials == _NAN_ONLY:
        magnitude = tl.where((codes & MASK) == MASK, 0x7E00, magnitude).to(tl.int16)
    sign = (codes & E.sign).to(tl.int16) << (16 - E.bits)
    return (magnitude | sign).to(tl.float16, bitcast=True)
