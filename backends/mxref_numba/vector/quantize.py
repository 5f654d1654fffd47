"""Quantization in one pass, on vectors.

The inner step, in `encode.py` or, for elements other than E2M1, in `encode_bytes.py`, takes a step of eight vectors to
their codes and scale codes without leaving registers. Everything else here brings elements to it, so that one
step serves every layout:

    float32 or bfloat16 rows, as they are  ------------------------------------->  encode steps
    rows that need more (float16, Hadamard)  --->  stage_row  --->  scratch  --->  encode steps
    columns under SR, and other strides  --->  turn, or gather  --->  stage_row in place -->  encode steps

Columns under RNE need no step and are not turned: `columns.py` quantizes them as they lie in memory.

A *unit* is what is staged at once, small enough for the first-level cache: part of one row, or, where rows
must be turned or share tiles, a panel of 32 or 128 rows. The codes of a unit go straight to the result.
SR needs nothing but an element's position, so Philox runs inside the step. Tiles take a pass over the panel
that collects the amax of its rows, four blocks at a time, before the steps encode it.
Both axes of a matrix go together, by parts that the caches hold. Where columns have to be turned, sixteen lines
are quantized as rows, and at once turned into the panel of the other axis.

Kernels know a quantization as a *job*: 31 numbers, some of them addresses (`jobs.py`). They call each other
by address, so that each is compiled once (`native.py`).

Files, in the order of the work: `sources.py` (types), `turn.py`, `hadamard.py`, `scale.py`, `philox.py`,
`rounding.py`, `encode.py` and `encode_bytes.py` (the step), `columns.py`, this file (units, threads). `lanes.py` is
the notation they share, and `target.py` and `instructions.py` are what depends on the CPU.
"""

# Kernels have no annotations: Numba infers their types.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from typing import Any

import numpy as np
from numba import carray  # type: ignore[attr-defined]
from numpy.typing import NDArray

from mxref.formats import BlockShape
from mxref.plan import QuantPlan
from mxref_numba import compiled, memory
from mxref_numba.compiled import kernel, share
from mxref_numba.elements import held_bits
from mxref_numba.native import Native, numbers_at, run_native
from mxref_numba.scalar.panels import BFLOAT16, FLOAT32
from mxref_numba.vector.columns import encode_columns
from mxref_numba.vector.encode import LONGEST_STEP, encode_rows, tile_amax
from mxref_numba.vector.encode_bytes import encode_byte_rows
from mxref_numba.vector.hadamard import stage_row
from mxref_numba.vector.jobs import (
    COLUMNS,
    DIRECT,
    JOB_SIZE,
    PANEL,
    PANEL_BYTES,
    STAGED,
    TURNED,
    Result,
    panel_pitch,
    read_job,
)
from mxref_numba.vector.native import call_5, call_7, call_9, call_14, copy_bytes
from mxref_numba.vector.target import Target
from mxref_numba.vector.turn import fill_panel

Quantized = tuple[NDArray[np.uint8], NDArray[np.uint8]]

_PART = (256, 512)
"""Rows and columns of a matrix that are quantized along one axis, then the other: multiples of every Hadamard size."""
_PART_SIDE = 128
"""Rows and columns of a matrix that are quantized along both axes together."""
_COLUMNS_PART = (128, 1024)
"""The same if columns are not transposed: half a mebibyte of float32, which a second-level cache holds."""
_STAGED_LINES = 8
"""Rows of such a part that are staged at once: 33 KiB of float32, which a first-level cache holds."""
_LINES = 16
"""Rows that are quantized and transposed together, while the caches still hold them."""
_CODES, _SCALES, _FLOOR, _ZEROS, _RUN_AT = (
    4 * LONGEST_STEP + n for n in (0, LONGEST_STEP, LONGEST_STEP + 64, LONGEST_STEP + 192, LONGEST_STEP + 256)
)
_PANEL = _RUN_AT + _LINES * (4 * _PART_SIDE + memory.LINE)
"""Where a worker's scratch, after a step, holds: its codes; its scales; the amax floors of a tile's steps; zeros;
lines that are staged; a panel."""
_HEADER = 14
"""Numbers of a share before its jobs: see `_run`."""


