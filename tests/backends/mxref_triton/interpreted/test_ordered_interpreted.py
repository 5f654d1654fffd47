"""`ordered` of every pair of formats from packed codes in Triton's interpreter, bit for bit."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from numpy.typing import NDArray

import gemm_cases
from interpreted.gemm_operands import bits, on
from mxref import MXArray, get_backend
from mxref.formats import CANONICAL_NAN, MXFP4, MXFP8_E4M3, MXFP8_E5M2, MXINT8, NVFP4, BlockFormat
from mxref.gemm import scaled_gemm
from mxref.layouts.packed import pack
from mxref_triton import TritonBackend
from mxref_triton.products import ordered as kernels

# The interpreter computes in NumPy, which warns of what a GPU does silently.
pytestmark = pytest.mark.filterwarnings(
    "ignore:(overflow|invalid value|underflow|divide by zero) encountered:RuntimeWarning"
)

BACKEND, REFERENCE = TritonBackend(), get_backend("reference")
PAIRS = [pair for pair in gemm_cases.pairs(REFERENCE.capabilities.formats) if pair != (MXFP4, MXFP4)]
every_pair = pytest.mark.parametrize("pair", PAIRS, ids=gemm_cases.ids)


def check(a: MXArray, b: MXArray) -> NDArray[Any]:
    """Hold a product to the reference's bits in both types; return the float32 one."""
    left, right = on("cpu", a), on("cpu", b)
    results = []
    for out in ("float32", "bfloat16"):
        want = REFERENCE.scaled_gemm(a, b, out_dtype=out)
        results.append(BACKEND.to_numpy(BACKEND.scaled_gemm(left, right, out_dtype=out)))
        differ = bits(results[-1]) != bits(want)
        assert not differ.any(), f"{out}: {differ.sum()} differ, the first at {np.argwhere(differ)[0]}"
    return results[0]


