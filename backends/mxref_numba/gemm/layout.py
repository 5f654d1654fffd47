"""How the GEMM of MXFP4 packs its operands and cuts C into tiles, for vectors of any length.

A block dot is exact in integers, whatever the order of its products (`dots`). Both operands are packed into panels
of rows, and a panel into one record per block, in order. With R rows and N columns in a tile:

    left record              bytes [R rows][8 groups][4]       int32 [R], what the scale adds to a power's bits
    right record             bytes [8 groups][N rows][4]       int32 [N], where the dots start, unless all start at 0
                                                               int32 [N], what the scale adds to a power's bits

Of a block's 16 packed bytes, the low nibbles become its first four groups and the high ones the last four.
A block that is NaN or all zeros gets the scale 2^0: it adds nothing, and rows with a NaN are overwritten
at the end.
"""

# Emitters work on IR values, which llvmlite does not annotate.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from llvmlite import ir

from mxref.formats import E2M1
from mxref_numba.gemm.dots import BytePairs, Dots, SignedDots, SignedProducts, Vnni
from mxref_numba.path import KernelPath
from mxref_numba.vector.lanes import I64, Lanes, constant
from mxref_numba.vector.target import AVX_VNNI, Target

LOWEST_SUM, HIGHEST_SUM = 130, 383
"""Sums of two scale codes for which 2^(eA + eB - 2) is a normal float32."""

GROUPS = 8
TWICE = [sign * int(2 * magnitude) for sign in (1, -1) for magnitude in E2M1.magnitudes]
"""2P of all codes."""


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
        return self.starts + self.columns * 4 * bool(self.dots.offset)

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
NEON = Tiling(lanes=4, rows=4, vectors=2, dots=SignedProducts(), masks=False)
"""For any Arm of 64 bits: dots take two registers each, 16 of 32, and sums 8."""
NEON_DOTS = Tiling(lanes=4, rows=4, vectors=3, dots=SignedDots(), masks=False)
"""For Armv8.2 with SDOT, and later."""


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