@kernel(inline="always")
def _encode_last(source, half, rest, floor, packed, scales, group, job, room):
    # A step reads and writes whole vectors: the last blocks of a row go through scratch.
    encode, bits, _, _ = read_job(job)[6]
    copy_bytes(source, room, (2 if half else 4) * rest)
    call_14(encode, room, 0, half, 1, 1, floor, 0, room + _CODES, 0, room + _SCALES, 0, group, 0, job)
    copy_bytes(room + _CODES, packed, rest * bits // 8)
    copy_bytes(room + _SCALES, scales, rest // 32)


@Native
def _quantize_unit(calls, job, row, height, column, width, panel, scratch, filled):
    # `filled`: whether the panel holds the elements already.
    numbers = carray(numbers_at(calls), (4,))
    fill, stage, amax, step_size = numbers[0], numbers[1], numbers[2], numbers[3]
    layout, (packed, scales, _, length), (flow, tile), (n, _, _), _, random, element, _ = read_job(job)
    encode, bits, _, _ = element
    address, row_step, column_step, _, kind = layout
    pitch = panel_pitch(job)
    source, step, source_kind = address + row * row_step + column * column_step, row_step, kind
    if flow >= PANEL:
        if not filled:
            call_7(fill, job, row, column, height, width, panel, height * row_step)
        source, step, source_kind = panel, pitch, FLOAT32
    if flow != DIRECT:
        if flow == STAGED or n > 1:
            for r in range(height):
                call_5(stage, source + step * r, source_kind, panel + pitch * r, width, job)
        source, step, source_kind = panel, pitch, FLOAT32
    half, floor, floor_step = int(source_kind == BFLOAT16), scratch + _ZEROS, 0
    if tile:
        floor, floor_step = scratch + _FLOOR, step_size // 2
        call_5(amax, panel, height, width, pitch, floor)

    row_indices, first_row, row_groups, first_column, per_call = random
    place, first_group = row * length + column, (first_column + column) // per_call
    packed, scales, packed_step, scales_step = (
        packed + place * bits // 8,
        scales + place // 32,
        length * bits // 8,
        length // 32,
    )
    steps, rest = width // step_size, width % step_size
    once = 1 if row_indices else height  # rows whose groups are evenly apart
    for r in range(0, height, once):
        index = (
            carray(numbers_at(row_indices), (row + r + 1,))[row + r] if row_indices else first_row + row + r
        )
        group = index * row_groups + first_group
        call_14(
            encode, source + step * r, step, half, once, steps, floor, floor_step,
            packed + packed_step * r, packed_step, scales + scales_step * r, scales_step, group, row_groups, job,
        )  # fmt: skip
        if rest:
            for last in range(r, r + once):
                _encode_last(
                    source + step * last + (2 if half else 4) * steps * step_size, half, rest,
                    floor + floor_step * steps,
                    packed + packed_step * last + steps * step_size * bits // 8,
                    scales + scales_step * last + steps * step_size // 32,
                    group + row_groups * (last - r) + steps * step_size // per_call, job, scratch,
                )  # fmt: skip


@kernel(inline="always")
def _place(task, down, across, turned):
    """Return row and column of a task, such that consecutive tasks are neighbours in the memory of the input."""
    if turned:
        return task % down, task // down
    return task // across, task % across


@kernel(inline="always")
def _quantize_part(calls, unit, columns, job, top, bottom, left, right, scratch):
    """Quantize the part of the matrix at (`top`, `left`), cut at its edges, unit by unit."""
    _, (_, _, rows, length), (flow, _), _, _, _, _, (height, width) = read_job(job)
    bottom, right = min(bottom, rows), min(right, length)
    down, across = max(-(-(bottom - top) // height), 0), max(-(-(right - left) // width), 0)
    for task in range(down * across):
        r, c = _place(task, down, across, flow >= TURNED)
        r, c = top + r * height, left + c * width
        call_9(
            columns if flow == COLUMNS else unit,
            calls,
            job,
            r,
            min(height, bottom - r),
            c,
            min(width, right - c),
            scratch + _PANEL,
            scratch,
            0,
        )


@kernel(inline="always")
def _quantize_both(calls, unit, fill, by_row, by_column, top, left, scratch):
    # A panel of the column job is filled from few lines at a time; the row job takes them while they are near.
    _, (_, _, rows, _), _, _, _, _, _, _ = read_job(by_row)
    layout, (_, _, columns, length), _, _, _, _, _, (height, width) = read_job(by_column)
    height, width = min(height, columns - left), min(width, length - top)
    panel = scratch + _PANEL
    for line in range(0, width, _LINES):
        r = top + line
        if r < rows:
            count = min(_LINES, rows - r)
            call_9(unit, calls, by_row, r, count, left, height, scratch + _RUN_AT, scratch, 0)
        ahead = _LINES * layout[2]
        call_7(fill, by_column, left, top + line, height, min(_LINES, width - line), panel + 4 * line, ahead)
    call_9(unit, calls, by_column, left, height, top, width, panel, scratch, 1)


@Native
def _quantize_share(arguments, worker, workers):
    numbers = carray(numbers_at(arguments), (_HEADER,))
    part_height, part_width, down, across = numbers[0], numbers[1], numbers[2], numbers[3]
    jobs, together, unit = numbers[4], numbers[5], numbers[8]
    scratch, calls = numbers[6] + worker * numbers[7], arguments + 8 * 9
    carray(numbers_at(scratch + _ZEROS), (8,))[:] = 0
    first, second = arguments + 8 * _HEADER, arguments + 8 * (_HEADER + JOB_SIZE)
    turned = read_job(first)[2][0] >= TURNED
    begin, end = share(down * across, worker, workers)
    for task in range(begin, end):
        r, c = _place(task, down, across, turned)
        top, left = r * part_height, c * part_width
        if together:
            _quantize_both(calls, unit, numbers[9], first, second, top, left, scratch)
            continue
        for i in range(jobs):
            bottom, right = top + part_height, left + part_width
            if i:  # the second job sees the matrix from its other axis
                _quantize_part(calls, unit, numbers[13], second, left, right, top, bottom, scratch)
            else:
                _quantize_part(calls, unit, numbers[13], first, top, bottom, left, right, scratch)


def _result(plan: QuantPlan, target: Target) -> Result:
    encode = encode_rows if held_bits(plan.format.element) == 4 else encode_byte_rows
    return Result(plan, encode.on(target).address)


def quantize_planned(x: NDArray[Any], plan: QuantPlan, target: Target) -> Quantized:
    """Return packed codes [rows..., K * bits / 8] and scale codes [rows..., K / 32] of a planned quantization."""
    result = _result(plan, target)
    for job in result.jobs(x):
        _run(target, (job,), job[7], job[8], job[-2:], PANEL_BYTES)
    return result.arrays()


def quantize_dual(
    x: NDArray[Any], row: QuantPlan, column: QuantPlan, target: Target
) -> tuple[Quantized, Quantized]:
    """Return what `quantize_planned` returns for both axes of a matrix, reading it once.

    Rows as they are and columns that have to be turned go sixteen lines at a time. All else goes by parts of the
    matrix, which are quantized along one axis, then along the other.
    """
    by_row, by_column = _result(row, target), _result(column, target)
    for first, second in zip(by_row.jobs(x, whole=False), by_column.jobs(x, whole=False), strict=True):
        rows, columns = max(row.rows, column.length), max(row.length, column.rows)
        plain = row.spec.block is column.spec.block is BlockShape.ROW
        if plain and first[9] <= STAGED and second[9] == TURNED and max(row.unit, column.unit) <= _PART_SIDE:
            side = _PART_SIDE, _PART_SIDE
            _run(
                target,
                ((*first[:-2], *side), (*second[:-2], *side)),
                rows,
                columns,
                side,
                2 * PANEL_BYTES,
                together=True,
            )
        elif COLUMNS in (first[9], second[9]):
            part = _COLUMNS_PART if second[9] == COLUMNS else _COLUMNS_PART[::-1]
            _run(target, (_by_lines(first), _by_lines(second)), rows, columns, part, PANEL_BYTES)
        else:
            _run(target, (first, second), rows, columns, _PART, PANEL_BYTES)
    return by_row.arrays(), by_column.arrays()


def _by_lines(job: tuple[int, ...]) -> tuple[int, ...]:
    """Return a job whose unit, where rows are staged one by one, is several rows of a part."""
    flow, tile = job[9:11]
    return (*job[:-2], _STAGED_LINES, _COLUMNS_PART[1]) if flow == STAGED and not tile else job


def _run(
    target: Target,
    jobs: tuple[tuple[int, ...], ...],
    rows: int,
    columns: int,
    part: tuple[int, ...],
    panel_bytes: int,
    together: bool = False,
) -> None:
    """Quantize a matrix part by part, with room for a panel, as one or two jobs say."""
    size = _PANEL + panel_bytes
    scratch = np.empty(compiled.worker_count(rows * columns) * size + memory.LINE, np.uint8)
    parts = -(-rows // part[0]), -(-columns // part[1])
    addresses = (native.on(target).address for native in (fill_panel, stage_row, tile_amax))
    header = *part, *parts, len(jobs), together, memory.aligned(scratch), size
    calls = _quantize_unit.address, *addresses, target.step, encode_columns.on(target).address
    arguments = np.array([*header, *calls, *(number for job in jobs for number in job)], np.int64)
    run_native(_quantize_share, arguments, rows * columns)
