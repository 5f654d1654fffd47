"""Scaled GEMM of MXFP8, alone and with MXFP4, in the reference against the oracle."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction
from itertools import product

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
import strategies
from differential import bits_of
from mxref import GemmRole, MXArray, OperandSpec, quantize, scaled_gemm
from mxref.conformance.checks.gemms import spanning
from mxref.errors import RecipeError, ShapeError
from mxref.formats import BLOCK_FORMATS, MXFP4, MXFP8_E4M3, MXFP8_E5M2
from mxref.gemm import bounded_tolerance
from mxref.layouts.packed import pack
from mxref.recipe import FpropSpec, Recipe

_FORMATS = list(BLOCK_FORMATS.values())
PAIRS = [*zip(_FORMATS, _FORMATS[1:] + _FORMATS[:1], strict=True), (MXFP8_E5M2, MXFP8_E5M2)]
"""Every format on either side once, and the widest products; the conformance suite asks for all pairs."""
EVERY_PAIR = pytest.mark.parametrize("formats", PAIRS, ids=lambda pair: "-".join(map(str, pair)))
E5M2_INF, E5M2_NAN, E5M2_ONE, E4M3_NAN, E4M3_ONE = 0x7C, 0x7E, 0x3C, 0x7F, 0x38


def elements_of(formats):
    return tuple(oracle.ELEMENTS[f.element.name] for f in formats)


def row(blocks, block_format, prescale=False):
    """The MXArray of one row of (scale byte, 32 codes)."""
    codes = np.array([[c for _, block in blocks for c in block]], np.uint8).reshape(1, 32 * len(blocks))
    scales = np.array([[byte for byte, _ in blocks]], np.uint8).reshape(1, len(blocks))
    stored = pack(codes, block_format.element)
    return MXArray(stored, scales, codes.shape, 1, prescale=prescale, format=block_format)


def block(*codes):
    return [*codes] + [0] * (32 - len(codes))


def assert_same_sum(operands, formats, prescaled=(False, False)):
    """Both profiles and both output types give the oracle's bits."""
    elements = elements_of(formats)
    a, b = (row(*each) for each in zip(operands, formats, prescaled, strict=True))
    for out in ("float32", "bfloat16"):
        exact = scaled_gemm(a, b, profile="exact", out_dtype=out)
        assert bits_of(exact).tolist() == [[oracle.gemm_exact(*operands, out, prescaled, elements)]]
        ordered = scaled_gemm(a, b, profile="ordered", out_dtype=out)
        want = oracle.gemm_ordered(*operands, prescaled, elements)
        want = want if out == "float32" else oracle.f32_bits_to_bf16_bits(want)
        assert bits_of(ordered).tolist() == [[want]]


@pytest.mark.clause(
    "gemm.operands", "gemm.block_dot", "gemm.exact", "gemm.ordered", "gemm.nan", "gemm.prescale",
    "gemm.output", "gemm.special",
)  # fmt: skip
@EVERY_PAIR
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_drawn_operands_match_the_oracle(formats, data):
    operands = data.draw(strategies.gemm_operands(4, elements=elements_of(formats), special=True))
    prescaled = data.draw(st.tuples(st.booleans(), st.booleans()))
    assert_same_sum(operands, formats, prescaled)


@pytest.mark.clause("gemm.ordered", "gemm.exact")
@EVERY_PAIR
@settings(max_examples=40, deadline=None)
@given(data=st.data())
def test_sums_that_only_a_small_product_decides_match_the_oracle(formats, data):
    assert_same_sum(data.draw(strategies.nearly_tied_operands(elements_of(formats))), formats)


@pytest.mark.clause("gemm.block_dot", "gemm.ordered", evidence="known answer")
def test_a_block_is_added_with_one_rounding():
    # 1 + (2^-24 + 2^-58): the specification's example. A float64 would drop the last term.
    top, small = 0x78, 0x01  # 256 and 2^-9 in E4M3
    a = row([(127, block(E4M3_ONE)), (87, block(top, small))], MXFP8_E4M3)
    b = row([(127, block(E4M3_ONE)), (127, block(top, small))], MXFP8_E4M3)
    for profile in ("exact", "ordered"):
        assert bits_of(scaled_gemm(a, b, profile=profile)).tolist() == [[0x3F800001]]
    # 57344^2 - 57344^2 + 2^-32 in one block of E5M2.
    big = 0x7B
    a = row([(127, block(big, big, 0x01))], MXFP8_E5M2)
    b = row([(127, block(big, big | 0x80, 0x01))], MXFP8_E5M2)
    for profile in ("exact", "ordered"):
        assert scaled_gemm(a, b, profile=profile).tolist() == [[2.0**-32]]


WIDE = [(MXFP8_E5M2, MXFP8_E5M2), (MXFP8_E4M3, MXFP8_E5M2), (MXFP8_E5M2, MXFP8_E4M3)]


