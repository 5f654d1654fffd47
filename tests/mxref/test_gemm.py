"""Scaled GEMM of every pair of formats: exact and ordered against the oracle, and the bound of the bounded one."""

from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
import strategies
from differential import bits_of
from mxref import MXArray, OperandSpec, quantize, scaled_gemm
from mxref.block_dots import block_dots
from mxref.conformance.checks.gemms import spanning
from mxref.errors import DtypeError, RecipeError, ShapeError
from mxref.formats import BLOCK_FORMATS, E2M1, MXFP4, MXFP8_E4M3, MXFP8_E5M2, MXINT8
from mxref.gemm import bounded_tolerance
from mxref.layouts.packed import pack, unpack

_FORMATS = [made for made in BLOCK_FORMATS.values() if made.scale.powers]
PAIRS = [
    (MXFP4, MXFP4),
    *zip(_FORMATS, _FORMATS[1:] + _FORMATS[:1], strict=True),
    (MXFP8_E5M2, MXFP8_E5M2),
    (MXINT8, MXINT8),
    (MXINT8, MXFP8_E5M2),
]
"""Every format on either side once, and the widest products; the conformance suite asks for all pairs."""
EVERY_PAIR = pytest.mark.parametrize("formats", PAIRS, ids=lambda pair: "-".join(map(str, pair)))
PROFILES = pytest.mark.parametrize("profile", ["exact", "ordered"])
E5M2_INF, E5M2_NAN, E5M2_ONE, E4M3_NAN, E4M3_ONE = 0x7C, 0x7E, 0x3C, 0x7F, 0x38


