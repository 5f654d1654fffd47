"""Shared scales against the oracle and ml_dtypes."""

import copy
import pickle
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

import oracle
from mxref import OperandSpec
from mxref.errors import RecipeError
from mxref.formats import E1M2, E2M1, E2M3, E3M2, E4M3, E5M2
from mxref.steps.scale import (
    EXPONENT_RULES,
    ScaleRule,
    bump_above,
    magnitude_bits,
    scale_code,
    scale_exponent,
    scale_value,
)
from strategies import amax_mantissas

ELEMENTS = pytest.mark.parametrize("element", [E2M1, E4M3, E5M2, E2M3, E3M2, E1M2], ids=lambda e: e.name)
MANTISSAS = (0, 1, 2, 0x3FFFFF, 0x400000, 0x400001, 0x5FFFFF, 0x600000, 0x600001, 0x7FFFFE, 0x7FFFFF)


@pytest.mark.clause(
    "scale.rule.floor", "scale.rule.ceil", "scale.rule.rceil", "scale.rule.even", "scale.clamp"
)
@ELEMENTS
@pytest.mark.parametrize("rule", EXPONENT_RULES)
def test_every_exponent_and_turning_mantissa_matches_the_oracle(rule, element):
    same = oracle.ELEMENTS[element.name]
    turns = {m + d for m in amax_mantissas(same) for d in (-1, 0, 1)} | set(MANTISSAS)
    mantissas = [m for m in sorted(turns) if 0 <= m < 1 << 23]
    bits = [e << 23 | m for e in range(255) for m in mantissas if e or m]
    got = scale_code(np.array(bits, np.uint32), rule, element)
    assert got.dtype == np.uint8
    assert got.tolist() == [oracle.shared_scale(b, rule.value, same) for b in bits]


THRESHOLDS = (">1.5", ">=1.75", ">1.3", ">=1.3", ">=1.00000011920928955078125", ">1", ">=1", ">=2", ">2")


@pytest.mark.clause("scale.rule.threshold")
@pytest.mark.parametrize("element", [E2M1, E4M3, E5M2], ids=lambda element: element.name)
@pytest.mark.parametrize("text", THRESHOLDS)
def test_thresholds_match_the_oracle_at_every_exponent(text, element):
    """At the mantissas beside the real number, and where other rules turn."""
    c = Fraction(text.lstrip(">="))
    at = int((c - 1) * 2**23)
    mantissas = {m for m in (*MANTISSAS, *range(at - 1, at + 3)) if 0 <= m < 1 << 23}
    # Below emax the scale is clamped whatever the rule.
    bits = [e << 23 | m for e in range(255) for m in sorted(mantissas) if e or m]
    want = [oracle.shared_scale(b, text, oracle.ELEMENTS[element.name]) for b in bits]
    assert scale_code(np.array(bits, np.uint32), ScaleRule(text), element).tolist() == want


@pytest.mark.clause("scale.rule.threshold", evidence="known answer")
def test_names_are_thresholds_of_their_element():
    for element, rceil, even in (
        (E2M1, ">1.5", ">=1.75"),
        (E4M3, ">1.75", ">=1.9375"),
        (E5M2, ">1.75", ">=1.875"),
    ):
        for name, text in (("floor", ">=2"), ("ceil", ">1"), ("rceil", rceil), ("even", even)):
            assert bump_above(ScaleRule(name), element) == bump_above(ScaleRule(text), element), (
                name,
                element,
            )
    assert bump_above(ScaleRule(">=1"), E2M1) == -1


@pytest.mark.clause("scale.rule.threshold", "recipe.unknown")
def test_a_threshold_is_its_text_without_zeros_that_change_nothing():
    rule = ScaleRule(">= 1.750")
    assert rule == ">=1.75"
    assert rule is ScaleRule(">=1.75")
    assert str(rule) == rule.value == ">=1.75"
    assert pickle.loads(pickle.dumps(rule)) is rule
    assert copy.deepcopy(rule) is rule
    assert list(ScaleRule) == ["floor", "ceil", "rceil", "even", "nearest"]
    for text in (">", ">0.5", ">2.1", ">=3", ">1.5.", "> =1.5", ">1e0", f">1.{'1' * 24}", ">\u0661"):
        with pytest.raises(RecipeError, match=r"scale_rule: .* is no threshold: write > or >= and a number"):
            OperandSpec(scale_rule=text)


