"""Scaled GEMM on gfx950's matrix cores in which elements of 6 bits are multiplied as they are.

`v_mfma_scale_f32_16x16x128_f8f6f4` reads two operands of 6 bits, or one of 6 and one of 4, at twice the rate of 8 bits.
Triton's own operations do not pass it elements of 6 bits. So `gfx950.ll` calls the instruction as a function of the
registers of one lane, and the kernel is written in Gluon, which says which lane holds what.

A lane of 64 holds a row of A and one of four blocks of 32 elements: lane l row l % 16 and block l / 16, with the scale
of that block. Of elements of 8 bits it holds two runs of 16 instead, half a step apart, while its scale stays that of
block l / 16. A result is row 4 * (l / 16) + r of column l % 16, r = 0 to 3. Operands are read from memory without a
detour through LDS: the 24 bytes of a block are 6 registers of a lane.
"""

# Triton infers the types of kernels; their tuples grow.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-incomplete-defs, allow-untyped-decorators
# mypy: disable-error-code="assignment"

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.amd.cdna4 import buffer_load, buffer_store
from triton.language import core

from mxref.formats import CANONICAL_NAN, E2M1, E2M3, E3M2, E4M3, E5M2, ElementFormat
from mxref_triton.lane.gfx950 import library
from mxref_triton.launch import launch, tiles_of
from mxref_triton.products.tiling import Tile

FORMATS = {E4M3: 0, E5M2: 1, E2M3: 2, E3M2: 3, E2M1: 4}
"""How the instruction numbers element formats."""
_GROUP = 8
"""Tiles along M that share their columns of B in the second-level cache."""


@core.builtin
def _result(a, b, acc, scale_a, scale_b, formats, number, _semantic=None):
    """Return one of the four results of a lane, float32."""
    constants = [_semantic.to_tensor(core._unwrap_if_constexpr(c)) for c in (formats, number)]
    words = [[*o, *(o[0],) * (8 - len(o))] for o in (a, b)]
    arguments = [*words[0], *words[1], *acc, scale_a, scale_b, *constants]
    kinds = tuple(x.dtype for x in arguments)
    return core.extern_elementwise(
        "", "", arguments, {kinds: ("__mxref_multiply", core.float32)}, is_pure=True, _semantic=_semantic
    )


@gluon.jit
def _load(codes, scales, row, lane, rest, blocks, BITS: gl.constexpr, EVEN: gl.constexpr):
    """Return what lanes hold of rows of an operand: words of codes, a tuple of int32, and scale codes, int32.

    Args:
        codes: int32 pointer to packed rows, at the first of four blocks.
        scales: uint8 pointer to their scale codes, likewise.
        row: int32 [tiles, 64].
        lane: numbers of the lanes, [tiles, 64].
        rest: blocks from there on.
        blocks: of a row.
        BITS: of an element, also the words of a block.
        EVEN: whether there are 4 blocks.
    """
    group = lane // 16
    words = ()
    for word in gl.static_range(BITS):
        if BITS == 8:
            at, block = word // 4 * 16 + group * 4 + word % 4, word // 4 * 2 + group // 2
        else:
            at, block = group * BITS + word, group
        at = codes + (row * (blocks * BITS) + at)
        if EVEN:
            words = words + (gl.load(at),)
        else:
            words = words + (gl.load(at, mask=block < rest, other=0),)
    scale_at = scales + (row * blocks + group)
    if EVEN:
        scale = gl.load(scale_at)
    else:
        scale = gl.load(scale_at, mask=group < rest, other=127)
    return words, scale.to(gl.int32)


@gluon.jit
def _across(words, axis: gl.constexpr):
    """Return words of A, axis 1, or of B, axis 0, as functions of both tiles and the lane."""
    out = ()
    for i in gl.static_range(len(words)):
        out = out + (gl.expand_dims(words[i], axis),)
    return out


