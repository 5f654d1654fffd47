"""How the GEMM of MXFP4 adds up a block's products, cuts C into tiles, and packs its operands for both.

A block dot is exact in integers, whatever the order of its products. A vector has a word of four bytes for each column
of C. A step adds the four products of a word of A, the same for all columns, with each column's word of B. E2M1 values
are held as 2P, from -12 to 12, so a dot is at most 32 * 144 = 4608. x86 multiplies unsigned bytes by signed ones: A is
held as 2P + 12 (0 to 24), and a dot starts from -12 times the sum of B's block. Partial sums are then at most
32 * 24 * 12 = 9216, which int16 holds too.

Both operands are packed into panels of rows, and a panel into one record per block, in order. With R rows and N columns
in a tile:

    left record              bytes [R rows][8 groups][4]       int32 [R], what the scale adds to a power's bits
    right record             bytes [8 groups][N rows][4]       int32 [N], where the dots start
                                                               int32 [N], what the scale adds to a power's bits

Of a block's 16 packed bytes, the low nibbles become its first four groups and the high ones the last four.
A block that is NaN or all zeros gets the scale 2^0: it adds nothing, and rows with a NaN are overwritten
at the end. The numbers of a `Tiling` may be changed: they are about registers, and no bit depends on them.
"""

# Emitters work on IR values, which llvmlite does not annotate.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llvmlite import ir
from numba.core import types

from mxref.formats import E2M1, E8M0
from mxref_numba.lanes import I8, I16, I32, I64, Lanes, constant, load, named, vector_code
from mxref_numba.path import KernelPath
from mxref_numba.vector.target import AVX_VNNI, Target, target_of

LOWEST_SUM, HIGHEST_SUM = 130, 383
"""Sums of two scale codes for which 2^(eA + eB - 2) is a normal float32."""

GROUPS = 8
TWICE = [sign * int(2 * magnitude) for sign in (1, -1) for magnitude in E2M1.magnitudes]
"""2P of all codes."""
OFFSET = 12
"""What is added to A's bytes to make them unsigned."""


