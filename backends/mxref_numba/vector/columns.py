"""Quantization along the first axis of a row-major matrix: a lane is a block, and only results are turned.

Vectors run along memory, so that the 32 elements of a block lie in one lane of 32 vectors. The largest magnitude of a
block then takes no shuffle, a transform is sums of whole vectors, and a vector of scales belongs to as many blocks.
Eight vectors of codes are joined to one of words. The words of 128 lines are turned and stored together, as whole cache
lines; the codes of one block would be a quarter of a line.

Lines are staged, since all lines of a block share few cache sets: what is read a second time would have been evicted.
"""

# Kernels and emitters have no annotations: Numba infers the types of the former, llvmlite has none.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from functools import reduce
from operator import or_
from typing import Any

from llvmlite import ir
from numba import carray  # type: ignore[attr-defined]
from numba.core import types

from mxref.formats import MXFP4
from mxref_numba.kernels import fields_at, numbers_at, words_at
from mxref_numba.lanes import (
    F32,
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
from mxref_numba.quantize_job import FLOAT32
from mxref_numba.scale import scale_codes
from mxref_numba.vector.block_lanes import TOP_VALUE, round_even
from mxref_numba.vector.flows import COLUMN_LINES, VectorJob
from mxref_numba.vector.staging import VectorLoad, bfloat16, butterflies, float32, transposed
from mxref_numba.vector.target import VectorNative, lanes_of, step_length

_BLOCK = MXFP4.k
_GROUP = 16
"""Lines that are staged together: those of a transform."""
_CODES = 8
"""Codes of a word."""
_WORDS, _BLOCKS = COLUMN_LINES // _CODES, COLUMN_LINES // _BLOCK
_FLIPPED = 0x44444444
"""The bit of each code that `round_even` flips."""


def _line(builder: ir.IRBuilder, address: Any, pitch: Any, index: int) -> Any:
    return builder.add(address, builder.mul(pitch, ir.Constant(I64, index)))


def _larger(a: Lanes, b: Lanes) -> Lanes:
    return a.call("umax", b)


def _stage(source: VectorLoad) -> Any:
    """Return code that stages one vector of each of 16 lines, and includes them in amax."""

    @vector_code(*(types.int64,) * 7, types.float32, types.int64, types.int64)
    def stage(builder, address, step, target, pitch, ahead, n, signs, factor, floor, amax):
        lanes = lanes_of(builder)
        lines = [_line(builder, address, step, i) for i in range(_GROUP)]
        x = [source(builder, line).cast(F32) for line in lines]
        for line in lines:
            prefetch(builder, builder.add(line, ahead))

        def keep(y: list[Lanes]) -> None:
            for i, v in enumerate(y):
                v.store(_line(builder, target, pitch, i))
            magnitudes = [v.cast(I32) & MAGNITUDE for v in y]
            reduce(_larger, magnitudes, load(builder, I32, lanes, floor)).store(amax)

        with builder.if_else(builder.icmp_signed("==", n, ir.Constant(I64, 1))) as (plain, transformed):
            with plain:
                keep(x)
            with transformed:
                signed = [v * broadcast(builder, F32, lanes, signs, 4 * i) for i, v in enumerate(x)]
                norm = splat(builder, factor, lanes)
                keep([v * norm for v in butterflies(signed, _GROUP)])

    return stage


_stage_float32, _stage_bfloat16 = _stage(float32), _stage(bfloat16)


@vector_code(*(types.int64,) * 5, types.int32, types.int32, types.float32, types.int32)
def _encode(builder, source, pitch, amax, scales, words, round_up, zero_scale, prescale, max_exponent):
    lanes = lanes_of(builder)
    top = load(builder, I32, lanes, amax)
    stored, inverse, finite = scale_codes(top, round_up, zero_scale, max_exponent, to_the_end=False)
    stored.convert("trunc", I8).store(scales)
    # The prescale times 2^-e is exact, so that one rounding gives fl32(prescale * (|x| * 2^-e)).
    factor = inverse * splat(builder, prescale, lanes)
    zeros = constant(builder, I32, [0] * lanes)
    for word in range(_BLOCK // _CODES):
        codes = []
        for i in range(_CODES):
            x = load(builder, I32, lanes, _line(builder, source, pitch, _CODES * word + i))
            code = round_even((x.cast(F32) * factor).at_most(TOP_VALUE))
            codes.append(((code & 7) | ((x >> 28) & ~7)) << 4 * i)
        joined = reduce(or_, codes) ^ _FLIPPED
        finite.choose(joined, zeros).store(_line(builder, words, pitch, word))


@vector_code(*(types.int64,) * 4)
def _turn_words(builder, words, pitch, codes, codes_pitch):
    lanes = lanes_of(builder)
    lines = [load(builder, I32, lanes, _line(builder, words, pitch, i)) for i in range(lanes)]
    for i, row in enumerate(transposed(lines)):
        row.store(_line(builder, codes, codes_pitch, i))


@vector_code(*(types.int64,) * 3)
def _join_scales(builder, scales, pitch, joined):
    lanes = lanes_of(builder)
    of_blocks = [load(builder, I8, lanes, _line(builder, scales, pitch, i)) for i in range(_BLOCKS)]
    reduce(or_, [v.convert("zext", I32) << 8 * i for i, v in enumerate(of_blocks)]).store(joined)


@VectorNative
def encode_columns(address, row, height, column, width, room, scratch):
    """Quantize the rows of a unit, as `_quantize_unit` does, from lines that hold one element of each row.

    Rows go in a multiple of 16, their elements in a multiple of 128. The rounding is RNE, a transform has size 16, and
    a code four bits. `room` is scratch for a panel.
    """
    job = fields_at(address, VectorJob).job
    layout, (n, signs, factor), packed, scales, length = (
        job.layout, job.transform, job.codes, job.scales, job.length
    )  # fmt: skip
    row_step, column_step = layout.row_step, layout.column_step
    (round_up, zero_scale, max_exponent), prescale = job.scale, job.prescale
    # A power of two between lines would make them compete for cache sets.
    lanes, pitch, ahead = step_length() // 8, 4 * height + 64, height * row_step
    words = room + pitch * _BLOCK
    amax = words + pitch * _WORDS
    none, stored, joined = amax + pitch, amax + pitch + 64, amax + 2 * pitch
    carray(numbers_at(none), (8,))[:] = 0
    for first in range(column, column + width, COLUMN_LINES):
        for block in range(_BLOCKS):
            for group in range(0, _BLOCK, _GROUP):
                source = layout.address + row * row_step + (first + _BLOCK * block + group) * column_step
                target = room + pitch * group
                for c in range(0, height, lanes):
                    floor = amax + 4 * c if group else none
                    if layout.kind == FLOAT32:
                        _stage_float32(
                            source + 4 * c, column_step, target + 4 * c, pitch, ahead, n, signs, factor,
                            floor, amax + 4 * c,
                        )  # fmt: skip
                    else:
                        _stage_bfloat16(
                            source + 2 * c, column_step, target + 4 * c, pitch, ahead, n, signs, factor,
                            floor, amax + 4 * c,
                        )  # fmt: skip
            target = words + pitch * block * (_BLOCK // _CODES)
            for c in range(0, height, lanes):
                _encode(
                    room + 4 * c, pitch, amax + 4 * c, stored + height * block + c, target + 4 * c,
                    round_up, zero_scale, prescale, max_exponent,
                )  # fmt: skip
        codes, codes_step = packed + (row * length + first) // 2, length // 2
        for c in range(0, height, lanes):
            for word in range(0, _WORDS, lanes):
                _turn_words(
                    words + pitch * word + 4 * c, pitch, codes + codes_step * c + 4 * word, codes_step
                )
            _join_scales(stored + c, height, joined + 4 * c)
        found, scale = carray(words_at(joined), (height,)), scales + (row * length + first) // _BLOCK
        for c in range(height):
            carray(words_at(scale), (1,))[0] = found[c]
            scale += length // _BLOCK
