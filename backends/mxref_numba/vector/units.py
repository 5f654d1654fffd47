"""Quantization in one pass, on vectors.

The inner step, in `encode.py`, takes a step of eight vectors to their codes and scale codes without leaving registers.
Everything else here brings elements to it, so that one step serves every layout:

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

Kernels know a quantization as a `Job` (`quantize_job.py`). They call each other by address, so that each is compiled
once.

Files, in the order of the work: `flows.py` (which way), `staging.py` (types, transposition, transforms),
`block_lanes.py` (scales, random integers, rounding), `encode.py` (the step), `columns.py`, this file (units, threads).
`lanes.py` is the notation they share, and `target.py` is what depends on the CPU. The sizes of units and parts may be
changed for speed: no bit depends on them.
"""

# Kernels have no annotations: Numba infers their types.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import carray  # type: ignore[attr-defined]
from numpy.typing import NDArray

from mxref.formats import BlockShape
from mxref.plan import QuantPlan
from mxref_numba.buffers import LINE
from mxref_numba.grids import held_bits
from mxref_numba.kernels import Native, address_of, fields_at, kernel, numbers_at, share, written
from mxref_numba.quantize_job import BFLOAT16, FLOAT32, Job, Unit, job_at
from mxref_numba.threads import run_native, scratch
from mxref_numba.vector.columns import encode_columns
from mxref_numba.vector.encode import LONGEST_STEP, encode_byte_rows, encode_rows, tile_amax
from mxref_numba.vector.flows import (
    COLUMNS,
    DIRECT,
    PANEL,
    PANEL_BYTES,
    STAGED,
    TURNED,
    VectorResult,
    panel_pitch,
)
from mxref_numba.vector.staging import fill_panel, stage_row
from mxref_numba.vector.target import Target, call_5, call_7, call_9, call_14, copy_bytes

Quantized = tuple[NDArray[np.uint8], NDArray[np.uint8]]

_PART = Unit(256, 512)
"""Rows and columns of a matrix that are quantized along one axis, then the other: multiples of every Hadamard size."""
_SIDE = 128
"""Rows and columns of a matrix that are quantized along both axes together."""
_COLUMNS_PART = Unit(128, 1024)
"""The same if columns are not transposed: half a mebibyte of float32, which a second-level cache holds."""
_STAGED_LINES = 8
"""Rows of such a part that are staged at once: 33 KiB of float32, which a first-level cache holds."""
_LINES = 16
"""Rows that are quantized and transposed together, while the caches still hold them."""
_CODES, _SCALES, _FLOOR, _ZEROS, _RUN_AT = (
    4 * LONGEST_STEP + n for n in (0, LONGEST_STEP, LONGEST_STEP + 64, LONGEST_STEP + 192, LONGEST_STEP + 256)
)
_PANEL = _RUN_AT + _LINES * (4 * _SIDE + LINE)
"""Where a worker's scratch, after a step, holds: its codes; its scales; the amax floors of a tile's steps; zeros;
lines that are staged; a panel."""


class _Kernels(NamedTuple):
    """What kernels of a target call by address."""

    step: int
    """Elements of a step."""
    fill: int
    stage: int
    amax: int
    unit: int
    columns: int


@cache
def _kernels_of(target: Target) -> _Kernels:
    called = (
        fill_panel.on(target),
        stage_row.on(target),
        tile_amax.on(target),
        _quantize_unit,
        encode_columns.on(target),
    )
    return _Kernels(target.step, *(each.address for each in called))


class _Work(NamedTuple):
    """One or two jobs on a matrix, cut into parts."""

    part: Unit
    down: int
    """Parts of the matrix along its rows."""
    across: int
    first: int
    """Address of a job."""
    second: int
    """Address of the job along the other axis, which sees the matrix from there, or 0."""
    together: int
    """Whether both jobs go together."""
    scratch: int
    scratch_size: int
    """Bytes of a worker."""
    kernels: _Kernels


_work_at = fields_at(_Work)


