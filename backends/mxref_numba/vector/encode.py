"""The inner step of quantization: eight vectors of consecutive elements to their scale codes and element codes.

Codes have four bits (E2M1), or take a byte each, the sign on top. For the second kind the element format is a `Grid`,
which each step reads from the first-level cache: all formats but E2M1 share this code, which waits for memory anyway.
Codes of fewer than eight bits are packed afterwards (`held_codes.py`).

With 512 bits these are 128 elements, four blocks; with 256 bits 64, and with 128 bits 32. As many blocks go together
because then every part fits one vector: their amax and scales (four lanes each, which is also where their 16 bytes
end up), and their packed codes.

A step has two halves, *scales* and *codes*, and scales run one step ahead. Alone, each half would stall: the first on a
chain of shuffles, the second on a chain of roundings. Interleaved, they keep the CPU busy, but elements are read twice,
the second time from the first-level cache. The factors, and which blocks are finite, pass from half to half on the
stack.
"""

# Emitters work on IR values, which llvmlite does not annotate.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba import carray  # type: ignore[attr-defined]
from numba.core import cgutils, types
from numba.extending import intrinsic

from mxref_numba.kernels import fields_at, kernel, numbers_at
from mxref_numba.lanes import (
    F32,
    I8,
    I16,
    I32,
    I64,
    MAGNITUDE,
    Lanes,
    broadcast,
    constant,
    load,
    prefetch,
    splat,
    vector_code,
)
from mxref_numba.quantize_job import CONSTANT, EVEN, RANDOM_16, RANDOM_32
from mxref_numba.scale import scale_codes, store_codes
from mxref_numba.vector.block_lanes import (
    TOP_VALUE,
    GridLanes,
    largest,
    random_vectors,
    round_by,
    round_even,
)
from mxref_numba.vector.flows import VectorJob, asked_ahead
from mxref_numba.vector.target import VectorNative, lanes_of, step_length, target_of

LONGEST_STEP = 128
"""Elements of the longest step."""

_VECTORS = range(8)
_SIGN = 0x80
"""The sign of a code of a byte. The same constant selects all other bits: with a second one a step takes 3 % longer."""
_LONGEST_HALF = 128
"""Bytes between the halves of the longest step: its factors, and all ones in the lanes of finite blocks."""


@dataclass(frozen=True)
class ElementType:
    """How elements of a type are loaded, and codes packed; the elements of a block are in neighbouring vectors."""

    bits: Callable[[ir.IRBuilder, Any], list[Lanes]]
    """Load a step as the bits of float32."""
    pack: Callable[[list[Lanes]], Lanes]
    """Make the packed bytes, in order, from such vectors of four bits."""
    pack_bytes: Callable[[list[Lanes]], list[Lanes]]
    """Make two vectors of bytes, in order, from the low bytes of such vectors."""
    size: int
    """Bytes of an element."""


def _float32_bits(builder: ir.IRBuilder, source: Any) -> list[Lanes]:
    lanes = lanes_of(builder)
    return [load(builder, I32, lanes, source, 4 * lanes * j) for j in _VECTORS]


