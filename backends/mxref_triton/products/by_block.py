"""`bounded` for operands of any block format and any scale: each block is multiplied separately, then scaled.

Elements are multiplied as float16, which holds every element of 8 bits or fewer exactly, and are summed in float32
over one block. The sum is then multiplied by both scales in two factors of nearly the same exponent: neither they nor
the product between them overflow unless the result does, and what is lost below float32 is less than 2^-149.

It is slower than a product of whole rows, and is used if an operand does not fit that.
"""

# Triton infers the types of kernels.
# mypy: allow-untyped-defs, allow-untyped-calls, allow-incomplete-defs, allow-untyped-decorators

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from mxref.formats import CANONICAL_NAN
from mxref.mxarray import MXArray
from mxref_triton.lane.quads import byte_of_pair, half_element, load_codes
from mxref_triton.launch import INTERPRETED, launch, power_of_two_from, tiles_of
from mxref_triton.memory import empty
from mxref_triton.operands import rows_of, unprescale
from mxref_triton.products.ordered import place_tile, power_of_two, store_tile
from mxref_triton.products.tiling import MATRIX_SIDE

_GROUP = 8
"""Tiles along M that share their columns of B in the second-level cache."""


@triton.jit
def _halves(codes, at, mask, E: tl.constexpr, K: tl.constexpr, EMULATED: tl.constexpr):
    """Return the elements of a block with even and with odd index as float16, both as `half_element` scales them.

    Args:
        codes: pointer to the block of each row.
        at: 0 to K / 2 - 1, along the axis of the contraction.
        mask: of the rows that exist.
        E: the element format.
        K: elements of a block.
        EMULATED: whether they become float32, which the interpreter multiplies.
    """
    even, odd = load_codes(codes + byte_of_pair(at, E), at, mask, E)
    even = half_element(even, E)
    odd = half_element(odd, E)
    if EMULATED:
        return even.to(tl.float32), odd.to(tl.float32)
    else:
        return even, odd


@triton.jit
def _multiply_blocks(
    a_codes, a_scales, b_codes, b_scales, out, rows, columns, blocks, factor,
    A: tl.constexpr, B: tl.constexpr, K: tl.constexpr,
    SCALED: tl.constexpr, HALF: tl.constexpr, EMULATED: tl.constexpr, NAN: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr,
):  # fmt: skip
    """Multiply a tile of A, elements of format A, with one of B; `out` holds bits."""
    top, left = place_tile(tl.program_id(0), rows, columns, BM, BN, GROUP)
    row, column, at = top + tl.arange(0, BM), left + tl.arange(0, BN), tl.arange(0, K // 2)
    here_a, here_b = row < rows, column < columns
    A_BYTES: tl.constexpr = K * A.bits // 8
    B_BYTES: tl.constexpr = K * B.bits // 8
    # What `half_element` takes out of both elements.
    UNDO: tl.constexpr = 2.0 ** (30 - A.bias - B.bias)
    a_line = a_codes + row.to(tl.int64)[:, None] * (blocks * A_BYTES)
    b_line = b_codes + column.to(tl.int64)[None, :] * (blocks * B_BYTES)
    a_scale, b_scale = a_scales + row.to(tl.int64) * blocks, b_scales + column.to(tl.int64) * blocks
    acc = tl.zeros((BM, BN), tl.float32)
    for block in range(0, blocks):
        a_even, a_odd = _halves(a_line + block * A_BYTES, at[None, :], here_a[:, None], A, K, EMULATED)
        b_even, b_odd = _halves(b_line + block * B_BYTES, at[:, None], here_b[None, :], B, K, EMULATED)
        code_a = tl.load(a_scale + block, here_a, 127).to(tl.int32)
        code_b = tl.load(b_scale + block, here_b, 127).to(tl.int32)
        dot = tl.dot(a_even, b_even, out_dtype=tl.float32)
        dot = tl.dot(a_odd, b_odd, dot, out_dtype=tl.float32) * UNDO
        first_a, first_b = (code_a - 127) >> 1, (code_b - 126) >> 1
        near_a = tl.where(code_a == 255, float("nan"), power_of_two(first_a))
        near_b = tl.where(code_b == 255, float("nan"), power_of_two(first_b))
        far_a, far_b = power_of_two(code_a - 127 - first_a), power_of_two(code_b - 127 - first_b)
        acc += dot * (near_a[:, None] * near_b[None, :]) * (far_a[:, None] * far_b[None, :])
    store_tile(acc, out, row, column, rows, columns, factor, NAN, SCALED, HALF)


def multiply_blocks(a: MXArray, b: MXArray, out_dtype: str) -> torch.Tensor:
    """Return A B^T of A [M, K] and B [N, K], checked operands, under `bounded`, class `fp32`, for any scale.

    Args:
        a: left operand.
        b: right operand; its format may be another, of the same block length.
        out_dtype: `float32` or `bfloat16`.
    """
    (a_codes, a_scales), (b_codes, b_scales) = rows_of(a), rows_of(b)
    m, n, blocks = a_scales.shape[0], b_scales.shape[0], a_scales.shape[1]
    out = empty((m, n), getattr(torch, out_dtype), a_codes.device)
    if not out.numel():
        return out
    half = out.dtype == torch.bfloat16
    factor = unprescale(a, b)
    amd = torch.version.hip is not None
    # Larger tiles spill scalar registers on gfx950.
    tile = _side(m, 64), _side(n, 64 if amd else 128)
    options: dict[str, Any] = {"num_warps": 4, "num_stages": 2} | (MATRIX_SIDE if amd else {})
    launch(
        _multiply_blocks, (tiles_of(m, tile[0]) * tiles_of(n, tile[1]),),
        a_codes, a_scales, b_codes, b_scales, out.view(torch.int16 if half else torch.int32), m, n, blocks, factor,
        A=a.format.element, B=b.format.element, K=a.format.k, SCALED=factor != 1, HALF=half,
        EMULATED=INTERPRETED, NAN=CANONICAL_NAN, BM=tile[0], BN=tile[1], GROUP=_GROUP,
        **options,
    )  # fmt: skip
    return out


def _side(length: int, largest: int) -> int:
    return max(16, power_of_two_from(length, 512 if INTERPRETED else largest))