def matrix(rows, made=MXFP4, prescale=False):
    """The MXArray whose rows are lists of (scale byte, 32 codes)."""
    k = 32 * len(rows[0])
    codes = np.array([[c for _, block in row for c in block] for row in rows], np.uint8).reshape(len(rows), k)
    scales = np.array([[byte for byte, _ in row] for row in rows], np.uint8).reshape(len(rows), k // 32)
    return MXArray(pack(codes, made.element), scales, (len(rows), k), 1, prescale=prescale, format=made)


def block(*codes):
    return [*codes] + [0] * (32 - len(codes))


def elements_of(formats):
    return tuple(oracle.ELEMENTS[f.element.name] for f in formats)


def assert_same_sum(operands, formats, prescaled=(False, False)):
    """Both profiles and both output types give the oracle's bits."""
    elements = elements_of(formats)
    a, b = (matrix([row], *how) for row, *how in zip(operands, formats, prescaled, strict=True))
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
@settings(max_examples=30, deadline=None)
@given(data=st.data())
def test_drawn_operands_match_the_oracle(formats, data):
    operands = data.draw(strategies.gemm_operands(elements=elements_of(formats), special=True))
    prescaled = data.draw(st.tuples(st.booleans(), st.booleans()))
    assert_same_sum(operands, formats, prescaled)


@pytest.mark.clause("gemm.ordered", "gemm.exact")
@EVERY_PAIR
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_sums_that_only_a_small_product_decides_match_the_oracle(formats, data):
    assert_same_sum(data.draw(strategies.nearly_tied_operands(elements_of(formats))), formats)


@pytest.mark.clause("gemm.exact", "gemm.ordered", "gemm.operands")
@PROFILES
def test_matrices_match_the_oracle_element_by_element(profile):
    rng = np.random.default_rng(0)

    def draw(rows):
        return [
            [(int(rng.integers(90, 165)), rng.integers(0, 16, 32).tolist()) for _ in range(5)]
            for _ in range(rows)
        ]

    a, b = draw(4), draw(3)
    compute = oracle.gemm_exact if profile == "exact" else oracle.gemm_ordered
    want = [[compute(row, column) for column in b] for row in a]
    assert scaled_gemm(matrix(a), matrix(b), profile=profile).view(np.uint32).tolist() == want


@pytest.mark.clause("gemm.block_dot", evidence="known answer")
def test_exponents_are_combined_before_anything_is_multiplied():
    """A product that dequantizing first would turn into Inf times 0."""
    a = matrix([[(0, [7] + [0] * 31)]])
    b = matrix([[(254, [7] + [0] * 31)]])
    for profile in ("exact", "ordered"):
        assert scaled_gemm(a, b, profile=profile).tolist() == [[36 * 2.0**0]]


@pytest.mark.clause("gemm.nan", "conventions.nan", evidence="known answer")
@PROFILES
def test_a_nan_block_spoils_its_row(profile):
    zero, one = [0] * 32, [2] * 32
    a = matrix([[(127, one), (255, zero)], [(127, one), (127, zero)]])
    out = scaled_gemm(a, matrix([[(127, one), (0, zero)]]), profile=profile)
    assert out.view(np.uint32).tolist() == [[0x7FC00000], [0x42000000]]
    half = scaled_gemm(a, matrix([[(127, one), (0, zero)]]), profile=profile, out_dtype="bfloat16")
    assert half.view(np.uint16).tolist() == [[0x7FC0], [0x4200]]


@pytest.mark.clause("gemm.ordered", "gemm.exact", evidence="known answer")
def test_order_of_blocks_matters_to_ordered_and_not_to_exact():
    def block(byte, code):
        return (byte, [code] + [0] * 31)

    big, small, minus = block(127 + 30, 2), block(127 - 10, 2), block(127 + 30, 10)
    one = [block(127, 2)] * 3
    first, last = matrix([[big, minus, small]]), matrix([[big, small, minus]])
    assert scaled_gemm(first, matrix([one]), profile="ordered")[0, 0] == 2.0**-10
    assert scaled_gemm(last, matrix([one]), profile="ordered")[0, 0] == 0
    assert scaled_gemm(last, matrix([one]), profile="exact")[0, 0] == 2.0**-10


@pytest.mark.clause("gemm.ordered", evidence="known answer")
def test_infinity_stays():
    big, minus = (254, [7] * 32), (254, [15] * 32)
    out = scaled_gemm(matrix([[big, minus, minus]]), matrix([[big, big, big]]), profile="ordered")
    assert out[0, 0] == np.inf


@pytest.mark.clause("gemm.ordered", "gemm.block_dot", evidence="known answer")
def test_a_zero_dot_is_positive_even_after_a_negative_underflow():
    a = matrix([[(0, [9] + [0] * 31), (127, [8] * 32)]])
    b = matrix([[(0, [1] + [0] * 31), (127, [2] * 32)]])
    assert scaled_gemm(a, b, profile="ordered").view(np.uint32).tolist() == [[0]]


@pytest.mark.clause("gemm.exact", evidence="known answer")
def test_underflow_keeps_its_sign_and_zero_is_positive():
    a = matrix([[(0, [9] + [0] * 31)], [(0, [8] * 32)]])
    b = matrix([[(0, [1] + [0] * 31)]])
    assert scaled_gemm(a, b, profile="exact").view(np.uint32).tolist() == [[0x80000000], [0]]


@pytest.mark.clause("gemm.exact", evidence="known answer")
@pytest.mark.parametrize(("out", "least"), [("float32", -149), ("bfloat16", -133)])
@pytest.mark.parametrize(("halves", "little", "units"), [((2, 0), 2, 1), ((5, 0), 10, 1), ((6, 2), 2, 3)])
def test_subnormals_are_rounded_once(out, least, halves, little, units):
    """1, 3 or 5 halves of the least number and a little: ties if they are rounded to normal precision first."""
    byte = least - 1 + 127 + 75  # the scale of B is 2^-75
    a = matrix([[(byte, [*halves] + [0] * 30), (byte - 30, [little] + [0] * 31)]])
    b = matrix([[(52, [2, 2] + [0] * 30)] * 2])
    assert scaled_gemm(a, b, profile="exact", out_dtype=out).astype(np.float64).tolist() == [
        [units * 2.0**least]
    ]


@pytest.mark.clause("gemm.exact", evidence="known answer")
@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0, 0)])
def test_empty(shape):
    a, b = (quantize(np.zeros((n, 64), np.float32)) for n in shape)
    for profile in ("exact", "ordered"):
        assert scaled_gemm(a, b, profile=profile).shape == shape
    k0 = quantize(np.zeros((2, 0), np.float32))
    assert scaled_gemm(k0, k0, profile="exact").view(np.uint32).tolist() == [[0, 0]] * 2


