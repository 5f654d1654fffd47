"""Squares of 16 by 16 elements, read along their memory lines and stored as rows of the other axis."""

# Emitters work on IR values, which llvmlite does not annotate.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import carray  # type: ignore[attr-defined]
from numba.core import types

from mxref_numba.scalar.panels import BFLOAT16, FLOAT32, load_panel
from mxref_numba.vector.jobs import TURNED, panel_pitch, read_job
from mxref_numba.vector.lanes import I64, Lanes, prefetch, vector_code
from mxref_numba.vector.native import Native, floats_at
from mxref_numba.vector.sources import Source, bfloat16, float16, float32

SIDE = 16


# A turn in four stages, each of which is one instruction per vector. Two work within the quarters of vectors:
# lanes of two neighbours side by side, then pairs of lanes. Two more move whole quarters.
_QUARTERS = range(0, SIDE, 4)
_LOW_LANES = [lane for q in _QUARTERS for lane in (q, q + 16, q + 1, q + 17)]
_HIGH_LANES = [lane + 2 for lane in _LOW_LANES]
_LOW_PAIRS = [lane for q in _QUARTERS for lane in (q, q + 1, q + 16, q + 17)]
_HIGH_PAIRS = [lane + 2 for lane in _LOW_PAIRS]
_EVEN_QUARTERS = [start + lane for start in (0, 8, 16, 24) for lane in range(4)]
_ODD_QUARTERS = [lane + 4 for lane in _EVEN_QUARTERS]


def _crossed(vectors: list[Lanes], distance: int, low: list[int], high: list[int]) -> list[Lanes]:
    """Replace vectors `distance` apart by two choices from both."""
    out = list(vectors)
    for i, a in enumerate(vectors):
        if not i & distance:
            b = vectors[i + distance]
            out[i], out[i + distance] = a.pick(low, b), a.pick(high, b)
    return out


def _transposed(lines: list[Lanes]) -> list[Lanes]:
    """Return the columns of 16 vectors of 16 as vectors."""
    lines = _crossed(lines, 1, _LOW_LANES, _HIGH_LANES)
    lines = _crossed(lines, 2, _LOW_PAIRS, _HIGH_PAIRS)
    lines = _crossed(lines, 4, _EVEN_QUARTERS, _ODD_QUARTERS)
    lines = _crossed(lines, 8, _EVEN_QUARTERS, _ODD_QUARTERS)
    # The first two stages leave the two low bits of a column in each other's place.
    return [lines[column & 12 | (column & 1) << 1 | (column & 2) >> 1] for column in range(SIDE)]


def _turn(source: Source) -> Any:
    @vector_code(*(types.int64,) * 5)
    def turn(builder, address, step, target, pitch, ahead):
        lines = []
        for i in range(SIDE):
            line = builder.add(address, builder.mul(step, ir.Constant(I64, i)))
            lines.append(source(builder, line))
            prefetch(builder, builder.add(line, ahead))
        for i, row in enumerate(_transposed(lines)):
            row.store(builder.add(target, builder.mul(pitch, ir.Constant(I64, i))))

    return turn


_turn_float32, _turn_bfloat16, _turn_float16 = map(_turn, (float32, bfloat16, float16))


@Native
def fill_panel(job, row, column, height, width, panel, ahead):
    """Store a panel of a job's input as float32, with +0 past its last column, from (row, column) on.

    What lies `ahead` bytes further is asked for meanwhile: the elements of the next panel, say.
    """
    layout, _, (flow, _), _, _, _, _, _ = read_job(job)
    address, row_step, column_step, columns, kind = layout
    pitch = panel_pitch(job)
    if flow != TURNED or height % SIDE or width % SIDE or column + width > columns:
        load_panel(layout, row, column, height, width, carray(floats_at(panel), (height, pitch // 4)))
        return
    start = address + row * row_step + column * column_step
    for c in range(0, width, SIDE):
        for r in range(0, height, SIDE):
            source, square = start + c * column_step + r * row_step, panel + r * pitch + 4 * c
            if kind == FLOAT32:
                _turn_float32(source, column_step, square, pitch, ahead)
            elif kind == BFLOAT16:
                _turn_bfloat16(source, column_step, square, pitch, ahead)
            else:
                _turn_float16(source, column_step, square, pitch, ahead)
