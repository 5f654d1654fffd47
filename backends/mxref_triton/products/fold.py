"""Operands folded into FP8: rows of a block format as FP8 elements under one power of two, without rounding.

Elements of fewer than 8 bits are values of E4M3. An element P of a block with scale 2^e, in a row whose largest live
scale is 2^E, becomes P * 2^(L - (E - e)), and the row's 2^(E - L) is left for the GEMM. L, the lift, is the largest for
which the largest P lies within 448. P is a multiple of its format's smallest magnitude 2^u, and E4M3 holds every
multiple of 2^-9 of as few bits. So every element is exact while the gap E - e is at most L + u + 9. A row with a wider
gap fits too, if the elements beyond the gap are multiples of a larger power of two.

    E2M1: largest 6,    L = 6, smallest 2^-1, gap 14
    E1M2: largest 1.75, L = 8, smallest 2^-2, gap 15
    E2M3: largest 7.5,  L = 5, smallest 2^-3, gap 11
    E3M2: largest 28,   L = 4, smallest 2^-4, gap 9

The more of E4M3's range an element format takes itself, the less is left for the gap.

Folded wide, elements are of E5M2, whose exponents reach further: largest 57344, smallest 2^-16. Elements with at most
two mantissa bits fit; those of E2M3 do not, and are folded into E4M3 instead.

    E2M1: L = 13, gap 26, within which every element is a normal number
    E1M2: L = 15, gap 29
    E3M2: L = 11, gap 23

Gradients, whose magnitude differs much from token to token, fit that. Hopper multiplies E5M2 with E4M3 but not with
itself, so one operand of a GEMM may be folded wide.

E2M1 is folded four codes at a time, by integers. For any other element float16 does the arithmetic: a code is the top
of a float16, one multiplication by a power of two puts the value where float16's exponents, subnormals included, are
those of the FP8 format, and the FP8 code is the upper bits of the product. Bits below these are lost, and such a row
does not fit.

Within each block the elements with even index come first, then those with odd index: the order does not matter to a
contraction as long as both operands have it, and every code of E2M1 keeps its place in a word.

Folded by row, an operand keeps its rows together, as Hopper's copy engine reads them. Folded by block, the same block
of all rows lies together: gfx950 multiplies one block at a time, and a tile's 32 bytes of each row are then one piece
of memory.
"""

# Triton infers the types of kernels.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl

from mxref.formats import E2M1, E4M3, E5M2, ElementFormat
from mxref.mxarray import MXArray
from mxref_triton.lane.quads import half_element
from mxref_triton.launch import INTERPRETED, launch, power_of_two_from, tiles_of
from mxref_triton.memory import empty
from mxref_triton.operands import rows_of

MISFIT_PROGRAMS = 4 if INTERPRETED else 1056
"""Programs that share the products of misfits under `bounded`: eight for each multiprocessor of an H200."""

_SMALLEST_NORMAL = -14
"""Exponent of E5M2's smallest normal number, and of float16's."""

_BLOCK = 32
"""Elements of a block of the formats that are folded."""
_TILE = 1 << 14 if INTERPRETED else 128
"""Blocks that a program folds at a time. A longer row is read twice, the second time from the cache."""
_WIDEST_BY_BLOCK = 1 << 14 if INTERPRETED else 512
_LEAST_ROWS_BY_BLOCK = 4
"""Rows of a program that folds by block: so many of 32 bytes fill a line of gfx950's caches."""


@dataclass(frozen=True)
class Fold:
    """How elements of a format are folded. Scales are meant as codes of E8M0.

    The limits of tops keep row scales of E4M3 between 2^-54 and 2^42, and those of E5M2 between 2^-49 and 2^35. No
    product or sum of folded elements, multiplied by two of them, leaves float32's normal numbers but for a sum that
    overflows in truth.
    """

    lift: int
    """Exponent of the power of two by which elements under the top scale of their row are multiplied."""
    gap: int
    """Largest gap at which every element is exact."""
    lowest: int
    """Scales between which the top of a row may lie; one below is raised, which narrows its gaps."""
    highest: int

    @classmethod
    def of(cls, element: ElementFormat, wide: bool = False) -> Fold:
        """Return how elements of a format of at most 6 bits are folded into E4M3, or into E5M2."""
        into = E5M2 if wide else E4M3
        lift = math.frexp(into.max_value / element.max_value)[1] - 1
        # E2M1 has only normal numbers in E5M2: its integer arithmetic knows no others there.
        smallest = _SMALLEST_NORMAL if wide and element is E2M1 else into.unit_exponent
        gap = lift + element.unit_exponent - smallest
        below, above = (64 - smallest, 162) if wide else (73, 169)
        return cls(lift, gap, lift + below, lift + above)


