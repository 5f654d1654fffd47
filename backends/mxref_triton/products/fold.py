"""Operands folded into FP8: rows of MXFP4 as FP8 elements under one power of two, without rounding.

An element P of a block with scale 2^e, in a row whose largest live scale is 2^E, becomes P * 2^(6 - (E - e)).
E4M3 holds that exactly while E - e <= 14: 6 * 2^6 lies below 448, and 0.5 * 2^-8 is its smallest subnormal. The
row's 2^(E - 6) is left for the GEMM.

Folded wide, elements are of E5M2, and P becomes P * 2^(13 - (E - e)), a normal number while E - e <= 26. Gradients,
whose magnitude differs much from token to token, fit that. Hopper multiplies E5M2 with E4M3 but not with itself, so
one operand of a GEMM may be folded wide.

Within each block the elements with even index come first, then those with odd index: the order does not matter to a
contraction, and every byte keeps its place in a word.

Folded by row, an operand keeps its rows together, as Hopper's copy engine reads them. Folded by block, the same block
of all rows lies together: gfx950 multiplies one block at a time, and a tile's 32 bytes of each row are then one piece
of memory.
"""

# Triton infers the types of kernels.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from mxref.mxarray import MXArray
from mxref_triton.launch import INTERPRETED, launch, power_of_two_from, tiles_of
from mxref_triton.memory import empty
from mxref_triton.operands import rows_of

LOWEST_TOP, HIGHEST_TOP = 79, 175
"""Scale codes between which the top of a row may lie; one below is raised, which narrows its gaps.

Two row scales then multiply to between 2^-108 and 2^84: no product or sum of folded elements, multiplied by both,
leaves float32's normal numbers but for a sum that overflows in truth.
"""

MISFIT_PROGRAMS = 4 if INTERPRETED else 1056
"""Programs that share the products of misfits under `bounded`: eight for each multiprocessor of an H200."""

LOWEST_WIDE_TOP = 91
"""The same limit for E5M2, whose elements may be smaller."""

WIDEST = 26
"""Largest gap of an operand that is folded wide."""

_BLOCK = 32
"""Elements of a block of MXFP4, the format that is folded."""
_TILE = 1 << 14 if INTERPRETED else 128
"""Blocks that a program folds at a time. A longer row is read twice, the second time from the cache."""
_WIDEST_BY_BLOCK = 1 << 14 if INTERPRETED else 512
_LEAST_ROWS_BY_BLOCK = 4
"""Rows of a program that folds by block: so many of 32 bytes fill a line of gfx950's caches."""


@dataclass(frozen=True)
class Folded:
    """An operand in FP8: `values` times `scale`, row by row."""

    values: torch.Tensor
    """float8_e4m3fn [rows, K] by row, [K / 32, rows, 32] by block, or, folded wide, float8_e5m2 [rows, K]; in every
    block first its even elements."""
    scale: torch.Tensor
    """Powers of two, float32 [rows, 1]; NaN for a row with a NaN block, or with an element that is too large."""
    misfits: torch.Tensor
    """int32 [1 + rows + MISFIT_PROGRAMS]: how many rows hold an element that is not exact, these rows, in no order,
    and `done`."""

    @property
    def done(self) -> torch.Tensor:
        """Zeros for the kernel that multiplies misfits, int32 [MISFIT_PROGRAMS], which it leaves as zeros."""
        return self.misfits[1 + self.scale.shape[0] :]

    @property
    def by_block(self) -> bool:
        """Whether the same block of all rows lies together."""
        return self.values.ndim == 3

    @property
    def layout(self) -> tuple[torch.Tensor, ...]:
        """The three arrays of a layout; the values are stored as bytes, because torch cannot compare FP8."""
        return self.values.view(torch.uint8), self.scale, self.misfits

    @classmethod
    def of(cls, layout: tuple[torch.Tensor, ...]) -> Folded:
        """Return what `layout` gave for an operand in E4M3."""
        values, scale, misfits = layout
        return cls(values.view(torch.float8_e4m3fn), scale, misfits)


@triton.jit
def _either(a, b):
    return a | b


@triton.jit
def _extent(high, low, other_high, other_low):
    return tl.maximum(high, other_high), tl.minimum(low, other_low)


@triton.jit
def _load(codes, scales, row, block, rows, blocks):
    """Return words [rows, blocks, 4] and scale codes [rows, blocks] of a tile, and where it lies inside."""
    here = (row < rows)[:, None] & (block < blocks)[None, :]
    at = row.to(tl.int64)[:, None] * blocks + block[None, :]
    scale = tl.load(scales + at, here, 0).to(tl.int32)
    words = tl.load(codes + (at[:, :, None] * 4 + tl.arange(0, 4)[None, None, :]), here[:, :, None], 0)
    return words, scale


