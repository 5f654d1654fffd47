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
Both axes of a matrix go together, by parts that the caches hold: a part is quantized along one axis, then along the
other.

Kernels know a quantization as a `VectorJob` (`flows.py`, `quantize_job.py`). They call each other by address, so that
each is compiled once.

Files, in the order of the work: `flows.py` (which way), `staging.py` (types, transposition, transforms),
`elements.py` (types of elements, packing), `block_lanes.py` (amax, random integers, rounding), `scale.py` above
(scales), `encode.py` (the step), `columns.py`, this file (units, threads). `lanes.py` above is the notation that they
share, and `target.py` is what depends on the CPU. The sizes of units and parts may be changed for speed: no bit
depends on them.
"""

# Kernels have no annotations: Numba infers their types.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Iterator
from functools import cache
from typing import Any, NamedTuple

import numpy as np
from numba import carray  # type: ignore[attr-defined]
from numpy.typing import NDArray

from mxref.formats import MXFP4
from mxref.plan import QuantPlan
from mxref_numba.kernels import Native, address_of, call, fields_at, kernel, numbers_at, written
from mxref_numba.quantize_job import BFLOAT16, FLOAT32, Job, Result, amax_jobs
from mxref_numba.threads import run
from mxref_numba.vector.amax import finite_amax_rows, tile_amax
from mxref_numba.vector.columns import encode_columns
from mxref_numba.vector.encode import LONGEST_STEP, encoder_of
from mxref_numba.vector.flows import (
    COLUMNS,
    DIRECT,
    FAR,
    PANEL,
    PANEL_BYTES,
    STAGED,
    TURNED,
    Called,
    Unit,
    VectorJob,
    asked_ahead,
    joined,
    panel_pitch,
    quantization_flow,
    unit_of,
)
from mxref_numba.vector.staging import fill_panel, stage_row
from mxref_numba.vector.target import Target, VectorNative, copy_bytes

Quantized = tuple[NDArray[np.uint8], NDArray[np.uint8]]

_PART = Unit(256, 512)
"""Rows and columns of a matrix that are quantized along one axis, then the other: multiples of every Hadamard size."""
_CODES, _SCALES, _FLOOR, _ZEROS, _PANEL = (
    4 * LONGEST_STEP + n for n in (0, LONGEST_STEP, LONGEST_STEP + 64, LONGEST_STEP + 192, LONGEST_STEP + 256)
)
"""Where a share's memory, after a step, holds: its codes; its scales; the amax floors of a tile's steps; zeros; a
panel."""


class _Parts(NamedTuple):
    """One or two jobs on a matrix, cut into parts."""

    part: Unit
    down: int
    """Parts of the matrix along its rows."""
    across: int
    turned: int
    """Whether consecutive parts are neighbours along columns."""
    first: int
    """Address of a `VectorJob`."""
    second: int
    """Address of the job along the other axis, which sees the matrix from there, or 0."""


@kernel(inline="always")
def _encode_last(source, half, rest, floor, packed, scales, group, address, room):
    # A step reads and writes whole vectors: the last blocks of a row go through scratch.
    job, called = fields_at(address, VectorJob).job, fields_at(address, VectorJob).called
    carray(numbers_at(room), (_CODES // 8,))[:] = 0  # magnitudes that change no amax
    copy_bytes(source, room, (2 if half else 4) * rest)
    call(called.encode, (room, 0, 0, half, 1, 1, floor, 0, room + _CODES, room + _SCALES, group, address))
    copy_bytes(room + _CODES, packed, rest * job.bits // 8)
    copy_bytes(room + _SCALES, scales, rest // job.k)


@Native
def _quantize_unit(address, row, height, column, width, panel, scratch):
    job, flow, unit, called = fields_at(address, VectorJob)
    layout, bits, length, k = job.layout, job.bits, job.length, job.k
    pitch = panel_pitch(unit)
    source, step, kind = (
        layout.address + row * layout.row_step + column * layout.column_step, layout.row_step, layout.kind
    )  # fmt: skip
    size = 4 if kind == FLOAT32 else 2
    # While a run is encoded, the next one is on its way.
    ahead = source + size * width - panel if flow == STAGED else asked_ahead(size * width, step, FAR)
    if flow >= PANEL:
        call(called.fill, (address, row, column, height, width, panel, height * step))
        source, step, kind = panel, pitch, FLOAT32
    if flow != DIRECT:
        if flow == STAGED or job.transform.n > 1:
            for r in range(height):
                call(called.stage, (source + step * r, kind, panel + pitch * r, width, address))
        source, step, kind = panel, pitch, FLOAT32
    half, floor, floor_step = int(kind == BFLOAT16), scratch + _ZEROS, 0
    if job.tile:
        floor, floor_step = scratch + _FLOOR, called.step // 2
        call(called.amax, (panel, height, width, pitch, floor, k))

    place, first_group = row * length + column, (job.first_column + column) // job.per_call
    packed, packed_step = job.codes + place * bits // 8, length * bits // 8
    scales, scales_step = job.scales + place // k, length // k
    steps, rest = width // called.step, width % called.step
    once = 1 if job.row_indices else height  # rows whose groups are evenly apart
    for r in range(0, height, once):
        index = job.first_row + row + r
        if job.row_indices:
            index = carray(numbers_at(job.row_indices), (row + r + 1,))[row + r]
        group = index * job.row_groups + first_group
        call(
            called.encode,
            (
                source + step * r, step, ahead, half, once, steps, floor, floor_step, packed + packed_step * r,
                scales + scales_step * r, group, address,
            ),
        )  # fmt: skip
        if rest:
            done = steps * called.step
            for last in range(r, r + once):
                _encode_last(
                    source + step * last + (2 if half else 4) * done, half, rest, floor + floor_step * steps,
                    packed + packed_step * last + done * bits // 8, scales + scales_step * last + done // k,
                    group + job.row_groups * (last - r) + done // job.per_call, address, scratch,
                )  # fmt: skip


@kernel(inline="always")
def _place(task, down, across, turned):
    """Return row and column of a task, such that consecutive tasks are neighbours in the memory of the input."""
    if turned:
        return task % down, task // down
    return task // across, task % across


@kernel(inline="always")
def _quantize_part(address, top, bottom, left, right, room):
    """Quantize the part of the matrix at (`top`, `left`), cut at its edges, unit by unit."""
    job, flow, (height, width), called = fields_at(address, VectorJob)
    bottom, right = min(bottom, job.rows), min(right, job.length)
    down, across = max(-(-(bottom - top) // height), 0), max(-(-(right - left) // width), 0)
    for task in range(down * across):
        r, c = _place(task, down, across, flow >= TURNED)
        r, c = top + r * height, left + c * width
        call(
            called.unit, (address, r, min(height, bottom - r), c, min(width, right - c), room + _PANEL, room)
        )


@Native
def _quantize_parts(address, begin, end, room):
    parts = fields_at(address, _Parts)
    carray(numbers_at(room + _ZEROS), (8,))[:] = 0
    for task in range(begin, end):
        r, c = _place(task, parts.down, parts.across, parts.turned)
        top, left = r * parts.part.rows, c * parts.part.columns
        bottom, right = top + parts.part.rows, left + parts.part.columns
        _quantize_part(parts.first, top, bottom, left, right, room)
        if parts.second:
            _quantize_part(parts.second, left, right, top, bottom, room)


@cache
def _called(target: Target, encode: VectorNative, flow: int) -> Called:
    unit = encode_columns.on(target) if flow == COLUMNS else _quantize_unit
    return Called(
        step=target.step, fill=fill_panel.on(target).address, stage=stage_row.on(target).address,
        amax=tile_amax.on(target).address, encode=encode.on(target).address, unit=unit.address,
    )  # fmt: skip


def _vector_job(job: Job, encode: VectorNative, target: Target, *, join: bool) -> VectorJob:
    """Return a job with its way; rows without a gap between them become one where `join` allows."""
    flow = quantization_flow(job)
    # The blocks of `amax_jobs` are longer than any format's.
    unit = unit_of(flow, job.transform.n, bool(job.tile), min(job.k, MXFP4.k))
    if join and flow <= STAGED:
        job = joined(job)
    return VectorJob(job, flow, unit, _called(target, encode, flow))


def _jobs(result: Result, x: NDArray[Any], target: Target, *, join: bool) -> Iterator[VectorJob]:
    """Yield a quantization's jobs."""
    encode = encoder_of(result.plan.format)
    assert encode  # the backend asks for no other format
    for job in result.jobs(x):
        yield _vector_job(job, encode, target, join=join)


