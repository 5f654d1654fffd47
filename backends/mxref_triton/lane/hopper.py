"""RNE of two elements per instruction, by the packed bfloat16 arithmetic of NVIDIA GPUs from Hopper on.

A word holds two bfloat16 elements, as they are read or as `pairs_of` makes them. Between 126 and 128 bfloat16 has
steps of 1/2, between 128 and 256 steps of 1, so the adder rounds as in `rounding`: the bits of v + 126 count the
grid's points up to 4, those of v / 2 + 128 the ones from 4 on, and the smaller of both is `_FIRST` and the code.
Division by the scale is part of either: a product with a power of two is exact inside a fused multiply-add,
subnormals included.

Codes gather by shifts and sums, in which `_FIRST` leaves constants, signs by permutes of bytes.
"""

# Triton infers the types of kernels; their tuples grow.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="assignment"

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from mxref_triton.lane.registers import bits_of
from mxref_triton.lane.scale import scaling

_CAPABILITY = (9, 0)

_FIRST = 0x42FC
"""Bits of 126."""
_BYTES = _FIRST + (_FIRST << 8)
"""What two sums of `_FIRST` leave in four bytes: the lower half in it, the rest in the upper half."""
_LOW = _BYTES & 0xFFFF
_HIGH = (_BYTES + (_BYTES >> 16)) & 0xFFFF
# Codes up to 7 carry nothing out of a half.
assert max(_LOW, _HIGH) + 0x0707 < 1 << 16


def _in_word(even: int, odd: int) -> int:
    """Return the constant that remains in a word for these bytes of its even and odd elements."""
    return (even * 0x10001 + 16 * odd * 0x10001) & 0xFFFFFFFF


_BELOW = tl.constexpr(_FIRST * 0x10001)
_ABOVE = tl.constexpr((_FIRST + 4) * 0x10001)
_LAST = tl.constexpr((_FIRST + 7) * 0x10001)
_ROW_EXCESS = tl.constexpr(_in_word(_LOW, _HIGH))
_LOW_EXCESS = tl.constexpr(_in_word(_LOW, _LOW))
_HIGH_EXCESS = tl.constexpr(_in_word(_HIGH, _HIGH))

_LARGER = tl.constexpr("max.u16x2 $0, $1, $2;")
_SMALLER = tl.constexpr("min.u16x2 $0, $1, $2;")
_FUSED = tl.constexpr("fma.rn.bf16x2 $0, $1, $2, $3;")
_HALF = tl.constexpr("mul.rn.bf16x2 $0, $1, $2;")
_LOW_HALVES = tl.constexpr("prmt.b32 $0, $1, $2, 0x5410;")
_HIGH_HALVES = tl.constexpr("prmt.b32 $0, $1, $2, 0x7632;")
_TOP_BITS = tl.constexpr("prmt.b32 $0, $1, $2, 0xFBD9;")
"""The top bits of both lower halves, each as a byte of eight, then those of both upper halves."""


@cache
def packs_bfloat16(device: torch.device) -> bool:
    """Return whether a device of this torch has packed bfloat16 arithmetic."""
    return (
        torch.version.hip is None
        and device.type == "cuda"
        and torch.cuda.get_device_capability(device) >= _CAPABILITY
    )


@triton.jit
def _of_two(TEXT: tl.constexpr, a, b):
    """Return the result of an instruction on two words."""
    return tl.inline_asm_elementwise(TEXT, "=r,r,r", [a, b], dtype=tl.uint32, is_pure=True, pack=1)


@triton.jit
def _all_of(word: tl.constexpr, like):
    """Return a constant as a tensor like another."""
    return tl.full(like.shape, word, tl.uint32)


@triton.jit
def _fused(a, b, c: tl.constexpr):
    """Return a * b + c of two bfloat16 in each word, rounded once."""
    return tl.inline_asm_elementwise(
        _FUSED, "=r,r,r,r", [a, b, _all_of(c, a)], dtype=tl.uint32, is_pure=True, pack=1
    )


@triton.jit
def pairs_of(values, COUNT: tl.constexpr):
    """Return COUNT float32 as words of two bfloat16 without signs, and as words whose upper bits are their signs.

    Bits beyond bfloat16's precision set its lowest bit. This is rounding to odd. Rounding the result to nearest gives
    the same as rounding the float32, because bfloat16 keeps more than two bits below any rounding point.
    """
    magnitudes = ()
    signed = ()
    for i in tl.static_range(0, COUNT, 2):
        low, high = bits_of(values[i]), bits_of(values[i + 1])
        tops = _of_two(_HIGH_HALVES, low, high)
        rest = _of_two(_LOW_HALVES, low, high)
        lost = _of_two(_SMALLER, rest, _all_of(0x00010001, rest))
        magnitudes = magnitudes + ((tops | lost) & 0x7FFF7FFF,)
        signed = signed + (tops,)
    return magnitudes, signed


@triton.jit
def _without_signs(words, COUNT: tl.constexpr):
    out = ()
    for i in tl.static_range(COUNT):
        out = out + (words[i] & 0x7FFF7FFF,)
    return out


@triton.jit
def larger_halves(words):
    """Return the largest pattern of each half over a tuple of words; a NaN is larger than any number."""
    out = words[0]
    for i in tl.static_range(1, len(words)):
        out = _of_two(_LARGER, out, words[i])
    return out