@pytest.mark.clause("gemm.block_dot", evidence="known answer")
@pytest.mark.parametrize("bits", [48, 49, 50])
@pytest.mark.parametrize("formats", WIDE, ids=lambda pair: "-".join(map(str, pair)))
def test_a_unit_survives_products_that_no_float64_adds(formats, bits):
    """31 products of blocks that span 48 bits together, and one unit, fit a float64; of 49 bits they do not."""
    ((a, b),) = spanning(bits, *formats)
    want = 2.0 ** sum(f.element.unit_exponent for f in formats)
    for profile in ("exact", "ordered"):
        assert scaled_gemm(a, b, profile=profile).tolist() == [[want]]


SPECIAL = {
    "NaN of E4M3 times zero": (MXFP8_E4M3, [block(E4M3_NAN)], [block(0)], "nan"),
    "negative NaN of E5M2": (MXFP8_E5M2, [block(E5M2_NAN | 0x80)], [block(E5M2_ONE)], "nan"),
    "infinity times one": (MXFP8_E5M2, [block(E5M2_INF)], [block(E5M2_ONE)], "inf"),
    "infinity times minus one": (MXFP8_E5M2, [block(E5M2_INF)], [block(E5M2_ONE | 0x80)], "-inf"),
    "infinity times zero": (MXFP8_E5M2, [block(E5M2_INF)], [block(0)], "nan"),
    "both infinities in a block": (MXFP8_E5M2, [block(E5M2_INF, E5M2_INF | 0x80)], [block(60, 60)], "nan"),
    "both infinities in two blocks": (MXFP8_E5M2, [block(E5M2_INF), block(E5M2_INF | 0x80)], [block(60)] * 2, "nan"),
    "infinity, then a number": (MXFP8_E5M2, [block(E5M2_INF), block(60)], [block(60)] * 2, "inf"),
}  # fmt: skip


@pytest.mark.clause("gemm.special", "conventions.nan", evidence="known answer")
@pytest.mark.parametrize("profile", ["exact", "ordered", "bounded"])
@pytest.mark.parametrize("name", SPECIAL)
def test_codes_that_are_nan_or_infinite(name, profile):
    block_format, left, right, want = SPECIAL[name]
    a, b = (row([(127, codes) for codes in side], block_format) for side in (left, right))
    bits = {"nan": 0x7FC00000, "inf": 0x7F800000, "-inf": 0xFF800000}[want]
    out = scaled_gemm(a, b, profile=profile)
    assert out.view(np.uint32).tolist() == [[bits]]
    half = scaled_gemm(a, b, profile=profile, out_dtype="bfloat16")
    assert half.view(np.uint16).tolist() == [[bits >> 16]]


@pytest.mark.clause("gemm.special", evidence="known answer")
def test_a_sum_that_overflowed_meets_the_other_infinity():
    largest = (254, block(0x7B))
    a = row([largest, (127, block(E5M2_INF | 0x80))], MXFP8_E5M2)
    b = row([largest, (127, block(E5M2_ONE))], MXFP8_E5M2)
    assert scaled_gemm(a, b, profile="ordered").view(np.uint32).tolist() == [[0x7FC00000]]
    assert scaled_gemm(a, b, profile="exact").tolist() == [[-np.inf]]


@pytest.mark.clause("gemm.special")
def test_special_codes_spoil_their_own_rows_alone():
    x = np.random.default_rng(0).standard_normal((3, 64)).astype(np.float32)
    a, b = (quantize(x, OperandSpec(format=MXFP8_E5M2)) for _ in range(2))
    codes = a.codes.copy()
    codes[1, 40] = E5M2_NAN
    spoiled = MXArray(codes, a.scales, a.shape, 1, format=MXFP8_E5M2)
    for profile in ("exact", "ordered"):
        clean, got = (scaled_gemm(left, b, profile=profile) for left in (a, spoiled))
        np.testing.assert_array_equal(got[[0, 2]], clean[[0, 2]])
        assert np.isnan(got[1]).all()


@pytest.mark.clause("gemm.prescale", evidence="known answer")
@pytest.mark.parametrize(
    ("formats", "prescaled", "bits"),
    [
        ((MXFP8_E4M3, MXFP8_E5M2), (True, False), 0x3F924925),
        ((MXFP8_E4M3, MXFP8_E5M2), (True, True), 0x3FA72F05),
        ((MXFP8_E4M3, MXFP4), (True, True), 0x3FC30C31),
        ((MXFP4, MXFP8_E5M2), (True, False), 0x3FAAAAAB),
        ((MXFP4, MXFP8_E5M2), (False, True), 0x3F924925),
    ],
    ids=str,
)
def test_prescales_of_two_formats_are_undone_together(formats, prescaled, bits):
    ones = [f.element.magnitudes.index(1.0) for f in formats]
    operands = (row([(127, block(one))], f, p) for one, f, p in zip(ones, formats, prescaled, strict=True))
    a, b = operands
    for profile in ("exact", "ordered"):
        assert scaled_gemm(a, b, profile=profile).view(np.uint32).tolist() == [[bits]]


