"""The inner step of quantization: eight vectors of consecutive elements to their scale codes and element codes.

There are three kinds of blocks. E2M1 under powers of two is rounded by arithmetic of its own. For other elements under
powers of two the format is a `Grid`, which each step reads from the first-level cache: those with as many bits share a
kernel, which waits for memory anyway. E2M1 under scales with a mantissa takes real quotients: RNE compares magnitudes
with the thresholds that a block's scale gives to the codes, and the other roundings find the position on the grid in
float64.

With 512 bits a step has 128 elements, with 256 bits 64. As many go together because then every part fits one vector:
amax and scales of blocks (k / 8 lanes each, which is also where their k / 2 bytes end up), and packed codes.

A step has two halves, *scales* and *codes*. Each is a chain of instructions that wait for each other, so the CPU must
see several steps at once: it sees more steps of one half than of both. So a few steps find their scales, then the same
steps their codes. Elements are read twice, the second time from the first-level cache. What codes need of their blocks
passes from half to half on the stack: factors, which blocks are finite, and under RNE of quotients the starts of codes.
"""

# Emitters work on IR values, which llvmlite does not annotate.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

from mxref.capabilities import scaled_by_powers
from mxref.formats import BLOCK_FORMATS, E2M1, MXFP4, NVFP4, BlockFormat
from mxref_numba.kernels import fields_at, kernel
from mxref_numba.lanes import (
    F32,
    F64,
    I8,
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
from mxref_numba.scale import INFINITY, quotient_scales, scale_codes, store_codes
from mxref_numba.vector.block_lanes import (
    TOP_VALUE,
    GridLanes,
    Starts,
    inverse_lines,
    largest,
    line,
    random_vectors,
    round_by,
    round_even,
    round_line,
    store_starts,
)
from mxref_numba.vector.elements import BFLOAT16, BFLOAT16_IN_ORDER, FLOAT32, ElementType
from mxref_numba.vector.flows import VectorJob
from mxref_numba.vector.target import VectorNative, lanes_of, step_length, target_of

LONGEST_STEP = 128
"""Elements of the longest step."""

_MOST_AT_ONCE = 16
_AT_ONCE = {EVEN: _MOST_AT_ONCE, CONSTANT: _MOST_AT_ONCE, RANDOM_16: 2, RANDOM_32: 2}
"""Steps whose scales are found before their codes. Under SR, codes leave the CPU enough to do between two scales."""
_LONGEST_HALF = 3 * LONGEST_STEP
"""Most bytes that pass from half to half: factors, all ones in the lanes of finite blocks, and starts of codes."""


_POLICY = (types.int32, types.int32, types.float32, types.int32, types.float32)


def _prefetch(builder: ir.IRBuilder, kind: ElementType, half: int, source: Any, ahead: Any) -> None:
    """Prefetch half of the elements of a step further ahead: the CPU holds few requests at once."""
    asked, size = builder.add(source, ahead), kind.size * target_of(builder).step // 2
    for cache_line in range(half * size, (half + 1) * size, 64):
        prefetch(builder, builder.add(asked, ir.Constant(I64, cache_line)))


def _amax(builder: ir.IRBuilder, kind: ElementType, k: int, source: Any, floor: Any) -> Lanes:
    """Return the largest magnitude bits of a step's blocks, in k / 8 lanes each."""
    amax = largest([x & MAGNITUDE for x in kind.bits(builder, source)], k)
    return amax.call("umax", load(builder, I32, amax.count, floor))


def _starts(builder: ir.IRBuilder, half: Any) -> Any:
    """Return the address of the starts of codes, behind the factors and the finite blocks."""
    return builder.add(half, ir.Constant(I64, 8 * lanes_of(builder)))


def _store_half(half: Any, factors: Lanes, finite: Lanes) -> None:
    builder, lanes = finite.builder, finite.count
    factors.store(half)
    ones = finite.choose(constant(builder, I32, [-1] * lanes), constant(builder, I32, [0] * lanes))
    ones.store(builder.add(half, ir.Constant(I64, 4 * lanes)))


def _power_scales(k: int, *, to_the_end: bool) -> Callable[[ElementType, int], Any]:
    """Return what makes code for the first half, given the type of elements and the rounding.

    The code takes the addresses of source, amax floor (a vector of int32), scale codes, and a half; and the distance in
    bytes at which it prefetches elements.
    """

    def of(kind: ElementType, rounding: int) -> Any:
        @vector_code(*(types.int64,) * 5, *_POLICY)
        def scales(
            builder, source, floor, codes, half, ahead, round_up, zero_scale, prescale, max_exponent, _
        ):
            _prefetch(builder, kind, 0, source, ahead)
            amax = _amax(builder, kind, k, source, floor)
            stored, inverse, finite = scale_codes(
                amax, round_up, zero_scale, max_exponent, to_the_end=to_the_end
            )
            store_codes(stored, codes, k)
            # The prescale times 2^-e is exact, so that one rounding gives fl32(prescale * (|x| * 2^-e)).
            _store_half(half, inverse * splat(builder, prescale, amax.count), finite)

        return scales

    return of


def _mantissa_scales(made: BlockFormat) -> Callable[[ElementType, int], Any]:
    """Return the same for scales with a mantissa."""

    def of(kind: ElementType, rounding: int) -> Any:
        @vector_code(*(types.int64,) * 5, *_POLICY)
        def scales(builder, source, floor, codes, half, ahead, _, zero_scale, __, ___, tensor):
            _prefetch(builder, kind, 0, source, ahead)
            amax = _amax(builder, kind, made.k, source, floor)
            of_blocks = amax.pick(range(0, amax.count, made.k // 8))
            code, divisor = quotient_scales(of_blocks, made, tensor)
            code = of_blocks.compare("==", 0).choose(splat(builder, zero_scale, code.count), code)
            nan = constant(builder, I32, [made.scale.nan_code] * code.count)
            of_blocks.compare("<", int(INFINITY)).choose(code, nan).convert("trunc", I8).store(codes)
            factor = inverse_lines(divisor) if rounding in (CONSTANT, RANDOM_16) else divisor
            _store_half(half, factor, amax.compare("<", int(INFINITY)))
            if rounding == EVEN:
                store_starts(divisor, _starts(builder, half))

        return scales

    return of


_CODES = (*(types.int64,) * 7, types.int32)
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
    def codes(builder, source, half, packed, _, ahead, group, key, integer):
        _prefetch(builder, kind, 1, source, ahead)
        bits, scaled = _load_scaled(builder, kind, source, half, TOP_VALUE)
        magnitudes = rounded(builder, scaled, group, key, integer)
        nibbles = [(code & 7) | ((b >> 28) & ~7) for b, code in zip(bits, magnitudes, strict=True)]
        ((kind.pack(nibbles).cast(I32) ^ 0x11111111 * flipped) & _load_finite(builder, half)).store(packed)

    return codes


def _packed(codes: Lanes, bits: int) -> Lanes:
    """Return codes of `bits` bits, a byte each, without the gaps: bytes."""
    if bits == 8:
        return codes
    pairs = codes.pairs_summed((1, 1 << bits))
    if bits == 4:
        return pairs.convert("trunc", I8)
    words = pairs.cast(I32)
    fours = (words & 0xFFF) | ((words >> 4) & 0xFFF000)
    return fours.cast(I8).pick([byte for byte in range(4 * fours.count) if byte % 4 < 3])


def _grid_codes(k: int, bits: int) -> Callable[[ElementType, int], Any]:
    """Return what makes code for the second half to codes of the formats with so many bits."""
    sign = 1 << bits - 1
    # One constant for both parts: with a second one a step takes 3 % longer.
    rest = ~sign if bits == 8 else sign - 1

    def of(kind: ElementType, rounding: int) -> Any:
        @vector_code(*_CODES)
        def codes(builder, source, half, packed, element, ahead, group, key, integer):
            _prefetch(builder, kind, 1, source, ahead)
            grid, finite = GridLanes(builder, element), _load_finite(builder, half)
            elements, scaled = _load_scaled(builder, kind, source, half, grid.top)
            rounded = _roundings(grid.round_even, grid.round_by)[rounding]
            magnitudes = rounded(builder, scaled, group, key, integer)
            signed = [
                ((x >> 32 - bits) & sign) | (code & rest)
                for x, code in zip(elements, magnitudes, strict=True)
            ]
            for i, bytes_ in enumerate(kind.pack_bytes(signed)):
                words = bytes_.cast(I32)
                blocks = [4 * (words.count * i + word) // k for word in range(words.count)]
                stored = words & finite.pick([k // 8 * block for block in blocks])
                place = ir.Constant(I64, bytes_.count * bits // 8 * i)
                _packed(stored.cast(I8), bits).store(builder.add(packed, place))

        return codes

    return of


_OF_LINES = _roundings(lambda code: code, round_line)


def _quotient_codes(k: int) -> Callable[[ElementType, int], Any]:
    """Return what makes code for the second half to E2M1 under scales with a mantissa, which stores a vector."""

    def of(kind: ElementType, rounding: int) -> Any:
        @vector_code(*_CODES)
        def codes(builder, source, half, packed, _, ahead, group, key, integer):
            _prefetch(builder, kind, 1, source, ahead)
            bits, lanes = kind.bits(builder, source), lanes_of(builder)
            if rounding == EVEN:
                starts = Starts(builder, _starts(builder, half))
                magnitudes = [starts.round_even(x & MAGNITUDE, j * lanes // k) for j, x in enumerate(bits)]
            else:
                by = [broadcast(builder, F64, lanes // 2, half, 8 * block) for block in range(8 * lanes // k)]
                found = [
                    line((x & MAGNITUDE).cast(F32), by[j * lanes // k], divides=rounding == RANDOM_32)
                    for j, x in enumerate(bits)
                ]
                magnitudes = _OF_LINES[rounding](builder, found, group, key, integer)
            nibbles = [code ^ ((x >> 28) & 8) for x, code in zip(bits, magnitudes, strict=True)]
            stored = kind.pack(nibbles, masked=rounding == EVEN).cast(I32)
            if rounding == EVEN:
                # Three bits are flipped, and the fourth where the number of the block is odd.
                odd = [8 * lane // k % 2 for lane in range(lanes)]
                stored = stored ^ constant(builder, I32, [0x11111111 * (7 + 8 * each) for each in odd])
            (stored & _load_finite(builder, half)).store(packed)

        return codes

    return of


def _on_stack(typingctx):
    """Return the address on the stack of what passes from half to half, on a cache line."""

    def generate(context, builder, *_):
        room = cgutils.alloca_once(builder, ir.ArrayType(I8, _MOST_AT_ONCE * _LONGEST_HALF))
        room.align = 64
        return builder.ptrtoint(room, I64)

    return types.int64(), generate


step_halves: Any = intrinsic(_on_stack)


def _encoder(item: int, per_group: int, at_once: int, scales: Any, codes: Any, bits: int, k: int) -> Any:
    """Return a kernel that encodes the steps of a row, at least one, to codes of `bits` bits."""

    @kernel(inline="always")
    def encode(source, steps, ahead, floor, floor_step, packed, stored, group, job, room):
        (round_up, zero_scale, top), prescale, tensor = job.scale, job.prescale, job.quotient.tensor
        grid, key, integer = job.grid, job.key, job.integer
        step = step_length()
        size, width, blocks, groups = item * step, step * bits // 8, step // k, step // per_group
        half = 3 * step  # bytes of six vectors
        for first in range(0, steps, at_once):
            end = min(first + at_once, steps)
            for i in range(first, end):
                scales(
                    source + size * i, floor + floor_step * i, stored + blocks * i, room + half * (i - first),
                    ahead, round_up, zero_scale, prescale, top, tensor,
                )  # fmt: skip
            for i in range(first, end):
                codes(
                    source + size * i, room + half * (i - first), packed + width * i, grid, ahead,
                    group + groups * i, key, integer,
                )  # fmt: skip

    return encode


@dataclass(frozen=True)
class Kind:
    """The code for a kind of blocks."""

    k: int
    bits: int
    scales: Callable[[ElementType, int], Any]
    """Gives the first half, of a type of elements and a rounding."""
    codes: Callable[[ElementType, int], Any]
    """Gives the second half likewise."""
    bfloat16: ElementType = BFLOAT16


def _rows_encoder(kind: Kind) -> Any:
    """Return a kernel with the arguments of `encode_rows`."""
    k, bits = kind.k, kind.bits

    def of(source: ElementType, rounding: int, per_group: int = 1) -> Any:
        scales, codes = kind.scales(source, rounding), kind.codes(source, rounding)
        return _encoder(source.size, per_group, _AT_ONCE[rounding], scales, codes, bits, k)

    even_bfloat16, even, by_constant = of(kind.bfloat16, EVEN), of(FLOAT32, EVEN), of(FLOAT32, CONSTANT)
    random_16, random_32 = of(FLOAT32, RANDOM_16, 8), of(FLOAT32, RANDOM_32, 4)

    @kernel(inline="always")
    def encode(
        source, source_step, ahead, half, rows, steps, floor, floor_step, packed, scales, group, address
    ):
        job, room = fields_at(address, VectorJob).job, step_halves()
        for r in range(rows if steps else 0):
            x, g = source + source_step * r, group + job.row_groups * r
            p, s = packed + job.length * bits // 8 * r, scales + job.length // k * r
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


_K = MXFP4.k
"""Of all blocks under powers of two."""
_GRID_SCALES = _power_scales(_K, to_the_end=True)

_encode = _rows_encoder(Kind(_K, E2M1.bits, _power_scales(_K, to_the_end=False), _codes))
_encode_8, _encode_6, _encode_4 = (
    _rows_encoder(Kind(_K, bits, _GRID_SCALES, _grid_codes(_K, bits))) for bits in (8, 6, 4)
)
_encode_quotients = _rows_encoder(
    Kind(NVFP4.k, E2M1.bits, _mantissa_scales(NVFP4), _quotient_codes(NVFP4.k), BFLOAT16_IN_ORDER)
)


@VectorNative
def encode_rows(source, source_step, ahead, half, rows, steps, floor, floor_step, packed, scales, group, job):
    """Encode the given number of steps of each row: float32, or bfloat16 if `half`, under RNE.

    `source`, `packed` and `scales` are addresses in the first row, and `group` is its first random group. Rows are
    `source_step` bytes apart; where results of the next row lie follows from the job. What lies `ahead` bytes further
    is prefetched. `floor` is the address of a vector of int32, the least amax of a step's blocks, and that of the next
    step is `floor_step` bytes further.
    """
    _encode(source, source_step, ahead, half, rows, steps, floor, floor_step, packed, scales, group, job)


@VectorNative
def _encode_8_rows(
    source, source_step, ahead, half, rows, steps, floor, floor_step, packed, scales, group, job
):
    _encode_8(source, source_step, ahead, half, rows, steps, floor, floor_step, packed, scales, group, job)


@VectorNative
def _encode_6_rows(
    source, source_step, ahead, half, rows, steps, floor, floor_step, packed, scales, group, job
):
    _encode_6(source, source_step, ahead, half, rows, steps, floor, floor_step, packed, scales, group, job)


@VectorNative
def _encode_4_rows(
    source, source_step, ahead, half, rows, steps, floor, floor_step, packed, scales, group, job
):
    _encode_4(source, source_step, ahead, half, rows, steps, floor, floor_step, packed, scales, group, job)


@VectorNative
def _encode_quotient_rows(
    source, source_step, ahead, half, rows, steps, floor, floor_step, packed, scales, group, job
):
    _encode_quotients(
        source, source_step, ahead, half, rows, steps, floor, floor_step, packed, scales, group, job
    )


_GRID_ROWS = {8: _encode_8_rows, 6: _encode_6_rows, 4: _encode_4_rows}
_OF_POWERS = scaled_by_powers(BLOCK_FORMATS.values(), _K)


def encoder_of(made: BlockFormat) -> VectorNative | None:
    """Return the kernel with the arguments of `encode_rows` that makes a format, or None if no vectors do."""
    if made in _OF_POWERS:
        return encode_rows if made.element is E2M1 else _GRID_ROWS[made.element.bits]
    same = made.k == NVFP4.k and made.element == NVFP4.element and made.scale == NVFP4.scale
    return _encode_quotient_rows if same else None
