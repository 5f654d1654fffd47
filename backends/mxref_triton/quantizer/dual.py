"""Both orientations from one read of memory: a program quantizes its tile along the rows, then along the columns.

The second pass finds the tile in the first-level cache, so the elements cross the memory bus once. Each pass assigns
elements to threads in its own way, and no element moves between threads.
"""

# Triton infers the types of kernels.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from mxref_triton.lane.random import given
from mxref_triton.lane.registers import tile_index
from mxref_triton.quantizer.column import column_units
from mxref_triton.quantizer.row import row_units


@triton.jit(
    do_not_specialize=[
        "row_signs_low", "row_signs_high", "row_group", "row_seed_low", "row_seed_high",
        "row_stream_low", "row_stream_high",
        "column_signs_low", "column_signs_high", "column_group", "column_seed_low", "column_seed_high",
        "column_stream_low", "column_stream_high",
    ]
)  # fmt: skip
def quantize_both(
    x, row_codes, row_scales, row_tensor, column_codes, column_scales, column_tensor,
    rows, columns, stride,
    row_signs_low, row_signs_high, row_group, row_groups,
    row_seed_low, row_seed_high, row_stream_low, row_stream_high,
    column_signs_low, column_signs_high, column_group, column_groups,
    column_seed_low, column_seed_high, column_stream_low, column_stream_high,
    R: tl.constexpr, C: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
    BAND: tl.constexpr, STEP: tl.constexpr, VECTOR: tl.constexpr, MASKED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Quantize ROWS x COLUMNS elements per program.

    Args as in `row_units`, `column_units` and `given`; `stride` counts elements, R and C are the two treatments.
    """
    down, across = tile_index(BAND)
    row = down * ROWS
    column = across * COLUMNS
    shared = given(
        row_signs_low, row_signs_high, row_seed_low, row_seed_high, row_stream_low, row_stream_high, row_tensor, R
    )  # fmt: skip
    PER_WORD: tl.constexpr = R.unit // R.words_in
    row_units(
        x.to(tl.pointer_type(tl.int32)), row_codes, row_scales,
        row, column // R.unit, rows, columns // R.unit, stride // PER_WORD,
        row_group, row_groups, shared,
        R, ROWS, COLUMNS // R.unit, MASKED, WIDE,
    )  # fmt: skip
    shared = given(
        column_signs_low, column_signs_high, column_seed_low, column_seed_high,
        column_stream_low, column_stream_high, column_tensor, C,
    )  # fmt: skip
    TOGETHER: tl.constexpr = 2 if C.two_lines else 1
    x = x.to(tl.pointer_type(tl.int32 if C.kind == "float32" or C.two_lines else tl.int16))
    column_units(
        x, column_codes, column_scales,
        column, row // C.unit, columns, rows // C.unit, rows, 1, stride // TOGETHER,
        column_group, column_groups, shared,
        C, COLUMNS, ROWS // C.unit, STEP // TOGETHER, TOGETHER, VECTOR, MASKED, False, WIDE,
    )  # fmt: skip
