"""Row-wise quantization: the block axis is contiguous, and each thread reads the whole of its own units.

Thread t of a program owns unit t: of MXFP4 it reads the 64 bytes of 32 bfloat16 elements as four vectors of 16 bytes,
and writes 16 bytes of codes and one scale byte, next to those of threads t - 1 and t + 1. The lines of memory that the
threads of a warp touch with one vector are read again from the first-level cache with the next one.
"""

# Triton infers the types of kernels.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import triton
import triton.language as tl

from mxref_triton.lane.random import first_call, given
from mxref_triton.lane.registers import load_words, store_largest, store_unit, tile_index
from mxref_triton.lane.treatment import Output
from mxref_triton.lane.unit import encode_words

_AMAX = tl.constexpr(Output.AMAX.value)


@triton.jit
def row_units(
    x, codes, scales,
    row, unit, rows, units, stride, group, groups, shared,
    P: tl.constexpr, ROWS: tl.constexpr, UNITS: tl.constexpr, MASKED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Quantize ROWS x UNITS units, a multiple of the program's threads.

    Args:
        x: int32 pointer to the elements, the block axis contiguous and `stride` words between rows.
        codes: int32 pointer to packed codes, or to bfloat16 values, [rows, units]; or to the one word of amax.
        scales: uint8 pointer to scale codes, [rows, units].
        row: first row, an int64 scalar.
        unit: first unit of each row, an int64 scalar.
        rows: number of rows of the whole.
        units: units per row of the whole.
        stride: see x.
        group: number of the first Philox call of row 0.
        groups: calls per row.
        shared: from `given`.
        P: the treatment.
        ROWS: see above.
        UNITS: see above.
        MASKED: whether rows or units may end within these.
        WIDE: whether offsets between the units need 64 bits.
    """
    IN: tl.constexpr = P.words_in
    OUT: tl.constexpr = P.words_out
    BLOCKS: tl.constexpr = P.blocks
    VECTOR: tl.constexpr = min(OUT, 4) if BLOCKS else OUT
    i = tl.arange(0, ROWS * UNITS)
    r = i // UNITS
    u = i % UNITS
    mask = None
    if MASKED:
        mask = (row + r < rows) & (unit + u < units)
    if WIDE:
        r = r.to(tl.int64)
    words = load_words(x + (row * stride + unit * IN), r * stride + u * IN, mask, IN)
    first = None
    if P.random_bits:
        first = first_call(row + r, unit + u, group, groups, P)
    out, stored = encode_words(words, first, shared, P, ROWS, UNITS)
    if P.output == _AMAX:
        store_largest(codes, out)
    else:
        store_unit(codes + (row * units + unit) * OUT, (r * units + u) * OUT, mask, out, OUT, VECTOR)
    for block in tl.static_range(len(stored)):
        target = scales + (row * units + unit) * BLOCKS + ((r * units + u) * BLOCKS + block)
        tl.store(target, stored[block], mask=mask)


@triton.jit(
    do_not_specialize=[
        "rows", "signs_low", "signs_high", "group", "seed_low", "seed_high", "stream_low", "stream_high",
    ]
)  # fmt: skip
def quantize_rows(
    x, codes, scales, tensor,
    rows, units, stride,
    signs_low, signs_high, group, groups, seed_low, seed_high, stream_low, stream_high,
    P: tl.constexpr, ROWS: tl.constexpr, UNITS: tl.constexpr, BAND: tl.constexpr,
    MASKED: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Quantize a matrix, ROWS x UNITS units per program; arguments as in `row_units` and `given`, x of any type."""
    down, across = tile_index(BAND)
    row = down * ROWS
    unit = across * UNITS
    shared = given(signs_low, signs_high, seed_low, seed_high, stream_low, stream_high, tensor, P)
    row_units(
        x.to(tl.pointer_type(tl.int32)), codes, scales, row, unit, rows, units, stride, group, groups, shared,
        P, ROWS, UNITS, MASKED, WIDE,
    )  # fmt: skip
