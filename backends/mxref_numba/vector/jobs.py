"""What kernels need to know about a planned quantization: numbers and addresses.

Kernels that take arrays are compiled anew for every type, layout and mutability; these are compiled once.
"""

# Kernels have no annotations: Numba infers their types.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Any

import numpy as np
from numba.core import types
from numba.extending import intrinsic
from numpy.typing import NDArray

from mxref.formats import BlockShape
from mxref.plan import QuantPlan
from mxref.steps.hadamard import Rotation, norm_factor
from mxref.steps.rounding import Rounding
from mxref.steps.scale import bump_above
from mxref_numba import memory
from mxref_numba.compiled import kernel
from mxref_numba.elements import FRACTION_BITS, held_bits, rounding_numbers
from mxref_numba.native import address_of
from mxref_numba.scalar.hadamard import panel_signs
from mxref_numba.scalar.packing import stored
from mxref_numba.scalar.panels import BFLOAT16, FLOAT32, WIDTH, Matrix, matrices
from mxref_numba.scalar.philox import stream_key
from mxref_numba.scalar.rounding import CONSTANTS
from mxref_numba.scalar.scale import MANTISSA
from mxref_numba.vector.lanes import F32, I32, I64
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

JOB_SIZE = 31
"""Numbers of a job."""


_N, _WORD, _REAL = types.int64, types.int32, types.float32
_GROUPS = tuple(
    types.Tuple(group)
    for group in (
        (_N, _N, _N, _N, _N), (_N, _N, _N, _N), (_N, _N), (_N, _N, _REAL), (_WORD, _WORD, _REAL, _N, _WORD, _N),
        (_N, _N, _N, _N, _N), (_N, _N, _WORD, _N), (_N, _N),
    )
)  # fmt: skip


def _read_job(typingctx, job):
    """Return a job from the address of its numbers, int64 [31], in groups of what is used together.

    (address, bytes between rows, bytes between columns, columns, type of the input), (addresses of codes and
    scales, rows, columns), (flow, tiles), (Hadamard size or 1, address of signs, factor), (what carries into the
    exponent, zero scale, prescale, rounding, integer, address of the Philox table), (address of row indices or 0,
    first row, groups of a row, first column, elements per group), (address of the `Native` that encodes rows, bits of
    an element, exponent of its largest binade, address of `rounding_numbers`), (rows and columns of a unit).
    """

    def generate(context, builder, signature, arguments):
        numbers = builder.inttoptr(arguments[0], I64.as_pointer())
        places = iter(range(JOB_SIZE))

        def read(kind: Any) -> Any:
            number = builder.load(builder.gep(numbers, [I64(next(places))]))
            if kind is _N:
                return number
            word = builder.trunc(number, I32)
            return word if kind is _WORD else builder.bitcast(word, F32)

        groups = [context.make_tuple(builder, group, [read(kind) for kind in group]) for group in _GROUPS]
        return context.make_tuple(builder, signature.return_type, groups)

    return types.Tuple(_GROUPS)(types.int64), generate


read_job: Any = intrinsic(_read_job)


def bits_of(value: np.float32) -> int:
    """Return the bits of a float32."""
    return int(value.view(np.int32))


@lru_cache(64)
def transform_of(rotation: Rotation | None) -> tuple[tuple[int, int, int], NDArray[np.float32]]:
    """Return the numbers of a transform, as in a job, and the signs of a panel's width, which the caller keeps."""
    signs = panel_signs(rotation)
    n, norm = (rotation.n, norm_factor(rotation.n)) if rotation else (1, np.float32(1.0))
    return (n, address_of(signs), bits_of(norm)), signs


def _without(values: tuple[int, ...], axis: int) -> tuple[int, ...]:
    return values[:axis] + values[axis + 1 :]


def flow_of(m: Matrix) -> int:
    """Return how elements of a matrix get into staged rows."""
    _, row_step, column_step, _, kind = m.layout
    size = 4 if kind == FLOAT32 else 2
    if column_step == size:
        return STAGED
    return TURNED if row_step == size else PANEL


def unit_of(flow: int, n: int, tile: bool, k: int = 32) -> tuple[int, int]:
    """Return the rows and columns of a unit: what is staged, or encoded, at once.

    Args:
        flow: how elements get there.
        n: Hadamard size.
        tile: whether `k` rows belong together.
        k: block length.
    """
    if flow == COLUMNS:
        return WIDTH, COLUMN_LINES
    if flow == TURNED and n < WIDTH and not tile:
        return 128, WIDTH // 2  # lines of half a kibibyte
    if flow >= PANEL or tile:
        return k, WIDTH
    if flow == DIRECT:
        return k, 16 * RUN  # nothing is staged
    return 1, RUN


_AHEAD = 8192
"""Distance in bytes at which elements are prefetched; the CPU's own prefetcher alone is slower."""


