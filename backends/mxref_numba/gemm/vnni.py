"""The inner loops of the GEMM for AVX-512 VNNI: packing a row of A, 16 rows of B, and one tile of C.

A block dot is exact in integers. VPDPBUSD adds four products of an unsigned and a signed byte to each of 16
int32 lanes, so A is held as 2P + 12 (0 to 24) and B as 2P, and a dot starts from -12 times the sum of B's
block: what it ends as is four times the dot of the element values, whatever the order of the products.

Both operands are packed into panels of rows, and a panel into one record per block, in order:

    left record, 6 rows      bytes [6 rows][8 groups][4]     int32 [6], what the scale adds to a power's bits
    right record, 32 rows    bytes [8 groups][32 rows][4]    int32 [32], where the dots start
                                                             int32 [32], what the scale adds to a power's bits

Of a block's 16 packed bytes, the low nibbles become its first four groups and the high ones the last four.
A block that is NaN or all zeros gets the scale 2^0: it adds nothing, and rows with a NaN are overwritten
at the end.

A tile of C is 6 x 32. Its 12 vectors of sums and 12 of dots stay in registers over all blocks, together with
two vectors of B; each group of a row of A is broadcast from memory. The sum of the two scale words is the bits
of 2^(eA + eB - 2), so that one fused multiply-add per vector takes the dot into the sum and rounds once, as
the definition of `ordered` does. A block thus costs each vector eight VPDPBUSD and one FMA on the same units:
the bound is 8/9 of the rate of VPDPBUSD. Where such a power is not a normal float32, float64 does the same.
"""

# Emitters work on IR values, which llvmlite does not annotate.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba.core import cgutils, types

from mxref.formats import E2M1, E8M0
from mxref_numba.vector.lanes import F32, I8, I16, I32, I64, Lanes, constant, load, splat, vector_code

TILE_ROWS, TILE_COLUMNS = 6, 32
LANES = 16
"""Rows that `pack_right` packs at once."""
LEFT_RECORD = TILE_ROWS * (32 + 4)
RIGHT_RECORD = TILE_COLUMNS * (32 + 4 + 4)
LOWEST_SUM, HIGHEST_SUM = 130, 383
"""Sums of two scale codes for which 2^(eA + eB - 2) is a normal float32."""

_I1, _F64 = ir.IntType(1), ir.DoubleType()
_GROUPS = 8
_VECTORS = TILE_COLUMNS // LANES
_LEFT_SCALES = TILE_ROWS * 32
_STARTS = TILE_COLUMNS * 32
_RIGHT_SCALES = _STARTS + TILE_COLUMNS * 4
_TWICE = [sign * int(2 * magnitude) for sign in (1, -1) for magnitude in E2M1.magnitudes]
_OFFSET = 12
_MAGNITUDES = 0x77
"""The bits of a packed byte that are not signs."""


def _after(builder: ir.IRBuilder, address: Any, offset: int) -> Any:
    return builder.add(address, I64(offset))


def _same(builder: ir.IRBuilder, element: Any, value: Any, count: int = LANES) -> Lanes:
    return constant(builder, element, [value] * count)


def _named(name: str, result: Any, builder: ir.IRBuilder, *operands: Any) -> Any:
    """Return what an LLVM function of values of several types, or of the name's own, gives."""
    kinds = [operand.type for operand in operands]
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, kinds), name)
    return builder.call(function, operands)


def _add_products(sums: Lanes, unsigned: Lanes, signed: Lanes) -> Lanes:
    values = sums.value, unsigned.value, signed.value
    return Lanes(sums.builder, _named("llvm.x86.avx512.vpdpbusd.512", values[0].type, sums.builder, *values))


