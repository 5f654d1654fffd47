"""Elements of any format: four codes to a quad, and back.

The element format E is a constant of the kernel, an `ElementFormat`. A quad is a word whose lowest bits are four codes,
one after the other: 16 bits for codes of 4 bits, 24 for 6, 32 for 8. E2M1 has arithmetic of its own in `rounding`,
which is faster.
"""

# Triton infers the types of kernels; their tuples grow.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="assignment"

from __future__ import annotations

import triton
import triton.language as tl

from mxref.formats import CANONICAL_NAN, Negatives, Specials
from mxref_triton.lane.grid import by_fraction, to_even
from mxref_triton.lane.random import random_fraction
from mxref_triton.lane.registers import bits_of, float_of

_EXPONENT = tl.constexpr(0x7F800000)
_NAN = tl.constexpr(CANONICAL_NAN)
_IEEE = tl.constexpr(Specials.IEEE.value)
_NAN_ONLY = tl.constexpr(Specials.NAN.value)
_TWOS_COMPLEMENT = tl.constexpr(Negatives.TWOS_COMPLEMENT.value)


@triton.jit
def _with_sign(code, value, E: tl.constexpr):
    """Return codes of magnitudes with the signs of values, uint32."""
    if E.negatives == _TWOS_COMPLEMENT:
        negative = bits_of(value) >> 31
        return ((code ^ (0 - negative)) + negative) & (2 * E.sign - 1)
    else:
        return code | ((bits_of(value) >> (32 - E.bits)) & E.sign)


