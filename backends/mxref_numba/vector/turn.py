"""Elements of each input type as float32, and squares of them, as wide as a vector, from one axis to the other."""

# Emitters work on IR values, which llvmlite does not annotate.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import carray  # type: ignore[attr-defined]
from numba.core import types

from mxref_numba.scalar.panels import BFLOAT16, FLOAT32, load_panel, unsigned_at
from mxref_numba.vector.jobs import TURNED, job_at, panel_pitch
from mxref_numba.vector.lanes import F16, F32, I16, I32, I64, Lanes, load, prefetch, vector_code
from mxref_numba.vector.target import VectorNative, lanes_of, step_length

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
    job = job_at(address)
    layout, pitch, side = job.layout, panel_pitch(job), step_length() // 8
    row_step, column_step, kind = layout.row_step, layout.column_step, layout.kind
    if job.flow != TURNED or height % side or width % side or column + width > layout.columns:
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
