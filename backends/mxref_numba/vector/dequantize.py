"""Dequantization, on vectors: a table of sixteen values, and one multiplication by the scale.

A code of a byte has no table: its digits, moved, are those of a float16, which an instruction converts.

The product is exact, or overflows to Inf as it should; the scale of code 0 is subnormal, that of 255 the
canonical NaN, which a product keeps. Results beyond the caches are streamed past them.
"""

# Kernels and emitters have no annotations: Numba infers the types of the former, llvmlite has none.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from llvmlite import ir
from numba import carray  # type: ignore[attr-defined]
from numba.core import types
from numpy.typing import NDArray

from mxref.formats import CANONICAL_NAN, E2M1, E8M0
from mxref.mxarray import MXArray
from mxref_numba import compiled, memory
from mxref_numba.compiled import kernel, share
from mxref_numba.elements import (
    HALF_SHIFT,
    HALF_UNIT,
    LAST_NUMBER,
    MAGNITUDE_CODE,
    decoding_numbers,
    held_bits,
)
from mxref_numba.native import address_of, numbers_at, run_native
from mxref_numba.scalar.dequantize import code_rows
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
from mxref_numba.vector.native import VectorNative, copy_bytes
from mxref_numba.vector.target import Target, lanes_of, step_length

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


def _decode(half: bool, streaming: bool) -> Any:
    @vector_code(*(types.int64,) * 3)
    def decode(builder, packed, scales, out):
        scale, lanes = _scales(builder, scales), lanes_of(builder)
        vectors = []
        for j in range(_VECTORS):
            pairs = load(builder, I8, lanes // 2, packed, lanes // 2 * j).convert("zext", I64)
            # A table lookup sees the low four bits of a 32-bit lane: the even element's, then the odd one's.
            codes = (pairs | (pairs << 28)).cast(I32)
            vectors.append(codes.look_up(E2M1.values) * scale.pick([j * lanes // 32] * lanes))
        _store(builder, _upper_halves(vectors) if half else vectors, out, streaming)

    return decode


def _upper_halves(vectors: list[Lanes]) -> list[Lanes]:
    """Return bfloat16 vectors, half as many as the given float32 vectors."""
    upper = range(1, 4 * vectors[0].count, 2)  # of the 16-bit halves of two vectors
    return [a.cast(I16).pick(upper, b.cast(I16)) for a, b in zip(vectors[::2], vectors[1::2], strict=True)]


def _store(builder: ir.IRBuilder, vectors: list[Lanes], out: Any, streaming: bool) -> None:
    for j, vector in enumerate(vectors):
        vector.store(builder.add(out, ir.Constant(I64, 4 * lanes_of(builder) * j)), streaming=streaming)


def _decode_bytes(half: bool, streaming: bool) -> Any:
    @vector_code(*(types.int64,) * 4)
    def decode(builder, codes, scales, out, element):
        scale, lanes = _scales(builder, scales), lanes_of(builder)
        shift, unit, last = (
            broadcast(builder, I32, lanes, element, 4 * i) for i in (HALF_SHIFT, HALF_UNIT, LAST_NUMBER)
        )
        vectors = []
        for j in range(_VECTORS):
            code, block = load(builder, I8, lanes, codes, lanes * j).convert("zext", I32), j * lanes // 32
            magnitude = code & MAGNITUDE_CODE
            digits = (magnitude << shift) | ((code ^ magnitude) << 8)
            value = digits.convert("trunc", I16).cast(F16).convert("fpext", F32) * unit.cast(F32)
            bits = (value * scale.pick([block] * lanes)).cast(I32)
            if half:  # to nearest, ties to even, and Inf to itself
                bits = bits + ((bits >> 16) & 1) + 0x7FFF
            spoiled = scale.cast(I32).pick([block] * lanes).compare("==", CANONICAL_NAN)
            nan = magnitude.compare(">", last) | spoiled
            vectors.append(nan.choose(constant(builder, I32, [CANONICAL_NAN] * lanes), bits))
        _store(builder, _upper_halves(vectors) if half else vectors, out, streaming)

    return decode


_decode_float32, _stream_float32 = _decode(half=False, streaming=False), _decode(half=False, streaming=True)
_decode_bfloat16, _stream_bfloat16 = _decode(half=True, streaming=False), _decode(half=True, streaming=True)


_bytes_float32, _stream_bytes_float32 = (_decode_bytes(half=False, streaming=s) for s in (False, True))
_bytes_bfloat16, _stream_bytes_bfloat16 = (_decode_bytes(half=True, streaming=s) for s in (False, True))


@kernel(inline="always")
def _decode_steps(packed, scales, out, steps, half, streaming, bits, element):
    step = step_length()
    width, blocks, size = step * bits // 8, step // 32, 2 * step if half else 4 * step
    if bits == 8 and half and streaming:
        for i in range(steps):
            _stream_bytes_bfloat16(packed + width * i, scales + blocks * i, out + size * i, element)
    elif bits == 8 and half:
        for i in range(steps):
            _bytes_bfloat16(packed + width * i, scales + blocks * i, out + size * i, element)
    elif bits == 8 and streaming:
        for i in range(steps):
            _stream_bytes_float32(packed + width * i, scales + blocks * i, out + size * i, element)
    elif bits == 8:
        for i in range(steps):
            _bytes_float32(packed + width * i, scales + blocks * i, out + size * i, element)
    elif half and streaming:
        for i in range(steps):
            _stream_bfloat16(packed + width * i, scales + blocks * i, out + size * i)
    elif half:
        for i in range(steps):
            _decode_bfloat16(packed + width * i, scales + blocks * i, out + size * i)
    elif streaming:
        for i in range(steps):
            _stream_float32(packed + width * i, scales + blocks * i, out + size * i)
    else:
        for i in range(steps):
            _decode_float32(packed + width * i, scales + blocks * i, out + size * i)


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


@VectorNative
def _dequantize_share(arguments, worker, workers):
    numbers = carray(numbers_at(arguments), (11,))
    packed, scales, out, rows, columns, length = (
        numbers[0], numbers[1], numbers[2], numbers[3], numbers[4], numbers[5]
    )  # fmt: skip
    half, streaming, room = numbers[6], numbers[7], numbers[8] + worker * _ROOM
    bits, element = numbers[9], numbers[10]
    size = 2 if half else 4
    if rows > 1:
        begin, end = share(rows, worker, workers)
        columns_here, rows_here, first = columns, end - begin, begin * length
        out += begin * columns * size
    else:
        step = step_length()
        begin, end = share(-(-columns // step), worker, workers)
        columns_here, rows_here, first = min(end * step, columns) - begin * step, 1, begin * step
        out += first * size
    _decode_rows(
        packed + first * bits // 8, scales + first // 32, out, rows_here, columns_here, length, half, streaming,
        room, bits, element,
    )  # fmt: skip


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
    out = memory.empty((*q.rows_shape, q.shape[q.axis]), ml_dtypes.bfloat16 if half else np.float32)
    if out.size:
        packed, scales = code_rows(q)
        rows, columns, length = len(packed), out.shape[-1], q.length
        if columns == length:
            rows, columns = 1, rows * length
        streaming = out.nbytes >= _STREAMED_FROM and columns * out.itemsize % memory.LINE == 0
        room = np.empty(compiled.worker_count(out.size) * _ROOM, np.uint8)
        numbers = (
            *map(address_of, (packed, scales, out)),
            rows,
            columns,
            length,
            half,
            streaming,
            address_of(room),
            held_bits(q.format.element),
            address_of(decoding_numbers(q.format.element)),
        )
        run_native(_dequantize_share.on(target), np.array(numbers, np.int64), out.size)
    return np.moveaxis(out, -1, q.axis)
