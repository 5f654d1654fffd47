"""`ordered` of every pair of formats on the GPU, bit for bit against the reference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("triton")

import gemm_cases
from mxref import MXArray, get_backend
from mxref.formats import MXFP8_E4M3, MXFP8_E5M2, BlockFormat
from mxref_triton import TritonBackend

REFERENCE = get_backend("reference")
PAIRS = gemm_cases.pairs(REFERENCE.capabilities.formats)
every_pair = pytest.mark.parametrize("pair", PAIRS, ids=gemm_cases.ids)


def check(backend: TritonBackend, a: MXArray, b: MXArray) -> np.ndarray:
    """Hold a product to the reference's bits in both types; return the float32 one."""
    left, right = (
        replace(q, **{name: backend.from_numpy(array) for name, array in q.arrays().items()}) for q in (a, b)
    )
    results: list[Any] = []
    for out in ("float32", "bfloat16"):
        want = REFERENCE.scaled_gemm(a, b, out_dtype=out)
        results.append(backend.to_numpy(backend.scaled_gemm(left, right, out_dtype=out)))
        differ = results[-1].view(f"u{want.itemsize}") != want.view(f"u{want.itemsize}")
        assert not differ.any(), f"{out}: {differ.sum()} differ, the first at {np.argwhere(differ)[0]}"
    first: np.ndarray = results[0]
    return first


@pytest.mark.clause("gemm.ordered", "gemm.output", "gemm.block_dot", "gemm.nan", "gemm.special")
@every_pair
def test_every_pair(pair, cases):
    backend = TritonBackend()
    for a, b in (*gemm_cases.drawn(pair), *gemm_cases.special(pair)):
        cases(check(backend, a, b).size)


@pytest.mark.clause("gemm.ordered", "gemm.block_dot")
@pytest.mark.parametrize("pair", [pair for pair in PAIRS if pair[0].k == gemm_cases.K], ids=gemm_cases.ids)
def test_scales_at_the_limits_of_float32(pair):
    for a, b in gemm_cases.limits(pair):
        check(TritonBackend(), a, b)


@pytest.mark.clause("gemm.ordered", "gemm.block_dot")
@pytest.mark.parametrize("sign", [0x00, 0x80])
@pytest.mark.parametrize("made", [MXFP8_E4M3, MXFP8_E5M2], ids=str)
def test_one_rounding_and_not_two(made: BlockFormat, sign: int):
    for a, b, want in gemm_cases.one_rounding(made, sign):
        assert check(TritonBackend(), a, b)[0, 0] == want


@pytest.mark.clause("gemm.block_dot")
@pytest.mark.parametrize("cases_of", [gemm_cases.cancelled, gemm_cases.spans])
def test_dots_that_float64_does_not_hold(cases_of):
    for a, b, want in cases_of():
        assert check(TritonBackend(), a, b)[0, 0] == np.float32(want)


@pytest.mark.clause("gemm.special")
def test_infinities_add_as_ieee_has_it():
    a, b, want = gemm_cases.infinities()
    np.testing.assert_array_equal(check(TritonBackend(), a, b), want)


@pytest.mark.clause("gemm.tensor_scale")
def test_scales_of_tensors_are_multiplied_one_after_the_other():
    seen = [check(TritonBackend(), a, b) for a, b in gemm_cases.tensor_scales()]
    assert np.isinf(seen).any()
    assert (np.array(seen) == 0).any()