@pytest.fixture(autouse=True)
def _poisoned(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let fresh memory hold what no result here is."""

    def poisoned(shape: Any, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        return torch.full(shape, -7.75e33, dtype=dtype, device=device)

    monkeypatch.setattr(kernels, "empty", poisoned)


@pytest.mark.clause("gemm.ordered", "gemm.output", "gemm.block_dot")
@every_pair
def test_every_pair(pair: gemm_cases.Pair) -> None:
    for a, b in gemm_cases.drawn(pair):
        check(a, b)


@pytest.mark.clause("gemm.nan", "gemm.special", "conventions.nan")
@every_pair
def test_codes_of_nan_and_infinity(pair: gemm_cases.Pair) -> None:
    for a, b in gemm_cases.special(pair):
        out = check(a, b)
        assert (bits(out)[np.isnan(out)] == CANONICAL_NAN).all()
    assert np.isnan(out).any()


@pytest.mark.clause("gemm.special")
def test_infinities_add_as_ieee_has_it() -> None:
    a, b, want = gemm_cases.infinities()
    np.testing.assert_array_equal(check(a, b), want)


@pytest.mark.clause("gemm.ordered", "gemm.block_dot")
@pytest.mark.parametrize("sign", [0x00, 0x80])
@pytest.mark.parametrize("made", [MXFP8_E4M3, MXFP8_E5M2], ids=str)
def test_one_rounding_and_not_two(made: BlockFormat, sign: int) -> None:
    for a, b, want in gemm_cases.one_rounding(made, sign):
        assert check(a, b)[0, 0] == want


@pytest.mark.clause("gemm.block_dot")
@pytest.mark.parametrize("cases", [gemm_cases.cancelled, gemm_cases.spans])
def test_dots_that_float64_does_not_hold(cases: Any) -> None:
    for a, b, want in cases():
        assert check(a, b)[0, 0] == np.float32(want)


@pytest.mark.clause("gemm.ordered", "gemm.block_dot")
@pytest.mark.parametrize(
    "pair", [(MXINT8, MXINT8), (MXINT8, MXFP4), (MXFP8_E5M2, MXFP8_E5M2), (MXFP8_E4M3, MXINT8)], ids=gemm_cases.ids
)  # fmt: skip
def test_scales_at_the_limits_of_float32(pair: gemm_cases.Pair) -> None:
    for a, b in [*gemm_cases.limits(pair)][::4]:
        check(a, b)


@pytest.mark.clause("gemm.block_dot")
def test_every_pair_of_codes_of_int8() -> None:
    """-2 too, which quantization never makes."""
    codes = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 32, axis=1)
    q = MXArray(codes, np.full((256, 1), 127, np.uint8), codes.shape, 1, format=MXINT8)
    assert check(q, q)[128, 128] == 128.0


@pytest.mark.clause("gemm.tensor_scale")
def test_scales_of_tensors_are_multiplied_one_after_the_other() -> None:
    seen = [check(a, b) for a, b in gemm_cases.tensor_scales()]
    assert np.isinf(seen).any()
    assert (np.array(seen) == 0).any()


@pytest.mark.clause("gemm.tensor_scale")
def test_one_operand_alone_may_have_a_scale_of_its_tensor() -> None:
    """The table has no such pair, but a format that joins it may make one."""
    plain = BlockFormat("fp4_ue4m3", NVFP4.element, NVFP4.scale, k=NVFP4.k)
    a, b = (gemm_cases.operand(NVFP4, rows, 64, (40, 60), rows) for rows in (5, 7))
    b = replace(b, format=plain, tensor_scale=None)
    for left, right in ((a, b), (b, a)):
        for out in ("float32", "bfloat16"):
            got = kernels.ordered(on("cpu", left), on("cpu", right), out)
            want = scaled_gemm(left, right, profile="ordered", out_dtype=out)
            assert np.array_equal(bits(got), bits(want))


@pytest.mark.clause("gemm.nan")
@pytest.mark.parametrize("code", [0x7F, 0xFF])
def test_every_scale_of_nvfp4(code: int) -> None:
    """Each scale, zero and subnormal ones among them, with each code; and one NaN, of which there are many."""
    elements = np.arange(127 * 16, dtype=np.int64).reshape(127, 16)
    packed = pack(((elements + elements // 16) % 16).astype(np.uint8), NVFP4.element)
    scales = np.arange(127, dtype=np.uint8)[:, None]
    a = MXArray(packed, scales, (127, 16), 1, format=NVFP4, tensor_scale=np.float32([0.7]))
    b = replace(a, codes=a.codes[::-1].copy(), scales=np.roll(scales, 11), tensor_scale=np.float32([1.3]))
    assert (check(a, b) != 0).mean() > 0.8
    b.scales[5] = code
    assert np.isnan(check(a, b)[:, 5]).all()
    assert np.isnan(check(b, a)[5]).all()


@pytest.mark.clause("gemm.operands", "quantize.strides")
@pytest.mark.parametrize("made", [NVFP4, MXINT8, MXFP8_E4M3], ids=str)
def test_strides_and_empty_operands(made: BlockFormat) -> None:
    a, b = (gemm_cases.operand(made, rows, 96, (40, 60), rows) for rows in (7, 9))
    want = bits(REFERENCE.scaled_gemm(a, b))
    wide = {name: torch.from_numpy(np.repeat(getattr(a, name), 2, 1)) for name in ("codes", "scales")}
    strided = replace(on("cpu", a), **{name: t[:, ::2] for name, t in wide.items()})
    assert not strided.codes.is_contiguous()
    assert np.array_equal(bits(BACKEND.scaled_gemm(strided, on("cpu", b))), want)
    none = on("cpu", replace(a, codes=a.codes[:0], scales=a.scales[:0], shape=(0, 96)))
    assert tuple(BACKEND.scaled_gemm(none, on("cpu", b)).shape) == (0, 9)
    short = on("cpu", replace(b, codes=b.codes[:, :0], scales=b.scales[:, :0], shape=(9, 0)))
    assert bits(BACKEND.scaled_gemm(short, short)).tolist() == [[0] * 9] * 9


@pytest.mark.clause("conformance.dual")
def test_a_product_is_added_to_a_sum() -> None:
    a, b = (
        gemm_cases.operand(
            NVFP4,
            rows,
            64,
            (40, 60),
            rows,
        )
        for rows in (7, 9)
    )
    a, b = (replace(q, tensor_scale=np.float32([t])) for q, t in ((a, 3e-3), (b, 0.3)))
    onto = torch.linspace(-1e3, 1e3, 63).reshape(7, 9)
    want = onto + torch.from_numpy(REFERENCE.scaled_gemm(a, b))
    BACKEND.add_product(on("cpu", a), BACKEND.prepare(on("cpu", b)), onto)
    assert torch.equal(onto, want)
