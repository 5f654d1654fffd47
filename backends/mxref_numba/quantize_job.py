"""What kernels are told of a planned quantization, on every path: the fields of a `Job`.

`Result` holds the memory of what a quantization gives, and makes a `Job` for each matrix that its input consists of. A
format that joins needs nothing here: what its scale asks of amax is in `scale.py`.

Kernels get an address and two strides of an input, not an array: Numba compiles anew for every type, layout and
mutability of an array, and knows no bfloat16.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any, NamedTuple

import numpy as np
from numpy.typing import NDArray

from mxref.formats import BlockFormat, ElementFormat, Negatives
from mxref.plan import QuantPlan, dtype_name
from mxref.recipe import OperandSpec
from mxref.steps.four_over_six import FourOverSix
from mxref.steps.hadamard import Rotation, norm_factor
from mxref.steps.random import Stream
from mxref.steps.rounding import Rounding
from mxref_numba import buffers
from mxref_numba.grids import FRACTION_BITS, grid_of
from mxref_numba.kernels import address_of, written
from mxref_numba.scale import NAN_CODE, QuotientNumbers, ScaleNumbers, quotient_numbers, scale_numbers

WIDTH = 256
"""Columns of a panel, and signs in memory: a multiple of every k and of every Hadamard size."""

FLOAT32, BFLOAT16, FLOAT16 = range(3)

_KINDS = {"float32": FLOAT32, "bfloat16": BFLOAT16, "float16": FLOAT16}


class Strides(NamedTuple):
    """Where the elements of a matrix lie."""

    address: int
    row_step: int
    """Bytes between rows."""
    column_step: int
    """Bytes between columns."""
    columns: int
    kind: int
    """Type of an element."""


@dataclass(frozen=True)
class Matrix:
    """A two-dimensional piece of an input, block axis last, whose memory the input keeps alive."""

    first_row: int
    """Index of its first row in the whole."""
    rows: int
    layout: Strides


def matrices(x: NDArray[Any], axis: int) -> Iterator[Matrix]:
    """Yield an array with `axis` moved last as matrices: one if the strides of its rows allow, else several.

    Args:
        x: float32, bfloat16 or float16, any shape and strides; the caller keeps it.
        axis: not negative.
    """
    if x.size == 0:
        return
    shape, strides = (
        (*of_axes[:axis], *of_axes[axis + 1 :], of_axes[axis]) for of_axes in (x.shape, x.strides)
    )
    rows, step, leading = 1, 0, x.ndim - 1
    while leading > 0:
        length, stride = shape[leading - 1], strides[leading - 1]
        if length > 1:
            if rows > 1 and stride != step * rows:
                break
            step = step if rows > 1 else stride
            rows *= length
        leading -= 1
    address, kind = x.__array_interface__["data"][0], _KINDS[dtype_name(x)]
    # `ndindex` is slow, and most inputs are one matrix.
    for i, index in enumerate(np.ndindex(shape[:leading]) if leading else [()]):
        start = address + sum(j * stride for j, stride in zip(index, strides, strict=False))
        yield Matrix(i * rows, rows, Strides(start, step, strides[-1], shape[-1], kind))


EVEN, CONSTANT, RANDOM_16, RANDOM_32 = range(4)
"""Roundings: RNE; RNA and RTZ; SR with up to 16 bits; SR with more."""
CONSTANTS = {Rounding.RTZ: 0, Rounding.RNA: 1 << (FRACTION_BITS - 1)}
"""The integer with which SR is the rounding mode."""


class HadamardNumbers(NamedTuple):
    """A Hadamard transform."""

    n: int
    """Size; 1 for none."""
    signs: int
    """Address of the signs of `WIDTH` elements."""
    factor: np.float32


class Job(NamedTuple):
    """The quantization of one matrix, or, with the defaults, its transform alone.

    `codes`, `scales`, `key`, `row_indices`, `grid` and `encode` are addresses, of memory that `Result` keeps.
    """

    layout: Strides
    """Of the input."""
    codes: int
    """The first result: codes with the sign on top, or what is transformed."""
    rows: int
    length: int
    transform: HadamardNumbers
    scales: int = 0
    k: int = 32
    tile: int = 0
    """Rows that share their scales; 0 if each has its own."""
    scale: ScaleNumbers = ScaleNumbers(np.int32(0), np.int32(0), np.int32(0))
    prescale: np.float32 = np.float32(1)
    rounding: int = 0
    integer: np.int32 = np.int32(0)
    """What a rounding other than RNE adds, or keeps of random bits, in units of 2^-22 of a step of the grid."""
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
    bits: int = 0
    """Of a code."""
    grid: int = 0
    quotient: QuotientNumbers = QuotientNumbers()
    four_over_six: int = 0
    """Index of the error by which blocks choose between two scales; 0 for none."""
    nan_code: int = int(NAN_CODE)
    """Scale code of a block with NaN or Inf."""


@lru_cache(64)
def transform_of(rotation: Rotation | None) -> tuple[HadamardNumbers, NDArray[np.float32]]:
    """Return a transform, and the signs at its address, which the caller keeps."""
    signs = np.resize(rotation.vector(), WIDTH) if rotation else np.ones(WIDTH, np.float32)
    n, factor = (rotation.n, norm_factor(rotation.n)) if rotation else (1, np.float32(1))
    return HadamardNumbers(n, address_of(signs), factor), signs


_WEYL, _ROUNDS = (0x9E3779B9, 0xBB67AE85), 10


def round_table(stream: Stream) -> NDArray[np.uint64]:
    """Return what Philox needs of a stream: the last two words of the counter, then a pair of key words per round.

    uint64 [2 + 2 * 10]
    """
    seed, word = (np.array([n & 0xFFFFFFFF, n >> 32], np.uint32) for n in (stream.seed, stream.word))
    rounds = np.arange(_ROUNDS, dtype=np.uint32)[:, None] * np.array(_WEYL, np.uint32)
    return np.concatenate([word, (seed + rounds).reshape(-1)]).astype(np.uint64)


@cache
def _written_grid(element: ElementFormat) -> NDArray[np.uint8]:
    return written(grid_of(element))


def grid_at(element: ElementFormat) -> int:
    """Return the address of the `Grid` of an element, by which kernels know it."""
    return address_of(_written_grid(element))


@lru_cache(256)
def _job_of(spec: OperandSpec) -> Job:
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
        transform=transform_of(None)[0],
        k=spec.format.k,
        tile=spec.block.rows if spec.block.is_tile else 0,
        scale=scale_numbers(spec),
        prescale=np.float32(element.prescale if spec.prescale else 1),
        rounding=rounding,
        integer=np.int32(integer),
        per_call=per_call,
        bits=element.bits,
        grid=grid_at(element),
        quotient=quotient_numbers(spec.format),
        four_over_six=tuple(FourOverSix).index(spec.four_over_six),
        nan_code=spec.format.scale.nan_code,
    )


_NOTHING: NDArray[Any] = np.empty(0, np.int64)


class Result:
    """The result arrays of a planned quantization, and the jobs that fill them.

    It keeps the tables whose addresses the jobs hold: it must outlive them.
    """

    def __init__(self, plan: QuantPlan) -> None:
        """Make room for the results."""
        shape = plan.rows_shape
        self.plan, self.job = plan, _job_of(plan.spec)
        if plan.tensor_scale is not None:
            quotient = self.job.quotient._replace(tensor=np.float32(plan.tensor_scale[0]))
            self.job = self.job._replace(quotient=quotient)
        self._codes = buffers.empty((*shape, plan.length * self.job.bits // 8), np.uint8)
        self.scales = buffers.empty((*shape, plan.length // self.job.k), np.uint8)
        self.table, self.rows, self._first_row = _NOTHING, _NOTHING, 0
        if plan.stream is not None:
            self.table = round_table(plan.stream)
            self._place_rows()
        self.transform, self._signs = transform_of(plan.rotation)

    def arrays(self) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
        """Return codes as they are stored, and scale codes, once the jobs are done."""
        codes, element = self._codes, self.plan.format.element
        if element.negatives is Negatives.TWOS_COMPLEMENT:
            codes = np.where(codes & element.sign, element.sign - codes, codes)
        return codes, self.scales

    def _place_rows(self) -> None:
        """Find the global indices of rows: consecutive ones from the first on, or one by one."""
        plan, axis = self.plan, self.plan.axis
        consecutive, varied = True, False
        for i, (length, start, total) in enumerate(
            zip(plan.shape, plan.origin, plan.global_shape, strict=True)
        ):
            if i != axis:
                consecutive &= total == length or not varied
                varied |= length > 1
                self._first_row = self._first_row * total + start
        if not consecutive:
            self.rows = plan.global_rows()

    def jobs(self, x: NDArray[Any]) -> Iterator[Job]:
        """Yield a job for each matrix that the input consists of; the caller keeps the input, which was planned."""
        plan, job, stored_length = self.plan, self.job, self.plan.length
        codes, scales = address_of(self._codes), address_of(self.scales)
        for m in matrices(x, plan.axis):
            made = job._replace(
                layout=m.layout,
                codes=codes + m.first_row * stored_length * job.bits // 8,
                rows=m.rows,
                length=stored_length,
                transform=self.transform,
                scales=scales + m.first_row * stored_length // job.k,
                first_column=plan.first,
            )
            if self.table.size:
                made = made._replace(
                    key=address_of(self.table),
                    row_indices=address_of(self.rows) + 8 * m.first_row if self.rows.size else 0,
                    first_row=self._first_row + m.first_row,
                    row_groups=plan.global_length // job.per_call,
                )
            yield made


def amax_jobs(x: NDArray[Any], plan: QuantPlan, found: NDArray[np.int32]) -> Iterator[Job]:
    """Yield jobs that find the largest finite magnitude of an input, as a quantization sees it.

    They give the address of `found` for that of scales. They have no codes, and a block is a whole panel, so that no
    kernel stores any.
    """
    transform, _ = transform_of(plan.rotation)  # kept by its cache and the plan's result
    job = _job_of(plan.spec)._replace(
        length=plan.length,
        transform=transform,
        scales=address_of(found),
        k=WIDTH,
        tile=0,
        rounding=EVEN,
        bits=0,
    )
    for m in matrices(x, plan.axis):
        yield job._replace(layout=m.layout, rows=m.rows)
