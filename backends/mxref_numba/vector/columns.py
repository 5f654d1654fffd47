"""Quantization along the first axis of a row-major matrix: a lane is a block, and nothing is turned but results.

Vectors run along memory, so that the 32 elements of a block lie in 32 vectors, in one lane. The largest magnitude of
a block then takes no shuffle, a transform is sums of whole vectors, and a vector of scales belongs to as many blocks.
Eight vectors of codes are joined to one of words. Words of 128 lines are turned and stored: whole cache lines, where
the codes of one block would be a quarter of one.
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

from mxref_numba.scalar.panels import FLOAT32
from mxref_numba.vector.hadamard import butterflies
from mxref_numba.vector.jobs import COLUMN_LINES, read_job
from mxref_numba.vector.lanes import F32, I8, I32, I64, Lanes, broadcast, load, prefetch, splat, vector_code
from mxref_numba.vector.native import Native, numbers_at, words_at
from mxref_numba.vector.rounding import TOP_VALUE, round_even
from mxref_numba.vector.scale import MAGNITUDE, scale_codes
from mxref_numba.vector.sources import Source, bfloat16, float32
from mxref_numba.vector.target import lanes_of, step_length
from mxref_numba.vector.turn import transposed

_BLOCK, _GROUP = 32, 16
_WORD = 8
"""Codes of four bits in a word."""


def _at(builder: ir.IRBuilder, address: Any, step: Any, count: int) -> Any:
    return builder.add(address, builder.mul(step, ir.Constant(I64, count)))


def _stage(source: Source) -> Any:
    @vector_code(*(types.int64,) * 7, types.float32, types.int64, types.int64)
    def stage(builder, address, step, target, pitch, ahead, n, signs, factor, floor, amax):
        lanes = lanes_of(builder)
        lines = [_at(builder, address, step, i) for i in range(_GROUP)]
        x = [source(builder, line).cast(F32) for line in lines]
        for line in lines:
            prefetch(builder, builder.add(line, ahead))

        def keep(y: list[Lanes]) -> None:
            for i, v in enumerate(y):
                v.store(_at(builder, target, pitch, i))
            magnitudes = [v.cast(I32) & MAGNITUDE for v in y]
            top = reduce(lambda a, b: a.call("umax", b), [load(builder, I32, lanes, floor), *magnitudes])
            top.store(amax)

        with builder.if_else(builder.icmp_signed("==", n, ir.Constant(I64, 1))) as (plain, transformed):
            with plain:
                keep(x)
            with transformed:
                signed = [v * broadcast(builder, F32, lanes, signs, 4 * i) for i, v in enumerate(x)]
                norm = splat(builder, factor, lanes)
                keep([v * norm for v in butterflies(signed, _GROUP)])

    return stage


_stage_float32, _stage_bfloat16 = _stage(float32), _stage(bfloat16)


@vector_code(*(types.int64,) * 6, types.int32, types.int32, types.float32, types.int32)
def _encode(
    builder, source, pitch, amax, scales, words, words_pitch, round_up, zero_scale, prescale, max_exponent
):
    lanes = lanes_of(builder)
    stored, inverse, finite = scale_codes(
        load(builder, I32, lanes, amax), round_up, zero_scale, max_exponent
    )
    stored.convert("trunc", I8).store(scales)
    # The prescale times 2^-e is exact, so that one rounding gives fl32(prescale * (|x| * 2^-e)).
    factor = inverse * splat(builder, prescale, lanes)
    for word in range(_BLOCK // _WORD):
        nibbles = []
        for i in range(_WORD):
            x = load(builder, I32, lanes, _at(builder, source, pitch, _WORD * word + i))
            code = round_even((x.cast(F32) * factor).at_most(TOP_VALUE))
            nibbles.append((((code & 7) | ((x >> 28) & ~7)) << 4 * i))
        joined = reduce(or_, nibbles) ^ 0x44444444
        finite.choose(joined, joined ^ joined).store(_at(builder, words, words_pitch, word))


@vector_code(*(types.int64,) * 4)
def _turn_words(builder, words, words_pitch, codes, codes_pitch):
    lines = [load(builder, I32, lanes_of(builder), _at(builder, words, words_pitch, i)) for i in range(lanes_of(builder))]
    for i, row in enumerate(transposed(lines)):
        row.store(_at(builder, codes, codes_pitch, i))


@vector_code(*(types.int64,) * 3)
def _join_scales(builder, scales, pitch, joined):
    lanes = lanes_of(builder)
    bytes_ = [load(builder, I8, lanes, _at(builder, scales, pitch, i)).convert("zext", I32) << 8 * i for i in range(4)]
    reduce(or_, bytes_).store(joined)


@Native
def encode_columns(calls, job, row, height, column, width, room, scratch, filled):
    """Quantize `width` lines, a multiple of 128, from `column` on, of `height` columns, a multiple of 16, from `row` on.

    The arguments are those of a unit (`quantize.py`), which sees the matrix from its other axis. `room` is scratch.
    """
    layout, (packed, scales, _, length), _, (n, signs, factor), policy, _, (_, bits, max_exponent, _), _ = read_job(job)
    address, row_step, column_step, _, kind = layout
    round_up, zero_scale, prescale, _, _, _ = policy
    lanes, pitch = step_length() // 8, 4 * height + 64
    words = room + 32 * pitch
    amax = words + 16 * pitch
    stored = amax + pitch
    joined = stored + 4 * height
    zeros = joined + 4 * height
    carray(numbers_at(zeros), (8,))[:] = 0
    ahead = height * row_step
    for first in range(column, column + width, COLUMN_LINES):
        for block in range(COLUMN_LINES // 32):
            for half in range(2):
                source = address + row * row_step + (first + 32 * block + 16 * half) * column_step
                target, floor = room + 16 * half * pitch, amax if half else zeros
                for c in range(0, height, lanes):
                    if kind == FLOAT32:
                        _stage_float32(source + 4 * c, column_step, target + 4 * c, pitch, ahead, n, signs, factor, floor + 4 * c * half, amax + 4 * c)
                    else:
                        _stage_bfloat16(source + 2 * c, column_step, target + 4 * c, pitch, ahead, n, signs, factor, floor + 4 * c * half, amax + 4 * c)
            for c in range(0, height, lanes):
                _encode(room + 4 * c, pitch, amax + 4 * c, stored + height * block + c, words + 4 * block * pitch + 4 * c, pitch, round_up, zero_scale, prescale, max_exponent)
        codes, codes_pitch = packed + (row * length + first) // 2, length // 2
        for c in range(0, height, lanes):
            for word in range(0, 16, lanes):
                _turn_words(words + word * pitch + 4 * c, pitch, codes + codes_pitch * c + 4 * word, codes_pitch)
            _join_scales(stored + c, height, joined + 4 * c)
        source_words, scale = carray(words_at(joined), (height,)), scales + (row * length + first) // 32
        for c in range(height):
            carray(words_at(scale), (1,))[0] = source_words[c]
            scale += length // 32
