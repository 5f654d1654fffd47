"""Scaled GEMM: the exact and ordered profiles against the oracle, and the bound of the bounded one."""

import itertools
from dataclasses import replace
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
from differential import bits_of
from mxref import MXArray, OperandSpec, quantize, scaled_gemm
from mxref.block_dots import block_dots
from mxref.errors import DtypeError, RecipeError, ShapeError
from mxref.formats import BLOCK_FORMATS, E2M1, MXFP4, MXFP8_E4M3, MXFP8_E5M2
from mxref.gemm import bounded_tolerance, prescale_product
from mxref.packing import pack, unpack
from strategies import gemm_operands, nearly_tied_operands


def matrix(rows, prescale=False, block_format=MXFP4):
    """The MXArray whose rows are lists of (scale byte, 32 codes)."""
    k = 32 * len(rows[0])
    codes = np.array([[c for _, block in row for c in block] for row in rows], np.uint8).reshape(len(rows), k)
    scales = np.array([[byte for byte, _ in row] for row in rows], np.uint8).reshape(len(rows), k // 32)
    packed = pack(codes, block_format.element)
    return MXArray(packed, scales, (len(rows), k), 1, prescale=prescale, format=block_format)


@pytest.mark.clause(
    "gemm.block_dot", "gemm.exact", "gemm.ordered", "gemm.nan", "gemm.prescale", "gemm.output"
)
@settings(max_examples=300, deadline=None)
@given(gemm_operands(), st.sampled_from(["float32", "bfloat16"]), st.integers(0, 2))
def test_drawn_operands_match_the_oracle(operands, out, prescaled):
    a, b = operands
    qa, qb = matrix([a], prescale=prescaled > 0), matrix([b], prescale=prescaled > 1)
    exact = scaled_gemm(qa, qb, profile="exact", out_dtype=out)
    assert bits_of(exact).tolist() == [[oracle.gemm_exact(a, b, out, prescaled)]]
    ordered = scaled_gemm(qa, qb, profile="ordered", out_dtype=out)
    want = oracle.gemm_ordered(a, b, prescaled)
    want = want if out == "float32" else oracle.f32_bits_to_bf16_bits(want)
    assert bits_of(ordered).tolist() == [[want]]


@pytest.mark.clause("gemm.exact", "gemm.ordered", "gemm.operands")
@pytest.mark.parametrize("profile", ["exact", "ordered"])
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
@pytest.mark.parametrize("profile", ["exact", "ordered"])
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
@pytest.mark.parametrize("shape", [(0, 3), (3, 0), (0, 0)])
def test_empty(shape):
    a, b = (quantize(np.zeros((n, 64), np.float32)) for n in shape)
    for profile in ("exact", "ordered"):
        assert scaled_gemm(a, b, profile=profile).shape == shape
    k0 = quantize(np.zeros((2, 0), np.float32))
    assert scaled_gemm(k0, k0, profile="exact").view(np.uint32).tolist() == [[0, 0]] * 2


@pytest.mark.clause("gemm.bounded")
@pytest.mark.parametrize("out", ["float32", "bfloat16"])
@pytest.mark.parametrize("prescale", [False, True])
def test_ordered_is_a_member_of_bounded(out, prescale):
    rng = np.random.default_rng(0)
    spec = OperandSpec(prescale=prescale)
    a, b = (quantize((rng.standard_t(2, (n, 512))).astype(np.float32), spec) for n in (17, 9))
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
    got = bounded_tolerance(matrix(a, prescaled > 0), matrix(b, prescaled > 1), error_class)
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


# ---- formats other than MXFP4, and pairs of two ----

PAIRS = pytest.mark.parametrize(
    "pair",
    list(itertools.product(BLOCK_FORMATS.values(), repeat=2)),
    ids=lambda pair: "x".join(map(str, pair)),
)


def same(pair):
    """The oracle's own description of the elements of a pair of formats."""
    return tuple(oracle.ELEMENTS[each.element.name] for each in pair)


def operands_of(a, b, pair, prescaled=(False, False)):
    return [matrix([row], on, each) for row, on, each in zip((a, b), prescaled, pair, strict=True)]


def assert_oracle(a, b, pair, out="float32", prescaled=(False, False)):
    qa, qb = operands_of(a, b, pair, prescaled)
    exact = scaled_gemm(qa, qb, profile="exact", out_dtype=out)
    assert bits_of(exact).tolist() == [[oracle.gemm_exact(a, b, out, prescaled, same(pair))]]
    want = oracle.gemm_ordered(a, b, prescaled, same(pair))
    want = want if out == "float32" else oracle.f32_bits_to_bf16_bits(want)
    assert bits_of(scaled_gemm(qa, qb, profile="ordered", out_dtype=out)).tolist() == [[want]]


@pytest.mark.clause(
    "gemm.block_dot", "gemm.exact", "gemm.ordered", "gemm.special", "gemm.nan", "formats.mxfp8"
)
@PAIRS
def test_drawn_operands_of_any_pair_match_the_oracle(pair):
    @settings(max_examples=40, deadline=None)
    @given(gemm_operands(elements=same(pair), special=True), st.sampled_from(["float32", "bfloat16"]))
    def check(operands, out):
        assert_oracle(*operands, pair, out)

    check()


@pytest.mark.clause("gemm.ordered", "gemm.block_dot")
@PAIRS
def test_operands_that_all_but_tie_are_rounded_once(pair):
    @settings(max_examples=40, deadline=None)
    @given(nearly_tied_operands(same(pair)))
    def check(operands):
        assert_oracle(*operands, pair)

    check()


def of_e5m2(*numbers):
    values = list(MXFP8_E5M2.element.values)
    return [(127, [values.index(number) for number in numbers] + [0] * (32 - len(numbers)))]


@pytest.mark.clause("gemm.ordered", "gemm.block_dot", evidence="known answer")
@pytest.mark.parametrize(
    ("a", "b", "want"),
    [
        ((57344, 2.0**-16, -57344), (57344, 2.0**-16, 57344), 2.0**-32),
        # 2^30 + 2^6 is a tie of float32, which 2^-32 raises above.
        ((2.0**15, 8, 2.0**-16), (2.0**15, 8, 2.0**-16), 2.0**30 + 2.0**7),
    ],
    ids=["cancels", "tie"],
)
def test_a_dot_of_e5m2_that_float64_cannot_hold(a, b, want):
    assert np.float32(sum(p * q for p, q in zip(a, b, strict=True))) == (0 if want < 1 else 2.0**30) != want
    pair = MXFP8_E5M2, MXFP8_E5M2
    assert scaled_gemm(*operands_of(of_e5m2(*a), of_e5m2(*b), pair), profile="ordered")[0, 0] == want
    assert_oracle(of_e5m2(*a), of_e5m2(*b), pair)


@pytest.mark.clause("gemm.ordered", evidence="known answer")
def test_a_sum_that_float64_would_round_to_a_tie():
    """1, then 2^-24 + 2^-58: the real sum lies above the tie between 1 and 1 + 2^-23."""
    code = {value: code for code, value in enumerate(MXFP8_E4M3.element.magnitudes)}
    one, both = [code[1.0], *[0] * 31], [code[256.0], code[2.0**-9], *[0] * 30]
    a, b, pair = [(127, one), (87, both)], [(127, one), (127, both)], (MXFP8_E4M3, MXFP8_E4M3)
    assert np.float32(1 + (2.0**-24 + 2.0**-58)) == 1
    assert scaled_gemm(*operands_of(a, b, pair), profile="ordered")[0, 0] == 1 + 2.0**-23
    assert_oracle(a, b, pair)


@pytest.mark.clause("gemm.prescale", evidence="known answer")
@pytest.mark.parametrize(
    ("pair", "prescaled", "factor", "word"),
    [
        ((MXFP8_E4M3, MXFP8_E4M3), (True, False), Fraction(8, 7), 0x3F924925),
        ((MXFP8_E5M2, MXFP8_E4M3), (True, True), Fraction(64, 49), 0x3FA72F05),
        ((MXFP8_E4M3, MXFP4), (True, True), Fraction(32, 21), 0x3FC30C31),
        ((MXFP4, MXFP8_E4M3), (True, False), Fraction(4, 3), 0x3FAAAAAB),
        ((MXFP4, MXFP4), (True, True), Fraction(16, 9), 0x3FE38E39),
    ],
)
def test_the_factor_that_undoes_the_prescales(pair, prescaled, factor, word):
    a, b = ([(127, [each.element.values.index(1.0), *[0] * 31])] for each in pair)
    operands = operands_of(a, b, pair, prescaled)
    assert prescale_product(*operands) == 1 / factor
    for profile in ("exact", "ordered"):
        assert scaled_gemm(*operands, profile=profile).view(np.uint32)[0, 0] == word
    assert_oracle(a, b, pair, prescaled=prescaled)


@pytest.mark.clause("gemm.special", "conventions.nan", evidence="known answer")
@pytest.mark.parametrize("out", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("left", "right", "want"),
    [
        ("inf", "one", np.inf), ("-inf", "one", -np.inf), ("inf", "-one", -np.inf), ("inf", "zero", np.nan),
        ("nan", "zero", np.nan), ("nan", "one", np.nan), ("inf", "-inf", -np.inf), ("-nan", "inf", np.nan),
        ("inf inf", "one -one", np.nan), ("inf one", "one -inf", np.nan), ("inf one", "one inf", np.inf),
    ],
)  # fmt: skip
def test_special_codes_are_what_ieee_arithmetic_makes_of_them(left, right, want, out):
    codes = {"inf": 0x7C, "nan": 0x7E, "one": 0x3C, "zero": 0}
    codes |= {f"-{name}": code | 0x80 for name, code in codes.items()}
    rows = [[codes[name] for name in names.split()] for names in (left, right)]
    a, b = ([(127, row + [codes["one"]] * (32 - len(row)))] for row in rows)
    ones = [(127, [codes["one"]] * 32)]
    qa, qb = (matrix([row, ones], block_format=MXFP8_E5M2) for row in (a, b))
    nan, word = (0x7FC00000, "u4") if out == "float32" else (0x7FC0, "u2")
    for profile in ("exact", "ordered"):
        got = scaled_gemm(qa, qb, profile=profile, out_dtype=out)
        np.testing.assert_array_equal(got.astype(np.float64)[0, 0], want)
        assert got[1, 1] == 32
        assert not np.isnan(want) or got.view(word)[0, 0] == nan
    assert_oracle(a, b, (MXFP8_E5M2, MXFP8_E5M2), out)


@pytest.mark.clause("gemm.special", "gemm.ordered", evidence="known answer")
def test_an_infinity_after_an_overflow_of_the_other_sign_is_nan_in_ordered_alone():
    top, inf, one = 0x7B, 0x7C, 0x3C
    a = [(254, [top] * 32), (127, [inf | 0x80, *[one] * 31])]
    b = [(254, [top] * 32), (127, [one] * 32)]
    operands = operands_of(a, b, (MXFP8_E5M2, MXFP8_E5M2))
    assert np.isnan(scaled_gemm(*operands, profile="ordered")[0, 0])
    assert scaled_gemm(*operands, profile="exact")[0, 0] == -np.inf
    assert_oracle(a, b, (MXFP8_E5M2, MXFP8_E5M2))


@pytest.mark.clause("gemm.bounded")
@PAIRS
def test_the_bound_of_any_pair_is_that_of_fractions(pair):
    rng = np.random.default_rng(5)
    a, b = (
        [(int(rng.integers(110, 140)), rng.integers(0, each.element.max_code + 1, 32).tolist()) for _ in "12"]
        for each in pair
    )
    operands = operands_of(a, b, pair, (True, True))
    ea, eb = same(pair)
    total = sum(
        oracle.block_dot(left, right, (ea, eb)) * Fraction(2) ** (byte_a + byte_b - 254)
        for (byte_a, left), (byte_b, right) in zip(a, b, strict=True)
    ) / prescale_product(*operands)
    want = (64 + 2) * Fraction(1, 1 << 24) * total + 64 * Fraction(1, 1 << 149)
    assert bounded_tolerance(*operands, "fp32")[0, 0] == pytest.approx(float(want), rel=1e-12)


@pytest.mark.clause("gemm.bounded", "gemm.special", evidence="known answer")
def test_the_bound_counts_finite_products_alone():
    a, b = operands_of([(127, [0x7C, *[0x3C] * 31])], [(127, [0x3C] * 32)], (MXFP8_E5M2, MXFP8_E5M2))
    assert bounded_tolerance(a, b, "fp32")[0, 0] == pytest.approx(32 * 2.0**-24 * 31, rel=1e-6)


@pytest.mark.clause("gemm.operands", evidence="known answer")
def test_two_block_lengths_are_refused():
    short = replace(MXFP8_E4M3, name="short", k=16)
    a = MXArray(np.zeros((1, 64), np.uint8), np.zeros((1, 4), np.uint8), (1, 64), 1, format=short)
    with pytest.raises(ShapeError, match="block lengths differ: 16 in SHORT and 32 in MXFP8 E4M3; both"):
        scaled_gemm(a, quantize(np.ones((1, 64), np.float32), OperandSpec(MXFP8_E4M3)))