def _decoded(packed: Lanes, table: list[int]) -> tuple[Lanes, Lanes]:
    """Return the entries of `table` for the low and for the high nibbles of packed bytes."""
    builder, kind = packed.builder, packed.value.type
    name = {16: "llvm.x86.ssse3.pshuf.b.128", 64: "llvm.x86.avx512.pshuf.b.512"}[packed.count]
    entries = constant(builder, I8, table * (packed.count // 16)).value
    low, high = (
        Lanes(builder, _named(name, kind, builder, entries, n.value)) for n in (packed & 15, packed >> 4)
    )
    return low, high


def _repeat(builder: ir.IRBuilder, count: Any, state: list[Any], body: Callable[..., list[Any]]) -> list[Any]:
    """Emit a loop, run at least once, of `body`, which turns a state into the next; return the last one."""
    before, again, done = builder.block, *(builder.append_basic_block(name) for name in ("again", "done"))
    builder.branch(again)
    builder.position_at_end(again)
    phis = [builder.phi(value.type) for value in (I64(0), *state)]
    following = [builder.add(phis[0], I64(1)), *body(*phis[1:])]
    for phi, first, next_value in zip(phis, (I64(0), *state), following, strict=True):
        phi.add_incoming(first, before)
        phi.add_incoming(next_value, builder.block)
    builder.cbranch(builder.icmp_unsigned("<", following[0], count), again, done)
    builder.position_at_end(done)
    return following[1:]


def _live(scale: Lanes, zero: Lanes) -> tuple[Lanes, Lanes]:
    """Return the scale codes, with that of 2^0 for blocks that are NaN or zero, and which are NaN."""
    nan = scale.compare("==", E8M0.nan_code)
    return (nan | zero).choose(E8M0.bias, scale), nan


def _pack(
    builder: ir.IRBuilder, blocks: Any, places: list[tuple[Any, int]], rows: int, found: tuple[Any, Any],
    block: Callable[..., tuple[Lanes, Lanes]],
) -> None:  # fmt: skip
    """Emit the loop over blocks, whose addresses advance by fixed steps, and keep what was found about the rows."""

    def body(*state):
        addresses, (low, high, nan) = (
            state[: len(places)],
            (Lanes(builder, value) for value in state[len(places) :]),
        )
        live, is_nan = block(*addresses)
        advanced = [
            _after(builder, address, step) for address, (_, step) in zip(addresses, places, strict=True)
        ]
        return [
            *advanced,
            *(lanes.value for lanes in (low.call("umin", live), high.call("umax", live), nan | is_nan)),
        ]

    start = (
        _same(builder, I32, E8M0.nan_code, rows),
        _same(builder, I32, 0, rows),
        _same(builder, _I1, 0, rows),
    )
    state = [*(address for address, _ in places), *(lanes.value for lanes in start)]
    last = _repeat(builder, blocks, state, body)[len(places) :]
    address, pitch = found
    for value in last:
        lanes = Lanes(builder, value)
        lanes.convert("zext" if lanes.element == _I1 else "trunc", I8).store(address)
        address = builder.add(address, pitch)


_INT = types.int64


@vector_code(*[_INT] * 7)
def pack_left(builder, codes, scales, blocks, record, row, found, found_pitch):
    """Pack one row of A, all arguments being int64.

    Args:
        builder: where the code goes.
        codes: address of the row's packed bytes.
        scales: address of the row's scale codes.
        blocks: how many, at least one.
        record: address of the first record of the panel.
        row: number of the row in its panel.
        found: address of three bytes, `found_pitch` apart: the lowest and the highest scale code in use, and
            whether any block is NaN.
        found_pitch: bytes.
    """
    values = builder.add(record, builder.mul(row, I64(32)))
    words = _after(builder, builder.add(record, builder.mul(row, I64(4))), _LEFT_SCALES)

    def block(codes, scales, values, words):
        packed = load(builder, I8, 16, codes)
        for i, half in enumerate(_decoded(packed, [twice + _OFFSET for twice in _TWICE])):
            half.store(_after(builder, values, 16 * i))
        zero = (packed & _MAGNITUDES).cast(ir.IntType(128)).compare("==", 0)
        live, nan = _live(load(builder, I8, 1, scales).convert("zext", I32), zero)
        ((live - (LOWEST_SUM - 1)) << 23).store(words)
        return live, nan

    places = [(codes, 16), (scales, 1), (values, LEFT_RECORD), (words, LEFT_RECORD)]
    _pack(builder, blocks, places, 1, (found, found_pitch), block)


def _groups(rows: list[Lanes]) -> list[Lanes]:
    """Return four vectors, each a 4-byte word of 16 rows in order, from 16 rows of four words."""

    def within(pair: list[Lanes], places: tuple[int, ...]) -> Lanes:
        return pair[0].pick([lane + place for lane in (0, 4, 8, 12) for place in places], pair[1])

    # Rows q, q + 4, q + 8 and q + 12 together: the transpositions of 4 x 4 words then keep to their lanes.
    pairs = [[rows[i].pick(range(8), rows[i + 4]) for i in (q, q + 8)] for q in range(4)]
    quads = [pair[0].pick(range(16), pair[1]) for pair in pairs]
    halves = [[within(quads[q : q + 2], some) for q in (0, 2)] for some in ((0, 16, 1, 17), (2, 18, 3, 19))]
    return [within(half, side) for half in halves for side in ((0, 1, 16, 17), (2, 3, 18, 19))]


@vector_code(*[_INT] * 9)
def pack_right(builder, codes, code_pitch, scales, scale_pitch, last, blocks, record, found, found_pitch):
    """Pack 16 rows of B, half a panel, all arguments being int64.

    Args:
        builder: where the code goes.
        codes: address of the first row's packed bytes.
        code_pitch: bytes from row to row.
        scales: address of the first row's scale codes.
        scale_pitch: bytes from row to row.
        last: number of the last row that exists; further ones repeat it.
        blocks: how many, at least one.
        record: address of the first record of the panel, 64 bytes further for its second half.
        found: address of 16 bytes three times, `found_pitch` apart, with what `pack_left` writes per row.
        found_pitch: bytes.
    """
    rows = [builder.select(builder.icmp_unsigned("<", I64(r), last), I64(r), last) for r in range(LANES)]
    code_rows, scale_rows = ([builder.mul(row, pitch) for row in rows] for pitch in (code_pitch, scale_pitch))

    def block(codes, scales, record):
        groups = _groups([load(builder, I32, 4, builder.add(codes, row)) for row in code_rows])
        decoded = [_decoded(group.cast(I8), _TWICE) for group in groups]
        offsets, products = _same(builder, I32, _OFFSET * 0x01010101), _same(builder, I32, 0)
        for i, values in enumerate([*(low for low, _ in decoded), *(high for _, high in decoded)]):
            values.store(_after(builder, record, i * TILE_COLUMNS * 4))
            products = _add_products(products, offsets, values.cast(I32))
        (_same(builder, I32, 0) - products).store(_after(builder, record, _STARTS))
        scale = _same(builder, I8, 0).value
        for r, row in enumerate(scale_rows):
            byte = load(builder, I8, 1, builder.add(scales, row)).value
            scale = builder.insert_element(scale, builder.extract_element(byte, I32(0)), I32(r))
        seen = groups[0] | groups[1] | groups[2] | groups[3]
        zero = (seen & (_MAGNITUDES * 0x01010101)).compare("==", 0)
        live, nan = _live(Lanes(builder, scale).convert("zext", I32), zero)
        (live << 23).store(_after(builder, record, _RIGHT_SCALES))
        return live, nan

    places = [(codes, 16), (scales, 1), (record, RIGHT_RECORD)]
    _pack(builder, blocks, places, LANES, (found, found_pitch), block)


def _add_exactly(total: Lanes, dots: Lanes, left_scale: Lanes, right_scales: Lanes) -> Lanes:
    power = (right_scales + left_scale).cast(F32)
    return dots.convert("sitofp", F32).call("fma", power, total)


def _add_any(total: Lanes, dots: Lanes, left_scale: Lanes, right_scales: Lanes) -> Lanes:
    # In float64 the product is exact, and the sum good enough to be rounded again.
    builder, doubles = total.builder, ir.VectorType(_F64, 8)
    fields = [
        Lanes(builder, builder.ashr(word.value, _same(builder, I32, 23).value))
        for word in (left_scale, right_scales)
    ]
    field = fields[0] + fields[1] + (1023 - 127)
    halves = []
    for lanes in (range(8), range(8, 16)):
        bits = field.pick(lanes).convert("zext", I64) << 52
        product = dots.pick(lanes).convert("sitofp", _F64) * Lanes(
            builder, builder.bitcast(bits.value, doubles)
        )
        halves.append((total.pick(lanes).convert("fpext", _F64) + product).convert("fptrunc", F32))
    return halves[0].pick(range(16), halves[1])


def _sums(builder: ir.IRBuilder, left: Any, right: Any, blocks: Any, add: Callable[..., Lanes]) -> list[Any]:
    """Return the sums over all blocks, in order: row by row, two vectors each."""

    def columns(record, offset):
        return [load(builder, I32, LANES, record, offset + 64 * v) for v in range(_VECTORS)]

    def broadcast(record, offset):
        word = builder.extract_element(load(builder, I32, 1, record, offset).value, I32(0))
        return splat(builder, word, LANES)

    def block(left, right, *totals):
        dots = [columns(right, _STARTS)] * TILE_ROWS
        for group in range(_GROUPS):
            b = columns(right, group * TILE_COLUMNS * 4)
            for r in range(TILE_ROWS):
                a = broadcast(left, 32 * r + 4 * group)
                dots[r] = [_add_products(dots[r][v], a, b[v]) for v in range(_VECTORS)]
        scales = columns(right, _RIGHT_SCALES)
        following = []
        for r in range(TILE_ROWS):
            scale = broadcast(left, _LEFT_SCALES + 4 * r)
            for v in range(_VECTORS):
                total = Lanes(builder, totals[r * _VECTORS + v])
                following.append(add(total, dots[r][v], scale, scales[v]).value)
        return [_after(builder, left, LEFT_RECORD), _after(builder, right, RIGHT_RECORD), *following]

    zeros = [_same(builder, F32, 0.0).value] * (TILE_ROWS * _VECTORS)
    return _repeat(builder, blocks, [left, right, *zeros], block)[2:]


def _bfloat16(value: Lanes) -> Lanes:
    """Return the bits of float32 lanes rounded to nearest, ties to even; no NaN comes here."""
    bits = value.cast(I32)
    return ((bits + ((bits >> 16) & 1) + 0x7FFF) >> 16).convert("trunc", I16)


def _store(values: list[Lanes], out: Any, pitch: Any, height: Any, width: Any) -> None:
    """Store the first `height` rows and `width` columns of a tile."""
    builder, kind = values[0].builder, values[0].value.type
    name, item = ("i16", 2) if values[0].element == I16 else ("f32", 4)
    inside = [
        constant(builder, I64, range(v * LANES, (v + 1) * LANES)).compare("<", splat(builder, width, LANES))
        for v in range(_VECTORS)
    ]
    done = builder.append_basic_block("stored")
    for r in range(TILE_ROWS):
        row = builder.append_basic_block("row")
        builder.cbranch(builder.icmp_unsigned("<", I64(r), height), row, done)
        builder.position_at_end(row)
        for v in range(_VECTORS):
            place = _after(builder, builder.add(out, builder.mul(pitch, I64(r))), v * LANES * item)
            pointer = builder.inttoptr(place, kind.as_pointer())
            operands = values[r * _VECTORS + v].value, pointer, I32(1), inside[v].value
            _named(f"llvm.masked.store.v{LANES}{name}.p0", ir.VoidType(), builder, *operands)
    builder.branch(done)
    builder.position_at_end(done)


@vector_code(_INT, _INT, _INT, types.boolean, types.float32, _INT, _INT, _INT, _INT, types.boolean)
def multiply(builder, left, right, blocks, fits, factor, out, pitch, height, width, narrow):
    """Write one tile of C; integers are int64.

    Args:
        builder: where the code goes.
        left: address of a panel of A.
        right: address of a panel of B.
        blocks: how many, at least one.
        fits: whether all sums of two scale codes are in LOWEST_SUM .. HIGHEST_SUM.
        factor: float32, by which the sums are multiplied at the end.
        out: address of the tile's first element.
        pitch: bytes from row to row of C.
        height: rows of C from there on; the tile has at most 6.
        width: columns of C from there on; the tile has at most 32.
        narrow: whether C is bfloat16, not float32.
    """
    ways = []
    with builder.if_else(fits) as branches:
        for branch, add in zip(branches, (_add_exactly, _add_any), strict=True):
            with branch:
                sums = _sums(builder, left, right, blocks, add)
                ways.append((sums, builder.block))
    totals = []
    for both in zip(*(sums for sums, _ in ways), strict=True):
        total = builder.phi(both[0].type)
        for value, (_, origin) in zip(both, ways, strict=True):
            total.add_incoming(value, origin)
        totals.append(total)
    results = [Lanes(builder, total) * splat(builder, factor, LANES) for total in totals]
    with builder.if_else(narrow) as (to_bfloat16, to_float32):
        with to_bfloat16:
            _store([_bfloat16(result) for result in results], out, pitch, height, width)
        with to_float32:
            _store(results, out, pitch, height, width)
