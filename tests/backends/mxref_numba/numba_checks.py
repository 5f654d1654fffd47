"""Inputs of the tests of the Numba backend."""

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from mxref import (
    MXArray,
    OperandSpec,
    Rounding,
    SignPolicy,
    Stream,
    get_backend,
)
from strategies import K

numba = pytest.importorskip("numba")


BACKEND = get_backend("numba")
REFERENCE = get_backend("reference")
STREAM = Stream(seed=0x0123456789ABCDEF, step=70_000, layer=300, operand=4)


def normal(*shape: int, dtype: Any = np.float32, seed: int = 0) -> NDArray[Any]:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) * np.exp2(rng.integers(-8, 8, shape))).astype(dtype)


SR_SPEC = OperandSpec(rounding=Rounding.SR, hadamard=16, signs=SignPolicy.FIXED)


def operand(rows: int, length: int, low: int, high: int, seed: int, **fields: Any) -> MXArray:
    """Any codes, one block in ten all zeros of either sign, under scale bytes drawn from [low, high]."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 256, (rows, length // K, K // 2), np.uint8)
    codes[rng.random(codes.shape[:2]) < 0.1] &= 0x88
    scales = rng.integers(low, high + 1, codes.shape[:2]).astype(np.uint8)
    return MXArray(codes.reshape(rows, length // 2), scales, (rows, length), 1, **fields)


def bits(out: NDArray[Any]) -> NDArray[Any]:
    return out.view(f"u{out.itemsize}")
