"""One unit from elements to packed codes and scale bytes, all of it in the registers of one thread."""

# Triton infers the types of kernels; their tuples grow.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="assignment"

from __future__ import annotations

import triton
import triton.language as tl

from mxref_triton.lane.four_over_six import chosen
from mxref_triton.lane.gfx950 import nearest_word, nearest_words_of_block, stochastic_word
from mxref_triton.lane.hadamard import butterflies, flip_signs, multiplied
from mxref_triton.lane.hopper import amax_bits_of_pairs, encode_pairs, encode_two, factors, pairs_of
from mxref_triton.lane.hopper import encode_word as encode_packed
from mxref_triton.lane.hopper_sr import stochastic_word as sum_stochastic_word
from mxref_triton.lane.quads import decode_pairs, encode_quads, words_of_quads
from mxref_triton.lane.random import philox
from mxref_triton.lane.registers import bits_of, floats_of, halves_of
from mxref_triton.lane.rounding import decode_element, encode_word
from mxref_triton.lane.scale import (
    amax_bits_of,
    finite_amax,
    over_tile,
    power_of_code,
    scaled,
    scaling,
    value_of_scale,
)
from mxref_triton.lane.treatment import Output

_VALUES = tl.constexpr(Output.VALUES.value)
_TRANSFORMED = tl.constexpr(Output.TRANSFORMED.value)
_AMAX = tl.constexpr(Output.AMAX.value)


@triton.jit
def _transformed(values, shared, P: tl.constexpr):
    """Return the elements of a unit after signs and Hadamard transform, but for a norm that folds into the scale."""
    UNIT: tl.constexpr = P.unit
    N: tl.constexpr = P.n
    NORM: tl.constexpr = P.norm
    if P.signed:
        values = flip_signs(values, shared[0], shared[1], UNIT, N)
    if N:
        values = butterflies(values, UNIT, N)
    if NORM != 1.0:
        values = multiplied(values, NORM, UNIT)
    return values


@triton.jit
def _random_words(group, shared, index: tl.constexpr, P: tl.constexpr):
    """Return the random words of the eight elements `index` of a unit whose first call has number `group`."""
    if P.random_bits == 0:
        return ()
    elif P.random_bits <= 16:
        return philox(group + index, shared[2], shared[3], shared[4], shared[5])
    else:
        low = philox(group + 2 * index, shared[2], shared[3], shared[4], shared[5])
        high = philox(group + (2 * index + 1), shared[2], shared[3], shared[4], shared[5])
        return low + high


@triton.jit
def _decoded(word, code, P: tl.constexpr):
    """Return the eight elements of a word as four words of two bfloat16 values; the scale is a power of two."""
    scale = power_of_code(code)
    out = ()
    for i in tl.static_range(4):
        low = decode_element(word, 2 * i, scale) >> 16
        high = decode_element(word, 2 * i + 1, scale) & 0xFFFF0000
        out = out + (tl.where(code == P.scale.nan_code, 0x7FC07FC0, low | high),)
    return out


@triton.jit
def _values(quads, code, shared, P: tl.constexpr):
    """Return the eight elements of two quads as four words of two bfloat16 values."""
    E: tl.constexpr = P.element
    S: tl.constexpr = P.scale
    return decode_pairs(quads, value_of_scale(code, S), shared[6] if P.tensor_scale else None, E)


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
def _quantized(values, group, shared, P: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    words = ()
    codes = ()
    if P.packed:
        magnitudes, signed = pairs_of(values, P.unit)
    K: tl.constexpr = P.k
    E: tl.constexpr = P.element  # Triton 3.6 does not pass attributes of a constant on
    for block in tl.static_range(P.unit // K):
        block_values = values[K * block : K * block + K]
        if P.packed:
            amax_bits = amax_bits_of_pairs(magnitudes[16 * block : 16 * block + 16])
        else:
            amax_bits = amax_bits_of(block_values)
        if P.tile:
            amax_bits = over_tile(amax_bits, ROWS, COLUMNS, P.tile)
        if P.chooses:
            block_values, factor, keep, stored = chosen(block_values, amax_bits, shared[6], P, ROWS, COLUMNS)
        else:
            factor, keep, stored = scaling(amax_bits, shared[6], P)
            block_values, factor = scaled(block_values, factor, shared[6], P)
        if P.packed:
            both = factors(factor, factor)
        codes = codes + (stored,)
        quads = ()
        if P.by_block:
            words = words + nearest_words_of_block(block_values, factor, keep, E)
        for i in tl.static_range(0 if P.by_block else K // 8):
            random = _random_words(group, shared, K // 8 * block + i, P)
            eight = block_values[8 * i : 8 * i + 8]
            if P.packed:
                pairs = magnitudes[16 * block + 4 * i : 16 * block + 4 * i + 4]
                tops = signed[16 * block + 4 * i : 16 * block + 4 * i + 4]
                words = words + (encode_packed(pairs, tops, both, keep),)
            elif not P.is_e2m1:
                two = encode_quads(eight, factor, keep, random, P)
                if P.output == _VALUES:
                    words = words + _values(two, stored.to(tl.int32), shared, P)
                else:
                    quads = quads + two
            else:
                word = _encoded(eight, factor, keep, random, P)
                if P.output == _VALUES:
                    if P.scale.powers:
                        words = words + _decoded(word, stored.to(tl.int32), P)
                    else:
                        words = words + _values((word & 0xFFFF, word >> 16), stored.to(tl.int32), shared, P)
                else:
                    words = words + (word,)
        if len(quads) != 0:
            words = words + words_of_quads(quads, E)
    return words, codes


@triton.jit
def encode_unit(values, group, shared, P: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return what a unit is stored as.

    Args:
        values: its elements, a tuple of float32 [B].
        group: for SR, the number of its first Philox call, int64 [B]; else None.
        shared: from `given`.
        P: the treatment.
        ROWS: for tiles, units lie row-major in ROWS x COLUMNS, and P.tile rows share a scale.
        COLUMNS: see ROWS.

    Returns:
        Words of codes, bfloat16 values or float32, or one of the bits of amax, a tuple of uint32 [B], and scale bytes,
        one uint8 [B] per block.
    """
    values = _transformed(values, shared, P)
    if P.output == _TRANSFORMED:
        return _all_bits(values), ()
    elif P.output == _AMAX:
        return (finite_amax(values, P.folded_norm),), ()
    else:
        return _quantized(values, group, shared, P, ROWS, COLUMNS)


@triton.jit
def encode_words(words, group, shared, P: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr):
    """Return what a unit is stored as, from words of neighbouring elements; the rest as in `encode_unit`."""
    KIND: tl.constexpr = P.kind
    if P.direct:
        return encode_pairs(words, P)
    else:
        return encode_unit(floats_of(words, P.words_in, KIND), group, shared, P, ROWS, COLUMNS)


@triton.jit
def encode_two_lines(words, shared, P: tl.constexpr):
    """Return what two units are stored as, one in the lower halves of words, one in the upper; no unit has randomness.

    Args:
        words: a tuple of uint32 [B], one for each element.
        shared: and P as in `encode_unit`.
        P: see shared.

    Returns:
        Words and scale bytes of the lower unit, then of the upper, two tuples.
    """
    KIND: tl.constexpr = P.kind
    if P.direct:
        return encode_two(words, P)
    else:
        low, high = halves_of(words, P.unit, KIND)
        low_words, low_scales = encode_unit(low, None, shared, P, 1, 1)
        high_words, high_scales = encode_unit(high, None, shared, P, 1, 1)
        return low_words + high_words, low_scales + high_scales
