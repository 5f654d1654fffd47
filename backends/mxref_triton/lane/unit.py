"""One unit from elements to packed codes and scale bytes, all of it in the registers of one thread."""

# Triton infers the types of kernels; their tuples grow.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="assignment"

from __future__ import annotations

import triton
import triton.language as tl

from mxref_triton.lane.gfx950 import nearest_word, stochastic_word
from mxref_triton.lane.hadamard import butterflies, flip_signs, multiplied
from mxref_triton.lane.hopper import amax_bits_of_pairs, encode_pairs, encode_two, factors, pairs_of
from mxref_triton.lane.hopper import encode_word as encode_packed
from mxref_triton.lane.hopper_sr import stochastic_word as sum_stochastic_word
from mxref_triton.lane.quads import decode_pairs, encode_quads, words_of_quads
from mxref_triton.lane.random import philox
from mxref_triton.lane.registers import bits_of, floats_of, halves_of
from mxref_triton.lane.rounding import decode_element, encode_word, scale_or_nan, value_scale
from mxref_triton.lane.scale import (
    amax_bits_of,
    over_square,
    scaling,
)
from mxref_triton.lane.treatment import Output

_VALUES = tl.constexpr(Output.VALUES.value)
_TRANSFORMED = tl.constexpr(Output.TRANSFORMED.value)


@triton.jit
def _transformed(values, signs_low, signs_high, P: tl.constexpr):
    """Return the elements of a unit after signs and Hadamard transform, but for a norm that folds into the scale."""
    UNIT: tl.constexpr = P.unit
    N: tl.constexpr = P.n
    NORM: tl.constexpr = P.norm
    if P.signed:
        values = flip_signs(values, signs_low, signs_high, UNIT, N)
    if N:
        values = butterflies(values, UNIT, N)
    if NORM != 1.0:
        values = multiplied(values, NORM, UNIT)
    return values


@triton.jit
def _random_words(group, key, index: tl.constexpr, P: tl.constexpr):
    """Return the random words of the eight elements `index` of a unit whose first call has number `group`."""
    if P.random_bits == 0:
        return ()
    elif P.random_bits <= 16:
        return philox(group + index, key[0], key[1], key[2], key[3])
    else:
        low = philox(group + 2 * index, key[0], key[1], key[2], key[3])
        high = philox(group + (2 * index + 1), key[0], key[1], key[2], key[3])
        return low + high


@triton.jit
def _decoded(word, code):
    """Return the eight elements of a word as four words of two bfloat16 values."""
    scale = value_scale(code)
    out = ()
    for i in tl.static_range(4):
        low = decode_element(word, 2 * i, scale) >> 16
        high = decode_element(word, 2 * i + 1, scale) & 0xFFFF0000
        out = out + (tl.where(code == 255, 0x7FC07FC0, low | high),)
    return out


@triton.jit
def _all_bits(values):
    out = ()
    for i in tl.static_range(len(values)):
        out = out + (bits_of(values[i]),)
    return out


@triton.jit
def _encoded(eight, factor, keep, random, P: tl.constexpr):
    """Return eight elements as a word of four-bit codes, by the conversions of the target or without them."""
    if P.by_sum:
        return sum_stochastic_word(eight, factor, keep, random, P)
    elif not P.native:
        return encode_word(eight, factor, keep, random, P)
    elif P.random_bits:
        return stochastic_word(eight, factor, random) & keep
    else:
        return nearest_word(eight, factor) & keep


@triton.jit
def _quantized(values, group, key, P: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    words = ()
    codes = ()
    if P.packed:
        magnitudes, signed = pairs_of(values, P.unit)
    K: tl.constexpr = P.k
    E: tl.constexpr = P.element  # Triton 3.6 does not pass attributes of a constant on
    for block in tl.static_range(P.unit // K):
        if P.packed:
            amax_bits = amax_bits_of_pairs(magnitudes[16 * block : 16 * block + 16])
        else:
            amax_bits = amax_bits_of(values[K * block : K * block + K])
        if P.square:
            amax_bits = over_square(amax_bits, ROWS, COLUMNS)
        factor, keep, stored = scaling(amax_bits, P)
        if P.packed:
            both = factors(factor, factor)
        codes = codes + (stored,)
        quads = ()
        for i in tl.static_range(K // 8):
            random = _random_words(group, key, K // 8 * block + i, P)
            eight = values[K * block + 8 * i : K * block + 8 * i + 8]
            if P.packed:
                pairs = magnitudes[16 * block + 4 * i : 16 * block + 4 * i + 4]
                tops = signed[16 * block + 4 * i : 16 * block + 4 * i + 4]
                words = words + (encode_packed(pairs, tops, both, keep),)
            elif not P.is_e2m1:
                two = encode_quads(eight, factor, keep, random, P)
                if P.output == _VALUES:
                    words = words + decode_pairs(two, scale_or_nan(stored.to(tl.int32)), E)
                else:
                    quads = quads + two
            else:
                word = _encoded(eight, factor, keep, random, P)
                if P.output == _VALUES:
                    words = words + _decoded(word, stored.to(tl.int32))
                else:
                    words = words + (word,)
        if len(quads) != 0:
            words = words + words_of_quads(quads, E)
    return words, codes


@triton.jit
def encode_unit(
    values, signs_low, signs_high, group, key, P: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Return what a unit is stored as.

    Args:
        values: its elements, a tuple of float32 [B].
        signs_low: bits 0 to 31 of the signs before the Hadamard transform.
        signs_high: bits 32 to 63.
        group: for SR, the number of its first Philox call, int64 [B]; else None.
        key: seed and stream, four words; else None.
        P: the treatment.
        ROWS: for 32x32 tiles, units lie row-major in ROWS x COLUMNS, and 32 rows share a scale.
        COLUMNS: see ROWS.

    Returns:
        Words of codes, bfloat16 values or float32, a tuple of uint32 [B], and scale bytes, one uint8 [B] per block.
    """
    values = _transformed(values, signs_low, signs_high, P)
    if P.output == _TRANSFORMED:
        return _all_bits(values), ()
    else:
        return _quantized(values, group, key, P, ROWS, COLUMNS)


@triton.jit
def encode_words(
    words, signs_low, signs_high, group, key, P: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr
):
    """Return what a unit is stored as, from words of neighbouring elements; the rest as in `encode_unit`."""
    KIND: tl.constexpr = P.kind
    if P.direct:
        return encode_pairs(words, P)
    else:
        values = floats_of(words, P.words_in, KIND)
        return encode_unit(values, signs_low, signs_high, group, key, P, ROWS, COLUMNS)


@triton.jit
def encode_two_lines(words, signs_low, signs_high, P: tl.constexpr):
    """Return what two units are stored as, one in the lower halves of words, one in the upper; no unit has randomness.

    Args:
        words: a tuple of uint32 [B], one for each element.
        signs_low: and signs_high and P as in `encode_unit`.
        signs_high: see signs_low.
        P: see signs_low.

    Returns:
        Words and scale bytes of the lower unit, then of the upper, two tuples.
    """
    KIND: tl.constexpr = P.kind
    if P.direct:
        return encode_two(words, P)
    else:
        low, high = halves_of(words, P.unit, KIND)
        low_words, low_scales = encode_unit(low, signs_low, signs_high, None, None, P, 1, 1)
        high_words, high_scales = encode_unit(high, signs_low, signs_high, None, None, P, 1, 1)
        return low_words + high_words, low_scales + high_scales
