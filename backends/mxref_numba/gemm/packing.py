"""Packing a row of A, or as many rows of B as a vector has lanes, in the layout of `layout`."""

# Emitters work on IR values, which llvmlite does not annotate.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir

from mxref.formats import E8M0
from mxref_numba.gemm.dots import Dots
from mxref_numba.gemm.layout import LOWEST_SUM, TWICE, Tiling, after, repeat, same
from mxref_numba.vector.lanes import I8, I32, I64, Lanes, load

_I1 = ir.IntType(1)
_MAGNITUDES = 0x77
"""The bits of a packed byte that are not signs."""


def _decoded(dots: Dots, packed: Lanes, table: list[int]) -> tuple[Lanes, Lanes]:
    """Return the entries of `table` for the low and for the high nibbles of packed bytes."""
    return dots.entries(table, packed & 15), dots.entries(table, packed >> 4)


def _live(scale: Lanes, zero: Lanes) -> tuple[Lanes, Lanes]:
    """Return the scale codes, 127 (2^0) for NaN and zero blocks, and which blocks are NaN."""
    nan = scale.compare("==", E8M0.nan_code)
    return (nan | zero).choose(E8M0.bias, scale), nan


def _pack(
    builder: ir.IRBuilder, blocks: Any, places: list[tuple[Any, int]], rows: int, found: tuple[Any, Any],
    block: Callable[..., tuple[Lanes, Lanes]],
) -> None:  # fmt: skip
    """Emit the loop over blocks, whose addresses advance by fixed steps, and store what it found about the rows."""

    def body(*state):
        addresses, (low, high, nan) = (
            state[: len(places)],
            (Lanes(builder, value) for value in state[len(places) :]),
        )
        live, is_nan = block(*addresses)
        advanced = [
            after(builder, address, step) for address, (_, step) in zip(addresses, places, strict=True)
        ]
        return [
            *advanced,
            *(lanes.value for lanes in (low.call("umin", live), high.call("umax", live), nan | is_nan)),
        ]

    start = (
        same(builder, I32, E8M0.nan_code, rows),
        same(builder, I32, 0, rows),
        same(builder, _I1, 0, rows),
    )
    state = [*(address for address, _ in places), *(lanes.value for lanes in start)]
    last = repeat(builder, blocks, state, body)[len(places) :]
    address, pitch = found
    for value in last:
        lanes = Lanes(builder, value)
        lanes.convert("zext" if lanes.element == _I1 else "trunc", I8).store(address)
        address = builder.add(address, pitch)


def pack_left(tiling: Tiling, builder: ir.IRBuilder, arguments: Sequence[Any]) -> None:
    """Pack one row of A, all arguments being int64.

    Args:
        tiling: the layout.
        builder: where the code goes.
        arguments: in order:

            - codes: address of the row's packed bytes.
            - scales: address of the row's scale codes.
            - blocks: how many, at least one.
            - record: address of the first record of the panel.
            - row: number of the row in its panel.
            - found: address of three bytes, `found_pitch` apart: the lowest and the highest scale code in use, and
              whether any block is NaN.
            - found_pitch: bytes.
    """
    codes, scales, blocks, record, row, found, found_pitch = arguments
    values = builder.add(record, builder.mul(row, I64(32)))
    words = after(builder, builder.add(record, builder.mul(row, I64(4))), tiling.left_scales)
    table = [twice + tiling.dots.offset for twice in TWICE]

    def block(codes, scales, values, words):
        packed = load(builder, I8, 16, codes)
        for i, half in enumerate(_decoded(tiling.dots, packed, table)):
            half.store(after(builder, values, 16 * i))
        zero = (packed & _MAGNITUDES).cast(ir.IntType(128)).compare("==", 0)
        live, nan = _live(load(builder, I8, 1, scales).convert("zext", I32), zero)
        ((live - (LOWEST_SUM - 1)) << 23).store(words)
        return live, nan

    places = [(codes, 16), (scales, 1), (values, tiling.left_record), (words, tiling.left_record)]
    _pack(builder, blocks, places, 1, (found, found_pitch), block)