@triton.jit
def _span(words, scale):
    """Return the largest and the smallest scale code of live blocks per row: zeros need no scale.

    A NaN block counts as a very small one, so that its row takes the path that handles NaN.
    """
    live = tl.reduce(words & 0x77777777, 2, _either) != 0
    spoiled = scale == 255
    return tl.reduce(
        (tl.where(live & ~spoiled, scale, -1), tl.where(spoiled, -512, tl.where(live, scale, 254))),
        1,
        _extent,
    )


@triton.jit
def _near_lanes(magnitude, sign, gap):
    """Fold four codes of a word, one per byte, at a gap of 0 to 12: each result is normal, or 4 times its code."""
    lanes = 0x01010101
    nonzero = ((magnitude + 0x07070707) >> 3) & lanes
    above_half = ((magnitude + 0x06060606) >> 3) & lanes
    offset = tl.maximum(92 - 8 * gap, 0)
    step = tl.where(gap < 12, 4, 0)
    return (magnitude << 2) + nonzero * offset + above_half * step + sign


@triton.jit
def _wide_lanes(magnitude, sign, gap):
    """Fold four codes of a word, one per byte, into E5M2, at a gap of 0 to `WIDEST`."""
    lanes = 0x01010101
    nonzero = ((magnitude + 0x07070707) >> 3) & lanes
    above_half = ((magnitude + 0x06060606) >> 3) & lanes
    return (magnitude << 1) + nonzero * tl.maximum(106 - 4 * gap, 0) + above_half * 2 + sign


@triton.jit
def _halves(magnitude):
    """Return 2P of four codes, one per byte: 0, 1, 2, 3, 4, 6, 8, 12."""
    lanes = 0x01010101
    above = ((magnitude + 0x03030303) >> 3 & lanes) + ((magnitude + 0x02020202) >> 3 & lanes)
    return magnitude + above + ((magnitude + 0x01010101) >> 3 & lanes) * 3


@triton.jit
def _far_lanes(magnitude, sign, gap):
    """Fold four codes of a word, one per byte, at a gap above 12: multiples of 2^-9, rounded to nearest even."""
    halves = _halves(magnitude)
    # At 13 the largest, 24 steps, is no longer its own code.
    wide = 2 * halves - ((magnitude + 0x01010101) >> 3 & 0x01010101) * 4
    shift = tl.minimum(tl.maximum(gap - 14, 0), 5)
    half = ((1 << shift) >> 1) - tl.where(shift > 0, 1, 0)
    tie = (halves >> shift) & tl.where(shift > 0, 0x01010101, 0)
    narrow = ((halves + half * 0x01010101 + tie) >> shift) & (0x01010101 * (0xFF >> shift))
    return tl.where(gap == 13, wide, narrow) + sign


@triton.jit
def _lost(magnitude, gap):
    """Return nonzero if one of four codes does not fit E4M3: it has bits below the smallest step, or is too large."""
    shift = tl.minimum(tl.maximum(gap - 14, 0), 5)
    below = _halves(magnitude) & (((1 << shift) - 1) * 0x01010101)
    return tl.where(gap < 0, magnitude, below)


