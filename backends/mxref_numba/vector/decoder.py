"""Dequantization, on vectors: a table of sixteen values for E2M1, and one multiplication by the scale.

Other elements have no table: the digits of a code, moved, are those of a float16, which an instruction converts.

The product is exact, or overflows to Inf as it should; the E8M0 of code 0 is subnormal, that of 255 the canonical NaN,
which a product keeps. The scale of a tensor is a second factor, whose product is rounded once. Results beyond the
caches are streamed past them.
"""

# Kernels and emitters have no annotations: Numba infers the types of the former, llvmlite has none.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from typing import Any, NamedTuple

import ml_dtypes
import numpy as np
from llvmlite import ir
from numba.core import types
from numpy.typing import NDArray

from mxref.formats import CANONICAL_NAN, E2M1, E8M0, MXFP4, NVFP4, BlockFormat, ElementFormat, ScaleFormat
from mxref.mxarray import MXArray
from mxref_numba import buffers
from mxref_numba.grids import Digits, digits_of
from mxref_numba.held_codes import stored_rows
from mxref_numba.kernels import FIELD, address_of, fields_at, kernel, written
from mxref_numba.lanes import (
    F16,
    F32,
    I8,
    I16,
    I32,
    I64,
    Lanes,
    broadcast,
    constant,
    load,
    splat,
    vector_code,
)
from mxref_numba.scale import mantissa_scales
from mxref_numba.threads import run
from mxref_numba.vector.encode import LONGEST_STEP
from mxref_numba.vector.target import Target, VectorNative, copy_bytes, lanes_of, step_length

_SUBNORMAL_SCALE = 1 << 22
"""Bits of 2^-127."""
_STREAMED_FROM = 8 << 20
"""Bytes of a result that the caches would not keep anyway."""
_ROOM = 192 + 4 * LONGEST_STEP
"""Bytes of a worker: codes and scales of a step, and its values."""
_VECTORS = 8
"""Vectors of float32 that a step gives."""


def _scales(builder: ir.IRBuilder, address: Any, k: int, scale: ScaleFormat) -> Lanes:
    """Return the scales of a step's blocks, float32."""
    blocks = _VECTORS * lanes_of(builder) // k
    code = load(builder, I8, blocks, address).convert("zext", I32)
    if scale.powers:
        subnormal = constant(builder, I32, [_SUBNORMAL_SCALE] * blocks)
        bits = code.compare("==", 0).choose(subnormal, code << 23)
    else:
        bits = mantissa_scales(code, scale).cast(I32)
    nan = code.compare(">", scale.max_code)
    return nan.choose(constant(builder, I32, [CANONICAL_NAN] * blocks), bits).cast(F32)


