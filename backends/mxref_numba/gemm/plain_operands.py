"""Operands of `plain_tiles`, decoded to float32, and what is known of their blocks."""

# Kernels have no annotations: Numba infers their types.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
from numba import carray  # type: ignore[attr-defined]
from numpy.typing import NDArray

from mxref.formats import ElementFormat
from mxref.mxarray import MXArray
from mxref_numba import buffers
from mxref_numba.grids import decoded, held_bits
from mxref_numba.held_codes import code_rows
from mxref_numba.kernels import (
    Native,
    address_of,
    bytes_at,
    fields_at,
    floats_at,
    kernel,
    unsigned_numbers_at,
)
from mxref_numba.threads import run

_TURNED_ROWS = 64


class DecodedOperand(NamedTuple):
    """An operand of at least one row and one block, decoded."""

    values: NDArray[np.float32]
    """Element values [rows, K]; [K, rows] for the right side, so that inner loops run along rows of C."""
    found: NDArray[np.uint8]
    """What is known of blocks, [2, K / k, rows]: the bits from the lowest to the highest that their finite
    magnitudes have; and their scale codes, that of 1 for those of NaN and of blocks that add nothing."""


@cache
def integers_of(element: ElementFormat) -> NDArray[np.uint64]:
    """Return the magnitudes of held codes in units of the smallest one, uint64; 0 for NaN and Inf."""
    magnitudes = np.abs(decoded(element).astype(np.float64))
    units = np.ldexp(np.where(np.isfinite(magnitudes), magnitudes, 0), -element.unit_exponent)
    integers = units.astype(np.uint64)
    integers.flags.writeable = False
    return integers


@cache
def _table(element: ElementFormat) -> NDArray[np.float32]:
    """Return the values of a byte of held codes: float32 [256], or of its two codes of four bits [512]."""
    values = decoded(element)
    if held_bits(element) == 8:
        return values
    byte = np.arange(256)
    return np.stack([values[byte & 15], values[byte >> 4]], axis=-1).reshape(-1)


@kernel
def _bit_span(seen):
    """Return the bits from the lowest set one to the highest set one: 0 for none."""
    if seen == np.uint64(0):
        return np.uint8(0)
    span = 0
    while seen & np.uint64(1) == np.uint64(0):
        seen = np.uint64(seen >> np.uint64(1))
    while seen:
        seen = np.uint64(seen >> np.uint64(1))
        span += 1
    return np.uint8(span)


@kernel(inline="always")
def _decode_block(codes, k, bits, table, integers, values):
    seen = np.uint64(0)
    if bits == 8:
        for i in range(np.uint64(k)):
            values[i] = table[codes[i]]
            seen = np.uint64(seen | integers[codes[i]])
    else:
        pairs, both = table.view(np.uint64), values.view(np.uint64)
        for i in range(np.uint64(k // 2)):
            both[i] = pairs[codes[i]]
            seen = np.uint64(seen | codes[i])
        # A code of four bits spans few bits, whatever it is.
        return np.uint8(4) if seen & np.uint64(0x77) else np.uint8(0)
    return _bit_span(seen)


class _Decoding(NamedTuple):
    """The decoding of an operand; places in memory are addresses."""

    codes: int
    scales: int
    rows: int
    blocks: int
    k: int
    nan_code: int
    one_code: int
    bits: int
    """Of a held code."""
    turn: int
    table: int
    integers: int
    values: int
    found: int


@Native
def _decode(address, begin, end, room):
    job = fields_at(address, _Decoding)
    rows, blocks, k, bits, turn = job.rows, job.blocks, job.k, job.bits, job.turn
    size, nan, one = k * bits // 8, np.uint8(job.nan_code), np.uint8(job.one_code)
    codes = carray(bytes_at(job.codes), (rows, blocks * size))
    scales = carray(bytes_at(job.scales), (rows, blocks))
    table, integers = carray(floats_at(job.table), (512,)), carray(unsigned_numbers_at(job.integers), (256,))
    by_row = carray(floats_at(job.values), (rows, blocks * k))
    by_column = carray(floats_at(job.values), (blocks * k, rows))
    spans = carray(bytes_at(job.found), (blocks, rows))
    live = carray(bytes_at(job.found + blocks * rows), (blocks, rows))
    turned = carray(floats_at(room), (_TURNED_ROWS, k))
    for first in range(begin, end, _TURNED_ROWS):
        count = min(_TURNED_ROWS, end - first)
        for b in range(blocks):
            for r in range(count):
                block = codes[first + r, b * size : (b + 1) * size]
                target = turned[r] if turn else by_row[first + r, b * k : (b + 1) * k]
                span, scale = _decode_block(block, k, bits, table, integers, target), scales[first + r, b]
                spans[b, first + r] = span
                live[b, first + r] = scale if span and scale != nan else one
            if turn:
                top, left = np.uint64(b * k), np.uint64(first)
                for i in range(np.uint64(k)):
                    for r in range(np.uint64(count)):
                        by_column[top + i, left + r] = turned[r, i]


def decoded_operand(q: MXArray, *, turn: bool) -> DecodedOperand:
    """Return an operand of at least one row and one block, decoded for the right side of the product if `turn`."""
    codes, scales = code_rows(q)
    rows, blocks = scales.shape
    values = buffers.empty((q.length, rows) if turn else (rows, q.length), np.float32)
    found = np.empty((2, blocks, rows), np.uint8)
    element, scale, k = q.format.element, q.format.scale, q.format.k
    table, integers = _table(element), integers_of(element)
    job = _Decoding(
        codes=address_of(codes), scales=address_of(scales), rows=rows, blocks=blocks, k=k,
        nan_code=scale.nan_code, one_code=scale.one_code, bits=held_bits(element), turn=turn, table=address_of(table),
        integers=address_of(integers), values=address_of(values), found=address_of(found),
    )  # fmt: skip
    run(_decode, job, rows, rows * q.length, room=4 * _TURNED_ROWS * k)
    return DecodedOperand(values, found)
