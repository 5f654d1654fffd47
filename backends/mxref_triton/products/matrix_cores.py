"""Scaled GEMM on gfx950's matrix cores, straight from packed codes and scale bytes.

`v_mfma_scale_f32_16x16x128_f8f6f4` multiplies four blocks of 32 elements at once and applies their scales itself; the
order and the width of its sums are not documented, so it serves the profile `bounded` only. Of the two shapes of that
instruction, the 16x16x128 one is used: for the other, a wrong layout of the right operand's scales was reported.

The instruction reads E2M3 and E3M2 too, and faster than elements of 8 bits, but Triton's `dot_scaled` does not. They,
and E1M2, which the instruction lacks, are recoded as E4M3 first, which has all their values. `sixes` has a kernel that
multiplies elements of 6 bits as they are, which is used where it was timed and was the fastest.
"""

# Triton infers the types of kernels.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

import os
from collections.abc import Container

import torch
import triton
import triton.language as tl

from mxref.formats import CANONICAL_NAN, E2M1, E4M3, E5M2, E8M0, INT8, ElementFormat
from mxref.mxarray import MXArray
from mxref_triton.lane.gfx950 import SIX_BITS
from mxref_triton.lane.quads import half_element, load_quads
from mxref_triton.launch import INTERPRETED, launch, tiles_of
from mxref_triton.memory import empty
from mxref_triton.operands import rows_of, unprescale
from mxref_triton.products.ordered import place_tile, store_tile, wide_power
from mxref_triton.products.tiling import Tile, largest_busy
from mxref_triton.quantizer.decode import QUAD_TYPES

if torch.version.hip is not None:  # importing Gluon takes a tenth of a second
    from mxref_triton.products import sixes


def max_scale(element: ElementFormat) -> int:
    """Return the largest scale code that is promised for elements of a format.

    An element under a larger one exceeds float32, and how the matrix cores add the exponents of two scales before they
    round is not documented.
    """
    return E8M0.max_exponent + E8M0.bias - element.max_exponent


MAX_SCALE = max_scale(E2M1)
"""The same of MXFP4."""

_BLOCK = 32
"""Elements of a block of the scaled matrix instruction."""
_QUADS = 1 << 16 if INTERPRETED else 512
"""Quads that a program recodes."""
_GROUP = 8
"""Tiles along M that share their columns of B in the second-level cache."""


# The larger a tile, the less often an operand is read from LDS and from memory. Counted for gfx950 with Triton 3.7.1,
# per matrix instruction in the loop: 128x256 takes 0.7 other vector instructions at three waves per SIMD, 128x128 takes
# 1.0 at four, 64x64 takes 2.0 at six. 256x256 takes 0.6 at two, but spills with Triton 3.9.0.
TILES: tuple[Tile, ...] = (Tile(128, 256, 128, 8), Tile(128, 128, 128, 4), Tile(64, 64, 256, 4))
"""Tiles by size; the first that gives work to every compute unit is used."""
SIX_TILES: tuple[Tile, ...] = (Tile(256, 128, 128, 4, sixes=True), Tile(128, 128, 128, 4, sixes=True))
"""Those of the kernel that multiplies elements of 6 bits as they are."""
_LONGEST_OF_SIXES = 1 << 20
"""Columns of its result, and elements along K, at most: its offsets in a tile have 32 bits."""
_INTERPRETED_TILE = Tile(64, 64, 128, 4)

TUNES = os.environ.get("MXREF_TRITON_TUNE") == "1"
"""Whether the first GEMM of a shape times all tiles on the device; the fastest is then used in this process."""
_fastest: dict[tuple[int, int, int, str, str, str], Tile] = {}
_AS_THEY_ARE = (E2M1, E4M3, E5M2)
"""Elements that `dot_scaled` multiplies."""


def tile_for(m: int, n: int) -> Tile:
    """Return the largest tile of which M x N has at least one for every compute unit, or the smallest."""
    if INTERPRETED:
        return _INTERPRETED_TILE
    return largest_busy(TILES, m, n)


def refuse_sixes() -> None:
    """Let no product take the kernel that multiplies elements of 6 bits as they are."""
    global SIX_TILES
    SIX_TILES = ()


def _takes_sixes(a: MXArray, b: MXArray) -> bool:
    """Return whether the kernel that multiplies elements of 6 bits as they are has something to gain, and may run."""
    has = any(q.format.element in SIX_BITS for q in (a, b))
    return has and max(b.scales.shape[0], a.length) <= _LONGEST_OF_SIXES


