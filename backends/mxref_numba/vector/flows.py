"""The ways on which elements reach the inner step of quantization, and in what portions: what a `VectorJob` adds."""

# Kernels have no annotations: Numba infers their types.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from mxref.formats import E2M1, MXFP4
from mxref_numba.kernels import kernel
from mxref_numba.quantize_job import BFLOAT16, EVEN, FLOAT32, WIDTH, Job, Strides, grid_at

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


class Unit(NamedTuple):
    """What is staged, or encoded, at once."""

    rows: int
    columns: int


class Called(NamedTuple):
    """Kernels of a target that are called by address, so that each is compiled once."""

    step: int
    """Elements of a step."""
    fill: int
    """`fill_panel`."""
    stage: int
    """`stage_row`."""
    amax: int = 0
    """`tile_amax`."""
    encode: int = 0
    """What encodes rows in the job's format."""
    unit: int = 0
    """What quantizes a unit."""


class VectorJob(NamedTuple):
    """A job, and how vectors do it."""

    job: Job
    flow: int
    unit: Unit
    called: Called


def flow_of(layout: Strides) -> int:
    """Return how elements of a matrix get into staged rows."""
    size = 4 if layout.kind == FLOAT32 else 2
    if layout.column_step == size:
        return STAGED
    return TURNED if layout.row_step == size else PANEL


@cache
def unit_of(flow: int, n: int, tile: bool, k: int = MXFP4.k) -> Unit:
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


def quantization_flow(job: Job) -> int:
    """Return how elements of a matrix reach a step."""
    kind, flow = job.layout.kind, flow_of(job.layout)
    if flow == TURNED and _runs_along_memory(job):
        return COLUMNS
    if flow != STAGED:
        return flow
    if job.layout.columns != job.length:
        return PANEL
    as_it_is = kind == FLOAT32 or (kind == BFLOAT16 and job.rounding == EVEN)
    return DIRECT if as_it_is and job.transform.n == 1 and not job.tile else STAGED


def _runs_along_memory(job: Job) -> bool:
    """Return whether vectors across blocks serve a turned matrix: the usual treatments of whole vectors."""
    e2m1 = job.grid == grid_at(E2M1) and not job.quotient.grid
    plain = job.rounding == EVEN and not job.tile and e2m1
    whole = job.rows % _COLUMN_ROWS == job.length % COLUMN_LINES == 0 and job.layout.columns == job.length
    return plain and whole and job.transform.n in (1, 16) and job.layout.kind in (FLOAT32, BFLOAT16)


def joined(job: Job) -> Job:
    """Return the job with its rows as one, if they are one long row, in memory and in the random groups."""
    layout, length = job.layout, job.length
    groups_join = not job.key or (not job.row_indices and job.row_groups * job.per_call == length)
    if job.tile or not groups_join or layout.row_step != layout.column_step * layout.columns:
        return job
    whole = job.rows * length
    return job._replace(layout=layout._replace(columns=whole), rows=1, length=whole)


FAR, NEAR = 8192, 2048
"""Distances in bytes at which elements are prefetched: where a step takes long, and where it waits for them. The CPU's
own prefetcher alone is slower."""


@kernel(inline="always")
def asked_ahead(run, row_step, distance):
    """Return the distance in bytes of the prefetch; runs shorter than that prefetch the next row."""
    return distance if run >= distance else row_step


@kernel(inline="always")
def panel_pitch(unit):
    """Return the bytes between the rows of a panel: a power of two would make them compete for cache sets."""
    return 4 * unit.columns + 64
