"""Products of every pair of formats but two of MXFP4, bit for bit."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
from numba_checks import bits
from numpy.typing import NDArray

import gemm_cases
from gemm_cases import K, operand
from mxref import GemmProfile, MXArray, OperandSpec, UnsupportedError, get_backend
from mxref.formats import BLOCK_FORMATS, CANONICAL_NAN, MXFP4, MXFP8_E4M3, MXFP8_E5M2, BlockFormat

pytest.importorskip("numba")

from mxref_numba import path
from mxref_numba.backend import NumbaBackend

REFERENCE = get_backend("reference")
BACKENDS = [NumbaBackend(p) for p in dict.fromkeys((path.available()[0], path.KernelPath.PORTABLE))]
"""All paths multiply these formats by the same kernels."""
FORMATS = [each for each in BLOCK_FORMATS.values() if each in NumbaBackend.capabilities.formats]
SHORT = [each for each in FORMATS if each.element.bits < 8 and each.scale.powers]
PAIRS = [pair for pair in gemm_cases.pairs(NumbaBackend.capabilities.formats) if pair != (MXFP4, MXFP4)]


@pytest.fixture(params=BACKENDS, ids=lambda b: b.path.value)
def kernels(request: pytest.FixtureRequest) -> NumbaBackend:
    chosen: NumbaBackend = request.param
    return chosen


def check(kernels: NumbaBackend, a: MXArray, b: MXArray) -> NDArray[Any]:
    for dtype in ("float32", "bfloat16"):
        got, want = (one.scaled_gemm(a, b, out_dtype=dtype) for one in (kernels, REFERENCE))
        assert got.dtype == want.dtype
        np.testing.assert_array_equal(bits(got), bits(want))
    return kernels.scaled_gemm(a, b)


@pytest.mark.clause("gemm.ordered", "gemm.output", "gemm.block_dot")
@pytest.mark.parametrize("pair", PAIRS, ids=gemm_cases.ids)
def test_every_pair(kernels: NumbaBackend, pair: gemm_cases.Pair) -> None:
    for a, b in gemm_cases.drawn(pair):
        check(kernels, a, b)


@pytest.mark.clause("gemm.nan", "conventions.nan")
@pytest.mark.parametrize("pair", PAIRS, ids=gemm_cases.ids)
def test_codes_of_nan_and_infinity(kernels: NumbaBackend, pair: gemm_cases.Pair) -> None:
    for a, b in gemm_cases.special(pair):
        out = check(kernels, a, b)
        assert (bits(out)[np.isnan(out)] == CANONICAL_NAN).all()
    assert np.isnan(out).any()


def test_infinities_add_as_ieee_has_it(kernels: NumbaBackend) -> None:
    a, b, want = gemm_cases.infinities()
    np.testing.assert_array_equal(check(kernels, a, b), want)


@pytest.mark.clause("gemm.ordered", "gemm.block_dot")
@pytest.mark.parametrize("sign", [0x00, 0x80])
@pytest.mark.parametrize("made", [MXFP8_E4M3, MXFP8_E5M2], ids=str)
def test_one_rounding_and_not_two(kernels: NumbaBackend, made: BlockFormat, sign: int) -> None:
    for a, b, want in gemm_cases.one_rounding(made, sign):
        assert check(kernels, a, b)[0, 0] == want


@pytest.mark.clause("gemm.block_dot")
@pytest.mark.parametrize("cases", [gemm_cases.cancelled, gemm_cases.spans])
def test_dots_that_float64_does_not_hold(kernels: NumbaBackend, cases: Any) -> None:
    for a, b, want in cases():
        assert check(kernels, a, b)[0, 0] == np.float32(want)


@pytest.mark.clause("gemm.ordered", "gemm.block_dot")
@pytest.mark.parametrize("pair", list(itertools.combinations_with_replacement(SHORT, 2)), ids=gemm_cases.ids)
def test_scales_at_the_limits_of_float32(kernels: NumbaBackend, pair: gemm_cases.Pair) -> None:
    for a, b in gemm_cases.limits(pair):
        check(kernels, a, b)


def test_of_quantized_arrays_of_any_strides(kernels: NumbaBackend) -> None:
    rng = np.random.default_rng(14)
    x, w = (rng.standard_t(1, shape).astype(np.float32) for shape in ((96, 64), (96, 130)))
    for made in (MXFP8_E4M3, MXFP8_E5M2):
        spec = OperandSpec(format=made, hadamard=32)
        a, b = kernels.quantize(x, spec, axis=0), kernels.quantize(w, spec, axis=0)
        check(kernels, a, b)
        every_other = MXArray(a.codes[::-2], a.scales[::-2], (96, 32), 0, rotation=a.rotation, format=made)
        check(kernels, every_other, b)


def test_bounded_gives_the_bits_of_ordered(kernels: NumbaBackend) -> None:
    a, b = operand(MXFP8_E4M3, 4, K, (120, 130), 1), operand(MXFP4, 5, K, (120, 130), 2)
    for left, right in ((a, a), (a, b), (b, a)):
        bounded, ordered = (
            kernels.scaled_gemm(left, right, profile=profile)
            for profile in (GemmProfile.BOUNDED, GemmProfile.ORDERED)
        )
        assert bounded.tobytes() == ordered.tobytes()
    high = operand(MXFP8_E4M3, 4, K, (253, 253), 3)
    with pytest.raises(UnsupportedError, match="bounded_max_scale = 252"):
        kernels.scaled_gemm(high, a, profile=GemmProfile.BOUNDED)


@pytest.mark.clause("gemm.tensor_scale")
def test_scales_of_tensors_are_multiplied_one_after_the_other(kernels: NumbaBackend) -> None:
    """That of A first: between the two, a result may overflow or underflow, and each multiplication rounds."""
    seen = [check(kernels, a, kernels.prepare(b)) for a, b in gemm_cases.tensor_scales()]
    assert np.isinf(seen).any()
    assert (np.array(seen) == 0).any()
