"""What kernels need to know about a planned quantization: the fields of a `Job`."""

# Kernels have no annotations: Numba infers their types.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Iterator
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mxref.formats import BlockFormat, BlockShape, ElementFormat
from mxref.plan import QuantPlan
from mxref.recipe import OperandSpec
from mxref.steps.hadamard import Rotation, norm_factor
from mxref.steps.rounding import Rounding
from mxref.steps.scale import bump_above
from mxref_numba import memory
from mxref_numba.compiled import kernel
from mxref_numba.elements import FRACTION_BITS, grid_of, held_bits
from mxref_numba.native import address_of, fields_at, written
from mxref_numba.scalar.packing import stored
from mxref_numba.scalar.panels import BFLOAT16, FLOAT32, WIDTH, Matrix, Strides, matrices
from mxref_numba.scalar.philox import stream_key
from mxref_numba.scalar.rounding import CONSTANTS
from mxref_numba.scalar.scale import MANTISSA
from mxref_numba.scalar.transform import panel_signs
from mxref_numba.vector.philox import round_table

EVEN, CONSTANT, RANDOM_16, RANDOM_32 = range(4)
"""Roundings: RNE; RNA and RTZ; SR with up to 16 bits; SR with more."""

DIRECT, STAGED, PANEL, TURNED, COLUMNS = range(5)
"""How elements reach a step: unchanged; converted or transformed; gathered or transposed in a panel; not at all."""

COLUMN_LINES = 128
"""Elements of a row that are quantized at once under `COLUMNS`, so that their codes fill a cache line."""
_COLUMN_ROWS = 16
"""Rows go in such numbers under `COLUMNS`."""