@triton.jit
def _fold_tile(
    values, words, scale, top, row, block, rows, blocks, near, widest: tl.constexpr, BY_BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """Fold and store a tile; return per row whether it has an element that is not exact."""
    gap = (top[:, None] - scale)[:, :, None]
    even, odd = words & 0x0F0F0F0F, (words >> 4) & 0x0F0F0F0F
    even_sign, odd_sign = (even & 0x08080808) << 4, (odd & 0x08080808) << 4
    even, odd = even & 0x07070707, odd & 0x07070707
    bad = top != top
    if WIDE:
        first, second = _wide_lanes(even, even_sign, gap), _wide_lanes(odd, odd_sign, gap)
        if near == 0:
            wrong = ((even | odd) != 0) & ((gap < 0) | (gap > widest)) & (scale != 255)[:, :, None]
            bad = tl.max(tl.max(wrong.to(tl.int32), axis=2), axis=1) != 0
    else:
        first, second = _near_lanes(even, even_sign, gap), _near_lanes(odd, odd_sign, gap)
        if near == 0:
            first = tl.where(gap > 12, _far_lanes(even, even_sign, gap), first)
            second = tl.where(gap > 12, _far_lanes(odd, odd_sign, gap), second)
            wrong = ((_lost(even, gap) | _lost(odd, gap)) != 0) & (scale != 255)[:, :, None]
            bad = tl.max(tl.max(wrong.to(tl.int32), axis=2), axis=1) != 0
    here = ((row < rows)[:, None] & (block < blocks)[None, :])[:, :, None]
    if BY_BLOCK:
        at = block.to(tl.int64)[None, :] * rows + row[:, None]
    else:
        at = row.to(tl.int64)[:, None] * blocks + block[None, :]
    at = values + (at[:, :, None] * 8 + tl.arange(0, 4)[None, None, :])
    tl.store(at, first, here)
    tl.store(at + 4, second, here)
    return bad


@triton.jit
def _fold(
    codes, scales, values, row_scales, misfits, rows, blocks, lowest: tl.constexpr, highest: tl.constexpr,
    widest: tl.constexpr, ROWS: tl.constexpr, BLOCKS: tl.constexpr, WHOLE: tl.constexpr, BY_BLOCK: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    block = tl.arange(0, BLOCKS)
    if WHOLE:
        words, scale = _load(codes, scales, row, block, rows, blocks)
        top, bottom = _span(words, scale)
    else:
        top, bottom = tl.full([ROWS], -1, tl.int32), tl.full([ROWS], 254, tl.int32)
        for start in range(0, blocks, BLOCKS):
            words, scale = _load(codes, scales, row, start + block, rows, blocks)
            high, low = _span(words, scale)
            top, bottom = _extent(top, bottom, high, low)
    # A NaN block, or an element too large for the limit of tops: the row is NaN, not something else.
    spoiled = (bottom < 0) | (top > highest)
    closest: tl.constexpr = widest if WIDE else 12
    near = tl.min(((top - bottom <= closest) & (top <= highest) & (top >= lowest)).to(tl.int32), axis=0)
    top = tl.where(top < 0, 127, tl.minimum(tl.maximum(top, lowest), highest))
    power = (top - (13 if WIDE else 6)) << 23  # 2^(top - 127) less that of the fold, always a normal number
    tl.store(row_scales + row, tl.where(spoiled, 0x7FC00000, power).to(tl.float32, bitcast=True), row < rows)
    if WHOLE:
        bad = _fold_tile(values, words, scale, top, row, block, rows, blocks, near, widest, BY_BLOCK, WIDE)
    else:
        bad = top != top
        for start in range(0, blocks, BLOCKS):
            words, scale = _load(codes, scales, row, start + block, rows, blocks)
            bad |= _fold_tile(
                values, words, scale, top, row, start + block, rows, blocks, near, widest, BY_BLOCK, WIDE
            )
    if near == 0:
        none = tl.zeros([ROWS], tl.int32)
        slot = tl.atomic_add(misfits + none, 1, bad)
        tl.store(misfits + 1 + slot, row, bad)


def fold(q: MXArray, by_block: bool = False, wide: bool = False) -> Folded:
    """Return an operand [rows, K] folded into E4M3, or into E5M2.

    Args:
        q: an operand with the block axis stored last.
        by_block: whether the same block of all rows lies together.
        wide: whether elements are of E5M2; such an operand is folded by row.
    """
    codes, scales = rows_of(q)
    rows, blocks = scales.shape
    shape = (blocks, rows, _BLOCK) if by_block else (rows, q.length)
    values = empty(shape, torch.uint8, codes.device)
    row_scales = empty((rows, 1), torch.float32, codes.device)
    misfits = empty((1 + rows + MISFIT_PROGRAMS,), torch.int32, codes.device).zero_()
    if rows and blocks:
        height, width, warps = (_tile_by_block if by_block else _tile_by_row)(rows, blocks)
        launch(
            _fold, (tiles_of(rows, height),),
            codes.view(torch.int32), scales, values.view(torch.int32), row_scales, misfits, rows, blocks,
            lowest=LOWEST_WIDE_TOP if wide else LOWEST_TOP, highest=HIGHEST_TOP, widest=WIDEST,
            ROWS=height, BLOCKS=width, WHOLE=width >= blocks, BY_BLOCK=by_block, WIDE=wide, num_warps=warps,
        )  # fmt: skip
    else:
        row_scales.fill_(1.0)
    dtype = torch.float8_e5m2 if wide else torch.float8_e4m3fn
    return Folded(values.view(dtype), row_scales, misfits)


def _tile_by_row(rows: int, blocks: int) -> tuple[int, int, int]:
    """Return the rows and blocks that a program folds at a time, and its warps."""
    width = power_of_two_from(blocks, _TILE)
    height = power_of_two_from(rows, max(1, _TILE // 2 // width))
    return height, width, max(1, min(4, height * width // 32))


def _tile_by_block(rows: int, blocks: int) -> tuple[int, int, int]:
    """Return the same where four blocks are a thread's; rows of up to 512 blocks are read once."""
    width = power_of_two_from(blocks, _WIDEST_BY_BLOCK)
    height = power_of_two_from(rows, max(_LEAST_ROWS_BY_BLOCK, 1024 // width))
    return height, width, max(1, min(8, height * width // 256))
