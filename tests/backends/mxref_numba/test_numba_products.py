"""The scaled GEMM of the Numba backend against the reference, on the kernels that the CPU gets by default."""

import numpy as np
import pytest
from hypothesis import given, settings

from mxref import (
    GemmProfile,
    MXArray,
    OperandSpec,
    Rounding,
    UnsupportedError,
)
from mxref.formats import E2M1
from mxref.layouts.packed import pack
from mxref.placement import Placement
from strategies import Block, K, gemm_operands

numba = pytest.importorskip("numba")
from numba_checks import BACKEND, REFERENCE, STREAM, check_bounded, normal, operand


def check_gemm(a: MXArray, b: MXArray) -> None:
    for dtype in ("float32", "bfloat16"):
        got, expected = (backend.scaled_gemm(a, b, out_dtype=dtype) for backend in (BACKEND, REFERENCE))
        assert got.dtype == expected.dtype
        np.testing.assert_array_equal(
            got.view(f"u{got.dtype.itemsize}"), expected.view(f"u{got.dtype.itemsize}")
        )


# Ranges of scale bytes on both sides of where float32 stops holding every product.
RANGES = [
    (120, 134),
    (0, 254),
    (0, 255),
    (0, 3),
    (252, 255),
    (50, 56),
    (53, 54),
    (54, 60),
    (180, 185),
    (186, 188),
]


@pytest.mark.clause("conformance.capabilities")
@pytest.mark.parametrize("scales", RANGES)
@pytest.mark.parametrize("shape", [(1, 1, 32), (5, 7, 64), (130, 259, 96), (3, 300, 512), (257, 2, 160)])
def test_gemm_ordered(shape: tuple[int, int, int], scales: tuple[int, int]) -> None:
    m, n, k = shape
    check_gemm(operand(m, k, *scales, seed=1), operand(n, k, *scales, seed=2))


@pytest.mark.parametrize("byte", [0, 1, 126, 127, 244, 245, 253, 254, 255])
def test_gemm_one_scale_against_all(byte: int) -> None:
    every = np.arange(256, dtype=np.uint8)
    codes = operand(256, K, 0, 0, seed=3).codes
    a = MXArray(codes, np.full((256, 1), byte, np.uint8), (256, K), 1)
    for i in range(0, 256, 8):  # few bytes at a time, so that both ways of accumulating are reached
        b = MXArray(codes[i : i + 8], every[i : i + 8, None], (8, K), 1)
        check_gemm(a, b)
        check_gemm(b, a)


def test_gemm_overflow_stays() -> None:
    big = operand(40, 256, 186, 192, seed=4)
    out = BACKEND.scaled_gemm(big, big)
    assert np.isinf(out).any()
    assert not np.isnan(out).any()
    check_gemm(big, big)
    check_gemm(operand(9, 256, 250, 254, seed=5), operand(9, 256, 0, 254, seed=6))


@pytest.mark.parametrize("scales", [(110, 140), (0, 255)])
@pytest.mark.parametrize("prescaled", [(True, False), (False, True), (True, True)])
def test_gemm_undoes_prescale(prescaled: tuple[bool, bool], scales: tuple[int, int]) -> None:
    a, b = (operand(33, 128, *scales, seed=i, prescale=p) for i, p in enumerate(prescaled))
    check_gemm(a, b)


@pytest.mark.parametrize("shape", [(0, 4, 32), (4, 0, 32), (4, 3, 0), (0, 0, 0)])
def test_gemm_empty(shape: tuple[int, int, int]) -> None:
    m, n, k = shape
    a, b = operand(m, k, 1, 2, seed=1, prescale=True), operand(n, k, 1, 2, seed=2)
    check_gemm(a, b)
    assert not BACKEND.scaled_gemm(a, b).any()


def test_gemm_of_quantized_arrays() -> None:
    tokens, inputs, outputs = normal(96, 64), normal(64, 160), normal(96, 160)
    spec = OperandSpec(hadamard=16, rounding=Rounding.SR, prescale=True)
    x, w = (
        BACKEND.quantize(tokens, spec, placement=Placement(STREAM)),
        BACKEND.quantize(inputs, spec, axis=0, placement=Placement(STREAM)),
    )
    check_gemm(x, w)
    dy = BACKEND.quantize(outputs, spec, axis=0, placement=Placement(STREAM))
    check_gemm(dy, BACKEND.quantize(tokens, spec, axis=0, placement=Placement(STREAM)))
    strided = MXArray(x.codes[::-2], x.scales[::-2], (48, 64), 1, prescale=True, rotation=x.rotation)
    check_gemm(strided, w)


def from_blocks(blocks: list[Block]) -> MXArray:
    codes = np.array([block[1] for block in blocks], np.uint8).reshape(1, -1)
    scales = np.array([block[0] for block in blocks], np.uint8).reshape(1, -1)
    return MXArray(pack(codes, E2M1), scales, codes.shape, 1)


@settings(max_examples=225, deadline=None)
@given(gemm_operands())
def test_gemm_of_drawn_rows(operands: tuple[list[Block], list[Block]]) -> None:
    check_gemm(*(from_blocks(blocks) for blocks in operands))


@pytest.mark.clause("conformance.capabilities", "gemm.bounded")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("scales", [(120, 134), (60, 190), (0, 252), (240, 252)])
@pytest.mark.parametrize("k", [32, 1024])
def test_gemm_bounded(k: int, scales: tuple[int, int], dtype: str) -> None:
    a, b = operand(35, k, *scales, seed=8, prescale=True), operand(21, k, *scales, seed=9)
    a.scales[3, 0] = 255
    check_bounded(BACKEND, a, b, dtype)


@pytest.mark.parametrize("byte", [253, 254])
def test_bounded_refuses_what_float32_cannot_decode(byte: int) -> None:
    fine, large = operand(4, 64, 100, 252, seed=1), operand(4, 64, byte, byte, seed=2)
    for a, b in ((fine, large), (large, fine)):
        with pytest.raises(UnsupportedError, match=f"bounded_max_scale = 252.*{byte}"):
            BACKEND.scaled_gemm(a, b, profile=GemmProfile.BOUNDED)
