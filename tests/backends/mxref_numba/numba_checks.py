"""Inputs of the tests of the Numba backend, and its comparison with the reference bit for bit."""

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from mxref import (
    Backend,
    GemmProfile,
    MXArray,
    OperandSpec,
    Rounding,
    SignPolicy,
    Stream,
    get_backend,
)
from mxref.formats import CANONICAL_NAN
from mxref.gemm import bounded_tolerance
from mxref.placement import Placement
from strategies import K, crafted_blocks

numba = pytest.importorskip("numba")


BACKEND = get_backend("numba")
REFERENCE = get_backend("reference")
STREAM = Stream(seed=0x0123456789ABCDEF, step=70_000, layer=300, operand=4)
DTYPES = (np.float32, ml_dtypes.bfloat16, np.float16)


def check_quantize(
    x: NDArray[Any], spec: OperandSpec, place: Placement = Placement(STREAM), **options: Any
) -> MXArray:
    got, expected = (b.quantize(x, spec, placement=place, **options) for b in (BACKEND, REFERENCE))
    differ = got.scales != expected.scales
    assert not differ.any(), f"scales differ first at {np.argwhere(differ)[0]}"
    differ = got.codes != expected.codes
    assert not differ.any(), f"codes differ first at byte {np.argwhere(differ)[0]}"
    assert got == expected
    return got


def crafted(dtype: Any, length: int = K) -> NDArray[Any]:
    """The crafted blocks as rows of `length`, repeated up to a multiple of 32 rows, in a type that may round them."""
    blocks = crafted_blocks().reshape(-1)
    size = -(-blocks.size // (32 * length)) * 32 * length
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return np.resize(blocks, size).reshape(-1, length).astype(dtype)


def normal(*shape: int, dtype: Any = np.float32, seed: int = 0) -> NDArray[Any]:
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(shape) * np.exp2(rng.integers(-8, 8, shape))).astype(dtype)


SR_SPEC = OperandSpec(rounding=Rounding.SR, hadamard=16, signs=SignPolicy.FIXED)


def check_dequantize(q: MXArray) -> None:
    for dtype in ("float32", "bfloat16"):
        got, expected = (b.dequantize(q, dtype) for b in (BACKEND, REFERENCE))
        assert got.dtype == expected.dtype
        assert got.shape == q.shape
        bits = f"u{got.dtype.itemsize}"
        np.testing.assert_array_equal(got.copy().view(bits), expected.copy().view(bits))


def operand(rows: int, length: int, low: int, high: int, seed: int, **fields: Any) -> MXArray:
    """Any codes, one block in ten all zeros of either sign, under scale bytes drawn from [low, high]."""
    rng = np.random.default_rng(seed)
    codes = rng.integers(0, 256, (rows, length // K, K // 2), np.uint8)
    codes[rng.random(codes.shape[:2]) < 0.1] &= 0x88
    scales = rng.integers(low, high + 1, codes.shape[:2]).astype(np.uint8)
    return MXArray(codes.reshape(rows, length // 2), scales, (rows, length), 1, **fields)


def bits(out: NDArray[Any]) -> NDArray[Any]:
    return out.view(f"u{out.itemsize}")


def check_bounded(backend: Backend, a: MXArray, b: MXArray, dtype: str) -> None:
    """Compare a bounded product with the exact one; row 3 of A holds a NaN block, and no other row does."""
    got = backend.scaled_gemm(a, b, profile=GemmProfile.BOUNDED, out_dtype=dtype)
    exact = REFERENCE.scaled_gemm(a, b, profile=GemmProfile.EXACT)
    bound = bounded_tolerance(a, b, backend.capabilities.bounded_class, dtype)
    assert got.dtype == dtype
    assert got.shape == exact.shape
    assert (bits(got[3]) == CANONICAL_NAN >> (32 - 8 * got.itemsize)).all()
    rows = np.arange(len(got)) != 3
    with np.errstate(invalid="ignore"):  # Inf - Inf, where anything goes
        error = np.abs(got[rows].astype(np.float64) - exact[rows])
    # The exact profile rounds once itself, by half a unit in the last place.
    assert ((error <= bound[rows] + np.abs(exact[rows]) * 2.0**-24) | np.isinf(bound[rows])).all()