def _of_nibbles(made: BlockFormat) -> Callable[..., list[Lanes]]:
    """Return what gives the values of a step of E2M1."""

    def of(builder: ir.IRBuilder, packed: Any, scales: Any, digits: Any, tensor: Any) -> list[Lanes]:
        scale, lanes = _scales(builder, scales, made.k, made.scale), lanes_of(builder)
        vectors = []
        for j in range(_VECTORS):
            pairs = load(builder, I8, lanes // 2, packed, lanes // 2 * j).convert("zext", I64)
            # A table lookup sees the low four bits of a 32-bit lane: the even element's, then the odd one's.
            codes = (pairs | (pairs << 28)).cast(I32)
            vectors.append(codes.look_up(E2M1.values) * scale.pick([j * lanes // made.k] * lanes))
        return [v * splat(builder, tensor, lanes) for v in vectors] if made.tensor_scale else vectors

    return of


def _codes_of(builder: ir.IRBuilder, packed: Any, bits: int, j: int) -> Lanes:
    """Return a vector of codes of a step, int32, and other bits above."""
    lanes = lanes_of(builder)
    if bits == 8:
        return load(builder, I8, lanes, packed, lanes * j).convert("zext", I32)
    # As many bytes as lanes, which end within the step.
    first, at = lanes * bits // 8 * j, min(lanes * bits // 8 * j, lanes * bits - lanes)
    places = [8 * (first - at) + bits * lane for lane in range(lanes)]
    ends = [(place // 8, (place + bits - 1) // 8) for place in places]
    bytes_ = load(builder, I8, lanes, packed, at).pick(
        [byte for low, high in ends for byte in (low, high) * 2]
    )
    return bytes_.cast(I32) >> constant(builder, I32, [place % 8 for place in places])


def _of_digits(k: int, bits: int) -> Callable[..., list[Lanes]]:
    """Return what gives the values of a step of another element of so many bits, given its `Digits`."""
    sign = 1 << bits - 1

    def of(builder: ir.IRBuilder, packed: Any, scales: Any, digits: Any, tensor: Any) -> list[Lanes]:
        scale, lanes = _scales(builder, scales, k, E8M0), lanes_of(builder)
        shift, unit, last_number = (
            broadcast(builder, I32, lanes, digits, FIELD * i) for i in range(len(Digits._fields))
        )
        vectors = []
        for j in range(_VECTORS):
            code, block = _codes_of(builder, packed, bits, j), j * lanes // k
            magnitude = code & (sign - 1)
            half_float = (magnitude << shift) | ((code & sign) << 16 - bits)
            value = half_float.convert("trunc", I16).cast(F16).convert("fpext", F32) * unit.cast(F32)
            product = (value * scale.pick([block] * lanes)).cast(I32)
            spoiled = scale.cast(I32).pick([block] * lanes).compare("==", CANONICAL_NAN)
            nan = magnitude.compare(">", last_number) | spoiled
            vectors.append(nan.choose(constant(builder, I32, [CANONICAL_NAN] * lanes), product))
        return vectors

    return of


def _rounded(bits: Lanes) -> Lanes:
    """Return float32 whose upper half is the nearest bfloat16, ties to even; that of Inf and of the one NaN stays."""
    return bits + ((bits >> 16) & 1) + 0x7FFF


def _upper_halves(vectors: list[Lanes]) -> list[Lanes]:
    """Return bfloat16 vectors, half as many as the given float32 vectors."""
    upper = range(1, 4 * vectors[0].count, 2)  # of the 16-bit halves of two vectors
    return [a.cast(I16).pick(upper, b.cast(I16)) for a, b in zip(vectors[::2], vectors[1::2], strict=True)]


def _step(values: Callable[..., list[Lanes]], *, rounds: bool) -> Any:
    """Return code that decodes a step to float32, or to bfloat16 if `half`; `rounds` where its values need it."""

    @vector_code(*(types.int64,) * 4, types.float32, types.int64, types.int64)
    def step(builder, packed, scales, out, digits, tensor, half, streaming):
        def stored(vectors: list[Lanes]) -> None:
            with builder.if_else(builder.trunc(streaming, ir.IntType(1))) as (past_caches, to_caches):
                for way, past in ((past_caches, True), (to_caches, False)):
                    with way:
                        for j, vector in enumerate(vectors):
                            place = builder.add(out, I64(4 * lanes_of(builder) * j))
                            vector.store(place, streaming=past)

        vectors = [v.cast(I32) for v in values(builder, packed, scales, digits, tensor)]
        with builder.if_else(builder.trunc(half, ir.IntType(1))) as (narrow, wide):
            with narrow:
                stored(_upper_halves([_rounded(v) for v in vectors] if rounds else vectors))
            with wide:
                stored(vectors)

    return step


class _Decoding(NamedTuple):
    packed: int
    scales: int
    out: int
    columns: int
    """Elements of a row that are wanted."""
    length: int
    """Elements of a row."""
    in_steps: int
    """Whether tasks are the steps of one row, not rows."""
    half: int
    streaming: int
    digits: int
    """Address of the element's `Digits`."""
    tensor: np.float32
    """The scale of the tensor."""


def _decoder(values: Callable[..., list[Lanes]], k: int, bits: int, *, rounds: bool) -> Any:
    """Return a kernel that decodes rows, or steps of one row, of codes of `bits` bits in blocks of k."""
    step_code = _step(values, rounds=rounds)

    @kernel(inline="always")
    def decode_steps(packed, scales, out, steps, streaming, job):
        length, size = step_length(), 2 if job.half else 4
        for i in range(steps):
            at, of_blocks, to = (
                packed + length * bits // 8 * i,
                scales + length // k * i,
                out + size * length * i,
            )
            step_code(at, of_blocks, to, job.digits, job.tensor, job.half, streaming)

    @kernel(inline="always")
    def decode(address, begin, end, room):
        job, step = fields_at(address, _Decoding), step_length()
        size = 2 if job.half else 4
        rows, columns, first = end - begin, job.columns, begin * job.length
        if job.in_steps:
            rows, columns, first = min(end - begin, 1), min(end * step, columns) - begin * step, begin * step
        out = job.out + (first if job.in_steps else begin * columns) * size
        packed, scales = job.packed + first * bits // 8, job.scales + first // k
        steps, rest = columns // step, columns % step
        codes, values_at = room + 64, room + 64 + LONGEST_STEP
        for r in range(rows):
            p, s, o = (
                packed + job.length * bits // 8 * r,
                scales + job.length // k * r,
                out + size * columns * r,
            )
            # A step reads and writes whole vectors, so the last elements go through scratch, in a second round: the
            # code of the steps a second time would compile slowly.
            for last in range(2 if rest else 1):
                packed_at, scales_at, out_at, count, stream = p, s, o, steps, job.streaming
                if last:
                    blocks_left = -(-rest // k)
                    copy_bytes(s + step // k * steps, room, blocks_left)
                    copy_bytes(p + step * bits // 8 * steps, codes, k * bits // 8 * blocks_left)
                    packed_at, scales_at, out_at, count, stream = codes, room, values_at, 1, 0
                decode_steps(packed_at, scales_at, out_at, count, stream, job)
                if last:
                    copy_bytes(values_at, o + size * step * steps, size * rest)

    return decode


_K = MXFP4.k
"""Of all blocks under powers of two."""
_e2m1 = _decoder(_of_nibbles(MXFP4), _K, E2M1.bits, rounds=False)
_e2m1_of_quotients = _decoder(_of_nibbles(NVFP4), NVFP4.k, E2M1.bits, rounds=True)
_bits_8, _bits_6, _bits_4 = (_decoder(_of_digits(_K, bits), _K, bits, rounds=True) for bits in (8, 6, 4))


@VectorNative
def _decode_e2m1(address, begin, end, room):
    _e2m1(address, begin, end, room)


@VectorNative
def _decode_e2m1_of_quotients(address, begin, end, room):
    _e2m1_of_quotients(address, begin, end, room)


@VectorNative
def _decode_8(address, begin, end, room):
    _bits_8(address, begin, end, room)


@VectorNative
def _decode_6(address, begin, end, room):
    _bits_6(address, begin, end, room)


@VectorNative
def _decode_4(address, begin, end, room):
    _bits_4(address, begin, end, room)


_OF_BITS = {8: _decode_8, 6: _decode_6, 4: _decode_4}


def _decoder_of(made: BlockFormat) -> VectorNative:
    """Return the kernel for a format that `encoder_of` has one for."""
    if not made.scale.powers:
        return _decode_e2m1_of_quotients
    return _decode_e2m1 if made.element is E2M1 else _OF_BITS[made.element.bits]


@cache
def _written_digits(element: ElementFormat) -> NDArray[np.uint8]:
    return written(digits_of(element))


def dequantize(q: MXArray, dtype: str, target: Target) -> NDArray[Any]:
    """Return the values of an MXArray, in its own shape.

    Args:
        q: codes and scales of any strides.
        dtype: `float32` or `bfloat16`, to which values beyond its range are rounded.
        target: whose instructions run.

    Returns:
        `dtype`, in the shape `q.shape`; in memory the block axis is the last.
    """
    half = dtype == "bfloat16"
    out = buffers.empty((*q.rows_shape, q.shape[q.axis]), ml_dtypes.bfloat16 if half else np.float32)
    if out.size:
        packed, scales = stored_rows(q)
        rows, columns, length = len(packed), out.shape[-1], q.length
        in_steps = rows == 1 or columns == length
        if in_steps:
            columns = length = rows * columns if columns == length else columns
            rows = -(-columns // target.step)
        streaming = out.nbytes >= _STREAMED_FROM and columns * out.itemsize % buffers.LINE == 0
        digits = _written_digits(q.format.element)
        job = _Decoding(
            packed=address_of(packed), scales=address_of(scales), out=address_of(out), columns=columns,
            length=length, in_steps=in_steps, half=half, streaming=streaming,
            digits=address_of(digits), tensor=np.float32(1 if q.tensor_scale is None else q.tensor_scale[0]),
        )  # fmt: skip
        run(_decoder_of(q.format).on(target), job, rows, out.size, room=_ROOM)
    return np.moveaxis(out, -1, q.axis)