def are_folded(*operands: MXArray) -> bool:
    """Return whether FP8 holds the elements of all operands, under scales that are powers of two."""
    return all(q.format.element.bits < 8 and q.format.k == _BLOCK and q.format.scale.powers for q in operands)


def fits_wide(element: ElementFormat) -> bool:
    """Return whether E5M2 has as many mantissa bits as an element format."""
    return element.mantissa_bits <= E5M2.mantissa_bits


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
def _load(codes, scales, row, block, rows, blocks, E: tl.constexpr):
    """Return scale codes [rows, blocks] of a tile, and words [rows, blocks, 4] of eight codes, 64 bits if E has 6."""
    here = (row < rows)[:, None] & (block < blocks)[None, :]
    at = row.to(tl.int64)[:, None] * blocks + block[None, :]
    scale = tl.load(scales + at, here, 0).to(tl.int32)
    part = tl.arange(0, 4)[None, None, :]
    if E.bits == 4:
        words = tl.load(codes + (at[:, :, None] * 4 + part), here[:, :, None], 0)
    else:
        first = codes + (at[:, :, None] * 6 + (3 * part >> 1))
        low = tl.load(first, here[:, :, None], 0).to(tl.uint32, bitcast=True).to(tl.int64)
        high = tl.load(first + 1, here[:, :, None], 0).to(tl.int64)
        words = ((high << 32) | low) >> (16 * (part & 1))
    return words, scale


@triton.jit
def _span(words, scale, E: tl.constexpr):
    """Return the largest and the smallest scale code of live blocks per row: zeros need no scale.

    A NaN block counts as a very small one, so that its row takes the path that handles NaN.
    """
    MAGNITUDES: tl.constexpr = 0x77777777 if E.bits == 4 else 0x7DF7DF7DF7DF
    live = tl.reduce(words & MAGNITUDES, 2, _either) != 0
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
    """Fold four codes of a word, one per byte, into E5M2, at a gap of 0 to 26."""
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
def _by_float16(words, first: tl.constexpr, gap, E: tl.constexpr, LIFT: tl.constexpr, WIDE: tl.constexpr):
    """Fold the codes `first`, `first` + 2, .. of eight by float16, at any gap from 0 on.

    Returns:
        A word of four bytes, and nonzero if one of them is not exact.
    """
    BITS: tl.constexpr = 8 if WIDE else 7  # of float16 below the FP8 code
    # What the multiplication undoes: `half_element` divides by 2^(15 - bias), E4M3 has 8 exponents below float16's.
    EXPONENT: tl.constexpr = LIFT + 15 - E.bias - (0 if WIDE else 8)
    BEFORE: tl.constexpr = 2.0**14 if WIDE else 1.0  # no power of two of float16 is above 2^15
    field = tl.minimum((EXPONENT - (14 if WIDE else 0) + 15) - gap, 30)
    power = tl.where(field > 0, field << 10, 512 >> tl.minimum(-field, 31))
    power = power.to(tl.int16).to(tl.float16, bitcast=True)
    out = tl.zeros_like(gap + words.to(tl.int32))
    lost = out
    for i in tl.static_range(4):
        code = (words >> (E.bits * (2 * i + first))).to(tl.int32)
        magnitude = code & (E.sign - 1)
        half = half_element(magnitude, E) * BEFORE * power
        bits = half.to(tl.int16, bitcast=True).to(tl.int32)
        sign = (code & E.sign) << (8 - E.bits)
        out = out | (((bits >> BITS) | sign) << (8 * i))
        # A product of 0 has lost all bits.
        lost = lost | (bits & ((1 << BITS) - 1)) | tl.where(bits == 0, magnitude, 0)
    return out, lost


@triton.jit
def _by_integers(words, gap, scale, bad, near, widest: tl.constexpr, WIDE: tl.constexpr):
    """Fold eight codes of E2M1: return four bytes of even ones, of odd ones, and which rows have one not exact."""
    even, odd = words & 0x0F0F0F0F, (words >> 4) & 0x0F0F0F0F
    even_sign, odd_sign = (even & 0x08080808) << 4, (odd & 0x08080808) << 4
    even, odd = even & 0x07070707, odd & 0x07070707
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
    return first, second, bad


