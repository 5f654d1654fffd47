"""Operands of a GEMM as torch tensors, and what comes back of them as bits."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray

from mxref import MXArray
from mxref.formats import E2M1
from mxref.layouts.packed import pack

EXTREME_SCALES = (0, 1, 2, 63, 78, 79, 126, 127, 128, 175, 176, 190, 243, 244, 245, 251, 252, 253, 254)


def on(device: str, q: MXArray) -> MXArray:
    """A reference array as tensors of a device."""
    arrays = {name: torch.from_numpy(array).to(device) for name, array in q.arrays().items()}
    return replace(q, **arrays)


def bits(t: Any) -> NDArray[Any]:
    """Bit patterns of a result, of torch's or of the reference."""
    if isinstance(t, torch.Tensor):
        return t.cpu().view(torch.int16 if t.dtype == torch.bfloat16 else torch.int32).numpy()
    return t.view(np.int16 if t.dtype.itemsize == 2 else np.int32)


def drawn(
    rng: np.random.Generator, rows: int, k: int, low: int = 110, high: int = 140, nan: float = 0.0
) -> MXArray:
    """Drawn codes, a twelfth of the blocks all zeros of both signs, under scales from `low` to `high`."""
    codes = rng.integers(0, 256, (rows, k // 2)).astype(np.uint8)
    scales = rng.integers(low, high + 1, (rows, k // 32)).astype(np.uint8)
    zero = rng.random(scales.shape) < 1 / 12
    codes.reshape(rows, k // 32, 16)[zero] &= np.uint8(0x88)
    scales[rng.random(scales.shape) < nan] = 255
    return MXArray(codes, scales, (rows, k), 1)


def extreme(rng: np.random.Generator, rows: int, k: int) -> MXArray:
    """Drawn codes under scales at every border, some NaN."""
    q = drawn(rng, rows, k)
    scales = rng.choice(EXTREME_SCALES, q.scales.shape).astype(np.uint8)
    scales[rng.random(scales.shape) < 0.03] = 255
    return replace(q, scales=scales)


def hostile(rng: np.random.Generator, rows: int, blocks: int) -> MXArray:
    """Blocks of any codes, of sixes, of zeros and of codes that cancel, under scales that nearly agree along K."""
    codes = rng.integers(0, 16, (rows, blocks, 32)).astype(np.uint8)
    kind = rng.integers(0, 6, (rows, blocks))
    codes[kind == 0] = 7
    codes[kind == 1] &= 8
    codes[kind == 2, 16:] = codes[kind == 2, :16] ^ 8
    codes[kind == 3, 1:] &= 8
    centre = rng.integers(0, 255, blocks)
    scales = np.clip(centre + rng.integers(-12, 13, (rows, blocks)), 0, 254).astype(np.uint8)
    scales[rng.random(scales.shape) < 0.02] = 255
    return MXArray(pack(codes.reshape(rows, -1), E2M1), scales, (rows, 32 * blocks), 1)


def matrix(rows: list[list[tuple[int, list[int]]]], prescale: bool = False) -> MXArray:
    """The MXArray whose rows are lists of (scale code, 32 element codes)."""
    k = 32 * len(rows[0])
    codes = np.array([[c for _, block in row for c in block] for row in rows], np.uint8).reshape(len(rows), k)
    scales = np.array([[scale for scale, _ in row] for row in rows], np.uint8).reshape(len(rows), k // 32)
    return MXArray(pack(codes, E2M1), scales, (len(rows), k), 1, prescale=prescale)