@kernel(inline="always")
def asked_ahead(run, row_step):
    """Return the distance in bytes of the prefetch; runs shorter than that prefetch the next row."""
    return _AHEAD if run >= _AHEAD else row_step


@kernel(inline="always")
def panel_pitch(job):
    """Return the bytes between the rows of a panel: a power of two would make them compete for cache sets."""
    return 4 * read_job(job)[7][1] + 64


class Result:
    """The result arrays of a planned quantization, and the jobs that fill them.

    It keeps the tables whose addresses the jobs hold: it must outlive them.
    """

    def __init__(self, plan: QuantPlan, encode: int) -> None:
        """Make room for the results; `encode` is the address of the `Native` that encodes rows in the plan's format."""
        spec, element = plan.spec, plan.format.element
        self._plan = plan
        self._held = held_bits(element)
        self._codes = memory.empty((*plan.rows_shape, plan.length * self._held // 8), np.uint8)
        self.scales = memory.empty((*plan.rows_shape, plan.length // plan.format.k), np.uint8)
        self._rounding, self._per_call, integer = EVEN, 8, 0
        self._table, self._rows, self._first_row = np.empty(0, np.uint64), np.empty(0, np.int64), 0
        if plan.stream is not None:
            self._rounding, self._per_call = (RANDOM_16, 8) if spec.sr_bits <= 16 else (RANDOM_32, 4)
            integer = ((1 << spec.sr_bits) - 1) << (FRACTION_BITS - spec.sr_bits)
            self._table = round_table(stream_key(plan.stream))
            self._place_rows()
        elif spec.rounding is not Rounding.RNE:
            self._rounding, integer = CONSTANT, CONSTANTS[spec.rounding]
        self._transform, self._signs = transform_of(plan.rotation)
        self._policy = (
            MANTISSA - bump_above(spec.scale_rule, element),
            spec.zero_scale,
            bits_of(np.float32(element.prescale if spec.prescale else 1)),
            self._rounding,
            integer,
            address_of(self._table),
        )
        self._numbers = rounding_numbers(element)
        self._element = encode, self._held, element.max_exponent, address_of(self._numbers)

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

    def jobs(self, x: NDArray[Any], *, whole: bool = True) -> Iterator[tuple[int, ...]]:
        """Yield the numbers of a job, as `read_job` takes them, for each matrix that the input consists of.

        Args:
            x: the input that was planned; the caller keeps it.
            whole: whether rows without a gap between them may be joined to one.
        """
        plan, length = self._plan, self._plan.length
        codes, scales = address_of(self._codes), address_of(self.scales)
        for m in matrices(x, plan.axis):
            flow, rows, columns = self._flow(m), m.rows, length
            address, row_step, column_step, held, kind = m.layout
            if whole and flow <= STAGED and self._joins(m):
                rows, columns, held = 1, rows * length, rows * length
            yield (
                *(address, row_step, column_step, held, kind),
                codes + m.first_row * length * self._held // 8,
                *(scales + m.first_row * length // plan.format.k, rows, columns),
                *(flow, plan.spec.block is BlockShape.TILE),
                *self._transform,
                *self._policy,
                address_of(self._rows) + 8 * m.first_row if self._rows.size else 0,
                self._first_row + m.first_row,
                *(plan.global_length // self._per_call, plan.first, self._per_call),
                *self._element,
                *unit_of(flow, self._transform[0], plan.spec.block is BlockShape.TILE, plan.format.k),
            )

    def _flow(self, m: Matrix) -> int:
        kind, flow = m.layout[4], flow_of(m)
        if flow == TURNED and self._runs_along_memory(m):
            return COLUMNS
        if flow != STAGED:
            return flow
        if m.layout[3] != self._plan.length:
            return PANEL
        as_it_is = kind == FLOAT32 or (kind == BFLOAT16 and self._rounding == EVEN)
        in_steps = self._transform[0] == 1 and self._plan.spec.block is BlockShape.ROW
        return DIRECT if as_it_is and in_steps else STAGED

    def _runs_along_memory(self, m: Matrix) -> bool:
        """Return whether vectors across blocks serve a turned matrix: the usual treatments of whole vectors."""
        plain = self._rounding == EVEN and self._plan.spec.block is BlockShape.ROW and self._held == 4
        whole = (
            m.rows % _COLUMN_ROWS == self._plan.length % COLUMN_LINES == 0
            and m.layout[3] == self._plan.length
        )
        return plain and whole and self._transform[0] in (1, 16) and m.layout[4] in (FLOAT32, BFLOAT16)

    def _joins(self, m: Matrix) -> bool:
        """Return whether a matrix is one long row, in memory and in the random groups."""
        _, row_step, column_step, columns, _ = m.layout
        groups_join = self._table.size == 0 or (not self._rows.size and self._plan.global_length == columns)
        return self._plan.spec.block is BlockShape.ROW and row_step == column_step * columns and groups_join