@pytest.mark.clause("gemm.bounded", "gemm.prescale")
@EVERY_PAIR
@pytest.mark.parametrize(("out", "prescale"), [("float32", True), ("bfloat16", False)])
def test_ordered_is_a_member_of_bounded(formats, out, prescale):
    rng = np.random.default_rng(0)
    a, b = (
        quantize(rng.standard_t(2, (n, 256)).astype(np.float32), OperandSpec(f, prescale=prescale))
        for n, f in zip((9, 7), formats, strict=True)
    )
    exact = scaled_gemm(a, b, profile="exact").astype(np.float64)
    ordered = scaled_gemm(a, b, profile="ordered", out_dtype=out).astype(np.float64)
    tolerance = bounded_tolerance(a, b, "fp32", out)
    assert (np.abs(ordered - exact) <= tolerance).all()
    assert (tolerance < 0.05 * np.abs(exact).max()).all()


@pytest.mark.clause("gemm.bounded", "gemm.prescale")
@pytest.mark.parametrize(
    ("error_class", "eps"),
    [("fp32", lambda p: Fraction(98 if p else 96, 2**24)), ("fp8-hopper", lambda _: Fraction(1, 2**6))],
)
@pytest.mark.parametrize("prescaled", [0, 1, 2])
def test_the_bound_is_the_formula(error_class, eps, prescaled):
    rng = np.random.default_rng(0)
    rows = [
        [(int(rng.integers(0, 255)), rng.integers(0, 16, 32).tolist()) for _ in range(3)] for _ in range(24)
    ]
    a, b = rows[:12], rows[12:]
    got = bounded_tolerance(matrix(a, prescale=prescaled > 0), matrix(b, prescale=prescaled > 1), error_class)
    anything = 0
    for i, j in np.ndindex(got.shape):
        total = Fraction(4, 3) ** prescaled * sum(
            abs(oracle.element_value(x) * oracle.element_value(y))
            * oracle.scale_value(p)
            * oracle.scale_value(q)
            for (p, xs), (q, ys) in zip(a[i], b[j], strict=True)
            for x, y in zip(xs, ys, strict=True)
        )
        if total >= 2**127:
            anything += 1
            assert got[i, j] == np.inf
        else:
            assert got[i, j] == pytest.approx(
                float(eps(prescaled) * total + 96 * Fraction(1, 2**149)), rel=1e-12
            )
    assert 0 < anything < got.size


@pytest.mark.clause("gemm.block_dot")
def test_dots_are_exact_multiples_of_a_quarter():
    codes = np.arange(256, dtype=np.uint8)
    a = matrix([[(127, [int(c) & 15] * 32)] for c in codes[:16]])
    (dot,) = block_dots(a, a)
    want = [[float(oracle.block_dot([i] * 32, [j] * 32)) for j in range(16)] for i in range(16)]
    (exact,) = dot.parts
    assert exact.tolist() == want
    assert abs(exact).max() == 1152


@pytest.mark.clause("gemm.block_dot", "gemm.ordered", evidence="known answer")
def test_a_block_is_added_with_one_rounding():
    # 1 + (2^-24 + 2^-58): the specification's example. A float64 would drop the last term.
    top, small = 0x78, 0x01  # 256 and 2^-9 in E4M3
    a = matrix([[(127, block(E4M3_ONE)), (87, block(top, small))]], MXFP8_E4M3)
    b = matrix([[(127, block(E4M3_ONE)), (127, block(top, small))]], MXFP8_E4M3)
    for profile in ("exact", "ordered"):
        assert bits_of(scaled_gemm(a, b, profile=profile)).tolist() == [[0x3F800001]]
    # 57344^2 - 57344^2 + 2^-32 in one block of E5M2.
    big = 0x7B
    a = matrix([[(127, block(big, big, 0x01))]], MXFP8_E5M2)
    b = matrix([[(127, block(big, big | 0x80, 0x01))]], MXFP8_E5M2)
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
    a, b = (matrix([[(127, codes) for codes in side]], block_format) for side in (left, right))
    bits = {"nan": 0x7FC00000, "inf": 0x7F800000, "-inf": 0xFF800000}[want]
    out = scaled_gemm(a, b, profile=profile)
    assert out.view(np.uint32).tolist() == [[bits]]
    half = scaled_gemm(a, b, profile=profile, out_dtype="bfloat16")
    assert half.view(np.uint16).tolist() == [[bits >> 16]]


