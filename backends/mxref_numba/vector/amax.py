"""The largest magnitudes that quantization needs before it begins: of square tiles, and of a whole tensor."""

# Emitters work on IR values, which llvmlite does not annotate.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from functools import reduce
from typing import Any

from llvmlite import ir
from numba import carray  # type: ignore[attr-defined]
from numba.core import types

from mxref.formats import MXFP4, NVFP4
from mxref.steps.scale import MANTISSA_BITS
from mxref_numba.kernels import fields_at, numbers_at
from mxref_numba.lanes import I32, I64, MAGNITUDE, constant, load, named, prefetch, vector_code
from mxref_numba.vector.block_lanes import largest
from mxref_numba.vector.elements import BFLOAT16, FLOAT32, ElementType
from mxref_numba.vector.encode import step_halves
from mxref_numba.vector.flows import FAR, NEAR, VectorJob
from mxref_numba.vector.target import VectorNative, lanes_of, step_length, target_of


def _raise_amax(k: int) -> Any:
    @vector_code(types.int64, types.int64)
    def raise_amax(builder, source, floor):
        top = largest([x & MAGNITUDE for x in FLOAT32.bits(builder, source)], k)
        top.call("umax", load(builder, I32, top.count, floor)).store(floor)

    return raise_amax


_K = MXFP4.k
"""Of all blocks under powers of two."""
_raise_of_powers, _raise_of_quotients = _raise_amax(_K), _raise_amax(NVFP4.k)


@VectorNative
def tile_amax(panel, height, width, pitch, floor, k):
    """Set the amax floors of a panel's steps to the amax of whole tiles; rows are `pitch` bytes apart."""
    carray(numbers_at(floor), (16,))[:] = 0
    step = step_length()
    for r in range(height):
        for i in range(-(-width // step)):
            source, target = panel + pitch * r + 4 * step * i, floor + step // 2 * i
            if k == _K:
                _raise_of_powers(source, target)
            else:
                _raise_of_quotients(source, target)


_LEAST = 1 << MANTISSA_BITS
"""Added to magnitude bits, it makes those of NaN and Inf negative."""


def _raise_finite(kind: ElementType) -> Any:
    @vector_code(types.int64, types.int64, types.int64)
    def raise_finite(builder, source, ahead, top):
        lanes = lanes_of(builder)
        for cache_line in range(0, kind.size * target_of(builder).step, 64):
            prefetch(builder, builder.add(builder.add(source, ahead), ir.Constant(I64, cache_line)))
        tops = [(x & MAGNITUDE) + _LEAST for x in kind.bits(builder, source)]
        reduce(lambda a, b: a.call("smax", b), tops, load(builder, I32, lanes, top)).store(top)

    return raise_finite


_raise_finite_float32, _raise_finite_bfloat16 = _raise_finite(FLOAT32), _raise_finite(BFLOAT16)


@vector_code(types.int64)
def _start_finite(builder, top):
    lanes = lanes_of(builder)
    constant(builder, I32, [_LEAST] * lanes).store(top)


@vector_code(types.int64, types.int64)
def _share_finite(builder, top, found):
    lanes = lanes_of(builder)
    largest_of = named(f"vector.reduce.smax.v{lanes}i32", I32, load(builder, I32, lanes, top)).value
    magnitude = builder.sub(largest_of, ir.Constant(I32, _LEAST))
    builder.atomic_rmw("max", builder.inttoptr(found, I32.as_pointer()), magnitude, "monotonic")


@VectorNative
def finite_amax_rows(
    source, source_step, ahead, half, rows, steps, floor, floor_step, packed, scales, group, address
):
    """Raise the int32 at `job.scales` to the largest magnitude bits of finite elements: arguments as `encode_rows`."""
    job, room, step = fields_at(address, VectorJob).job, step_halves(), step_length()
    ahead = NEAR if ahead == FAR else ahead
    _start_finite(room)
    for r in range(rows):
        for i in range(steps):
            if half:
                _raise_finite_bfloat16(source + source_step * r + 2 * step * i, ahead, room)
            else:
                _raise_finite_float32(source + source_step * r + 4 * step * i, ahead, room)
    _share_finite(room, job.scales)
