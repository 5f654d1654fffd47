"""The ways on which elements reach the inner step of quantization, and in what portions: fields of a `Job`."""

# Kernels have no annotations: Numba infers their types.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from functools import cache

from mxref.formats import BlockShape
from mxref.plan import QuantPlan
from mxref_numba.kernels import kernel
from mxref_numba.quantize_job import BFLOAT16, EVEN, FLOAT32, WIDTH, Matrix, Result, Unit

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


def flow_of(m: Matrix) -> int:
    """Return how elements of a matrix get into staged rows."""
    size = 4 if m.layout.kind == FLOAT32 else 2
    if m.layout.column_step == size:
        return STAGED
    return TURNED if m.layout.row_step == size else PANEL


@cache
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


class VectorResult(Result):
    """The results of a planned quantization on vectors."""

    def __init__(self, plan: QuantPlan, encode: int, whole: bool) -> None:
        """Make room for the results.

        Args:
            plan: the quantization.
            encode: address of the `Native` that encodes rows in the plan's format.
            whole: whether rows without a gap between them may be joined to one.
        """
        super().__init__(plan, encode)
        self._whole = whole

    def moved(self, m: Matrix) -> tuple[int, Unit, bool]:
        """Return how elements of a matrix reach a step, in what units, and whether its rows are joined to one."""
        flow = self._flow(m)
        unit = unit_of(flow, self.transform.n, bool(self.job.tile), self.job.k)
        return flow, unit, self._whole and flow <= STAGED and self._joins(m)

    def _flow(self, m: Matrix) -> int:
        kind, flow = m.layout.kind, flow_of(m)
        if flow == TURNED and self._runs_along_memory(m):
            return COLUMNS
        if flow != STAGED:
            return flow
        if m.layout.columns != self.plan.length:
            return PANEL
        as_it_is = kind == FLOAT32 or (kind == BFLOAT16 and self.job.rounding == EVEN)
        in_steps = self.transform.n == 1 and self.plan.spec.block is BlockShape.ROW
        return DIRECT if as_it_is and in_steps else STAGED

    def _runs_along_memory(self, m: Matrix) -> bool:
        """Return whether vectors across blocks serve a turned matrix: the usual treatments of whole vectors."""
        plain = self.job.rounding == EVEN and self.plan.spec.block is BlockShape.ROW and self.job.bits == 4
        length = self.plan.length
        whole = m.rows % _COLUMN_ROWS == length % COLUMN_LINES == 0 and m.layout.columns == length
        return plain and whole and self.transform.n in (1, 16) and m.layout.kind in (FLOAT32, BFLOAT16)

    def _joins(self, m: Matrix) -> bool:
        """Return whether a matrix is one long row, in memory and in the random groups."""
        columns, layout = m.layout.columns, m.layout
        groups_join = self.table.size == 0 or (not self.rows.size and self.plan.global_length == columns)
        along = layout.row_step == layout.column_step * columns
        return self.plan.spec.block is BlockShape.ROW and along and groups_join
