"""Tests how gfx950's scaled matrix instruction reads every scale byte, before `bounded` relies on it.

No public text says that byte 255, NaN in E8M0, makes a product NaN: hardware that took it for 2^128 would turn a NaN
block, whose element codes are 0, into zeros. The products here check that each byte up to 252 is read as its power of
two, and 255 as NaN, for both operands. In each product only one block has codes other than 0, so no sum depends on an
order.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np
import torch
from numpy.typing import NDArray

from mxref.gemm import scaled_gemm
from mxref.mxarray import MXArray
from mxref_triton.products.matrix_cores import MAX_SCALE, TILES, multiply
from mxref_triton.products.tiling import Tile

Multiply = Callable[[MXArray, MXArray], NDArray[np.float32]]
"""A B^T of A [M, K] and B [N, K] by the instruction under test."""

_NAN = 255
_BLOCKS = 8
"""Along K: two instructions, each with four blocks in four groups of lanes."""


def _operand(codes: NDArray[np.uint8], scales: NDArray[np.uint8]) -> MXArray:
    rows = len(scales)
    return MXArray(codes.reshape(rows, 16 * _BLOCKS), scales, (rows, 32 * _BLOCKS), 1)


def asked() -> MXArray:
    """Return the operand whose scale bytes are tested, [384, 256].

    Row s of the first 256 has byte s in its block s / 32, and nonzero codes there; bytes that are not promised, 253
    and 254, are 255 instead. The other 128 rows have 255 in each block of each row that a lane can hold, and every
    second one the element codes of a NaN block, which are 0.
    """
    rng = np.random.default_rng(0)
    codes = np.zeros((384, _BLOCKS, 16), np.uint8)
    scales = np.full((384, _BLOCKS), 127, np.uint8)
    row = np.arange(384)
    block = np.where(row < 256, row // 32, (row - 256) // 16)
    codes[row, block] = rng.integers(0, 256, (384, 16))
    codes[257::2] = 0
    scales[row, block] = np.where(row <= MAX_SCALE, row, _NAN)
    return _operand(codes, scales)


def partner() -> MXArray:
    """Return the other operand, [64, 256]: in block b of its columns bytes that bring 32 b .. 32 b + 31 near 2^0."""
    rng = np.random.default_rng(1)
    codes = np.zeros((64, _BLOCKS, 16), np.uint8)
    scales = np.full((64, _BLOCKS), 127, np.uint8)
    column = np.arange(64)
    block = column % _BLOCKS
    codes[column, block] = rng.integers(0, 256, (64, 16))
    scales[column, block] = 254 - (32 * block + 16) + column // _BLOCKS - 4
    return _operand(codes, scales)


def first_wrong_scale(multiply: Multiply) -> str | None:
    """Return what is wrong with the first product that has other bits than the reference's, or None.

    Args:
        multiply: by the instruction under test.
    """
    a, b = asked(), partner()
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
                f"scale byte {byte} of the {side} operand gave {got[row, column]} "
                f"where {want[row, column]} is right"
            )
    return None


def _on_device(device: torch.device, tile: Tile, a: MXArray, b: MXArray) -> NDArray[np.float32]:
    left, right = (
        MXArray(torch.from_numpy(q.codes).to(device), torch.from_numpy(q.scales).to(device), q.shape, q.axis)
        for q in (a, b)
    )
    product: NDArray[np.float32] = multiply(left, right, "float32", tile).cpu().numpy()
    return product


def on_device(device: torch.device, tile: Tile = TILES[-1]) -> Multiply:
    """Return the product of a device's scaled matrix instruction, by the kernel of one tile."""
    return partial(_on_device, device, tile)