@pytest.mark.clause("gemm.bounded", "gemm.prescale")
@EVERY_PAIR
def test_ordered_is_a_member_of_bounded(formats):
    rng = np.random.default_rng(0)
    a, b = (
        quantize(rng.standard_t(2, (n, 256)).astype(np.float32), OperandSpec(format=f, prescale=True))
        for n, f in zip((9, 7), formats, strict=True)
    )
    exact = scaled_gemm(a, b, profile="exact").astype(np.float64)
    ordered = scaled_gemm(a, b, profile="ordered").astype(np.float64)
    tolerance = bounded_tolerance(a, b, "fp32", "float32")
    assert (np.abs(ordered - exact) <= tolerance).all()
    assert (tolerance < 0.05 * np.abs(exact).max()).all()


@pytest.mark.clause("gemm.bounded")
def test_the_bound_is_the_sum_of_magnitudes_times_eps():
    x = np.random.default_rng(1).standard_t(2, (2, 64)).astype(np.float32)
    formats = (MXFP8_E4M3, MXFP8_E5M2)
    a, b = (quantize(x, OperandSpec(format=f)) for f in formats)
    got = bounded_tolerance(a, b, "fp32", "float32")
    magnitudes = []
    for q, element in zip((a, b), elements_of(formats), strict=True):
        scales = [[oracle.scale_value(int(s)) for s in line] for line in q.scales]
        magnitudes.append(
            [
                [abs(element.value(int(c))) * scales[i][j // 32] for j, c in enumerate(line)]
                for i, line in enumerate(q.codes)
            ]
        )
    for i, j in product(range(2), repeat=2):
        total = sum((p * s for p, s in zip(magnitudes[0][i], magnitudes[1][j], strict=True)), Fraction(0))
        want = 64 * Fraction(1, 2**24) * total + 64 * Fraction(1, 2**149)
        assert got[i, j] == pytest.approx(float(want), rel=1e-12)


@pytest.mark.clause("gemm.bounded", "gemm.special", evidence="known answer")
def test_the_bound_counts_products_of_finite_elements_alone():
    a = row([(127, [E5M2_INF, *[E5M2_ONE] * 31])], MXFP8_E5M2)
    b = row([(127, [E5M2_ONE] * 32)], MXFP8_E5M2)
    assert bounded_tolerance(a, b, "fp32")[0, 0] == pytest.approx(32 * 2.0**-24 * 31, rel=1e-6)


@pytest.mark.clause("gemm.operands", evidence="known answer")
def test_two_block_lengths_are_refused():
    short = replace(MXFP8_E4M3, name="short", k=16)
    a = MXArray(np.zeros((1, 64), np.uint8), np.zeros((1, 4), np.uint8), (1, 64), 1, format=short)
    with pytest.raises(ShapeError, match="block lengths differ: 16 in SHORT and 32 in MXFP8 E4M3; both"):
        scaled_gemm(a, quantize(np.ones((1, 64), np.float32), OperandSpec(MXFP8_E4M3)))


@pytest.mark.clause("gemm.operands", evidence="known answer")
def test_operands_of_two_formats_must_fit_otherwise():
    x = np.random.default_rng(0).standard_normal((64, 96)).astype(np.float32)
    q = quantize(x, OperandSpec(format=MXFP8_E4M3))
    assert scaled_gemm(q, quantize(x)).shape == (64, 64)
    with pytest.raises(ShapeError, match="contraction lengths differ: 96"):
        scaled_gemm(q, quantize(x, axis=0))
    with pytest.raises(ShapeError, match="different Hadamard transforms"):
        scaled_gemm(q, quantize(x, OperandSpec(hadamard=16)))


@pytest.mark.clause("recipe.formats", "recipe.unknown", "linear.formats", evidence="known answer")
def test_operands_of_a_gemm_share_the_kind_of_their_format():
    mixed = FpropSpec(x=OperandSpec(format="mxfp8_e4m3"), w=OperandSpec(format="mxfp4"))
    assert Recipe(fprop=mixed).formats(GemmRole.FPROP) == (MXFP8_E4M3, MXFP4)
    for pair in (("fp8", "mxfp4"), ("mxfp8_e4m3", "bf16"), ("bf16", "fp8")):
        x, w = (OperandSpec(format=name) for name in pair)
        with pytest.raises(
            RecipeError, match=r"kind of format, got \w+ for x and \w+ for w; set it in \[fprop\]"
        ):
            Recipe(fprop=FpropSpec(x=x, w=w))