@triton.jit
def amax_bits_of_pairs(magnitudes):
    """Return float32 bits of the largest magnitude in a tuple of words, uint32 [B].

    Rounding to odd keeps an amax on its side of the scale rule's bound: a treatment is packed only then.
    """
    both = larger_halves(magnitudes)
    return tl.maximum(both << 16, both & 0xFFFF0000)


@triton.jit
def factors(low, high):
    """Return two powers of two, float32, as a word of bfloat16, and a word of their halves."""
    factor = _of_two(_HIGH_HALVES, bits_of(low), bits_of(high))
    return factor, _of_two(_HALF, factor, _all_of(0x3F003F00, factor))


@triton.jit
def _nearest(magnitude, factor):
    """Return `_FIRST` and the code in each half of a word; 7 for a NaN, which must not carry into the other half.

    Args:
        magnitude: two bfloat16 without signs.
        factor: from `factors`: what they are multiplied with.
    """
    upto_four = _fused(magnitude, factor[0], _BELOW)
    from_four = _fused(magnitude, factor[1], _ABOVE)
    # An instruction takes the smallest of three, so the bound costs nothing.
    return _of_two(_SMALLER, _of_two(_SMALLER, upto_four, from_four), _all_of(_LAST, magnitude))


@triton.jit
def _nearest_bytes(magnitudes, factor):
    """Return the codes of four words' lower halves in the bytes of one word, and of their upper halves, with excess."""
    p0 = _nearest(magnitudes[0], factor)
    p1 = _nearest(magnitudes[1], factor)
    p2 = _nearest(magnitudes[2], factor)
    p3 = _nearest(magnitudes[3], factor)
    a = p0 + (p1 << 8)
    b = p2 + (p3 << 8)
    return _of_two(_LOW_HALVES, a, b), _of_two(_HIGH_HALVES, a, b)


@triton.jit
def _sign_bits(words):
    """Return the signs of four words' lower halves as bytes of one word, and those of their upper halves."""
    a = _of_two(_TOP_BITS, words[0], words[1])
    b = _of_two(_TOP_BITS, words[2], words[3])
    return _of_two(_LOW_HALVES, a, b), _of_two(_HIGH_HALVES, a, b)


@triton.jit
def _packed(even, odd, excess: tl.constexpr, even_signs, odd_signs, keep):
    """Return eight codes with their signs, the even ones in the lower nibbles."""
    codes = even + (odd << 4) - excess
    signs = (even_signs & 0x0F0F0F0F) | (odd_signs & 0xF0F0F0F0)
    return (codes | (signs & 0x88888888)) & keep


@triton.jit
def encode_word(magnitudes, signed, factor, keep):
    """Return eight elements of a block as packed codes, uint32 [B].

    Args:
        magnitudes: neighbouring elements two by two, a tuple of four uint32 [B].
        signed: the same with their signs.
        factor: from `factors`.
        keep: all bits set for a block that is finite, none for one that is not, uint32 [B].
    """
    even, odd = _nearest_bytes(magnitudes, factor)
    even_signs, odd_signs = _sign_bits(signed)
    return _packed(even, odd, _ROW_EXCESS, even_signs, odd_signs, keep)


@triton.jit
def encode_pairs(words, P: tl.constexpr):
    """Return the packed codes and the scale byte of blocks whose neighbouring elements share a word.

    Args:
        words: 16 words of two bfloat16, a tuple of uint32 [B].
        P: the treatment.

    Returns:
        Four words, a tuple of uint32 [B], and one uint8 [B], a tuple too.
    """
    magnitudes = _without_signs(words, 16)
    factor, keep, stored = scaling(amax_bits_of_pairs(magnitudes), None, P)
    both = factors(factor, factor)
    out = ()
    for i in tl.static_range(0, 16, 4):
        out = out + (encode_word(magnitudes[i : i + 4], words[i : i + 4], both, keep),)
    return out, (stored,)


@triton.jit
def encode_two(words, P: tl.constexpr):
    """Return the packed codes and scale bytes of two blocks, one in the lower halves of 32 words, one in the upper.

    Args:
        words: a tuple of uint32 [B].
        P: the treatment.

    Returns:
        Eight words, those of the lower block first, a tuple of uint32 [B], and two uint8 [B], a tuple too.
    """
    magnitudes = _without_signs(words, 32)
    amax = larger_halves(magnitudes)
    low, low_keep, low_stored = scaling(amax << 16, None, P)
    high, high_keep, high_stored = scaling(amax & 0xFFFF0000, None, P)
    both = factors(low, high)
    lows = ()
    highs = ()
    for i in tl.static_range(0, 32, 8):
        even = _nearest_bytes(magnitudes[i : i + 8 : 2], both)
        odd = _nearest_bytes(magnitudes[i + 1 : i + 8 : 2], both)
        even_signs = _sign_bits(words[i : i + 8 : 2])
        odd_signs = _sign_bits(words[i + 1 : i + 8 : 2])
        low = _packed(even[0], odd[0], _LOW_EXCESS, even_signs[0], odd_signs[0], low_keep)
        high = _packed(even[1], odd[1], _HIGH_EXCESS, even_signs[1], odd_signs[1], high_keep)
        lows = lows + (low,)
        highs = highs + (high,)
    return lows + highs, (low_stored, high_stored)
