"""`ordered` of MXFP4 in vector code: operands are packed, and tiles of C are computed in a cache-friendly order.

`packed_panels` has the layout. B's panels are divided into ranges that fit the outer cache, and A's into groups that
fit the inner cache. All of A is multiplied by one range of B before the next range begins.

A tile is computed from a panel of A and one of B. The dots of a block stay in registers, and with enough of these the
sums do over all blocks; each group of a row of A is broadcast from buffers. The sum of the two scale words is the bits
of 2^(eA + eB - 2), so that one fused multiply-add per vector takes the dot into the sum and rounds once, as the
definition of `ordered` does. Where such a power is not a normal float32, float64 does the same.
"""

# Kernels and emitters have no annotations: Numba infers the types of the former, llvmlite has none.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import carray  # type: ignore[attr-defined]
from numba.core import types
from numpy.typing import NDArray

from mxref.mxarray import MXArray
from mxref_numba import buffers
from mxref_numba.gemm.packed_panels import (
    GROUPS,
    HIGHEST_SUM,
    LOWEST_SUM,
    Tiling,
    after,
    pack_left,
    pack_right,
    repeat,
    same,
    tiling_of,
)
from mxref_numba.kernels import address_of, bytes_at, fields_at, kernel
from mxref_numba.lanes import F32, I16, I32, I64, Lanes, constant, load, named, splat, vector_code
from mxref_numba.threads import run, worker_count
from mxref_numba.vector.target import Target, VectorNative, copy_bytes, target_of

_K = 32
_GROUP_BYTES, _RANGE_BYTES = 1 << 18, 3 << 20
"""Packed bytes of a group of A and of a range of B."""
_PRODUCTS_PER_ELEMENT = 256
"""Multiplications that take as long as quantizing an element, roughly."""
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
        starts = columns(right, tiling.starts)
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


@vector_code(*(types.int64,) * 3, types.boolean, types.float32, *(types.int64,) * 4, types.boolean)
def multiply(builder, left, right, blocks, fits, factor, out, pitch, height, width, narrow):
    """Write one tile of C.

    Args:
        builder: where the code goes.
        left: address of a panel of A.
        right: address of a panel of B.
        blocks: how many, at least one.
        fits: whether all sums of two scale codes are in LOWEST_SUM .. HIGHEST_SUM.
        factor: float32, by which the sums are multiplied at the end.
        out: address of the tile's first element.
        pitch: bytes from row to row of C.
        height: rows of C from there on; a tiling without masks stores all rows of the tile.
        width: columns of C from there on, likewise.
        narrow: whether C is bfloat16, not float32.
    """
    tiling, ways = tiling_of(target_of(builder)), []
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


@kernel
def _extremes(found, padded, first, count):
    """Return the lowest and the highest scale code of rows, from the first two of three lines of `found`."""
    low, high = found[first], found[padded + first]
    for r in range(np.uint64(first), np.uint64(first + count)):
        low, high = min(low, found[r]), max(high, found[np.uint64(padded) + r])
    return np.int64(low), np.int64(high)


class _Packing(NamedTuple):
    """The packing of an operand; places in memory are addresses, and a pitch is the bytes to the next row."""

    is_right: int
    codes: int
    code_pitch: int
    scales: int
    scale_pitch: int
    rows: int
    blocks: int
    records: int
    panels: int
    height: int
    """Rows of a panel."""
    step: int
    """Rows that are packed at once."""
    size: int
    """Bytes of a panel."""


class _Product(NamedTuple):
    """The product of packed operands."""

    left: int
    right: int
    blocks: int
    group: int
    """Panels of A that the inner cache holds."""
    reach: int
    """Panels of B that the outer cache holds."""
    factor: np.float32
    out: int
    m: int
    n: int
    item: int
    """Bytes of an element of C."""
    tile_rows: int
    tile_columns: int
    left_size: int
    """Bytes of a panel of A."""
    right_size: int
    masks: int
    """Whether a part of a tile can be written; if not, tiles at the edges of C go through memory of their own."""


@VectorNative
def _pack(address, begin, end, room):
    job = fields_at(address, _Packing)
    rows, height, blocks = job.rows, job.height, job.blocks
    found, padded = job.records + job.panels * job.size, job.panels * height
    for panel in range(begin, end):
        record = job.records + panel * job.size
        for r in range(0, height, job.step):
            first = panel * height + r
            row = min(first, rows - 1)  # rows beyond the last repeat it
            codes, scales = job.codes + row * job.code_pitch, job.scales + row * job.scale_pitch
            if job.is_right:
                pack_right(
                    codes, job.code_pitch, scales, job.scale_pitch, rows - 1 - row, blocks, record + r * 4,
                    found + first, padded,
                )  # fmt: skip
            else:
                pack_left(codes, scales, blocks, record, r, found + first, padded)