@pytest.mark.clause("gemm.special", evidence="known answer")
def test_a_sum_that_overflowed_meets_the_other_infinity():
    largest = (254, block(0x7B))
    a = matrix([[largest, (127, block(E5M2_INF | 0x80))]], MXFP8_E5M2)
    b = matrix([[largest, (127, block(E5M2_ONE))]], MXFP8_E5M2)
    assert scaled_gemm(a, b, profile="ordered").view(np.uint32).tolist() == [[0x7FC00000]]
    assert scaled_gemm(a, b, profile="exact").tolist() == [[-np.inf]]


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
    a, b = (matrix([[(127, block(one))]], *how) for one, *how in zip(ones, formats, prescaled, strict=True))
    for profile in ("exact", "ordered"):
        assert scaled_gemm(a, b, profile=profile).view(np.uint32).tolist() == [[bits]]


@pytest.mark.clause("gemm.bounded", "gemm.special", evidence="known answer")
def test_the_bound_counts_products_of_finite_elements_alone():
    a = matrix([[(127, [E5M2_INF, *[E5M2_ONE] * 31])]], MXFP8_E5M2)
    b = matrix([[(127, [E5M2_ONE] * 32)]], MXFP8_E5M2)
    assert bounded_tolerance(a, b, "fp32")[0, 0] == pytest.approx(32 * 2.0**-24 * 31, rel=1e-6)


@pytest.mark.clause("gemm.operands", evidence="known answer")
def test_two_block_lengths_are_refused():
    short = replace(MXFP8_E4M3, name="short", k=16)
    a = MXArray(np.zeros((1, 64), np.uint8), np.zeros((1, 4), np.uint8), (1, 64), 1, format=short)
    with pytest.raises(ShapeError, match="block lengths differ: 16 in SHORT and 32 in MXFP8 E4M3; both"):
        scaled_gemm(a, quantize(np.ones((1, 64), np.float32), OperandSpec(MXFP8_E4M3)))


@pytest.mark.clause("gemm.operands", "gemm.output", evidence="known answer")
def test_operands_that_do_not_fit():
    x = np.random.default_rng(0).standard_normal((64, 96)).astype(np.float32)
    q = quantize(x)
    with pytest.raises(ShapeError, match="contraction lengths differ: 96"):
        scaled_gemm(q, quantize(x, axis=0))
    with pytest.raises(ShapeError, match="different Hadamard transforms"):
        scaled_gemm(q, quantize(x, OperandSpec(hadamard=16)))
    with pytest.raises(ShapeError, match="must have two axes"):
        scaled_gemm(quantize(x[None]), q)
    with pytest.raises(DtypeError, match="not float16"):
        scaled_gemm(q, q, out_dtype="float16")
    with pytest.raises(RecipeError, match="'fast' is not one of exact, ordered, bounded"):
        scaled_gemm(q, q, profile="fast")


@pytest.mark.clause("quantize.padding")
def test_padding_of_both_operands_adds_nothing():
    x = np.random.default_rng(0).standard_normal((5, 40)).astype(np.float32)
    q = quantize(x, pad=True)
    assert (unpack(q.codes, E2M1)[:, 40:] == 0).all()
    wide = quantize(np.pad(x, [(0, 0), (0, 24)]))
    np.testing.assert_array_equal(scaled_gemm(q, q), scaled_gemm(wide, wide))