@triton.jit(do_not_specialize=["quads"])
def _recode(codes, out, quads, E: tl.constexpr, QUADS: tl.constexpr):
    """Write the E4M3 codes of elements of 4 or 6 bits, from quads of E to words of four bytes."""
    base = tl.program_id(0).to(tl.int64) * QUADS
    i = tl.arange(0, QUADS)
    here = base + i < quads
    quad = load_quads(codes, base, i, here, E).to(tl.int32)
    word = tl.zeros_like(quad)
    for e in tl.static_range(4):
        code = quad >> (E.bits * e)
        # E4M3 has eight exponents less than float16: its code is the top of a float16 divided by 2^8.
        half = half_element(code & (E.sign - 1), E) * (2.0 ** (7 - E.bias))
        bits = half.to(tl.int16, bitcast=True).to(tl.int32) >> 7
        word = word | ((bits | ((code & E.sign) << (8 - E.bits))) << (8 * e))
    tl.store(out + base + i, word, here)


def on_matrix_cores(*operands: MXArray) -> bool:
    """Return whether the scaled matrix instruction multiplies the formats, as they are or recoded."""
    return all(
        q.format.k == _BLOCK and q.format.scale.powers and q.format.element is not INT8 for q in operands
    )


def _recoded(
    q: MXArray, as_they_are: Container[ElementFormat] = _AS_THEY_ARE
) -> tuple[torch.Tensor, torch.Tensor, ElementFormat]:
    """Return packed codes, scale codes and the element format of an operand, of which a kernel reads those named."""
    (codes, scales), element = rows_of(q), q.format.element
    if element in as_they_are:
        return codes, scales, element
    quads = scales.numel() * q.format.k // 4
    out = empty((codes.shape[0], q.length), torch.uint8, codes.device)
    if quads:
        launch(
            _recode, (tiles_of(quads, _QUADS),),
            codes.view(QUAD_TYPES[element.bits]), out.view(torch.int32), quads, E=element, QUADS=_QUADS,
        )  # fmt: skip
    return out, scales, E4M3


