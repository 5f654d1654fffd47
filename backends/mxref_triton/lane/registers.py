"""Moving data between memory and the registers of the one thread that owns it.

A unit is what a thread works on alone: one block, or a whole Hadamard group if that is longer. It is held as a tuple
of separate tensors, one per element, whose position i is unit i: all that is done to a block stays in the registers of
its thread, and no shuffle or shared memory is needed. Tuples are built by recursion.
"""

# Triton infers the types of kernels; their tuples grow.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="assignment"

from __future__ import annotations

import triton
import triton.language as tl

from mxref_triton.launch import INTERPRETED

_INTERPRETED = tl.constexpr(INTERPRETED)

UNITS_LAST = tl.constexpr(tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 7))
"""Whether units come after what is read of each in the tiles that are loaded and stored.

Triton spreads threads over the axis whose addresses are the most contiguous, and that has to be the units: of equal
ones it takes the last from 3.7 on, and the first in 3.6.
"""


@triton.jit
def float_of(bits):
    """Return the float32 that has the given bits."""
    return bits.to(tl.float32, bitcast=True)


@triton.jit
def bits_of(value):
    """Return the bits of a float32, uint32."""
    return value.to(tl.uint32, bitcast=True)


@triton.jit
def fused(a, b, c):
    """Return a * b + c of float32, rounded once; the interpreter's own `fma` rounds twice.

    Float64 holds the product. Where it rounds the sum, the result may differ in the last bit from one rounding.
    """
    if _INTERPRETED:
        return (a.to(tl.float64) * b.to(tl.float64) + c.to(tl.float64)).to(tl.float32)
    else:
        return tl.fma(a, b, c)


@triton.jit
def _halved(t, COUNT: tl.constexpr):
    """Return the COUNT tensors [B] along the other axes, all of length 2, of a tensor [B, 2, .., 2]."""
    if COUNT == 1:
        return (t,)
    else:
        even, odd = tl.split(t)
        evens = _halved(even, COUNT // 2)
        odds = _halved(odd, COUNT // 2)
        out = ()
        for i in tl.static_range(COUNT // 2):
            out = out + (evens[i], odds[i])
        return out


@triton.jit
def split_last(t, COUNT: tl.constexpr):
    """Return the COUNT tensors [B] along the last axis of a tensor [B, COUNT]."""
    SHAPE: tl.constexpr = [t.shape[0]] + [2] * (COUNT.bit_length() - 1)
    return _halved(tl.reshape(t, SHAPE), COUNT)


@triton.jit
def _doubled(values):
    """Return [B, 2, .., 2] from a tuple of tensors [B]."""
    if len(values) == 1:
        return values[0]
    else:
        return tl.join(_doubled(values[::2]), _doubled(values[1::2]))


@triton.jit
def join_last(values):
    """Return [B, COUNT] from a tuple of COUNT tensors [B], a power of two of them."""
    return tl.reshape(_doubled(values), [values[0].shape[0], len(values)])


@triton.jit
def _places(pointer, offsets, VECTORS: tl.constexpr, VECTOR: tl.constexpr):
    """Return pointers [VECTORS, B, VECTOR], or as `UNITS_LAST` says, to the words from `offsets` [B]."""
    word = tl.arange(0, VECTOR)[None, None, :]
    vector = VECTOR * tl.arange(0, VECTORS)
    if UNITS_LAST:
        return pointer + (offsets[None, :, None] + word) + vector[:, None, None]
    else:
        return pointer + (offsets[:, None, None] + word) + vector[None, :, None]


@triton.jit
def _mask_of(mask):
    """Return a mask [B] for `_places`."""
    return mask[None, :, None] if UNITS_LAST else mask[:, None, None]


@triton.jit
def _turned(t):
    """Return [B, VECTORS, VECTOR] from what lies at `_places`, or the other way."""
    return tl.permute(t, (1, 0, 2)) if UNITS_LAST else t


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
    VECTORS: tl.constexpr = COUNT // VECTOR
    place = _places(pointer, offsets, VECTORS, VECTOR)
    if mask is None:
        words = tl.load(place)
    else:
        words = tl.load(place, mask=_mask_of(mask), other=0)
    words = tl.reshape(_turned(words), [offsets.shape[0], COUNT])
    return split_last(words.to(tl.uint32, bitcast=True), COUNT)


@triton.jit
def store_words(pointer, offsets, mask, words, COUNT: tl.constexpr, VECTOR: tl.constexpr):
    """Store a tuple of COUNT 32-bit words per unit, VECTOR at once; the rest as in `load_words`.

    Up to 4 go straight from the thread that has them; a longer vector turns around in shared memory first, so that
    neighbouring threads write neighbouring words.
    """
    VECTORS: tl.constexpr = COUNT // VECTOR
    place = _places(pointer, offsets, VECTORS, VECTOR)
    vectors = tl.reshape(join_last(words), [offsets.shape[0], VECTORS, VECTOR])
    vectors = _turned(vectors).to(tl.int32, bitcast=True)
    if mask is None:
        tl.store(place, vectors)
    else:
        tl.store(place, vectors, mask=_mask_of(mask))


@triton.jit
def store_unit(pointer, offsets, mask, words, COUNT: tl.constexpr, VECTOR: tl.constexpr):
    """Store a tuple of COUNT words like `store_words`, where COUNT may be 3 times a power of two: in two parts then."""
    TAIL: tl.constexpr = COUNT // 3
    if COUNT % 3 == 0:
        store_words(pointer, offsets, mask, words[: 2 * TAIL], 2 * TAIL, min(TAIL, 4))
        store_words(pointer + 2 * TAIL, offsets, mask, words[2 * TAIL :], TAIL, min(TAIL, 4))
    else:
        store_words(pointer, offsets, mask, words, COUNT, VECTOR)


@triton.jit
def store_largest(pointer, tensors):
    """Replace the integer at a pointer by the largest of it and of a tuple of tensors of bits of magnitudes."""
    top = tensors[0]
    for i in tl.static_range(1, len(tensors)):
        top = tl.maximum(top, tensors[i])
    tl.atomic_max(pointer, tl.max(top.to(tl.int32, bitcast=True), 0))


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
def load_integers(pointer, mask):
    """Return integers as they are in memory; 0 where the mask, unless it is None, is not set."""
    if mask is None:
        return tl.load(pointer)
    else:
        return tl.load(pointer, mask=mask, other=0)


@triton.jit
def bits_alone(integers):
    """Return a tuple of integers of 16 or 32 bits as uint32."""
    out = ()
    for i in tl.static_range(len(integers)):
        integer = integers[i]
        if integer.dtype == tl.int16:
            integer = integer.to(tl.uint16, bitcast=True)
        out = out + (integer.to(tl.uint32),)
    return out


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
