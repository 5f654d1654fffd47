"""Rows that do not fit FP8 under `bounded`: their outputs are recomputed from packed codes, each sum in parts.

A few rows make only a few tiles. One program per tile would leave the GPU nearly idle for as long as a whole product
takes. `bounded` does not fix the order in which blocks are added, so several programs share the blocks of a tile. The
last one to finish adds their sums in the order of the blocks, so results do not depend on which program is the last.
"""

# Triton infers the types of kernels.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import torch
import triton
import triton.language as tl

from mxref.mxarray import MXArray
from mxref_triton.launch import INTERPRETED, launch
from mxref_triton.memory import empty
from mxref_triton.operands import rows_of
from mxref_triton.products.fold import MISFIT_PROGRAMS, Folded
from mxref_triton.products.ordered import (
    bits_of,
    formats,
    misfit_tile,
    ordered_sum,
    store_options,
    store_tile,
)

_ROWS, _COLUMNS = (16, 64)
"""Tile of a program; matrix units take no fewer than 16 rows."""
_LEAST_BLOCKS = 8
"""Blocks of a part: with fewer, adding the parts costs more than that saves."""


@triton.jit
def _bounded_misfits(
    a_codes, a_scales, b_codes, b_scales, a_misfits, b_misfits, parts, done, out,
    rows, columns, blocks, factor,
    A: tl.constexpr, B: tl.constexpr, S: tl.constexpr, K: tl.constexpr, LARGEST: tl.constexpr, WIDE: tl.constexpr,
    SCALED: tl.constexpr, HALF: tl.constexpr, EMULATED: tl.constexpr, NAN: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, LEAST: tl.constexpr,
):  # fmt: skip
    """Recompute every output that touches a listed row.

    Args as in `_ordered_misfits`, and `parts`, float32, a tile for each program; `done`, int32, for each program a
    zero, which it is again at the end.
    """
    a_count, b_count = tl.load(a_misfits), tl.load(b_misfits)
    a_tasks = tl.cdiv(a_count, BM) * tl.cdiv(columns, BN)
    tasks = a_tasks + tl.cdiv(b_count, BN) * tl.cdiv(rows, BM)
    # More than one part only if every part of every tile has a program of its own.
    most = tl.num_programs(0) // tl.maximum(tasks, 1)
    length = tl.cdiv(blocks, tl.maximum(tl.minimum(most, blocks // LEAST), 1))
    count = tl.cdiv(blocks, length)
    own = tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :]
    for item in range(tl.program_id(0), tasks * count, tl.num_programs(0)):
        task, part = item // count, item % count
        row, column = misfit_tile(
            task, a_tasks, a_count, b_count, a_misfits, b_misfits, rows, columns, BM, BN
        )
        first = part * length
        acc = ordered_sum(
            a_codes, a_scales, b_codes, b_scales, row, column, rows, columns,
            first, tl.minimum(first + length, blocks), blocks, A, B, S, K, LARGEST, WIDE, EMULATED, (BM, BN),
        )  # fmt: skip
        finished = count == 1
        if count > 1:
            tl.store(parts + item * (BM * BN) + own, acc)
            tl.debug_barrier()  # all threads have stored before one of them reports it
            finished = tl.atomic_add(done + task, 1) == count - 1
            if finished:
                tl.debug_barrier()
                acc = tl.zeros((BM, BN), tl.float32)
                for i in range(0, count):
                    acc += tl.load(parts + (task * count + i) * (BM * BN) + own, cache_modifier=".cg")
                tl.store(done + task, 0)
        if finished:
            store_tile(acc, out, row, column, rows, columns, factor, NAN, SCALED, HALF)


def multiply_misfits(a: MXArray, b: MXArray, left: Folded, right: Folded, out: torch.Tensor) -> None:
    """Overwrite every output that touches a row that does not fit FP8 by its value from packed codes, under `bounded`.

    Args:
        a: left operand [M, K].
        b: right operand [N, K].
        left: the first, folded.
        right: the second, folded.
        out: their product [M, N], float32 or bfloat16.
    """
    (a_codes, a_scales), (b_codes, b_scales) = rows_of(a), rows_of(b)
    options, factor = store_options(a, b, out.dtype)
    parts = empty((MISFIT_PROGRAMS * _ROWS * _COLUMNS,), torch.float32, out.device)
    launch(
        _bounded_misfits, (MISFIT_PROGRAMS,),
        a_codes, a_scales, b_codes, b_scales, left.misfits, right.misfits, parts, left.done, bits_of(out),
        *out.shape, a_scales.shape[1], factor,
        **formats(a, b), EMULATED=INTERPRETED, BM=_ROWS, BN=_COLUMNS, LEAST=_LEAST_BLOCKS, num_warps=2, num_stages=4,
        **options,
    )  # fmt: skip