@triton.jit
def _decoded(codes, scale, E: tl.constexpr, ROWS: tl.constexpr, DEPTH: tl.constexpr):
    """Return the values of packed rows of elements of a format in float64, [ROWS, DEPTH]."""
    if E.bits == 4:
        codes = tl.join(codes & 15, codes >> 4)
    elements = half_element(tl.reshape(codes, [ROWS, DEPTH // 32, 32]), E)
    power = tl.where(scale == 255, float("nan"), wide_power(scale.to(tl.int32) - 127 + 15 - E.bias))
    return tl.reshape(elements.to(tl.float64) * power[:, :, None], [ROWS, DEPTH])


@triton.jit
def _multiply(
    a_codes, a_scales, b_codes, b_scales, out, rows, columns, blocks, factor,
    A: tl.constexpr, B: tl.constexpr, A_NAME: tl.constexpr, B_NAME: tl.constexpr,
    SCALED: tl.constexpr, HALF: tl.constexpr, ONTO: tl.constexpr, NAN: tl.constexpr, EMULATED: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, EVEN: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Multiply a tile of A, elements of format A, with one of B; `out` holds bits, and ONTO adds to what it holds.

    A_NAME and B_NAME are what Triton calls the two formats. EVEN: no part of BK lies past the end.
    """
    A_BYTES: tl.constexpr = 4 * A.bits
    B_BYTES: tl.constexpr = 4 * B.bits
    top, left = place_tile(tl.program_id(0), rows, columns, BM, BN, GROUP)
    row, column = tl.arange(0, BM), tl.arange(0, BN)
    # Past the edge the last row is read again: nothing of it is stored.
    a_row = tl.minimum(row, rows - 1 - top)
    b_row = tl.minimum(column, columns - 1 - left)
    a_byte, b_byte = tl.arange(0, BK // 32 * A_BYTES), tl.arange(0, BK // 32 * B_BYTES)
    block = tl.arange(0, BK // 32)
    first_a, first_b = top.to(tl.int64) * blocks, left.to(tl.int64) * blocks
    a_at = a_codes + first_a * A_BYTES + (a_row[:, None] * (blocks * A_BYTES) + a_byte[None, :])
    b_at = b_codes + first_b * B_BYTES + (b_row[None, :] * (blocks * B_BYTES) + b_byte[:, None])
    a_scale_at = a_scales + first_a + (a_row[:, None] * blocks + block[None, :])
    b_scale_at = b_scales + first_b + (b_row[:, None] * blocks + block[None, :])
    acc = tl.zeros((BM, BN), tl.float32)
    for start in range(0, blocks, BK // 32):
        if EVEN:
            a, b = tl.load(a_at), tl.load(b_at)
            a_scale, b_scale = tl.load(a_scale_at), tl.load(b_scale_at)
        else:
            rest = blocks - start
            a = tl.load(a_at, (a_byte < rest * A_BYTES)[None, :], 0)
            b = tl.load(b_at, (b_byte < rest * B_BYTES)[:, None], 0)
            a_scale = tl.load(a_scale_at, (block < rest)[None, :], 127)
            b_scale = tl.load(b_scale_at, (block < rest)[None, :], 127)
        if EMULATED:
            left_values = _decoded(a, a_scale, A, BM, BK)
            right_values = tl.trans(_decoded(tl.trans(b), b_scale, B, BN, BK))
            acc += tl.dot(left_values, right_values, out_dtype=tl.float64).to(tl.float32)
        else:
            acc = tl.dot_scaled(a, a_scale, A_NAME, b, b_scale, B_NAME, acc)
        a_at += BK // 32 * A_BYTES
        b_at += BK // 32 * B_BYTES
        a_scale_at += BK // 32
        b_scale_at += BK // 32
    if SCALED:
        acc = acc * factor
    if ONTO:
        at = out + top.to(tl.int64) * columns + left + (a_row[:, None] * columns + column[None, :])
        acc += tl.load(at, (column < columns - left)[None, :], 0).to(tl.float32, bitcast=True)
    store_tile(acc, out, top + row, left + column, rows, columns, factor, NAN, False, HALF)


def multiply(a: MXArray, b: MXArray, out_dtype: str, tile: Tile | None = None) -> torch.Tensor:
    """Return A B^T of A [M, K] and B [N, K], checked operands, under `bounded`.

    Args:
        a: left operand.
        b: right operand.
        out_dtype: `float32` or `bfloat16`.
        tile: what a program multiplies; None chooses by M and N, or by time with MXREF_TRITON_TUNE=1.
    """
    shape = a.scales.shape[0], b.scales.shape[0]
    out = empty(shape, getattr(torch, out_dtype), a.codes.device)
    _into(out, a, b, tile, onto=False)
    return out


def multiply_onto(a: MXArray, b: MXArray, onto: torch.Tensor, tile: Tile | None = None) -> None:
    """Add A B^T of A [M, K] and B [N, K], checked operands, under `bounded` to a float32 array in place.

    Args:
        a: left operand.
        b: right operand.
        onto: float32 [M, N], contiguous, on the device of the operands.
        tile: as in `multiply`.
    """
    _into(onto, a, b, tile, onto=True)


def _into(out: torch.Tensor, a: MXArray, b: MXArray, tile: Tile | None, *, onto: bool) -> None:
    """Launch the kernel, which writes the product to `out` or adds it to what that holds."""
    m, n, blocks = a.scales.shape[0], b.scales.shape[0], a.scales.shape[1]
    half = out.dtype == torch.bfloat16
    if out.numel():
        if tile is None:
            tile = _tuned_tile(a, b, "bfloat16" if half else "float32") if TUNES else tile_for(m, n)
        factor = unprescale(a, b)
        if tile.sixes:
            operands = _recoded(a, sixes.FORMATS), _recoded(b, sixes.FORMATS)
            sixes.multiply_sixes(*operands, out, tile, factor, onto=onto)
            return
        (a_codes, a_scales, first), (b_codes, b_scales, second) = _recoded(a), _recoded(b)
        launch(
            _multiply, (tiles_of(m, tile.rows) * tiles_of(n, tile.columns),),
            a_codes, a_scales, b_codes, b_scales, out.view(torch.int16 if half else torch.int32),
            m, n, blocks, factor,
            A=first, B=second, A_NAME=first.name.lower(), B_NAME=second.name.lower(),
            SCALED=factor != 1, HALF=half, ONTO=onto, NAN=CANONICAL_NAN, EMULATED=INTERPRETED,
            BM=tile.rows, BN=tile.columns, BK=tile.depth, EVEN=blocks % (tile.depth // 32) == 0, GROUP=_GROUP,
            **tile.options,
        )  # fmt: skip


def _tuned_tile(a: MXArray, b: MXArray, out_dtype: str) -> Tile:
    """Return the tile that multiplies operands of these shapes in the least time, measured once on their device."""
    from triton.testing import do_bench

    key = a.shape[0], b.shape[0], a.length, out_dtype, a.format.name, b.format.name
    if key not in _fastest:
        tiles = TILES + (SIX_TILES if _takes_sixes(a, b) else ())
        _fastest[key] = min(tiles, key=lambda tile: float(do_bench(lambda: multiply(a, b, out_dtype, tile))))
    return _fastest[key]