@triton.jit
def _fold_tile(
    values, words, scale, top, row, block, rows, blocks, near, widest: tl.constexpr, BY_BLOCK: tl.constexpr,
    WIDE: tl.constexpr, E: tl.constexpr, LIFT: tl.constexpr,
):  # fmt: skip
    """Fold and store a tile; return per row whether it has an element that is not exact."""
    gap = (top[:, None] - scale)[:, :, None]
    bad = top != top
    if E.name == "E2M1":
        first, second, bad = _by_integers(words, gap, scale, bad, near, widest, WIDE)
    else:
        first, first_lost = _by_float16(words, 0, gap, E, LIFT, WIDE)
        second, second_lost = _by_float16(words, 1, gap, E, LIFT, WIDE)
        if near == 0:
            wrong = ((first_lost | second_lost) != 0) & (scale != 255)[:, :, None]
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


@dataclass(frozen=True)
class _How:
    """What a kernel that folds is compiled for."""

    lowest: int
    highest: int
    widest: int
    """The largest gap at which every element is exact."""
    lift: int
    element: ElementFormat
    wide: bool
    by_block: bool
    rows: int
    """Rows of a program."""
    blocks: int
    """Blocks that it folds at a time."""
    whole: bool
    """Whether these are all blocks of a row."""


@triton.jit
def _fold_rows(program, codes, scales, values, row_scales, misfits, rows, blocks, H: tl.constexpr):
    """Fold the rows of a program."""
    # Triton 3.6 does not pass attributes of a constant on.
    lowest: tl.constexpr = H.lowest
    highest: tl.constexpr = H.highest
    widest: tl.constexpr = H.widest
    ROWS: tl.constexpr = H.rows
    BLOCKS: tl.constexpr = H.blocks
    BY_BLOCK: tl.constexpr = H.by_block
    WIDE: tl.constexpr = H.wide
    E: tl.constexpr = H.element
    LIFT: tl.constexpr = H.lift
    row = program * ROWS + tl.arange(0, ROWS)
    block = tl.arange(0, BLOCKS)
    if H.whole:
        words, scale = _load(codes, scales, row, block, rows, blocks, E)
        top, bottom = _span(words, scale, E)
    else:
        top, bottom = tl.full([ROWS], -1, tl.int32), tl.full([ROWS], 254, tl.int32)
        for start in range(0, blocks, BLOCKS):
            words, scale = _load(codes, scales, row, start + block, rows, blocks, E)
            high, low = _span(words, scale, E)
            top, bottom = _extent(top, bottom, high, low)
    # A NaN block, or an element too large for the limit of tops: the row is NaN, not something else.
    spoiled = (bottom < 0) | (top > highest)
    # The integer arithmetic of E2M1 has a quick form up to 12.
    closest: tl.constexpr = 12 if E.name == "E2M1" and not WIDE else widest
    near = tl.min(((top - bottom <= closest) & (top <= highest) & (top >= lowest)).to(tl.int32), axis=0)
    too_large = top > highest
    top = tl.where(top < 0, 127, tl.minimum(tl.maximum(top, lowest), highest))
    power = (top - LIFT) << 23  # 2^(top - 127) less that of the fold, always a normal number
    tl.store(row_scales + row, tl.where(spoiled, 0x7FC00000, power).to(tl.float32, bitcast=True), row < rows)
    if H.whole:
        bad = _fold_tile(
            values, words, scale, top, row, block, rows, blocks, near, widest, BY_BLOCK, WIDE, E, LIFT
        )
    else:
        bad = top != top
        for start in range(0, blocks, BLOCKS):
            words, scale = _load(codes, scales, row, start + block, rows, blocks, E)
            bad |= _fold_tile(
                values,
                words,
                scale,
                top,
                row,
                start + block,
                rows,
                blocks,
                near,
                widest,
                BY_BLOCK,
                WIDE,
                E,
                LIFT,
            )
    if near == 0:
        if E.name != "E2M1":
            bad |= too_large
        none = tl.zeros([ROWS], tl.int32)
        slot = tl.atomic_add(misfits + none, 1, bad)
        tl.store(misfits + 1 + slot, row, bad)