def _bfloat16_bits(builder: ir.IRBuilder, source: Any) -> list[Lanes]:
    # A word is an even element and its odd neighbour: two vectors without a conversion.
    lanes = lanes_of(builder)
    words = [load(builder, I32, lanes, source, 4 * lanes * j) for j in range(len(_VECTORS) // 2)]
    return [half for word in words for half in (word << 16, word & 0xFFFF0000)]


def _pack_consecutive(nibbles: list[Lanes]) -> Lanes:
    """Pack eight vectors of consecutive elements."""
    # Instructions narrow two vectors within quarters: a quarter gets four elements of each of four vectors.
    bytes_ = [
        a.narrowed(b, I16).narrowed(c.narrowed(d, I16), I8) for a, b, c, d in (nibbles[:4], nibbles[4:])
    ]
    low, high = (b.pairs_summed((1, 16)) for b in bytes_)
    words = low.narrowed(high, I8).cast(I16)
    return words.pick([8 * quarter + j for j in _VECTORS for quarter in range(words.count // 8)])


def _pack_alternating(nibbles: list[Lanes]) -> Lanes:
    """Pack the even and the odd elements of four vectors of words: a lane holds a pair of each, in four bytes."""
    pairs = nibbles[0]
    for j, nibble in enumerate(nibbles[1:], 1):
        pairs = pairs | (nibble << 4 * j)
    return pairs.cast(I8).pick([4 * pair + word for word in range(4) for pair in range(pairs.count)])


def _joined(vectors: list[Lanes], order: Callable[[int], list[int]]) -> list[Lanes]:
    """Return two vectors of bytes from eight vectors of words, whose elements alternate between pairs of vectors."""
    bytes_ = [vector.cast(I8) for vector in vectors]
    parts = [a.pick(order(a.count), b) for a, b in zip(bytes_[::2], bytes_[1::2], strict=True)]
    while len(parts) > 2:
        parts = [a.pick(range(2 * a.count), b) for a, b in zip(parts[::2], parts[1::2], strict=True)]
    return parts


def _low_bytes_consecutive(vectors: list[Lanes]) -> list[Lanes]:
    return _joined(vectors, lambda size: [*range(0, 2 * size, 4)])


def _low_bytes_alternating(vectors: list[Lanes]) -> list[Lanes]:
    return _joined(vectors, lambda size: [byte for i in range(0, size, 4) for byte in (i, size + i)])


FLOAT32 = ElementType(_float32_bits, _pack_consecutive, _low_bytes_consecutive, 4)
BFLOAT16 = ElementType(_bfloat16_bits, _pack_alternating, _low_bytes_alternating, 2)

_POLICY = (types.int32, types.int32, types.float32, types.int32)


def _scales(kind: ElementType, bits: int) -> Any:
    """Return code for the first half. It takes the addresses of source, amax floor (a vector of int32), scale codes,
    and a half; and the distance in bytes at which it prefetches elements.
    """

    @vector_code(*(types.int64,) * 5, *_POLICY)
    def scales(builder, source, floor, codes, half, ahead, round_up, zero_scale, prescale, max_exponent):
        asked = builder.add(source, ahead)
        target = target_of(builder)
        lanes = target.lanes
        for line in range(
            0, kind.size * target.step, 64
        ):  # under SR, reads are too slow for the CPU's own prefetcher
            prefetch(builder, builder.add(asked, ir.Constant(I64, line)))
        magnitudes = [x & MAGNITUDE for x in kind.bits(builder, source)]
        amax = largest(magnitudes).call("umax", load(builder, I32, lanes, floor))
        stored, inverse, finite = scale_codes(amax, round_up, zero_scale, max_exponent, to_the_end=bits == 8)
        store_codes(stored, codes)
        # The prescale times 2^-e is exact, so that one rounding gives fl32(prescale * (|x| * 2^-e)).
        (inverse * splat(builder, prescale, lanes)).store(half)
        ones = finite.choose(constant(builder, I32, [-1] * lanes), constant(builder, I32, [0] * lanes))
        ones.store(builder.add(half, ir.Constant(I64, 4 * lanes)))

    return scales


_CODES = (*(types.int64,) * 6, types.int32)
"""What the second half takes: addresses of source, the half, packed codes, and a `Grid`; then what SR needs: first
random group, key, and an integer."""


def _load_scaled(
    builder: ir.IRBuilder, kind: ElementType, source: Any, half: Any, top: float | Lanes
) -> tuple[list[Lanes], list[Lanes]]:
    """Return the bits of a step and its scaled magnitudes, those above `top` as `top`."""
    bits, lanes = kind.bits(builder, source), lanes_of(builder)
    factors = [broadcast(builder, F32, lanes, half, 16 * block) for block in range(lanes // 4)]
    return bits, [(x.cast(F32) * factors[j * lanes // 32]).at_most(top) for j, x in enumerate(bits)]


def _load_finite(builder: ir.IRBuilder, half: Any) -> Lanes:
    """Return all ones in the lanes of finite blocks, four lanes for each."""
    lanes = lanes_of(builder)
    return load(builder, I32, lanes, half, 4 * lanes)


def _roundings(
    even: Callable[[Lanes], Lanes], by: Callable[[Lanes, Lanes], Lanes]
) -> dict[int, Callable[..., list[Lanes]]]:
    """Return the two ways to round scaled magnitudes: `even` rounds to nearest even, `by` adds an integer."""

    def by_constant(builder, scaled, group, key, integer):
        same = splat(builder, integer, lanes_of(builder))
        return [by(v, same) for v in scaled]

    def randomly(per_call: int) -> Callable[..., list[Lanes]]:
        def rounded(builder, scaled, group, key, integer):
            random = random_vectors(builder, group, key, integer, target_of(builder).step, per_call)
            return [by(v, r) for v, r in zip(scaled, random, strict=True)]

        return rounded

    return {
        EVEN: lambda _, scaled, *__: [even(v) for v in scaled],
        CONSTANT: by_constant,
        RANDOM_16: randomly(8),
        RANDOM_32: randomly(4),
    }


_ROUNDED = _roundings(round_even, round_by)


def _codes(kind: ElementType, rounding: int) -> Any:
    """Return code for the second half to codes of four bits, which stores a vector."""
    rounded, flipped = _ROUNDED[rounding], 4 if rounding == EVEN else 0

    @vector_code(*_CODES)
    def codes(builder, source, half, packed, _, group, key, integer):
        bits, scaled = _load_scaled(builder, kind, source, half, TOP_VALUE)
        magnitudes = rounded(builder, scaled, group, key, integer)
        nibbles = [(code & 7) | ((b >> 28) & ~7) for b, code in zip(bits, magnitudes, strict=True)]
        ((kind.pack(nibbles).cast(I32) ^ 0x11111111 * flipped) & _load_finite(builder, half)).store(packed)

    return codes


def _byte_codes(kind: ElementType, rounding: int) -> Any:
    """Return code for the second half to bytes, which stores two vectors."""

    @vector_code(*_CODES)
    def codes(builder, source, half, packed, element, group, key, integer):
        grid, finite = GridLanes(builder, element), _load_finite(builder, half)
        bits, scaled = _load_scaled(builder, kind, source, half, grid.top)
        rounded = _roundings(grid.round_even, grid.round_by)[rounding]
        magnitudes = rounded(builder, scaled, group, key, integer)
        signed = [((b >> 24) & _SIGN) | (code & ~_SIGN) for b, code in zip(bits, magnitudes, strict=True)]
        for i, bytes_ in enumerate(kind.pack_bytes(signed)):
            words = bytes_.cast(I32)
            blocks = [(words.count * i + word) // 8 for word in range(words.count)]
            (words & finite.pick([4 * block for block in blocks])).store(
                builder.add(packed, ir.Constant(I64, bytes_.count * i))
            )

    return codes


def _on_stack(typingctx):
    """Return the address of two halves of a step on the stack, on a cache line."""

    def generate(context, builder, *_):
        room = cgutils.alloca_once(builder, ir.ArrayType(I8, 2 * _LONGEST_HALF))
        room.align = 64
        return builder.ptrtoint(room, I64)

    return types.int64(), generate


_halves: Any = intrinsic(_on_stack)


def _encoder(item: int, per_group: int, scales: Any, codes: Any, bits: int) -> Any:
    """Return a kernel that encodes the steps of a row, at least one, to codes of `bits` bits."""

    @kernel(inline="always")
    def encode(source, steps, ahead, floor, floor_step, packed, stored, group, job, room):
        (round_up, zero_scale, top), prescale = job.scale, job.prescale
        grid, key, integer = job.grid, job.key, job.integer
        step = step_length()
        size, width, blocks, groups = item * step, step * bits // 8, step // 32, step // per_group
        half = step  # bytes of two vectors
        scales(source, floor, stored, room, ahead, round_up, zero_scale, prescale, top)
        # The last round repeats the scales of the last step, because a second copy of that half would compile slowly.
        for i in range(1, steps + 1):
            following, last = min(i, steps - 1), i - 1
            scales(
                source + size * following, floor + floor_step * following, stored + blocks * following,
                room + half * (i & 1), ahead, round_up, zero_scale, prescale, top,
            )  # fmt: skip
            codes(
                source + size * last, room + half * (last & 1), packed + width * last, grid,
                group + groups * last, key, integer,
            )  # fmt: skip

    return encode


@vector_code(types.int64, types.int64)
def _raise_amax(builder, source, floor):
    top = largest([x & MAGNITUDE for x in FLOAT32.bits(builder, source)])
    top.call("umax", load(builder, I32, top.count, floor)).store(floor)


def _rows_encoder(codes: Callable[..., Any], bits: int) -> Any:
    """Return a kernel with the arguments of `encode_rows`, to codes of so many bits.

    `codes` gives the second half from a source and a rounding.
    """
    scales = _scales(FLOAT32, bits)
    even_bfloat16 = _encoder(2, 1, _scales(BFLOAT16, bits), codes(BFLOAT16, EVEN), bits)
    even, by_constant, random_16, random_32 = (
        _encoder(4, per_group, scales, codes(FLOAT32, rounding), bits)
        for rounding, per_group in ((EVEN, 1), (CONSTANT, 1), (RANDOM_16, 8), (RANDOM_32, 4))
    )

    @kernel(inline="always")
    def encode(source, source_step, half, rows, steps, floor, floor_step, packed, scales, group, address):
        job, room = fields_at(address, VectorJob).job, _halves()
        ahead = asked_ahead(steps * step_length() * (2 if half else 4), source_step)
        for r in range(rows if steps else 0):
            x, g = source + source_step * r, group + job.row_groups * r
            p, s = packed + job.length * bits // 8 * r, scales + job.length // 32 * r
            if job.rounding == EVEN and half:
                even_bfloat16(x, steps, ahead, floor, floor_step, p, s, g, job, room)
            elif job.rounding == EVEN:
                even(x, steps, ahead, floor, floor_step, p, s, g, job, room)
            elif job.rounding == CONSTANT:
                by_constant(x, steps, ahead, floor, floor_step, p, s, g, job, room)
            elif job.rounding == RANDOM_16:
                random_16(x, steps, ahead, floor, floor_step, p, s, g, job, room)
            else:
                random_32(x, steps, ahead, floor, floor_step, p, s, g, job, room)

    return encode


_encode, _encode_bytes = _rows_encoder(_codes, 4), _rows_encoder(_byte_codes, 8)


@VectorNative
def encode_rows(source, source_step, half, rows, steps, floor, floor_step, packed, scales, group, job):
    """Encode the given number of steps of each row: float32, or bfloat16 if `half`, under RNE.

    `source`, `packed` and `scales` are addresses in the first row, and `group` is its first random group. Rows are
    `source_step` bytes apart; where results of the next row lie follows from the job. `floor` is the address of a
    vector of int32, the least amax of a step's blocks, and that of the next step is `floor_step` bytes further.
    """
    _encode(source, source_step, half, rows, steps, floor, floor_step, packed, scales, group, job)


@VectorNative
def encode_byte_rows(source, source_step, half, rows, steps, floor, floor_step, packed, scales, group, job):
    """Do what `encode_rows` does, to codes of a byte each."""
    _encode_bytes(source, source_step, half, rows, steps, floor, floor_step, packed, scales, group, job)


@VectorNative
def tile_amax(panel, height, width, pitch, floor):
    """Set the amax floors of a panel's steps to the amax of whole tiles; rows are `pitch` bytes apart."""
    carray(numbers_at(floor), (16,))[:] = 0
    step = step_length()
    for r in range(height):
        for i in range(-(-width // step)):
            _raise_amax(panel + pitch * r + 4 * step * i, floor + step // 2 * i)