@triton.jit
def encode_quads(values, factor, keep, words, P: tl.constexpr):
    """Return eight elements as two quads, a tuple of uint32 [B].

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
            value = values[4 * half + i]
            v = tl.abs(value) * factor
            if PRESCALE != 1.0:
                v = v * PRESCALE
            if BITS:
                code = by_fraction(v, random_fraction(words, 4 * half + i, BITS), E)
            elif CONSTANT < 0:
                code = to_even(v, E)
                if P.saturates:
                    code = tl.minimum(code, E.max_code)
            else:
                code = by_fraction(v, CONSTANT, E)
            word = word | (_with_sign(code, value, E) << (E.bits * i))
        out = out + (word & keep,)
    return out


@triton.jit
def words_of_quads(quads, E: tl.constexpr):
    """Return a tuple of quads as the words of 32 bits that are stored: a multiple of two quads, of four for 6 bits."""
    out = ()
    if E.bits == 8:
        out = quads
    elif E.bits == 4:
        for i in tl.static_range(0, len(quads), 2):
            out = out + (quads[i] | (quads[i + 1] << 16),)
    else:
        for i in tl.static_range(0, len(quads), 4):
            out = out + (
                quads[i] | (quads[i + 1] << 24),
                (quads[i + 1] >> 8) | (quads[i + 2] << 16),
                (quads[i + 2] >> 16) | (quads[i + 3] << 8),
            )
    return out


@triton.jit
def load_quads(codes, first, i, mask, E: tl.constexpr):
    """Return quads from memory, uint32 [B].

    Args:
        codes: pointer to packed codes, int32 if E has 8 bits, int16 if 4, uint8 if 6.
        first: number of a quad, a scalar.
        i: numbers of the quads, counted from there.
        mask: of those that exist.
        E: the element format.
    """
    if E.bits == 8:
        return tl.load(codes + first + i, mask=mask, other=0).to(tl.uint32, bitcast=True)
    elif E.bits == 4:
        return tl.load(codes + first + i, mask=mask, other=0).to(tl.uint16, bitcast=True).to(tl.uint32)
    else:
        at = codes + 3 * first + 3 * i
        quad = tl.load(at, mask=mask, other=0).to(tl.uint32)
        quad = quad | (tl.load(at + 1, mask=mask, other=0).to(tl.uint32) << 8)
        return quad | (tl.load(at + 2, mask=mask, other=0).to(tl.uint32) << 16)


@triton.jit
def _magnitude(quad, i: tl.constexpr, E: tl.constexpr):
    """Return the magnitude of element i of a quad, float32 [B], and its sign as the top bit of uint32."""
    M: tl.constexpr = E.mantissa_bits
    NORMAL: tl.constexpr = 2.0 ** (127 - E.bias)
    UNIT: tl.constexpr = 2.0**E.unit_exponent
    SIGN: tl.constexpr = E.sign
    code = (quad >> (E.bits * i)) & (2 * SIGN - 1)
    sign = (code & SIGN) << (32 - E.bits)
    if E.negatives == _TWOS_COMPLEMENT:
        negative = sign >> 31
        # The highest bit stays set in the lowest code alone, whose magnitude it is.
        return (((code ^ (0 - negative)) + negative) & (2 * SIGN - 1)).to(tl.float32) * UNIT, sign
    else:
        magnitude = code & (SIGN - 1)
        value = float_of(magnitude << (23 - M)) * NORMAL
        if E.specials == _IEEE:
            special = tl.where(magnitude == E.max_code + 1, _EXPONENT, _NAN)
        else:
            special = tl.full(magnitude.shape, _NAN, tl.uint32)
        return float_of(tl.where(magnitude > E.max_code, special.to(tl.uint32), bits_of(value))), sign


@triton.jit
def decode_code(quad, i: tl.constexpr, scale, tensor, E: tl.constexpr):
    """Return the float32 bits of element i of a quad times its scales, uint32 [B]; every NaN is the canonical one.

    Args:
        quad: four codes.
        i: 0 to 3.
        scale: of the block, or NaN, float32 [B].
        tensor: the scale of the tensor, or None.
        E: the element format.
    """
    value, sign = _magnitude(quad, i, E)
    product = value * scale  # without a rounding where a scale of the tensor follows
    if tensor is not None:
        product = product * tensor
    return tl.where(product != product, _NAN, bits_of(product) | sign).to(tl.uint32)


@triton.jit
def to_half(bits):
    """Return float32 bits rounded to bfloat16, to nearest even, in the lower half of uint32."""
    return tl.where((bits & 0x7FFFFFFF) > _EXPONENT, bits, bits + 0x7FFF + ((bits >> 16) & 1)) >> 16


@triton.jit
def decode_pairs(quads, scale, tensor, E: tl.constexpr):
    """Return the eight elements of two quads as four words of two bfloat16 values, a tuple of uint32 [B]."""
    out = ()
    for k in tl.static_range(2):
        for i in tl.static_range(2):
            low = to_half(decode_code(quads[k], 2 * i, scale, tensor, E))
            high = to_half(decode_code(quads[k], 2 * i + 1, scale, tensor, E))
            out = out + (low | (high << 16),)
    return out


@triton.jit
def byte_of_pair(pair, E: tl.constexpr):
    """Return the byte of a packed row in which the codes 2 * pair and 2 * pair + 1 begin."""
    if E.bits == 8:
        return 2 * pair
    else:
        return pair if E.bits == 4 else 3 * pair >> 1


@triton.jit
def load_codes(codes, pair, mask, E: tl.constexpr):
    """Return the codes with even and with odd index from memory.

    Args:
        codes: uint8 pointers to the bytes that `byte_of_pair` numbers.
        pair: numbers of the pairs.
        mask: of those that exist; codes of others are 0.
        E: the element format.
    """
    if E.bits == 8:
        return tl.load(codes, mask, 0), tl.load(codes + 1, mask, 0)
    elif E.bits == 4:
        both = tl.load(codes, mask, 0)
        return both & 15, both >> 4
    else:
        both = tl.load(codes, mask, 0).to(tl.int32) | (tl.load(codes + 1, mask, 0).to(tl.int32) << 8)
        both = both >> (4 * (pair & 1))  # an odd pair begins in the middle of a byte
        return both & 63, (both >> 6) & 63


@triton.jit
def half_element(codes, E: tl.constexpr):
    """Return elements as float16, divided by 2^(15 - bias): a code is the top of a float16 that has their exponent.

    Args:
        codes: integers of any shape, one code in each, of an element format of up to 8 bits.
        E: the element format; NaN and Inf are float16's. The exponent field of an integer is 0.
    """
    M: tl.constexpr = E.mantissa_bits
    MASK: tl.constexpr = E.sign - 1
    if E.negatives == _TWOS_COMPLEMENT:
        number = ((codes & (2 * E.sign - 1)).to(tl.int16) ^ E.sign) - E.sign
        magnitude = tl.abs(number) << (10 - M)
    else:
        magnitude = (codes & MASK).to(tl.int16) << (10 - M)
    if E.specials == _NAN_ONLY:
        magnitude = tl.where((codes & MASK) == MASK, 0x7E00, magnitude).to(tl.int16)
    sign = (codes & E.sign).to(tl.int16) << (16 - E.bits)
    return (magnitude | sign).to(tl.float16, bitcast=True)
