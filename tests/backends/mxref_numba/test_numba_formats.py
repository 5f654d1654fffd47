"""Elements other than E2M1 on every set of Numba kernels, quantized and decoded with the bits of the reference."""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
import pytest
from numpy.typing import NDArray

from differential import assert_same_blocks
from mxref import BlockShape, MXArray, OperandSpec, Rounding, SignPolicy, Stream, get_backend
from mxref.formats import BLOCK_FORMATS, MXFP4, BlockFormat
from mxref.layouts.packed import unpack
from mxref.placement import Placement

pytest.importorskip("numba")

from every_path import EveryPath

REFERENCE = get_backend("reference")
FORMATS = [each for each in BLOCK_FORMATS.values() if each is not MXFP4]
DTYPES = (np.float32, ml_dtypes.bfloat16, np.float16)
PLACE = Placement(Stream(seed=0xFEDCBA9876543210, step=3, layer=9, operand=2))
K = 32


@pytest.fixture(scope="module")
def kernels() -> EveryPath:
    return EveryPath()


@pytest.fixture(params=FORMATS, ids=str)
def block_format(request: pytest.FixtureRequest) -> BlockFormat:
    chosen: BlockFormat = request.param
    return chosen


def values(*shape: int, dtype: Any = np.float32) -> NDArray[Any]:
    x = np.random.default_rng(0).standard_normal(shape) * np.exp2(
        np.random.default_rng(1).integers(-9, 9, shape)
    )
    return x.astype(dtype)


def check(kernels: EveryPath, x: NDArray[Any], spec: OperandSpec, **request: Any) -> MXArray:
    got, expected = (b.quantize(x, spec, **{"placement": PLACE, **request}) for b in (kernels, REFERENCE))
    element = got.format.element
    assert_same_blocks(
        unpack(got.codes, element), got.scales, unpack(expected.codes, element), expected.scales
    )
    assert got == expected
    return got


# ---- quantize ----


@pytest.mark.parametrize("rounding", [Rounding.RNE, Rounding.SR])
@pytest.mark.parametrize("n", [0, 16, 256])
def test_layouts(kernels: EveryPath, block_format: BlockFormat, n: int, rounding: Rounding) -> None:
    """Whole steps of 128 elements and what is left over, columns, strides, padding and tiles, in every type."""
    signs = SignPolicy.PER_STEP if n else SignPolicy.NONE
    spec = OperandSpec(format=block_format, hadamard=n, signs=signs, rounding=rounding)
    for dtype in DTYPES:
        wide = values(5, 2400, dtype=dtype)
        for x in (wide, wide[:, 3:2112], wide[::-2, ::2]):
            check(kernels, x, spec, pad=True)
        tall = values(320, 70, dtype=dtype)
        for x in (tall, tall.T.copy().T, tall[::-1]):
            check(kernels, x, spec, axis=0, pad=True)
    check(
        kernels,
        values(2, 64, 512),
        OperandSpec(format=block_format, block=BlockShape.TILE, rounding=rounding),
    )
    check(kernels, values(3, 256, 5), spec, axis=1)
    check(kernels, np.empty((0, 64), np.float32), spec, pad=True)


@pytest.mark.clause("conformance.dual")
@pytest.mark.parametrize("other", BLOCK_FORMATS.values(), ids=str)
def test_both_axes_at_once(kernels: EveryPath, block_format: BlockFormat, other: BlockFormat) -> None:
    for shape, dtype in (((192, 320), np.float32), ((128, 256), ml_dtypes.bfloat16)):
        x = values(*shape, dtype=dtype)
        for n, rounding in ((0, Rounding.RNE), (16, Rounding.SR)):
            specs = (
                OperandSpec(format=block_format, hadamard=n, rounding=rounding),
                OperandSpec(format=other, hadamard=n),
            )
            got = kernels.quantize_dual(x, specs, placements=(PLACE, PLACE))
            for axis, q, spec in zip((1, 0), got, specs, strict=True):
                assert q == REFERENCE.quantize(x, spec, axis=axis, placement=PLACE)


@pytest.mark.parametrize("workers", [1, 3])
def test_threads_change_nothing(
    kernels: EveryPath, block_format: BlockFormat, workers: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mxref_numba.threads.worker_count", lambda elements: workers)
    spec = OperandSpec(format=block_format, rounding=Rounding.SR)
    q = check(kernels, values(67, 320), spec)
    same_bits(kernels.dequantize(q), REFERENCE.dequantize(q))
    same_bits(kernels.scaled_gemm(q, q), REFERENCE.scaled_gemm(q, q, profile="ordered"))


# ---- dequantize ----


def same_bits(got: NDArray[Any], want: NDArray[Any]) -> None:
    assert got.dtype == want.dtype
    words = f"u{want.itemsize}"
    np.testing.assert_array_equal(
        np.ascontiguousarray(got).view(words), np.ascontiguousarray(want).view(words)
    )
