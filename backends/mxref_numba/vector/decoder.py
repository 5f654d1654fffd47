"""Dequantization, on vectors: a table of sixteen values, and one multiplication by the scale.

A code of a byte has no table: its digits, moved, are those of a float16, which an instruction converts.

The product is exact, or overflows to Inf as it should; the scale of code 0 is subnormal, that of 255 the
canonical NaN, which a product keeps. Results beyond the caches are streamed past them.
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

from mxref.formats import CANONICAL_NAN, E2M1, E8M0, ElementFormat
from mxref.mxarray import MXArray
from mxref_numba import buffers
from mxref_numba.grids import MAGNITUDE_CODE, Digits, digits_of, held_bits
from mxref_numba.held_codes import code_rows
from mxref_numba.kernels import FIELD, address_of, fields_at, kernel, share, written
from mxref_numba.threads import run_native, scratch
from mxref_numba.vector.encode import LONGEST_STEP
from mxref_numba.vector.lanes import (
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
    vector_code,
)
from mxref_numba.vector.target import Target, VectorNative, copy_bytes, lanes_of, step_length

_SUBNORMAL_SCALE = 1 << 22
"""Bits of 2^-127."""
_STREAMED_FROM = 8 << 20
"""Bytes of a result that the caches would not keep anyway."""
_ROOM = 192 + 4 * LONGEST_STEP
"""Bytes of a worker: codes and scales of a step, and its values."""
_VECTORS = 8
"""Vectors of float32 that a step gives."""


def _scales(builder: ir.IRBuilder, address: Any) -> Lanes:
    """Return the scales of a step's blocks, float32."""
    blocks = lanes_of(builder) // 4
    code = load(builder, I8, blocks, address).convert("zext", I32)
    bits = code.compare("==", 0).choose(constant(builder, I32, [_SUBNORMAL_SCALE] * blocks), code << 23)
    nan = code.compare("==", E8M0.nan_code)
    return nan.choose(constant(builder, I32, [CANONICAL_NAN] * blocks), bits).cast(F32)


