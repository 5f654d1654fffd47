"""Moving data between memory and the registers of the one thread that owns it.

A unit is what a thread works on alone: one block of 32 elements, or a whole Hadamard group if that is longer. It
is held as a tuple of separate tensors, one per element, whose position i is unit i: all that is done to a block
stays in the registers of its thread, and no shuffle or shared memory is needed. Tuples are built by recursion.
"""

# Triton infers the types of kernels; their tuples grow.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="assignment"

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def float_of(bits):
    """Return the float32 that has the given bits."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def bits_of(value):
    """Return the bits of a float32, uint32."""
    return value.to(tl.uint32, bitcast=True)


@triton.jit
def split_last(t, COUNT: tl.constexpr):
    """Return the COUNT tensors [B] along the last axis of a tensor [B, COUNT]."""
    if COUNT == 1:
        return (tl.reshape(t, [t.shape[0]]),)
    else:
        even, odd = tl.split(tl.reshape(t, [t.shape[0], COUNT // 2, 2]))
        evens = split_last(even, COUNT // 2)
        odds = split_last(odd, COUNT // 2)
        out = ()
        for i in tl.static_range(COUNT // 2):
            out = out + (evens[i], odds[i])
        return out


@triton.jit
def join_last(values, START: tl.constexpr, STEP: tl.constexpr, COUNT: tl.constexpr):
    """Return [B, COUNT] from the tensors [B] at START, START + STEP, .. of a tuple."""
    if COUNT == 1:
        return tl.reshape(values[START], [values[START].shape[0], 1])
    else:
        even = join_last(values, START, 2 * STEP, COUNT // 2)
        odd = join_last(values, START + STEP, 2 * STEP, COUNT // 2)
        return tl.reshape(tl.join(even, odd), [values[START].shape[0], COUNT])


@triton.jit
def load_words(pointer, offsets, mask, COUNT: tl.constexpr):
    """Return COUNT 32-bit words per unit as a tuple of uint32 [B].

    Args:
        pointer: to 32-bit words.
        offsets: of each unit's first word, [B].
        mask: of the units that exist, [B], or None.
        COUNT: a power of two; 4 words are read at once.
    """
    VECTOR: tl.constexpr = min(COUNT, 4)
    place = pointer + (offsets[:, None] + tl.arange(0, VECTOR)[None, :])
    out = ()
    for i in tl.static_range(COUNT // VECTOR):
        if mask is None:
            words = tl.load(place + i * VECTOR)
        else:
            words = tl.load(place + i * VECTOR, mask=mask[:, None], other=0)
        out = out + split_last(words.to(tl.uint32, bitcast=True), VECTOR)
    return out


@triton.jit
def store_words(pointer, offsets, mask, words, COUNT: tl.constexpr, VECTOR: tl.constexpr):
    """Store a tuple of COUNT 32-bit words per unit, VECTOR at once; the rest as in `load_words`.

    Up to 4 go straight from the thread that has them; a longer vector turns around in shared memory first, so that
    neighbouring threads write neighbouring words.
    """
    place = pointer + (offsets[:, None] + tl.arange(0, VECTOR)[None, :])
    for i in tl.static_range(COUNT // VECTOR):
        vector = join_last(words, i * VECTOR, 1, VECTOR).to(tl.int32, bitcast=True)
        if mask is None:
            tl.store(place + i * VECTOR, vector)
        else:
            tl.store(place + i * VECTOR, vector, mask=mask[:, None])


@triton.jit
def _half(bits, KIND: tl.constexpr):
    """Return the float32 of a 16-bit float in the upper half of uint32 `bits`, whose lower half is zero."""
    if KIND == "bfloat16":
        return float_of(bits)
    else:
        return (bits >> 16).to(tl.uint16).to(tl.float16, bitcast=True).to(tl.float32)


@triton.jit
def halves_of(words, COUNT: tl.constexpr, KIND: tl.constexpr):
    """Return the 16-bit floats in the lower halves of COUNT words, and those in the upper, tuples of float32 [B]."""
    lows = ()
    highs = ()
    for i in tl.static_range(COUNT):
        lows = lows + (_half(words[i] << 16, KIND),)
        highs = highs + (_half(words[i] & 0xFFFF0000, KIND),)
    return lows, highs


@triton.jit
def floats_of(words, COUNT: tl.constexpr, KIND: tl.constexpr):
    """Return the elements in a tuple of COUNT words as a tuple of float32 [B]; the first is in the lower half."""
    out = ()
    if KIND == "float32":
        for i in tl.static_range(COUNT):
            out = out + (float_of(words[i]),)
    else:
        lows, highs = halves_of(words, COUNT, KIND)
        for i in tl.static_range(COUNT):
            out = out + (lows[i], highs[i])
    return out


@triton.jit
def floats_alone(bits, COUNT: tl.constexpr, KIND: tl.constexpr):
    """Return COUNT elements as a tuple of float32 [B], from their own bits, uint32."""
    out = ()
    for i in tl.static_range(COUNT):
        if KIND == "float32":
            out = out + (float_of(bits[i]),)
        else:
            out = out + (_half(bits[i] << 16, KIND),)
    return out


@triton.jit
def load_bits(pointer, mask):
    """Return integers of 16 or 32 bits as uint32; 0 where the mask, unless it is None, is not set."""
    if mask is None:
        loaded = tl.load(pointer)
    else:
        loaded = tl.load(pointer, mask=mask, other=0)
    if loaded.dtype == tl.int16:
        loaded = loaded.to(tl.uint16, bitcast=True)
    return loaded.to(tl.uint32)


@triton.jit
def tile_index(BAND: tl.constexpr):
    """Return which tile the program has, down and across, int64: programs go across BAND tiles, then down.

    Outputs that lie across each other are both filled soon after each other so. BAND is 0 for a single row of tiles.
    """
    if BAND == 0:
        return tl.full([], 0, tl.int64), tl.program_id(0).to(tl.int64)
    else:
        down = tl.program_id(0) // BAND
        across = tl.program_id(1) * BAND + tl.program_id(0) % BAND
        return down.to(tl.int64), across.to(tl.int64)