def _groups(rows: list[Lanes]) -> list[Lanes]:
    """Return four vectors, each a 4-byte word of all rows in order, from rows of four words."""
    count = len(rows)

    def within(pair: list[Lanes], places: tuple[int, ...]) -> Lanes:
        return pair[0].pick([lane + place for lane in range(0, count, 4) for place in places], pair[1])

    def joined(parts: list[Lanes]) -> Lanes:
        while len(parts) > 1:
            pairs = zip(parts[::2], parts[1::2], strict=True)
            parts = [low.pick(range(2 * low.count), high) for low, high in pairs]
        return parts[0]

    # Rows q, q + 4, .. together: the transpositions of 4 x 4 words then keep to their lanes of 128 bits.
    quads = [joined(rows[q::4]) for q in range(4)]
    low, high = (0, count, 1, count + 1), (2, count + 2, 3, count + 3)
    halves = [[within(quads[q : q + 2], some) for q in (0, 2)] for some in (low, high)]
    sides = (0, 1, count, count + 1), (2, 3, count + 2, count + 3)
    return [within(half, side) for half in halves for side in sides]


def pack_right(tiling: Tiling, builder: ir.IRBuilder, arguments: Sequence[Any]) -> None:
    """Pack a vector's rows of B, all arguments being int64.

    Args:
        tiling: the layout.
        builder: where the code goes.
        arguments: in order:

            - codes: address of the first row's packed bytes.
            - code_pitch: bytes from row to row.
            - scales: address of the first row's scale codes.
            - scale_pitch: bytes from row to row.
            - last: index of the last row that exists; rows after it repeat it.
            - blocks: how many, at least one.
            - record: address of the first record of the panel, plus 4 bytes for each row of the panel before these.
            - found: address of three vectors of bytes, `found_pitch` apart, for what `pack_left` writes per row.
            - found_pitch: bytes.
    """
    codes, code_pitch, scales, scale_pitch, last, blocks, record, found, found_pitch = arguments
    lanes, dots = tiling.lanes, tiling.dots
    rows = [builder.select(builder.icmp_unsigned("<", I64(r), last), I64(r), last) for r in range(lanes)]
    code_rows, scale_rows = ([builder.mul(row, pitch) for row in rows] for pitch in (code_pitch, scale_pitch))

    def block(codes, scales, record):
        groups = _groups([load(builder, I32, 4, builder.add(codes, row)) for row in code_rows])
        decoded = [_decoded(dots, group.cast(I8), TWICE) for group in groups]
        offsets, none = (same(builder, I32, n, lanes) for n in (dots.offset * 0x01010101, 0))
        products = None
        for i, values in enumerate([*(low for low, _ in decoded), *(high for _, high in decoded)]):
            values.store(after(builder, record, i * tiling.columns * 4))
            products = dots.add(products, none, offsets, values.cast(I32))
        if dots.offset:
            (none - dots.total(products, none)).store(after(builder, record, tiling.starts))
        scale = same(builder, I8, 0, lanes).value
        for r, row in enumerate(scale_rows):
            byte = load(builder, I8, 1, builder.add(scales, row)).value
            scale = builder.insert_element(scale, builder.extract_element(byte, I32(0)), I32(r))
        seen = groups[0] | groups[1] | groups[2] | groups[3]
        zero = (seen & (_MAGNITUDES * 0x01010101)).compare("==", 0)
        live, nan = _live(Lanes(builder, scale).convert("zext", I32), zero)
        (live << 23).store(after(builder, record, tiling.right_scales))
        return live, nan

    places = [(codes, 16), (scales, 1), (record, tiling.right_record)]
    _pack(builder, blocks, places, lanes, (found, found_pitch), block)