class Dots:
    """How an instruction set adds up products of bytes."""

    def entries(self, table: list[int], index: Lanes) -> Lanes:
        """Return bytes of a table of sixteen, for indices below 16."""
        name = {16: "ssse3.pshuf.b.128", 32: "avx2.pshuf.b", 64: "avx512.pshuf.b.512"}[index.count]
        entries = constant(index.builder, I8, table * (index.count // 16))
        return named(f"x86.{name}", index.value.type, entries, index.value)

    def add(self, partial: Any, starts: Lanes, left: Lanes, right: Lanes) -> Any:
        """Return partial dots plus the products of one step.

        Args:
            partial: the result of the step before, or None in the first.
            starts: int32, where the dots start.
            left: one word of A in all lanes.
            right: words of B.
        """
        raise NotImplementedError

    def total(self, partial: Any, starts: Lanes) -> Lanes:
        """Return the dots, int32, from the result of the last step."""
        raise NotImplementedError


class Vnni(Dots):
    """VPDPBUSD adds the four products of a word to an int32."""

    def add(self, partial, starts, left, right):
        """Return int32."""
        sums = partial or starts
        return named(f"x86.avx512.vpdpbusd.{32 * sums.count}", sums.value.type, sums, left.value, right.value)

    def total(self, partial, starts):
        """Return what is there."""
        return partial


class BytePairs(Dots):
    """VPMADDUBSW adds two products to an int16; VPMADDWD makes int32 of pairs of these."""

    def add(self, partial, starts, left, right):
        """Return int16, two for each column."""
        kind = ir.VectorType(I16, 2 * right.count)
        products = named("x86.avx2.pmadd.ub.sw", kind, left.cast(I8), right.cast(I8).value)
        return _in_order(partial + products if partial else products)

    def total(self, partial, starts):
        """Return the sums of pairs, and the starts."""
        ones = constant(partial.builder, I16, [1] * partial.count)
        return named("x86.avx2.pmadd.wd", starts.value.type, partial, ones.value) + starts


def _in_order(lanes: Lanes) -> Lanes:
    """Return the lanes, computed after all others for which this was emitted before.

    LLVM would compute one dot after the other, and keep all words of a block on the stack for that.
    """
    kind = lanes.value.type
    nothing = ir.FunctionType(kind, [kind])
    in_a_register = lanes.builder.asm(nothing, "", "=x,0", [lanes.value], side_effect=True)
    return Lanes(lanes.builder, in_a_register)


@dataclass(frozen=True)
class Tiling:
    """A tile of C and the layout of what it is computed from."""

    lanes: int
    """Columns of C in a vector; `pack_right` packs as many rows at once."""
    rows: int
    vectors: int
    """Vectors of a row of the tile."""
    dots: Dots
    masks: bool
    """Whether one instruction can store a part of a vector; if not, only whole tiles are written."""

    @property
    def columns(self) -> int:
        """Columns of a tile."""
        return self.vectors * self.lanes

    @property
    def left_scales(self) -> int:
        """Offset of the scale words in a left record."""
        return self.rows * 32

    @property
    def left_record(self) -> int:
        """Bytes of a left record."""
        return self.rows * (32 + 4)

    @property
    def starts(self) -> int:
        """Offset in a right record of where the dots start."""
        return self.columns * 32

    @property
    def right_scales(self) -> int:
        """Offset of the scale words in a right record."""
        return self.starts + self.columns * 4

    @property
    def right_record(self) -> int:
        """Bytes of a right record."""
        return self.right_scales + self.columns * 4


AVX512 = Tiling(lanes=16, rows=6, vectors=2, dots=Vnni(), masks=True)
"""A tile's 12 vectors of sums and 12 of dots stay in registers over all blocks, together with two vectors of B.

A block costs each vector eight VPDPBUSD and one FMA on the same units: the bound is 8/9 of the rate of VPDPBUSD.
"""
AVX2 = Tiling(lanes=8, rows=4, vectors=2, dots=BytePairs(), masks=False)
"""Of 16 registers the dots take 8; sums are in memory between blocks.

A block costs each vector eight VPMADDUBSW, one VPMADDWD and one FMA on the same units, and nine additions on any.
"""
AVX2_VNNI = Tiling(lanes=8, rows=6, vectors=2, dots=Vnni(), masks=False)
"""For CPUs with VPDPBUSD of 256 bits (AVX-VNNI): the dots take 12 registers."""


def tiling_of(target: Target) -> Tiling:
    """Return the tiles that a target computes."""
    if target.path == KernelPath.AVX512:
        return AVX512
    return AVX2_VNNI if AVX_VNNI in target.features else AVX2


def after(builder: ir.IRBuilder, address: Any, offset: int) -> Any:
    """Return an address, int64, plus a constant number of bytes."""
    return builder.add(address, I64(offset))


def same(builder: ir.IRBuilder, element: Any, value: Any, count: int) -> Lanes:
    """Return one constant in every lane."""
    return constant(builder, element, [value] * count)


def repeat(builder: ir.IRBuilder, count: Any, state: list[Any], body: Callable[..., list[Any]]) -> list[Any]:
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


@vector_code(*(types.int64,) * 7)
def pack_left(builder, codes, scales, blocks, record, row, found, found_pitch):
    """Pack one row of A.

    Args:
        builder: where the code goes.
        codes: address of the row's packed bytes.
        scales: address of the row's scale codes.
        blocks: how many, at least one.
        record: address of the first record of the panel.
        row: number of the row in its panel.
        found: address of three bytes, `found_pitch` apart: the lowest and the highest scale code in use, and whether
            any block is NaN.
        found_pitch: bytes.
    """
    tiling = tiling_of(target_of(builder))
    values = builder.add(record, builder.mul(row, I64(32)))
    words = after(builder, builder.add(record, builder.mul(row, I64(4))), tiling.left_scales)
    table = [twice + OFFSET for twice in TWICE]

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


@vector_code(*(types.int64,) * 9)
def pack_right(builder, codes, code_pitch, scales, scale_pitch, last, blocks, record, found, found_pitch):
    """Pack a vector's rows of B.

    Args:
        builder: where the code goes.
        codes: address of the first row's packed bytes.
        code_pitch: bytes from row to row.
        scales: address of the first row's scale codes.
        scale_pitch: bytes from row to row.
        last: index of the last row that exists; rows after it repeat it.
        blocks: how many, at least one.
        record: address of the first record of the panel, plus 4 bytes for each row of the panel before these.
        found: address of three vectors of bytes, `found_pitch` apart, for what `pack_left` writes per row.
        found_pitch: bytes.
    """
    tiling = tiling_of(target_of(builder))
    lanes, dots = tiling.lanes, tiling.dots
    rows = [builder.select(builder.icmp_unsigned("<", I64(r), last), I64(r), last) for r in range(lanes)]
    code_rows, scale_rows = ([builder.mul(row, pitch) for row in rows] for pitch in (code_pitch, scale_pitch))

    def block(codes, scales, record):
        groups = _groups([load(builder, I32, 4, builder.add(codes, row)) for row in code_rows])
        decoded = [_decoded(dots, group.cast(I8), TWICE) for group in groups]
        offsets, none = (same(builder, I32, n, lanes) for n in (OFFSET * 0x01010101, 0))
        products = None
        for i, values in enumerate([*(low for low, _ in decoded), *(high for _, high in decoded)]):
            values.store(after(builder, record, i * tiling.columns * 4))
            products = dots.add(products, none, offsets, values.cast(I32))
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