def finite_amax(x: NDArray[Any], plan: QuantPlan, target: Target) -> np.float32:
    """Return the largest finite magnitude of an input after its transform."""
    found = np.zeros(1, np.int32)
    for each in amax_jobs(x, plan, found):
        job = _vector_job(each, finite_amax_rows, target, join=True)
        _run(job.unit, job)
    return np.float32(found.view(np.float32)[0])


def quantize_planned(x: NDArray[Any], plan: QuantPlan, target: Target) -> Quantized:
    """Return packed codes [rows..., K * bits / 8] and scale codes [rows..., K / k] of a planned quantization."""
    result = Result(plan)
    for job in _jobs(result, x, target, join=True):
        _run(job.unit, job)
    return result.arrays()


def quantize_dual(
    x: NDArray[Any], row: QuantPlan, column: QuantPlan, target: Target
) -> tuple[Quantized, Quantized]:
    """Return what `quantize_planned` returns for both axes of a matrix, reading it once, part by part."""
    results = Result(row), Result(column)
    for first, second in zip(*(_jobs(each, x, target, join=False) for each in results), strict=True):
        _run(_PART, first, second)
    return results[0].arrays(), results[1].arrays()


def _run(part: Unit, *jobs: VectorJob) -> None:
    """Quantize a matrix part by part, as one or two jobs say."""
    rows, columns = jobs[0].job.rows, jobs[0].job.length
    if len(jobs) > 1:  # padding is behind the blocks of either axis
        rows, columns = max(rows, jobs[1].job.length), max(columns, jobs[1].job.rows)
    down, across, table = -(-rows // part.rows), -(-columns // part.columns), written(*jobs)
    first = address_of(table)
    second = first + len(table) // 2 if len(jobs) > 1 else 0
    parts = _Parts(part, down, across, int(jobs[0].flow >= TURNED), first, second)
    run(_quantize_parts, parts, down * across, rows * columns, room=_PANEL + PANEL_BYTES)
