"""Dequantization, on vectors of 512 bits: a table of sixteen values, and one multiplication by the scale.

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
from mxref_numba.dequantize import code_rows
from mxref_numba.vector.encode import STEP
from mxref_numba.vector.jobs import address_of
from mxref_numba.vector.lanes import F32, I8, I16, I32, I64, Lanes, constant, load, vector_code
from mxref_numba.vector.native import Native, copy_bytes, numbers_at, run_native

_VALUES = [*E2M1.magnitudes, *(-m for m in E2M1.magnitudes)]
_SUBNORMAL_SCALE = 1 << 22
"""Bits of 2^-127."""
_STREAMED_FROM = 8 << 20
"""Bytes of a result that the caches would not keep anyway."""
_ROOM = 128 + 4 * STEP
"""Bytes of a worker: codes and scales of a step, and its values."""


def _scales(builder: ir.IRBuilder, address: Any) -> Lanes:
    """Return the scales of four blocks, float32 [4]."""
    code = load(builder, I8, 4, address).convert("zext", I32)
    bits = code.compare("==", 0).choose(constant(builder, I32, [_SUBNORMAL_SCALE] * 4), code << 23)
    nan = code.compare("==", E8M0.nan_code)
    return nan.choose(constant(builder, I32, [CANONICAL_NAN] * 4), bits).cast(F32)


def _decode(half: bool, streaming: bool) -> Any:
    @vector_code(*(types.int64,) * 3)
    def decode(builder, packed, scales, out):
        table, scale = constant(builder, F32, _VALUES), _scales(builder, scales)
        vectors = []
        for j in range(STEP // 16):
            pairs = load(builder, I8, 8, packed, 8 * j).convert("zext", I64)
            # A table lookup sees the low four bits of a 32-bit lane: the even element's, then the odd one's.
            codes = (pairs | (pairs << 28)).cast(I32)
            value = table.look_up(codes)
            vectors.append(value * scale.pick([j // 2] * 16))
        if half:
            upper = range(1, 64, 2)  # of the 16-bit halves of two vectors
            vectors = [
                a.cast(I16).pick(upper, b.cast(I16)) for a, b in zip(vectors[::2], vectors[1::2], strict=True)
            ]
        for j, vector in enumerate(vectors):
            vector.store(builder.add(out, ir.Constant(I64, 64 * j)), streaming=streaming)

    return decode


_decode_float32, _stream_float32 = _decode(half=False, streaming=False), _decode(half=False, streaming=True)
_decode_bfloat16, _stream_bfloat16 = _decode(half=True, streaming=False), _decode(half=True, streaming=True)


@kernel(inline="always")
def _decode_rows(packed, scales, out, rows, columns, length, half, streaming, room):
    """Decode `columns` of `length` elements of each row; rows of results follow each other."""
    size = 2 if half else 4
    steps, rest = columns // STEP, columns % STEP
    blocks = -(-rest // 32)
    for r in range(rows):
        p, s, o = packed + length // 2 * r, scales + length // 32 * r, out + size * columns * r
        if half and streaming:
            for i in range(steps):
                _stream_bfloat16(p + 64 * i, s + 4 * i, o + 2 * STEP * i)
        elif half:
            for i in range(steps):
                _decode_bfloat16(p + 64 * i, s + 4 * i, o + 2 * STEP * i)
        elif streaming:
            for i in range(steps):
                _stream_float32(p + 64 * i, s + 4 * i, o + 4 * STEP * i)
        else:
            for i in range(steps):
                _decode_float32(p + 64 * i, s + 4 * i, o + 4 * STEP * i)
        if rest:  # a step reads 68 bytes and writes 128 elements: the last ones borrow the space
            copy_bytes(p + 64 * steps, room, 16 * blocks)
            copy_bytes(s + 4 * steps, room + 64, blocks)
            if half:
                _decode_bfloat16(room, room + 64, room + 128)
            else:
                _decode_float32(room, room + 64, room + 128)
            copy_bytes(room + 128, o + size * STEP * steps, size * rest)


@Native
def _dequantize_share(arguments, worker, workers):
    numbers = carray(numbers_at(arguments), (9,))
    packed, scales, out, rows, columns, length = (
        numbers[0], numbers[1], numbers[2], numbers[3], numbers[4], numbers[5]
    )  # fmt: skip
    half, streaming, room = numbers[6], numbers[7], numbers[8] + worker * _ROOM
    size = 2 if half else 4
    if rows > 1:
        begin, end = share(rows, worker, workers)
        columns_here, rows_here, first = columns, end - begin, begin * length
        out += begin * columns * size
    else:
        begin, end = share(-(-columns // STEP), worker, workers)
        columns_here, rows_here, first = min(end * STEP, columns) - begin * STEP, 1, begin * STEP
        out += first * size
    _decode_rows(
        packed + first // 2, scales + first // 32, out, rows_here, columns_here, length, half, streaming, room
    )


def dequantize(q: MXArray, dtype: str) -> NDArray[Any]:
    """Return the values of an MXArray, in its own shape.

    Args:
        q: codes and scales of any strides.
        dtype: `float32` or `bfloat16`, which hold every value but for overflow to Inf.

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
        )
        run_native(_dequantize_share, np.array(numbers, np.int64), out.size)
    return np.moveaxis(out, -1, q.axis)