@triton.jit
def _fold(codes, scales, values, row_scales, misfits, rows, blocks, H: tl.constexpr):
    _fold_rows(tl.program_id(0), codes, scales, values, row_scales, misfits, rows, blocks, H)


@triton.jit
def _fold_both(
    a_codes, a_scales, a_values, a_row_scales, a_misfits, a_rows, a_blocks,
    b_codes, b_scales, b_values, b_row_scales, b_misfits, b_rows, b_blocks, a_programs,
    A: tl.constexpr, B: tl.constexpr,
):  # fmt: skip
    """Fold two operands; the first programs take the first one."""
    program = tl.program_id(0)
    if program < a_programs:
        _fold_rows(program, a_codes, a_scales, a_values, a_row_scales, a_misfits, a_rows, a_blocks, A)
    else:
        program -= a_programs
        _fold_rows(program, b_codes, b_scales, b_values, b_row_scales, b_misfits, b_rows, b_blocks, B)


class _Work:
    """An operand that is to be folded, the memory for it, and how a kernel does it."""

    def __init__(self, q: MXArray, by_block: bool, wide: bool) -> None:
        how = Fold.of(q.format.element, wide)
        codes, scales = rows_of(q)
        self.rows, self.blocks = scales.shape
        shape = (self.blocks, self.rows, _BLOCK) if by_block else (self.rows, q.length)
        self.values = empty(shape, torch.uint8, codes.device)
        self.row_scales = empty((self.rows, 1), torch.float32, codes.device)
        self.counters = 1 + self.rows + MISFIT_PROGRAMS
        height, width, self.warps = (_tile_by_block if by_block else _tile_by_row)(self.rows, self.blocks)
        self.programs = tiles_of(self.rows, height)
        self.how = _How(
            how.lowest, how.highest, how.gap, how.lift, q.format.element, wide, by_block,
            height, width, width >= self.blocks,
        )  # fmt: skip
        self._codes, self._scales = codes, scales

    def arguments(self, misfits: torch.Tensor) -> tuple[Any, ...]:
        """Return the arguments of `_fold_rows` after the program."""
        codes, values = self._codes.view(torch.int32), self.values.view(torch.int32)
        return codes, self._scales, values, self.row_scales, misfits, self.rows, self.blocks

    def folded(self, misfits: torch.Tensor) -> Folded:
        """Return the operand, once a kernel has been started for it."""
        dtype = torch.float8_e5m2 if self.how.wide else torch.float8_e4m3fn
        return Folded(self.values.view(dtype), self.row_scales, misfits)


def fold(q: MXArray, by_block: bool = False, wide: bool = False) -> Folded:
    """Return an operand [rows, K] folded into E4M3, or into E5M2.

    Args:
        q: an operand of at most 6 bits with the block axis stored last.
        by_block: whether the same block of all rows lies together.
        wide: whether elements are of E5M2; such an operand is folded by row, and its elements have to fit.
    """
    work = _Work(q, by_block, wide)
    misfits = _zeros(work.counters, work.values.device)
    if work.rows and work.blocks:
        launch(_fold, (work.programs,), *work.arguments(misfits), H=work.how, num_warps=work.warps)
    else:
        work.row_scales.fill_(1.0)
    return work.folded(misfits)


def fold_both(a: MXArray, b: MXArray, wide: bool) -> tuple[Folded, Folded]:
    """Return two operands folded by row in one kernel, the first one wide if that is asked.

    Of small models a kernel is short, so that two and their counters take longer than one.
    """
    if not (a.scales.numel() and b.scales.numel()):
        return fold(a, wide=wide), fold(b)
    first, second = _Work(a, False, wide), _Work(b, False, False)
    start = -(-first.counters // 4) * 4  # kernels are compiled for counters that are aligned
    counters = _zeros(start + second.counters, first.values.device)
    a_misfits, b_misfits = counters[: first.counters], counters[start:]
    launch(
        _fold_both, (first.programs + second.programs,),
        *first.arguments(a_misfits), *second.arguments(b_misfits), first.programs,
        A=first.how, B=second.how, num_warps=max(first.warps, second.warps),
    )  # fmt: skip
    return first.folded(a_misfits), second.folded(b_misfits)


def _zeros(count: int, device: torch.device) -> torch.Tensor:
    return empty((count,), torch.int32, device).zero_()


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
