"""Elements on their way to a step: from any input type to float32, from one axis to the other, and transformed.

At distance h of a transform, lane i of a vector y becomes y[i ^ h] + y[i] or, if i & h is not 0, y[i ^ h] - y[i]: a
shuffle and a fused multiply-add by +1 or -1, whose product is exact, so that it rounds as the sum does. If h is a
multiple of the vector length, whole vectors are added and subtracted. Sizes up to 16 stay in registers, later stages
are in memory. The order of these sums is the reference's: the bits depend on it.
"""

# Kernels and emitters have no annotations: Numba infers the types of the former, llvmlite has none.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray  # type: ignore[attr-defined]
from numba.core import cgutils, types
from numpy.typing import NDArray

from mxref.steps.hadamard import Rotation
from mxref_numba import buffers
from mxref_numba.kernels import Native, address_of, call, fields_at, unsigned_at
from mxref_numba.lanes import (
    F16,
    F32,
    I16,
    I32,
    I64,
    Lanes,
    constant,
    load,
    prefetch,
    splat,
    vector_code,
)
from mxref_numba.quantize_job import BFLOAT16, FLOAT32, WIDTH, Job, matrices, transform_of
from mxref_numba.scalar.panels import load_panel
from mxref_numba.threads import run
from mxref_numba.vector.flows import (
    NEAR,
    PANEL,
    PANEL_BYTES,
    STAGED,
    TURNED,
    Called,
    VectorJob,
    asked_ahead,
    flow_of,
    panel_pitch,
    unit_of,
)
from mxref_numba.vector.target import Target, VectorNative, copy_bytes, lanes_of, step_length

_GROUP = 16
"""Elements that are transformed in registers."""
_INSIDE = (1, 2, 4, 8, 16)

VectorLoad = Callable[..., Lanes]
"""What loads elements from an address, int64, plus a constant number of elements: int32 lanes."""


def float32(builder: ir.IRBuilder, address: Any, first: int = 0) -> Lanes:
    """Load float32."""
    return load(builder, I32, lanes_of(builder), address, 4 * first)


def bfloat16(builder: ir.IRBuilder, address: Any, first: int = 0) -> Lanes:
    """Load bfloat16, the upper half of a float32."""
    return load(builder, I16, lanes_of(builder), address, 2 * first).convert("zext", I32) << 16


def float16(builder: ir.IRBuilder, address: Any, first: int = 0) -> Lanes:
    """Load float16; the conversion is exact, subnormals included."""
    return load(builder, F16, lanes_of(builder), address, 2 * first).convert("fpext", F32).cast(I32)


def _crossed(vectors: list[Lanes], distance: int, low: list[int], further: int) -> list[Lanes]:
    """Replace each two vectors `distance` apart by two shuffles of both: lanes `low`, and lanes `further` on."""
    high = [lane + further for lane in low]
    out = list(vectors)
    for i, a in enumerate(vectors):
        if not i & distance:
            b = vectors[i + distance]
            out[i], out[i + distance] = a.pick(low, b), a.pick(high, b)
    return out


def transposed(lines: list[Lanes]) -> list[Lanes]:
    """Return the columns of as many vectors as they have lanes, as vectors."""
    # Each stage is one instruction per vector. Two work within the quarters of vectors: lanes of two neighbours side
    # by side, then pairs of lanes. The others move whole quarters.
    side = len(lines)
    quarters = range(0, side, 4)
    low_lanes = [lane for q in quarters for lane in (q, q + side, q + 1, q + side + 1)]
    low_pairs = [lane for q in quarters for lane in (q, q + 1, q + side, q + side + 1)]
    lines = _crossed(_crossed(lines, 1, low_lanes, 2), 2, low_pairs, 2)
    distance = 4
    while distance < side:
        even_quarters = [start + lane for start in range(0, 2 * side, 8) for lane in range(4)]
        lines = _crossed(lines, distance, even_quarters, 4)
        distance *= 2
    # The first two stages leave the two low bits of a column in each other's place.
    return [lines[column & ~3 | (column & 1) << 1 | (column & 2) >> 1] for column in range(side)]