@kernel(inline="always")
def _encode_last(source, half, rest, floor, packed, scales, group, address, room):
    # A step reads and writes whole vectors: the last blocks of a row go through scratch.
    job = job_at(address)
    copy_bytes(source, room, (2 if half else 4) * rest)
    call_14(job.encode, room, 0, half, 1, 1, floor, 0, room + _CODES, 0, room + _SCALES, 0, group, 0, address)
    copy_bytes(room + _CODES, packed, rest * job.bits // 8)
    copy_bytes(room + _SCALES, scales, rest // 32)


@Native
def _quantize_unit(work_address, job_address, row, height, column, width, panel, scratch, filled):
    # `filled`: whether the panel holds the elements already.
    work, job = _work_at(work_address), job_at(job_address)
    layout, flow, bits, length, step_size = job.layout, job.flow, job.bits, job.length, work.kernels.step
    pitch = panel_pitch(job)
    source, step, source_kind = (
        layout.address + row * layout.row_step + column * layout.column_step, layout.row_step, layout.kind
    )  # fmt: skip
    if flow >= PANEL:
        if not filled:
            call_7(work.kernels.fill, job_address, row, column, height, width, panel, height * step)
        source, step, source_kind = panel, pitch, FLOAT32
    if flow != DIRECT:
        if flow == STAGED or job.transform.n > 1:
            for r in range(height):
                call_5(
                    work.kernels.stage, source + step * r, source_kind, panel + pitch * r, width, job_address
                )
        source, step, source_kind = panel, pitch, FLOAT32
    half, floor, floor_step = int(source_kind == BFLOAT16), scratch + _ZEROS, 0
    if job.tile:
        floor, floor_step = scratch + _FLOOR, step_size // 2
        call_5(work.kernels.amax, panel, height, width, pitch, floor)

    place, first_group = row * length + column, (job.first_column + column) // job.per_call
    packed, packed_step = job.codes + place * bits // 8, length * bits // 8
    scales, scales_step = job.scales + place // 32, length // 32
    steps, rest = width // step_size, width % step_size
    once = 1 if job.row_indices else height  # rows whose groups are evenly apart
    for r in range(0, height, once):
        index = job.first_row + row + r
        if job.row_indices:
            index = carray(numbers_at(job.row_indices), (row + r + 1,))[row + r]
        group = index * job.row_groups + first_group
        call_14(
            job.encode, source + step * r, step, half, once, steps, floor, floor_step, packed + packed_step * r,
            packed_step, scales + scales_step * r, scales_step, group, job.row_groups, job_address,
        )  # fmt: skip
        if rest:
            done = steps * step_size
            for last in range(r, r + once):
                _encode_last(
                    source + step * last + (2 if half else 4) * done, half, rest, floor + floor_step * steps,
                    packed + packed_step * last + done * bits // 8, scales + scales_step * last + done // 32,
                    group + job.row_groups * (last - r) + done // job.per_call, job_address, scratch,
                )  # fmt: skip


@kernel(inline="always")
def _place(task, down, across, turned):
    """Return row and column of a task, such that consecutive tasks are neighbours in the memory of the input."""
    if turned:
        return task % down, task // down
    return task // across, task % across


@kernel(inline="always")
def _quantize_part(work_address, job_address, top, bottom, left, right, scratch):
    """Quantize the part of the matrix at (`top`, `left`), cut at its edges, unit by unit."""
    work, job = _work_at(work_address), job_at(job_address)
    kernel_address = work.kernels.columns if job.flow == COLUMNS else work.kernels.unit
    height, width = job.unit
    bottom, right = min(bottom, job.rows), min(right, job.length)
    down, across = max(-(-(bottom - top) // height), 0), max(-(-(right - left) // width), 0)
    for task in range(down * across):
        r, c = _place(task, down, across, job.flow >= TURNED)
        r, c = top + r * height, left + c * width
        call_9(
            kernel_address, work_address, job_address, r, min(height, bottom - r), c, min(width, right - c),
            scratch + _PANEL, scratch, 0,
        )  # fmt: skip


@kernel(inline="always")
def _quantize_both(work_address, top, left, scratch):
    # A panel of the column job is filled from few lines at a time; the row job takes them while they are near.
    work = _work_at(work_address)
    rows, job = job_at(work.first).rows, job_at(work.second)
    height, width = min(job.unit.rows, job.rows - left), min(job.unit.columns, job.length - top)
    panel, ahead = scratch + _PANEL, _LINES * job.layout.column_step
    for line in range(0, width, _LINES):
        r = top + line
        if r < rows:
            count = min(_LINES, rows - r)
            call_9(
                work.kernels.unit,
                work_address,
                work.first,
                r,
                count,
                left,
                height,
                scratch + _RUN_AT,
                scratch,
                0,
            )
        count = min(_LINES, width - line)
        call_7(work.kernels.fill, work.second, left, r, height, count, panel + 4 * line, ahead)
    call_9(work.kernels.unit, work_address, work.second, left, height, top, width, panel, scratch, 1)


@Native
def _quantize_share(arguments, worker, workers):
    work = _work_at(arguments)
    scratch = work.scratch + worker * work.scratch_size
    carray(numbers_at(scratch + _ZEROS), (8,))[:] = 0
    turned = job_at(work.first).flow >= TURNED
    begin, end = share(work.down * work.across, worker, workers)
    for task in range(begin, end):
        r, c = _place(task, work.down, work.across, turned)
        top, left = r * work.part.rows, c * work.part.columns
        bottom, right = top + work.part.rows, left + work.part.columns
        if work.together:
            _quantize_both(arguments, top, left, scratch)
            continue
        _quantize_part(arguments, work.first, top, bottom, left, right, scratch)
        if work.second:
            _quantize_part(arguments, work.second, left, right, top, bottom, scratch)


def _result(plan: QuantPlan, target: Target, whole: bool) -> VectorResult:
    encode = encode_rows if held_bits(plan.format.element) == 4 else encode_byte_rows
    return VectorResult(plan, encode.on(target).address, whole)


def quantize_planned(x: NDArray[Any], plan: QuantPlan, target: Target) -> Quantized:
    """Return packed codes [rows..., K * bits / 8] and scale codes [rows..., K / 32] of a planned quantization."""
    result = _result(plan, target, whole=True)
    for job in result.jobs(x):
        _run(target, (job,), job.rows, job.length, job.unit, PANEL_BYTES)
    return result.arrays()


def quantize_dual(
    x: NDArray[Any], row: QuantPlan, column: QuantPlan, target: Target
) -> tuple[Quantized, Quantized]:
    """Return what `quantize_planned` returns for both axes of a matrix, reading it once.

    Rows as they are and columns that have to be turned go sixteen lines at a time. All else goes by parts of the
    matrix, which are quantized along one axis, then along the other.
    """
    by_row, by_column = (_result(plan, target, whole=False) for plan in (row, column))
    for first, second in zip(by_row.jobs(x), by_column.jobs(x), strict=True):
        rows, columns = max(row.rows, column.length), max(row.length, column.rows)
        plain = row.spec.block is column.spec.block is BlockShape.ROW
        if plain and first.flow <= STAGED and second.flow == TURNED and max(row.unit, column.unit) <= _SIDE:
            side = Unit(_SIDE, _SIDE)
            jobs = (first._replace(unit=side), second._replace(unit=side))
            _run(target, jobs, rows, columns, side, 2 * PANEL_BYTES, together=True)
        elif COLUMNS in (first.flow, second.flow):
            part = _COLUMNS_PART if second.flow == COLUMNS else Unit(*_COLUMNS_PART[::-1])
            _run(target, (_by_lines(first), _by_lines(second)), rows, columns, part, PANEL_BYTES)
        else:
            _run(target, (first, second), rows, columns, _PART, PANEL_BYTES)
    return by_row.arrays(), by_column.arrays()


def _by_lines(job: Job) -> Job:
    """Return a job whose unit, where rows are staged one by one, is several rows of a part."""
    if job.flow == STAGED and not job.tile:
        return job._replace(unit=Unit(_STAGED_LINES, _COLUMNS_PART.columns))
    return job


def _run(
    target: Target, jobs: tuple[Job, ...], rows: int, columns: int, part: Unit, panel_bytes: int,
    together: bool = False,
) -> None:  # fmt: skip
    """Quantize a matrix part by part, with room for a panel, as one or two jobs say."""
    size = _PANEL + panel_bytes
    _memory, room = scratch(rows * columns, size)
    table = written(*jobs)
    work = _Work(
        part=part,
        down=-(-rows // part.rows),
        across=-(-columns // part.columns),
        first=address_of(table),
        second=address_of(table) + len(table) // 2 if len(jobs) > 1 else 0,
        together=together,
        scratch=room,
        scratch_size=size,
        kernels=_kernels_of(target),
    )
    run_native(_quantize_share, work, rows * columns)