@pytest.mark.clause("scale.clamp", evidence="known answer")
@pytest.mark.parametrize("rule", EXPONENT_RULES)
def test_the_two_lowest_exponents_give_byte_0_and_254_is_never_made(rule):
    low = np.arange(0, 2 << 23, 4097, dtype=np.uint32)
    assert not scale_code(low, rule, E2M1).any()
    assert scale_code(np.array([0x7F7FFFFF], np.uint32), rule, E2M1)[0] == (252 if rule == "floor" else 253)


@pytest.mark.clause("formats.e8m0", evidence="peer")
def test_all_256_codes_decode_as_ml_dtypes_does():
    codes = np.arange(256, dtype=np.uint8)
    want = codes.view(ml_dtypes.float8_e8m0fnu).astype(np.float64)
    np.testing.assert_array_equal(scale_value(codes), want)
    assert scale_value(codes)[0] == 2.0**-127
    assert scale_exponent(codes)[[0, 127, 254]].tolist() == [-127, 0, 127]


@pytest.mark.clause("scale.amax", evidence="known answer")
def test_magnitude_bits_put_nan_above_infinity():
    x = np.array([-np.inf, np.nan, -0.0, -1.0], np.float32)
    assert magnitude_bits(x).tolist() == [0x7F800000, 0x7FC00000, 0, 0x3F800000]


@pytest.mark.clause("scale.rule.rceil", "scale.rule.even", evidence="known answer")
@pytest.mark.parametrize(
    ("element", "rceil", "even"),
    [
        (E2M1, 0x400000, 0x5FFFFF),
        (E4M3, 0x600000, 0x77FFFF),
        (E5M2, 0x600000, 0x6FFFFF),
        (E2M3, 0x700000, 0x77FFFF),
        (E3M2, 0x600000, 0x6FFFFF),
        (E1M2, 0x600000, 0x6FFFFF),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_the_mantissas_above_which_the_rules_go_up(element, rceil, even):
    """The thresholds published for each element: RCEIL at its largest value, EVEN at half of its last place."""
    want = {ScaleRule.FLOOR: 0x7FFFFF, ScaleRule.CEIL: 0, ScaleRule.RCEIL: rceil, ScaleRule.EVEN: even}
    assert {rule: bump_above(rule, element) for rule in EXPONENT_RULES} == want


@pytest.mark.clause(
    "scale.rule.floor", "scale.rule.ceil", "scale.rule.rceil", "scale.rule.even", evidence="known answer"
)
@pytest.mark.parametrize(
    ("element", "rule", "low", "high", "low_allowed"),
    [
        (E2M1, "floor", 4, 8, True), (E2M1, "ceil", 2, 4, False), (E2M1, "rceil", 3, 6, False),
        (E2M1, "even", 3.5, 7, True),
        (E4M3, "floor", 256, 512, True), (E4M3, "ceil", 128, 256, False), (E4M3, "rceil", 224, 448, False),
        (E4M3, "even", 248, 496, True), (E5M2, "floor", 2**15, 2**16, True),
        (E5M2, "ceil", 2**14, 2**15, False), (E5M2, "rceil", 28672, 57344, False),
        (E5M2, "even", 30720, 61440, True), (E2M3, "floor", 4, 8, True), (E2M3, "ceil", 2, 4, False),
        (E2M3, "rceil", 3.75, 7.5, False), (E2M3, "even", 3.875, 7.75, True), (E3M2, "floor", 16, 32, True),
        (E3M2, "ceil", 8, 16, False), (E3M2, "rceil", 14, 28, False), (E3M2, "even", 15, 30, True),
        (E1M2, "floor", 1, 2, True), (E1M2, "ceil", 0.5, 1, False), (E1M2, "rceil", 0.875, 1.75, False),
        (E1M2, "even", 0.9375, 1.875, True),
    ],
    ids=lambda value: getattr(value, "name", None),
)  # fmt: skip
def test_amax_lands_in_the_documented_range(element, rule, low, high, low_allowed):
    bits = np.random.default_rng(0).integers(20 << 23, 0x7F000000, 20000, dtype=np.uint32)
    ratio = bits.view(np.float32).astype(np.float64) / scale_value(scale_code(bits, ScaleRule(rule), element))
    inside = (ratio >= low) & (ratio < high) if low_allowed else (ratio > low) & (ratio <= high)
    assert inside.all()