def _of_nibbles(builder: ir.IRBuilder, packed: Any, scales: Any, digits: Any, half: bool) -> list[Lanes]:
    """Return the values of a step of E2M1."""
    scale, lanes = _scales(builder, scales), lanes_of(builder)
    vectors = []
    for j in range(_VECTORS):
        pairs = load(builder, I8, lanes // 2, packed, lanes // 2 * j).convert("zext", I64)
        # A table lookup sees the low four bits of a 32-bit lane: the even element's, then the odd one's.
        codes = (pairs | (pairs << 28)).cast(I32)
        vectors.append(codes.look_up(E2M1.values) * scale.pick([j * lanes // 32] * lanes))
    return vectors


def _of_bytes(builder: ir.IRBuilder, packed: Any, scales: Any, digits: Any, half: bool) -> list[Lanes]:
    """Return the values of a step of another element, given its `Digits`; if `half`, rounded to bfloat16."""
    scale, lanes = _scales(builder, scales), lanes_of(builder)
    shift, unit, last_number = (
        broadcast(builder, I32, lanes, digits, FIELD * i) for i in range(len(Digits._fields))
    )
    vectors = []
    for j in range(_VECTORS):
        code, block = load(builder, I8, lanes, packed, lanes * j).convert("zext", I32), j * lanes // 32
        magnitude = code & MAGNITUDE_CODE
        half_float = (magnitude << shift) | ((code ^ magnitude) << 8)
        value = half_float.convert("trunc", I16).cast(F16).convert("fpext", F32) * unit.cast(F32)
        bits = (value * scale.pick([block] * lanes)).cast(I32)
        if half:  # to nearest, ties to even, and Inf to itself
            bits = bits + ((bits >> 16) & 1) + 0x7FFF
        spoiled = scale.cast(I32).pick([block] * lanes).compare("==", CANONICAL_NAN)
        nan = magnitude.compare(">", last_number) | spoiled
        vectors.append(nan.choose(constant(builder, I32, [CANONICAL_NAN] * lanes), bits))
    return vectors


def _upper_halves(vectors: list[Lanes]) -> list[Lanes]:
    """Return bfloat16 vectors, half as many as the given float32 vectors."""
    upper = range(1, 4 * vectors[0].count, 2)  # of the 16-bit halves of two vectors
    return [a.cast(I16).pick(upper, b.cast(I16)) for a, b in zip(vectors[::2], vectors[1::2], strict=True)]


def _decoder(values: Callable[..., list[Lanes]], half: bool, streaming: bool) -> Any:
    """Return a kernel that decodes steps to bfloat16 if `half`, else float32."""

    @vector_code(*(types.int64,) * 4)
    def step(builder, packed, scales, out, digits):
        vectors = values(builder, packed, scales, digits, half)
        for j, vector in enumerate(_upper_halves(vectors) if half else vectors):
            vector.store(builder.add(out, I64(4 * lanes_of(builder) * j)), streaming=streaming)

    size = 2 if half else 4

    @kernel(inline="always")
    def decode(packed, scales, out, steps, width, digits):
        length = step_length()
        for i in range(steps):
            step(packed + width * i, scales + length // 32 * i, out + size * length * i, digits)

    return decode


_nibbles_float32, _stream_nibbles_float32, _nibbles_bfloat16, _stream_nibbles_bfloat16 = (
    _decoder(_of_nibbles, half, streaming) for half in (False, True) for streaming in (False, True)
)
_bytes_float32, _stream_bytes_float32, _bytes_bfloat16, _stream_bytes_bfloat16 = (
    _decoder(_of_bytes, half, streaming) for half in (False, True) for streaming in (False, True)
)


@kernel(inline="always")
def _decode_steps(packed, scales, out, steps, half, streaming, bits, digits):
    width = step_length() * bits // 8
    if bits == 8 and half and streaming:
        _stream_bytes_bfloat16(packed, scales, out, steps, width, digits)
    elif bits == 8 and half:
        _bytes_bfloat16(packed, scales, out, steps, width, digits)
    elif bits == 8 and streaming:
        _stream_bytes_float32(packed, scales, out, steps, width, digits)
    elif bits == 8:
        _bytes_float32(packed, scales, out, steps, width, digits)
    elif half and streaming:
        _stream_nibbles_bfloat16(packed, scales, out, steps, width, digits)
    elif half:
        _nibbles_bfloat16(packed, scales, out, steps, width, digits)
    elif streaming:
        _stream_nibbles_float32(packed, scales, out, steps, width, digits)
    else:
        _nibbles_float32(packed, scales, out, steps, width, digits)


@kernel(inline="always")
def _decode_rows(packed, scales, out, rows, columns, length, half, streaming, room, bits, element):
    """Decode `columns` of `length` elements of each row; rows of results follow each other."""
    size = 2 if half else 4
    step = step_length()
    steps, rest = columns // step, columns % step
    codes, values = room + 64, room + 64 + LONGEST_STEP
    for r in range(rows):
        p, s, o = packed + length * bits // 8 * r, scales + length // 32 * r, out + size * columns * r
        # A step reads and writes whole vectors, so the last elements go through scratch, in a second round: the code
        # of the steps a second time would compile slowly.
        for last in range(2 if rest else 1):
            packed_at, scales_at, out_at, count, stream = p, s, o, steps, streaming
            if last:
                blocks_left = -(-rest // 32)
                copy_bytes(s + step // 32 * steps, room, blocks_left)
                copy_bytes(p + step * bits // 8 * steps, codes, 4 * bits * blocks_left)
                packed_at, scales_at, out_at, count, stream = codes, room, values, 1, 0
            _decode_steps(packed_at, scales_at, out_at, count, half, stream, bits, element)
            if last:
                copy_bytes(values, o + size * step * steps, size * rest)


class _Job(NamedTuple):
    packed: int
    scales: int
    out: int
    rows: int
    columns: int
    """Elements of a row that are wanted."""
    length: int
    """Elements of a row."""
    half: int
    streaming: int
    room: int
    bits: int
    digits: int
    """Address of the element's `Digits`."""


_job_at = fields_at(_Job)


@VectorNative
def _dequantize_share(arguments, worker, workers):
    job = _job_at(arguments)
    out, rows, columns, size = job.out, job.rows, job.columns, 2 if job.half else 4
    if rows > 1:
        begin, end = share(rows, worker, workers)
        columns_here, rows_here, first = columns, end - begin, begin * job.length
        out += begin * columns * size
    else:
        step = step_length()
        begin, end = share(-(-columns // step), worker, workers)
        columns_here, rows_here, first = min(end * step, columns) - begin * step, 1, begin * step
        out += first * size
    _decode_rows(
        job.packed + first * job.bits // 8, job.scales + first // 32, out, rows_here, columns_here, job.length,
        job.half, job.streaming, job.room + worker * _ROOM, job.bits, job.digits,
    )  # fmt: skip


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
        packed, scales = code_rows(q)
        rows, columns, length = len(packed), out.shape[-1], q.length
        if columns == length:
            rows, columns = 1, rows * length
        streaming = out.nbytes >= _STREAMED_FROM and columns * out.itemsize % buffers.LINE == 0
        _memory, room = scratch(out.size, _ROOM)
        digits = _written_digits(q.format.element)
        job = _Job(
            packed=address_of(packed), scales=address_of(scales), out=address_of(out), rows=rows,
            columns=columns, length=length, half=half, streaming=streaming, room=room,
            bits=held_bits(q.format.element), digits=address_of(digits),
        )  # fmt: skip
        run_native(_dequantize_share.on(target), job, out.size)
    return np.moveaxis(out, -1, q.axis)