@VectorNative
def _multiply_groups(address, begin, end, spare):
    job = fields_at(address, _Product)
    m, n, group, reach, item = job.m, job.n, job.group, job.reach, job.item
    tile_rows, tile_columns = job.tile_rows, job.tile_columns
    down, across = -(-m // tile_rows), -(-n // tile_columns)
    left_rows, right_rows = down * tile_rows, across * tile_columns
    left_found = carray(bytes_at(job.left + down * job.left_size), (3 * left_rows,))
    right_found = carray(bytes_at(job.right + across * job.right_size), (3 * right_rows,))
    groups, pitch, short = -(-down // group), n * item, tile_columns * item
    for task in range(begin, end):
        start = task // (groups * reach) * reach
        place, width = task - start * groups, min(reach, across - start)
        b, top = start + place % width, place // width * group
        column = b * tile_columns
        right_low, right_high = _extremes(right_found, right_rows, column, tile_columns)
        for a in range(top, min(top + group, down)):
            row = a * tile_rows
            low, high = _extremes(left_found, left_rows, row, tile_rows)
            fits = low + right_low >= LOWEST_SUM and high + right_high <= HIGHEST_SUM
            target, height, wide = job.out + row * pitch + column * item, m - row, n - column
            part = not job.masks and (height < tile_rows or wide < tile_columns)
            multiply(
                job.left + a * job.left_size, job.right + b * job.right_size, job.blocks, fits, job.factor,
                spare if part else target, short if part else pitch, height, wide, item == 2,
            )  # fmt: skip
            if part:
                for r in range(min(height, tile_rows)):
                    copy_bytes(spare + r * short, target + r * pitch, min(wide, tile_columns) * item)


def packed(target: Target, q: MXArray, *, is_right: bool) -> NDArray[np.uint8]:
    """Return an operand of at least one row and one block, packed for its side of the product.

    Returns:
        From the start of a cache line, the records, panel by panel, and then three lines with a byte for each
        row of all panels: the lowest scale code in use, the highest one, and whether a block is NaN.
    """
    # A row's bytes must lie side by side; rows may be any distance apart.
    codes, scales = (a if a.strides[-1] == 1 else np.ascontiguousarray(a) for a in (q.codes, q.scales))
    rows, blocks = scales.shape
    t = tiling_of(target)
    height, step, record = (t.columns, t.lanes, t.right_record) if is_right else (t.rows, 1, t.left_record)
    panels = -(-rows // height)
    out = buffers.empty((panels * (blocks * record + 3 * height),), np.uint8)
    job = _Packing(
        is_right=is_right, codes=address_of(codes), code_pitch=codes.strides[0], scales=address_of(scales),
        scale_pitch=scales.strides[0], rows=rows, blocks=blocks, records=address_of(out), panels=panels,
        height=height, step=step, size=blocks * record,
    )  # fmt: skip
    run(_pack.on(target), job, panels, rows * q.length)
    return out


def multiply_packed(
    target: Target,
    left: NDArray[np.uint8],
    right: NDArray[np.uint8],
    blocks: int,
    factor: np.float32,
    out: NDArray[Any],
) -> None:
    """Write the product of packed operands, times `factor`, into `out` [M, N], contiguous; NaN rows are not marked."""
    (m, n), t = out.shape, tiling_of(target)
    work = m * n * blocks * _K // _PRODUCTS_PER_ELEMENT
    down, across = -(-m // t.rows), -(-n // t.columns)
    left_size, right_size = blocks * t.left_record, blocks * t.right_record
    group = max(1, min(_GROUP_BYTES // left_size, -(-down // worker_count(work))))
    reach = max(1, _RANGE_BYTES // right_size)
    job = _Product(
        left=address_of(left), right=address_of(right), blocks=blocks, group=group, reach=reach, factor=factor,
        out=address_of(out), m=m, n=n, item=out.itemsize, tile_rows=t.rows, tile_columns=t.columns,
        left_size=left_size, right_size=right_size, masks=t.masks,
    )  # fmt: skip
    room = 0 if t.masks else t.rows * t.columns * out.itemsize
    run(_multiply_groups.on(target), job, -(-down // group) * across, work, room=room)


def spoiled(target: Target, operand: NDArray[np.uint8], rows: int, *, is_right: bool) -> NDArray[np.bool_]:
    """Return which of the rows of a packed operand have a NaN block, [rows, 1]."""
    height = tiling_of(target).columns if is_right else tiling_of(target).rows
    padded = -(-rows // height) * height
    return operand[len(operand) - padded :][:rows, None].view(np.bool_)
