"""One tile of C from a panel of A and one of B, in the layout of `layout`.

The dots of a block stay in registers, and with enough of these the sums do over all blocks; each group of a row of
A is broadcast from memory. The sum of the two scale words is the bits of 2^(eA + eB - 2), so that one fused
multiply-add per vector takes the dot into the sum and rounds once, as the definition of `ordered` does.
Where such a power is not a normal float32, float64 does the same.
"""

# Emitters work on IR values, which llvmlite does not annotate.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from llvmlite import ir

from mxref_numba.gemm.layout import GROUPS, Tiling, after, repeat, same
from mxref_numba.vector.instructions import named
from mxref_numba.vector.lanes import F32, I16, I32, I64, Lanes, constant, load, splat

_F64 = ir.DoubleType()


def _add_exactly(total: Lanes, dots: Lanes, left_scale: Lanes, right_scales: Lanes) -> Lanes:
    power = (right_scales + left_scale).cast(F32)
    return dots.convert("sitofp", F32).call("fma", power, total)


def _add_any(total: Lanes, dots: Lanes, left_scale: Lanes, right_scales: Lanes) -> Lanes:
    # In float64 the product is exact, and the sum good enough to be rounded again.
    builder, count = total.builder, total.count
    doubles = ir.VectorType(_F64, count // 2)
    fields = [
        Lanes(builder, builder.ashr(word.value, same(builder, I32, 23, count).value))
        for word in (left_scale, right_scales)
    ]
    field = fields[0] + fields[1] + (1023 - 127)
    halves = []
    for lanes in (range(count // 2), range(count // 2, count)):
        bits = field.pick(lanes).convert("zext", I64) << 52
        product = dots.pick(lanes).convert("sitofp", _F64) * Lanes(
            builder, builder.bitcast(bits.value, doubles)
        )
        halves.append((total.pick(lanes).convert("fpext", _F64) + product).convert("fptrunc", F32))
    return halves[0].pick(range(count), halves[1])


def _sums(
    tiling: Tiling, builder: ir.IRBuilder, left: Any, right: Any, blocks: Any, add: Callable[..., Lanes]
) -> list[Any]:
    """Return the sums over all blocks, in order: row by row."""
    lanes, vectors = tiling.lanes, range(tiling.vectors)

    def columns(record, offset):
        return [load(builder, I32, lanes, record, offset + 4 * lanes * v) for v in vectors]

    def broadcast(record, offset):
        word = builder.extract_element(load(builder, I32, 1, record, offset).value, I32(0))
        return splat(builder, word, lanes)

    def block(left, right, *totals):
        none = [same(builder, I32, 0, lanes)] * tiling.vectors
        starts = columns(right, tiling.starts) if tiling.dots.offset else none
        dots: list[list[Any]] = [[None] * tiling.vectors] * tiling.rows
        for group in range(GROUPS):
            b = columns(right, group * tiling.columns * 4)
            for r in range(tiling.rows):
                a = broadcast(left, 32 * r + 4 * group)
                dots[r] = [tiling.dots.add(dots[r][v], starts[v], a, b[v]) for v in vectors]
        scales = columns(right, tiling.right_scales)
        following = []
        for r in range(tiling.rows):
            scale = broadcast(left, tiling.left_scales + 4 * r)
            for v in vectors:
                total = Lanes(builder, totals[r * tiling.vectors + v])
                following.append(add(total, tiling.dots.total(dots[r][v], starts[v]), scale, scales[v]).value)
        return [
            after(builder, left, tiling.left_record),
            after(builder, right, tiling.right_record),
            *following,
        ]

    zeros = [same(builder, F32, 0.0, lanes).value] * (tiling.rows * tiling.vectors)
    return repeat(builder, blocks, [left, right, *zeros], block)[2:]


def _bfloat16(value: Lanes) -> Lanes:
    """Return the bits of float32 lanes rounded to nearest, ties to even; no NaN comes here."""
    bits = value.cast(I32)
    return ((bits + ((bits >> 16) & 1) + 0x7FFF) >> 16).convert("trunc", I16)


def _store(tiling: Tiling, values: list[Lanes], out: Any, pitch: Any) -> None:
    """Store a whole tile."""
    builder, step = values[0].builder, tiling.lanes * (2 if values[0].element == I16 else 4)
    for i, value in enumerate(values):
        row, v = divmod(i, tiling.vectors)
        value.store(after(builder, builder.add(out, builder.mul(pitch, I64(row))), v * step))


def _store_part(tiling: Tiling, values: list[Lanes], out: Any, pitch: Any, height: Any, width: Any) -> None:
    """Store the first `height` rows and `width` columns of a tile."""
    builder, kind, lanes = values[0].builder, values[0].value.type, tiling.lanes
    name, item = ("i16", 2) if values[0].element == I16 else ("f32", 4)
    inside = [
        constant(builder, I64, range(v * lanes, (v + 1) * lanes)).compare("<", splat(builder, width, lanes))
        for v in range(tiling.vectors)
    ]
    done = builder.append_basic_block("stored")
    for r in range(tiling.rows):
        row = builder.append_basic_block("row")
        builder.cbranch(builder.icmp_unsigned("<", I64(r), height), row, done)
        builder.position_at_end(row)
        for v in range(tiling.vectors):
            place = after(builder, builder.add(out, builder.mul(pitch, I64(r))), v * lanes * item)
            pointer = builder.inttoptr(place, kind.as_pointer())
            operands = values[r * tiling.vectors + v], pointer, I32(1), inside[v].value
            named(f"masked.store.v{lanes}{name}.p0", ir.VoidType(), *operands)
    builder.branch(done)
    builder.position_at_end(done)


def multiply(tiling: Tiling, builder: ir.IRBuilder, arguments: Sequence[Any]) -> None:
    """Write one tile of C; integers are int64.

    Args:
        tiling: the layout.
        builder: where the code goes.
        arguments: in order:

            - left: address of a panel of A.
            - right: address of a panel of B.
            - blocks: how many, at least one.
            - fits: whether all sums of two scale codes are in LOWEST_SUM .. HIGHEST_SUM.
            - factor: float32, by which the sums are multiplied at the end.
            - out: address of the tile's first element.
            - pitch: bytes from row to row of C.
            - height: rows of C from there on; a tiling without masks stores all rows of the tile.
            - width: columns of C from there on, likewise.
            - narrow: whether C is bfloat16, not float32.
    """
    left, right, blocks, fits, factor, out, pitch, height, width, narrow = arguments
    ways = []
    with builder.if_else(fits) as branches:
        for branch, add in zip(branches, (_add_exactly, _add_any), strict=True):
            with branch:
                sums = _sums(tiling, builder, left, right, blocks, add)
                ways.append((sums, builder.block))
    totals = []
    for both in zip(*(sums for sums, _ in ways), strict=True):
        total = builder.phi(both[0].type)
        for value, (_, origin) in zip(both, ways, strict=True):
            total.add_incoming(value, origin)
        totals.append(total)
    results = [Lanes(builder, total) * splat(builder, factor, tiling.lanes) for total in totals]
    place = (out, pitch, height, width) if tiling.masks else (out, pitch)
    store = _store_part if tiling.masks else _store
    with builder.if_else(narrow) as (to_bfloat16, to_float32):
        with to_bfloat16:
            store(tiling, [_bfloat16(result) for result in results], *place)
        with to_float32:
            store(tiling, results, *place)