PANEL_BYTES = 128 * 4 * (WIDTH // 2 + 16)
"""Bytes of the largest panel or staged run."""
RUN = 2048
"""Elements that are staged at once of a row: 8 KiB of float32."""


class HadamardNumbers(NamedTuple):
    """A Hadamard transform."""

    n: int
    """Size; 1 for none."""
    signs: int
    """Address of the signs of a panel's width."""
    factor: np.float32


class Unit(NamedTuple):
    """What is staged, or encoded, at once."""

    rows: int
    columns: int


class Job(NamedTuple):
    """The quantization of one matrix, or, with the defaults, its transform alone.

    `codes`, `scales`, `key`, `row_indices`, `encode` and `grid` are addresses, of memory that `Result` keeps.
    """

    layout: Strides
    """Of the input."""
    codes: int
    """The first result: codes, or what is transformed."""
    rows: int
    length: int
    flow: int
    """How elements reach a step."""
    transform: HadamardNumbers
    unit: Unit
    scales: int = 0
    tile: int = 0
    """Whether k rows share their scales."""
    round_up: np.int32 = np.int32(0)
    """What carries into the exponent of amax exactly when the scale rule bumps it."""
    zero_scale: np.int32 = np.int32(0)
    max_exponent: np.int32 = np.int32(0)
    """Of the element's largest binade."""
    prescale: np.float32 = np.float32(1)
    rounding: int = 0
    integer: np.int32 = np.int32(0)
    """What a rounding other than RNE adds, or keeps of random bits."""
    key: int = 0
    """A `round_table` of Philox."""
    row_indices: int = 0
    """Indices of the rows in the global tensor; 0 if they are consecutive."""
    first_row: int = 0
    row_groups: int = 0
    """Random groups of a row."""
    first_column: int = 0
    per_call: int = 0
    """Elements of a random group."""
    encode: int = 0
    """The `Native` that encodes rows."""
    bits: int = 0
    """Of a held code."""
    grid: int = 0


job_at = fields_at(Job)


@lru_cache(64)
def transform_of(rotation: Rotation | None) -> tuple[HadamardNumbers, NDArray[np.float32]]:
    """Return a transform, and the signs at its address, which the caller keeps."""
    signs = panel_signs(rotation)
    if rotation is None:
        return HadamardNumbers(1, address_of(signs), np.float32(1)), signs
    return HadamardNumbers(rotation.n, address_of(signs), norm_factor(rotation.n)), signs


def _without(values: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return values[:axis] + values[axis + 1 :]


def flow_of(m: Matrix) -> int:
    """Return how elements of a matrix get into staged rows."""
    size = 4 if m.layout.kind == FLOAT32 else 2
    if m.layout.column_step == size:
        return STAGED
    return TURNED if m.layout.row_step == size else PANEL


def unit_of(flow: int, n: int, tile: bool, k: int = 32) -> Unit:
    """Return the unit of a flow.

    Args:
        flow: how elements get there.
        n: Hadamard size.
        tile: whether `k` rows belong together.
        k: block length.
    """
    if flow == COLUMNS:
        return Unit(WIDTH, COLUMN_LINES)
    if flow == TURNED and n < WIDTH and not tile:
        return Unit(128, WIDTH // 2)  # lines of half a kibibyte
    if flow >= PANEL or tile:
        return Unit(k, WIDTH)
    if flow == DIRECT:
        return Unit(k, 16 * RUN)  # nothing is staged
    return Unit(1, RUN)


_AHEAD = 8192
"""Distance in bytes at which elements are prefetched; the CPU's own prefetcher alone is slower."""


@kernel(inline="always")
def asked_ahead(run, row_step):
    """Return the distance in bytes of the prefetch; runs shorter than that prefetch the next row."""
    return _AHEAD if run >= _AHEAD else row_step


@kernel(inline="always")
def panel_pitch(job):
    """Return the bytes between the rows of a panel: a power of two would make them compete for cache sets."""
    return 4 * job.unit.columns + 64


@cache
def _written_grid(element: ElementFormat) -> NDArray[np.uint8]:
    return written(grid_of(element))


@lru_cache(256)
def _job_of(spec: OperandSpec, encode: int) -> Job:
    """Return a job with what follows from the treatment alone; the other fields are those of one call.

    A model asks for few treatments, and filling in all fields takes as long as the kernel on a small array.
    """
    assert isinstance(spec.format, BlockFormat)  # checked when the plan was made
    element, rounding, per_call, integer = spec.format.element, EVEN, 8, 0
    if spec.rounding is Rounding.SR:
        rounding, per_call = (RANDOM_16, 8) if spec.sr_bits <= 16 else (RANDOM_32, 4)
        integer = ((1 << spec.sr_bits) - 1) << (FRACTION_BITS - spec.sr_bits)
    elif spec.rounding is not Rounding.RNE:
        rounding, integer = CONSTANT, CONSTANTS[spec.rounding]
    return Job(
        layout=Strides(0, 0, 0, 0, 0),
        codes=0,
        rows=0,
        length=0,
        flow=DIRECT,
        transform=transform_of(None)[0],
        unit=Unit(0, 0),
        tile=spec.block is BlockShape.TILE,
        round_up=np.int32(MANTISSA - bump_above(spec.scale_rule, element)),
        zero_scale=np.int32(spec.zero_scale),
        max_exponent=np.int32(element.max_exponent),
        prescale=np.float32(element.prescale if spec.prescale else 1),
        rounding=rounding,
        integer=np.int32(integer),
        per_call=per_call,
        encode=encode,
        bits=held_bits(element),
        grid=address_of(_written_grid(element)),
    )


_NOTHING: NDArray[Any] = np.empty(0, np.int64)


class Result:
    """The result arrays of a planned quantization, and the jobs that fill them.

    It keeps the tables whose addresses the jobs hold: it must outlive them.
    """

    def __init__(self, plan: QuantPlan, encode: int) -> None:
        """Make room for the results; `encode` is the address of the `Native` that encodes rows in the plan's format."""
        format, shape = plan.format, plan.rows_shape
        self._plan, self._job = plan, _job_of(plan.spec, encode)
        self._codes = memory.empty((*shape, plan.length * self._job.bits // 8), np.uint8)
        self.scales = memory.empty((*shape, plan.length // format.k), np.uint8)
        self._table, self._rows, self._first_row = _NOTHING, _NOTHING, 0
        if plan.stream is not None:
            self._table = round_table(stream_key(plan.stream))
            self._place_rows()
        self._transform, self._signs = transform_of(plan.rotation)

    def arrays(self) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """Return codes as they are stored, and scale codes, once the jobs are done."""
        return stored(self._codes, self._plan.format.element), self.scales

    def _place_rows(self) -> None:
        """Find the global indices of rows: consecutive ones from the first on, or one by one."""
        plan = self._plan
        consecutive, varied = True, False
        for length, start, total in zip(
            plan.rows_shape,
            _without(plan.origin, plan.axis),
            _without(plan.global_shape, plan.axis),
            strict=True,
        ):
            consecutive &= total == length or not varied
            varied |= length > 1
            self._first_row = self._first_row * total + start
        if not consecutive:
            self._rows = plan.global_rows()

    def jobs(self, x: NDArray[Any], *, whole: bool = True) -> Iterator[Job]:
        """Yield a job for each matrix that the input consists of.

        Args:
            x: the input that was planned; the caller keeps it.
            whole: whether rows without a gap between them may be joined to one.
        """
        plan, length, k, job = self._plan, self._plan.length, self._plan.format.k, self._job
        codes, scales = address_of(self._codes), address_of(self.scales)
        for m in matrices(x, plan.axis):
            flow, rows, columns, layout = self._flow(m), m.rows, length, m.layout
            if whole and flow <= STAGED and self._joins(m):
                rows, columns, layout = 1, rows * length, layout._replace(columns=rows * length)
            made = job._replace(
                layout=layout,
                codes=codes + m.first_row * length * job.bits // 8,
                rows=rows,
                length=columns,
                flow=flow,
                transform=self._transform,
                unit=unit_of(flow, self._transform.n, bool(job.tile), k),
                scales=scales + m.first_row * length // k,
                first_column=plan.first,
            )
            if self._table.size:
                made = made._replace(
                    key=address_of(self._table),
                    row_indices=address_of(self._rows) + 8 * m.first_row if self._rows.size else 0,
                    first_row=self._first_row + m.first_row,
                    row_groups=plan.global_length // job.per_call,
                )
            yield made

    def _flow(self, m: Matrix) -> int:
        kind, flow = m.layout.kind, flow_of(m)
        if flow == TURNED and self._runs_along_memory(m):
            return COLUMNS
        if flow != STAGED:
            return flow
        if m.layout.columns != self._plan.length:
            return PANEL
        as_it_is = kind == FLOAT32 or (kind == BFLOAT16 and self._job.rounding == EVEN)
        in_steps = self._transform.n == 1 and self._plan.spec.block is BlockShape.ROW
        return DIRECT if as_it_is and in_steps else STAGED

    def _runs_along_memory(self, m: Matrix) -> bool:
        """Return whether vectors across blocks serve a turned matrix: the usual treatments of whole vectors."""
        plain = self._job.rounding == EVEN and self._plan.spec.block is BlockShape.ROW and self._job.bits == 4
        length = self._plan.length
        whole = m.rows % _COLUMN_ROWS == length % COLUMN_LINES == 0 and m.layout.columns == length
        return plain and whole and self._transform.n in (1, 16) and m.layout.kind in (FLOAT32, BFLOAT16)

    def _joins(self, m: Matrix) -> bool:
        """Return whether a matrix is one long row, in memory and in the random groups."""
        columns, layout = m.layout.columns, m.layout
        groups_join = self._table.size == 0 or (not self._rows.size and self._plan.global_length == columns)
        along = layout.row_step == layout.column_step * columns
        return self._plan.spec.block is BlockShape.ROW and along and groups_join
