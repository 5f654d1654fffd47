"""Tests how gfx950's scaled matrix instruction reads scale bytes and elements, before `bounded` relies on it.

AMD's "CDNA4" ISA document says of these scales that 0xFF is NaN (7.2), and how lanes hold operands of 8 bits (7.1.5.1).
Hardware that took 255 for 2^128 would turn a NaN block, whose element codes are 0, into zeros. The products here check
that each byte up to the largest that is promised is read as its power of two, and 255 as NaN, in both operands: of
MXFP4 with itself, of E4M3 with MXFP4 and of E5M2 with E4M3. In each product only one block has codes other than 0, and
its sums are exact, so none depends on an order.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from mxref.formats import MXFP4, MXFP6_E2M3, MXFP6_E3M2, MXFP8_E4M3, MXFP8_E5M2, BlockFormat
from mxref.gemm import scaled_gemm
from mxref.layouts.packed import pack
from mxref.mxarray import MXArray
from mxref_triton.products.matrix_cores import TILES, max_scale, multiply
from mxref_triton.products.tiling import Tile

Multiply = Callable[[MXArray, MXArray], NDArray[np.float32]]
"""A B^T of A [M, K] and B [N, K] by the instruction under test."""

Pairs = tuple[tuple[BlockFormat, BlockFormat], ...]
"""Formats of the operand whose bytes are tested, and of the other."""
_PAIRS: Pairs = ((MXFP4, MXFP4), (MXFP8_E4M3, MXFP4), (MXFP8_E5M2, MXFP8_E4M3))
SIX_PAIRS: Pairs = (
    (MXFP6_E2M3, MXFP6_E3M2), (MXFP6_E3M2, MXFP6_E2M3), (MXFP6_E2M3, MXFP4), (MXFP8_E4M3, MXFP6_E3M2),
    (MXFP8_E5M2, MXFP6_E2M3),
)  # fmt: skip
"""Those for the kernel that multiplies elements of 6 bits as they are."""
_NAN = 255
_BLOCKS = 8
"""Along K: two instructions, each with four blocks in four groups of lanes."""


def _blocks(rng: np.random.Generator, rows: int, made: BlockFormat) -> NDArray[np.uint8]:
    """Return packed codes of a block for each row: any of 4 or 6 bits; of 8, zeros and magnitudes from 1 to below 4."""
    if made.element.bits < 8:
        return rng.integers(0, 256, (rows, made.code_bytes(32)), np.uint8)
    values = np.abs(made.element.values)
    codes = rng.choice(np.flatnonzero((values == 0) | ((values >= 1) & (values < 4))), (rows, 32))
    return pack(codes.astype(np.uint8), made.element)


def _operand(
    rows: NDArray[np.uint8], block: NDArray[np.int64], byte: NDArray[np.int64], made: BlockFormat
) -> MXArray:
    """Return an operand whose rows have codes and a scale byte in one block, and zeros under byte 127 in the others."""
    count, row = len(rows), np.arange(len(rows))
    codes = np.zeros((count, _BLOCKS, rows.shape[1]), np.uint8)
    scales = np.full((count, _BLOCKS), 127, np.uint8)
    codes[row, block], scales[row, block] = rows, byte
    return MXArray(codes.reshape(count, -1), scales, (count, 32 * _BLOCKS), 1, format=made)


def asked(made: BlockFormat = MXFP4) -> MXArray:
    """Return the operand whose scale bytes are tested, [384, 256].

    Row s of the first 256 has byte s in its block s / 32, and nonzero codes there; bytes that are not promised are 255
    instead. The other 128 rows have 255 in each block of each row that a lane can hold, and every second one the
    element codes of a NaN block, which are 0.
    """
    row = np.arange(384)
    rows = _blocks(np.random.default_rng(0), 384, made)
    rows[257::2] = 0
    block = np.where(row < 256, row // 32, (row - 256) // 16)
    return _operand(rows, block, np.where(row <= max_scale(made.element), row, _NAN), made)


def partner(made: BlockFormat = MXFP4) -> MXArray:
    """Return the other operand, [64, 256]: in block b of its columns bytes that bring 32 b .. 32 b + 31 near 2^0."""
    column = np.arange(64)
    block = column % _BLOCKS
    byte = 254 - (32 * block + 16) + column // _BLOCKS - 4
    return _operand(_blocks(np.random.default_rng(1), 64, made), block, byte, made)


def first_wrong_scale(multiply: Multiply, pairs: Pairs = _PAIRS) -> str | None:
    """Return what is wrong with the first product that has other bits than the reference's, or None.

    Args:
        multiply: by the instruction under test.
        pairs: of formats to multiply.
    """
    for formats in pairs:
        a, b = asked(formats[0]), partner(formats[1])
        for side, left, right in (("left", a, b), ("right", b, a)):
            want = scaled_gemm(left, right, profile="ordered")
            got = multiply(left, right)
            if side == "right":
                want, got = want.T, got.T
            wrong = (got.view(np.uint32) != want.view(np.uint32)) & ~(np.isnan(got) & np.isnan(want))
            if wrong.any():
                row, column = (int(i) for i in np.argwhere(wrong)[0])
                # A row has one byte other than 127, unless 127 is the byte under test.
                others = a.scales[row][a.scales[row] != 127]
                byte = int(others[0]) if len(others) else 127
                return (
                    f"scale byte {byte} of the {side} operand gave {got[row, column]} where {want[row, column]} is "
                    f"right, in {left.format.title} x {right.format.title}"
                )
    return None


def _on_device(device: torch.device, tile: Tile, a: MXArray, b: MXArray) -> NDArray[np.float32]:
    left, right = (
        replace(q, codes=torch.from_numpy(q.codes).to(device), scales=torch.from_numpy(q.scales).to(device))
        for q in (a, b)
    )
    product: NDArray[np.float32] = multiply(left, right, "float32", tile).cpu().numpy()
    return product


def on_device(device: torch.device, tile: Tile = TILES[-1]) -> Multiply:
    """Return the product of a device's scaled matrix instruction, by the kernel of one tile."""
    return partial(_on_device, device, tile)
