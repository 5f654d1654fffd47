"""SR to E2M1 on NVIDIA GPUs from Hopper on: the place of a value between grid points by a sum rounded toward zero.

The place is the code of the grid point below and, under it, 22 bits of the gap. From v = 1 on the bits of v are that,
less an offset; below 1, where all gaps are 1/2, those of v + 1 count steps of 2^-23 if the sum is truncated. The larger
of both is right on either side. All of it is done at v * 2^-7: the offset then is a multiple of 16 codes, and falls off
at the top of the word.

Codes and signs gather by funnel shifts from the top nibbles of words.
"""

# Triton infers the types of kernels.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from mxref_triton.lane.registers import bits_of

_ONE = tl.constexpr(2.0**-7)
"""What stands for 1."""
_TRUNCATED = tl.constexpr("add.rz.f32 $0, $1, $2;")


@triton.jit
def _truncated_sum(a, b):
    """Return the sum of two float32, rounded toward zero."""
    return tl.inline_asm_elementwise(_TRUNCATED, "=f,f,f", [a, b], dtype=tl.float32, is_pure=True, pack=1)


@triton.jit
def _place(v):
    """Return the code below v, 0 to 7, in the top nibble, and 22 bits of the gap after it, uint32."""
    from_one = bits_of(v) + 0x00800000
    upto_one = bits_of(_truncated_sum(v, tl.full(v.shape, _ONE, tl.float32)))
    return tl.maximum(from_one, upto_one) << 6


@triton.jit
def _fraction(words, i: tl.constexpr, BITS: tl.constexpr):
    """Return the integer r of element i of eight after the top nibble, uint32 [B]; words as in `random_fraction`."""
    if BITS > 16:
        return (words[i] >> 4) & (((1 << BITS) - 1) << (28 - BITS))
    elif i % 2 == 0:
        return (words[i // 2] & (((1 << BITS) - 1) << (16 - BITS))) << 12
    else:
        return (words[i // 2] >> (32 - BITS)) << (28 - BITS)


@triton.jit
def stochastic_word(values, factor, keep, words, P: tl.constexpr):
    """Return eight elements as packed codes, uint32 [B]; arguments as those of `rounding.encode_word`, under SR.

    Values stay below 8 times their scale, so a code is above the largest by one at most.
    """
    BITS: tl.constexpr = P.random_bits
    PRESCALE: tl.constexpr = P.prescale
    near = factor * _ONE
    codes = tl.zeros_like(keep)
    signs = codes
    for k in tl.static_range(8):
        v = tl.abs(values[7 - k]) * near
        if PRESCALE != 1.0:
            v = v * PRESCALE
        code = _place(v) + _fraction(words, 7 - k, BITS)
        codes = (codes << 4) | (code >> 28)
        signs = (signs << 4) | (bits_of(values[7 - k]) >> 28)
    codes = codes - ((codes & 0x88888888) >> 3)
    return ((codes & 0x77777777) | (signs & 0x88888888)) & keep