def _turn(source: VectorLoad) -> Any:
    @vector_code(*(types.int64,) * 5)
    def turn(builder, address, step, target, pitch, ahead):
        lines = []
        for i in range(lanes_of(builder)):
            line = builder.add(address, builder.mul(step, ir.Constant(I64, i)))
            lines.append(source(builder, line))
            prefetch(builder, builder.add(line, ahead))
        for i, row in enumerate(transposed(lines)):
            row.store(builder.add(target, builder.mul(pitch, ir.Constant(I64, i))))

    return turn


_turn_float32, _turn_bfloat16, _turn_float16 = map(_turn, (float32, bfloat16, float16))


@VectorNative
def fill_panel(address, row, column, height, width, panel, ahead):
    """Store a panel of a job's input as float32, with +0 past its last column, from (row, column) on.

    Meanwhile the elements `ahead` bytes further are prefetched, for example those of the next panel.
    """
    job, flow, unit, _ = fields_at(address, VectorJob)
    layout, pitch, side = job.layout, panel_pitch(unit), step_length() // 8
    row_step, column_step, kind = layout.row_step, layout.column_step, layout.kind
    if flow != TURNED or height % side or width % side or column + width > layout.columns:
        load_panel(layout, row, column, height, width, carray(unsigned_at(panel), (height, pitch // 4)))
        return
    start = layout.address + row * row_step + column * column_step
    for c in range(0, width, side):
        for r in range(0, height, side):
            source, square = start + c * column_step + r * row_step, panel + r * pitch + 4 * c
            if kind == FLOAT32:
                _turn_float32(source, column_step, square, pitch, ahead)
            elif kind == BFLOAT16:
                _turn_bfloat16(source, column_step, square, pitch, ahead)
            else:
                _turn_float16(source, column_step, square, pitch, ahead)


# ---- transforms ----


def _inside(vectors: list[Lanes], n: int) -> list[Lanes]:
    builder, lanes = vectors[0].builder, vectors[0].count
    h = 1
    while h < min(n, lanes):
        signs = constant(builder, F32, [-1.0 if lane & h else 1.0 for lane in range(lanes)])
        vectors = [y.call("fma", signs, y.pick([lane ^ h for lane in range(lanes)])) for y in vectors]
        h *= 2
    return vectors if n <= h else butterflies(vectors, n // lanes)


def butterflies(vectors: list[Lanes], n: int) -> list[Lanes]:
    """Return the transform of each lane over n vectors, or of each n of them, without the factor."""
    h = 1
    while h < n:
        vectors = [_butterfly(vectors, i, h) for i in range(len(vectors))]
        h *= 2
    return vectors


def _butterfly(vectors: list[Lanes], i: int, distance: int) -> Lanes:
    other = vectors[i ^ distance]
    return other - vectors[i] if i & distance else vectors[i] + other


def _stage(source: VectorLoad, size: int) -> Any:
    """Return code that stages a run: addresses of elements, of the result, and of signs, and numbers of bytes."""

    @vector_code(*(types.int64,) * 6, types.float32)
    def stage(builder, address, ahead, target, count, n, signs, factor):
        lanes = lanes_of(builder)
        firsts = range(0, _GROUP, lanes)

        def group(inside: int, first: Any) -> None:
            at = builder.add(address, builder.mul(first, ir.Constant(I64, size)))
            prefetch(builder, builder.add(at, ahead))
            x = [source(builder, at, lane).cast(F32) for lane in firsts]
            if inside > 1:
                place = builder.add(
                    signs,
                    builder.and_(builder.shl(first, ir.Constant(I64, 2)), ir.Constant(I64, 4 * WIDTH - 4)),
                )
                d = [load(builder, F32, lanes, place, 4 * lane) for lane in firsts]
                y = _inside([v * sign for v, sign in zip(x, d, strict=True)], inside)
                x = [v * splat(builder, factor, lanes) for v in y]
            out = builder.add(target, builder.shl(first, ir.Constant(I64, 2)))
            for lane, v in zip(firsts, x, strict=True):
                v.store(builder.add(out, ir.Constant(I64, 4 * lane)))

        # A loop for each size: the choice within one loop would take as long as the transform.
        for inside in _INSIDE:
            with builder.if_then(builder.icmp_signed("==", n, ir.Constant(I64, inside))):
                start, step = ir.Constant(I64, 0), ir.Constant(I64, _GROUP)
                with cgutils.for_range_slice(builder, start, count, step, I64) as (first, _):
                    group(inside, first)

    return stage


_stage_float32, _stage_bfloat16, _stage_float16 = _stage(float32, 4), _stage(bfloat16, 2), _stage(float16, 2)


@vector_code(types.int64, types.int64, types.float32)
def _across(builder, first, second, factor):
    lanes = lanes_of(builder)
    norm = splat(builder, factor, lanes)
    for offset in range(0, 4 * _GROUP, 4 * lanes):
        s, t = (load(builder, F32, lanes, address, offset) for address in (first, second))
        ((s + t) * norm).store(builder.add(first, ir.Constant(I64, offset)))
        ((s - t) * norm).store(builder.add(second, ir.Constant(I64, offset)))


@VectorNative
def stage_row(source, kind, target, count, address):
    """Store a run of `count` elements, a multiple of 16 and of n, in float32, transformed by the job's rotation."""
    job = fields_at(address, VectorJob).job
    layout, (n, signs, norm) = job.layout, job.transform
    ahead = asked_ahead(count * (4 if kind == FLOAT32 else 2), layout.row_step, NEAR)
    inside = min(n, 16)
    factor = norm if n <= 16 else np.float32(1.0)
    if kind == FLOAT32:
        _stage_float32(source, ahead, target, count, inside, signs, factor)
    elif kind == BFLOAT16:
        _stage_bfloat16(source, ahead, target, count, inside, signs, factor)
    else:
        _stage_float16(source, ahead, target, count, inside, signs, factor)
    h = 16
    while h < n:
        factor = norm if 2 * h == n else np.float32(1.0)
        for base in range(0, count, 2 * h):
            for j in range(base, base + h, 16):
                _across(target + 4 * j, target + 4 * (j + h), factor)
        h *= 2


@Native
def _transform_units(address, begin, end, panel):
    job, flow, unit, called = fields_at(address, VectorJob)
    layout, rows, length, pitch = job.layout, job.rows, job.length, panel_pitch(unit)
    across = -(-length // unit.columns)
    for task in range(begin, end):
        row, column = task // across * unit.rows, task % across * unit.columns
        height, width = min(unit.rows, rows - row), min(unit.columns, length - column)
        whole = -(-width // 16) * 16
        source, step, kind = (
            layout.address + row * layout.row_step + column * layout.column_step, layout.row_step, layout.kind
        )  # fmt: skip
        if flow >= PANEL:
            call(called.fill, (address, row, column, height, whole, panel, height * step))
            source, step, kind = panel, pitch, FLOAT32
        for r in range(height):
            target = job.codes + 4 * ((row + r) * length + column)
            if whole == width:
                call(called.stage, (source + step * r, kind, target, width, address))
            else:  # transformed in the panel, which holds zeros behind the row's end
                call(called.stage, (source + step * r, kind, panel + pitch * r, whole, address))
                copy_bytes(panel + pitch * r, target, 4 * width)


def hadamard(x: NDArray[Any], rotation: Rotation, axis: int, target: Target) -> NDArray[np.float32]:
    """Return x with each group of n elements along `axis` multiplied by d and H_n.

    Args:
        x: float32, bfloat16 or float16, any shape and strides; the axis length is a multiple of n.
        rotation: size and signs.
        axis: not negative.
        target: whose instructions run.

    Returns:
        float32 in the shape of x; in memory the transformed axis is the last.
    """
    length = x.shape[axis]
    out = buffers.empty((*x.shape[:axis], *x.shape[axis + 1 :], length), np.float32)
    transform, _signs = transform_of(rotation)  # whose address the transform holds
    called = Called(target.step, fill_panel.on(target).address, stage_row.on(target).address)
    for m in matrices(x, axis):
        flow = flow_of(m.layout)
        if flow == STAGED and length % 16:
            flow = PANEL
        result, unit = address_of(out) + 4 * m.first_row * length, unit_of(flow, rotation.n, False)
        job = VectorJob(Job(m.layout, result, m.rows, length, transform), flow, unit, called)
        units = -(-m.rows // unit.rows) * -(-length // unit.columns)
        run(_transform_units, job, units, m.rows * length, room=PANEL_BYTES)
    return np.moveaxis(out, -1, axis)
