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
    vector_code,
)
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


def _scales(builder: ir.IRBuilder, address: Any) -> Lanes:
    """Return the scales of a step's blocks, float32."""
    blocks = lanes_of(builder) // 4
    code = load(builder, I8, blocks, address).convert("zext", I32)
    bits = code.compare("==", 0).choose(constant(builder, I32, [_SUBNORMAL_SCALE] * blocks), code << 23)
    nan = code.compare("==", E8M0.nan_code)
    return nan.choose(constant(builder, I32, [CANONICAL_NAN] * blocks), bits).cast(F32)


def _of_nibbles(builder: ir.IRBuilder, packed: Any, scales: Any, digits: Any) -> list[Lanes]:
    """Return the values of a step of E2M1."""
    scale, lanes = _scales(builder, scales), lanes_of(builder)
    vectors = []
    for j in range(_VECTORS):
        pairs = load(builder, I8, lanes // 2, packed, lanes // 2 * j).convert("zext", I64)
        # A table lookup sees the low four bits of a 32-bit lane: the even element's, then the odd one's.
        codes = (pairs | (pairs << 28)).cast(I32)
        vectors.append(codes.look_up(E2M1.values) * scale.pick([j * lanes // 32] * lanes))
    return vectors


def _of_bytes(builder: ir.IRBuilder, packed: Any, scales: Any, digits: Any) -> list[Lanes]:
    """Return the values of a step of another element, given its `Digits`."""
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
        spoiled = scale.cast(I32).pick([block] * lanes).compare("==", CANONICAL_NAN)
        nan = magnitude.compare(">", last_number) | spoiled
        vectors.append(nan.choose(constant(builder, I32, [CANONICAL_NAN] * lanes), bits))
    return vectors


def _rounded(bits: Lanes) -> Lanes:
    """Return float32 whose upper half is the nearest bfloat16, ties to even; that of Inf and of the one NaN stays."""
    return bits + ((bits >> 16) & 1) + 0x7FFF


def _upper_halves(vectors: list[Lanes]) -> list[Lanes]:
    """Return bfloat16 vectors, half as many as the given float32 vectors."""
    upper = range(1, 4 * vectors[0].count, 2)  # of the 16-bit halves of two vectors
    return [a.cast(I16).pick(upper, b.cast(I16)) for a, b in zip(vectors[::2], vectors[1::2], strict=True)]


def _step(values: Callable[..., list[Lanes]], *, rounds: bool) -> Any:
    """Return code that decodes a step to float32, or to bfloat16 if `half`; `rounds` where its values need it."""

    @vector_code(*(types.int64,) * 6)
    def step(builder, packed, scales, out, digits, half, streaming):
        def stored(vectors: list[Lanes]) -> None:
            with builder.if_else(builder.trunc(streaming, ir.IntType(1))) as (past_caches, to_caches):
                for way, past in ((past_caches, True), (to_caches, False)):
                    with way:
                        for j, vector in enumerate(vectors):
                            place = builder.add(out, I64(4 * lanes_of(builder) * j))
                            vector.store(place, streaming=past)

        vectors = values(builder, packed, scales, digits)
        with builder.if_else(builder.trunc(half, ir.IntType(1))) as (narrow, wide):
            with narrow:
                stored(_upper_halves([_rounded(v) for v in vectors] if rounds else vectors))
            with wide:
                stored(vectors)

    return step


_nibbles, _bytes = _step(_of_nibbles, rounds=False), _step(_of_bytes, rounds=True)


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
    bits: int
    """Of a held code."""
    digits: int
    """Address of the element's `Digits`."""


@kernel(inline="always")
def _decode_steps(packed, scales, out, steps, streaming, job):
    length, size = step_length(), 2 if job.half else 4
    for i in range(steps):
        at, of_blocks, to = (
            packed + length * job.bits // 8 * i,
            scales + length // 32 * i,
            out + size * length * i,
        )
        if job.bits == 8:
            _bytes(at, of_blocks, to, job.digits, job.half, streaming)
        else:
            _nibbles(at, of_blocks, to, job.digits, job.half, streaming)


@VectorNative
def _decode(address, begin, end, room):
    job, step = fields_at(address, _Decoding), step_length()
    size, bits = 2 if job.half else 4, job.bits
    rows, columns, first = end - begin, job.columns, begin * job.length
    if job.in_steps:
        rows, columns, first = min(end - begin, 1), min(end * step, columns) - begin * step, begin * step
    out = job.out + (first if job.in_steps else begin * columns) * size
    packed, scales = job.packed + first * bits // 8, job.scales + first // 32
    steps, rest = columns // step, columns % step
    codes, values = room + 64, room + 64 + LONGEST_STEP
    for r in range(rows):
        p, s, o = packed + job.length * bits // 8 * r, scales + job.length // 32 * r, out + size * columns * r
        # A step reads and writes whole vectors, so the last elements go through scratch, in a second round: the code
        # of the steps a second time would compile slowly.
        for last in range(2 if rest else 1):
            packed_at, scales_at, out_at, count, stream = p, s, o, steps, job.streaming
            if last:
                blocks_left = -(-rest // 32)
                copy_bytes(s + step // 32 * steps, room, blocks_left)
                copy_bytes(p + step * bits // 8 * steps, codes, 4 * bits * blocks_left)
                packed_at, scales_at, out_at, count, stream = codes, room, values, 1, 0
            _decode_steps(packed_at, scales_at, out_at, count, stream, job)
            if last:
                copy_bytes(values, o + size * step * steps, size * rest)


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
        in_steps = rows == 1 or columns == length
        if in_steps:
            columns = length = rows * columns if columns == length else columns
            rows = -(-columns // target.step)
        streaming = out.nbytes >= _STREAMED_FROM and columns * out.itemsize % buffers.LINE == 0
        digits = _written_digits(q.format.element)
        job = _Decoding(
            packed=address_of(packed), scales=address_of(scales), out=address_of(out), columns=columns,
            length=length, in_steps=in_steps, half=half, streaming=streaming,
            bits=held_bits(q.format.element), digits=address_of(digits),
        )  # fmt: skip
        run(_decode.on(target), job, rows, out.size, room=_ROOM)
    return np.moveaxis(out, -1, q.axis)