@gluon.jit
def _multiply_sixes(
    a_codes, a_scales, b_codes, b_scales, out, rows, columns, blocks, factor,
    A_BITS: gl.constexpr, B_BITS: gl.constexpr, FORMATS: gl.constexpr,
    SCALED: gl.constexpr, HALF: gl.constexpr, ONTO: gl.constexpr, NAN: gl.constexpr,
    BM: gl.constexpr, BN: gl.constexpr, EVEN: gl.constexpr, GROUP: gl.constexpr, WARPS: gl.constexpr,
):  # fmt: skip
    """Multiply a tile of A with one of B; arguments as in `matrix_cores._multiply`, codes as int32."""
    DOWN: gl.constexpr = BM // 16
    ACROSS: gl.constexpr = BN // 16
    LAYOUT: gl.constexpr = gl.BlockedLayout([1, 1, 1], [1, 1, 64], [WARPS // 2, 2, 1], [2, 1, 0])
    LEFT: gl.constexpr = gl.SliceLayout(1, LAYOUT)
    RIGHT: gl.constexpr = gl.SliceLayout(0, LAYOUT)
    # Programs run down groups of rows of tiles.
    down, across = gl.cdiv(rows, BM), gl.cdiv(columns, BN)
    program = gl.program_id(0)
    first = program // (GROUP * across) * GROUP
    height = gl.minimum(down - first, GROUP)
    within = program % (GROUP * across)
    top, left = (first + within % height) * BM, within // height * BN

    a_lane = gl.arange(0, 64, gl.SliceLayout(0, LEFT))[None, :]
    b_lane = gl.arange(0, 64, gl.SliceLayout(0, RIGHT))[None, :]
    a_tile = 16 * gl.arange(0, DOWN, gl.SliceLayout(1, LEFT))[:, None]
    b_tile = 16 * gl.arange(0, ACROSS, gl.SliceLayout(1, RIGHT))[:, None]
    # Past the edge the last row is read again: nothing of it is stored.
    a_row = gl.minimum(a_tile + a_lane % 16, rows - 1 - top)
    b_row = gl.minimum(b_tile + b_lane % 16, columns - 1 - left)
    first_a, first_b = top.to(gl.int64) * blocks, left.to(gl.int64) * blocks
    a_codes, a_scales = a_codes + first_a * A_BITS, a_scales + first_a
    b_codes, b_scales = b_codes + first_b * B_BITS, b_scales + first_b
    acc = (gl.zeros((DOWN, ACROSS, 64), gl.float32, LAYOUT),) * 4
    for step in range(0, blocks, 4):
        a, a_scale = _load(a_codes, a_scales, a_row, a_lane, blocks - step, blocks, A_BITS, EVEN)
        b, b_scale = _load(b_codes, b_scales, b_row, b_lane, blocks - step, blocks, B_BITS, EVEN)
        a_codes, a_scales, b_codes, b_scales = (
            a_codes + 4 * A_BITS,
            a_scales + 4,
            b_codes + 4 * B_BITS,
            b_scales + 4,
        )
        a, b = _across(a, 1), _across(b, 0)
        a_scale, b_scale = gl.expand_dims(a_scale, 1), gl.expand_dims(b_scale, 0)
        acc = (
            _result(a, b, acc, a_scale, b_scale, FORMATS, 0),
            _result(a, b, acc, a_scale, b_scale, FORMATS, 1),
            _result(a, b, acc, a_scale, b_scale, FORMATS, 2),
            _result(a, b, acc, a_scale, b_scale, FORMATS, 3),
        )
    column = gl.expand_dims(b_tile + b_lane % 16, 0)
    corner = out + (top.to(gl.int64) * columns + left)
    for number in gl.static_range(4):
        row = gl.expand_dims(a_tile + (a_lane // 16 * 4 + number), 1)
        here = (row < rows - top) & (column < columns - left)
        at = row * columns + column
        value = acc[number]
        if SCALED:
            value = value * factor
        if ONTO:
            value = value + buffer_load(corner, at, mask=here, other=0).to(gl.float32, bitcast=True)
        bits = gl.where(value != value, NAN, value.to(gl.int32, bitcast=True))
        if HALF:
            wide = bits.to(gl.uint32, bitcast=True)
            narrow = ((wide + 0x7FFF + ((wide >> 16) & 1)) >> 16).to(gl.uint16)
            bits = gl.where(value != value, NAN >> 16, narrow).to(gl.uint16).to(gl.int16, bitcast=True)
        buffer_store(bits, corner, at, mask=here)


def multiply_sixes(
    a: tuple[torch.Tensor, torch.Tensor, ElementFormat], b: tuple[torch.Tensor, torch.Tensor, ElementFormat],
    out: torch.Tensor, tile: Tile, factor: float, *, onto: bool,
) -> None:  # fmt: skip
    """Write A B^T to `out` or add it to what that holds; operands are packed codes, scale codes and an element format.

    One of the two formats has 6 bits.
    """
    (a_codes, a_scales, first), (b_codes, b_scales, second) = a, b
    (m, blocks), n = a_scales.shape, b_scales.shape[0]
    half = out.dtype == torch.bfloat16
    launch(
        _multiply_sixes, (tiles_of(m, tile.rows) * tiles_of(n, tile.columns),),
        a_codes.view(torch.int32), a_scales, b_codes.view(torch.int32), b_scales,
        out.view(torch.int16 if half else torch.int32), m, n, blocks, factor,
        A_BITS=first.bits, B_BITS=second.bits, FORMATS=8 * FORMATS[first] + FORMATS[second],
        SCALED=factor != 1, HALF=half, ONTO=onto, NAN=CANONICAL_NAN,
        BM=tile.rows, BN=tile.columns, EVEN=blocks % 4 == 0, GROUP=_GROUP, WARPS=tile.warps,
        num_warps=tile.warps, **library(),
    )  # fmt: skip
