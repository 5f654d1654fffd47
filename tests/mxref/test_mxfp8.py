"""MXFP8 in the reference against the oracle: elements, scales, roundings, whole quantizations, and the way back."""

from __future__ import annotations

from dataclasses import replace
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
import strategies
from differential import assert_same_blocks, bits_of, oracle_quantize, oracle_quantize_array
from mxref import (
    BlockShape,
    MXArray,
    Nonfinite,
    OperandSpec,
    Rounding,
    ScaleRule,
    SignPolicy,
    Stream,
    dequantize,
    quantize,
)
from mxref.errors import NonfiniteError, ShapeError
from mxref.formats import BLOCK_FORMATS, E8M0, FORMATS, MXFP4, MXFP8_E4M3, MXFP8_E5M2
from mxref.layouts.packed import pack, unpack
from mxref.placement import Placement
from mxref.steps.rounding import apply_prescale, round_magnitude
from mxref.steps.scale import scale_code, scale_value

MXFP8 = pytest.mark.parametrize("block_format", [MXFP8_E4M3, MXFP8_E5M2], ids=str)
EVERY = pytest.mark.parametrize("block_format", BLOCK_FORMATS.values(), ids=str)
STREAM = Stream(0x0123456789ABCDEF, step=3, layer=5, operand=4)
TYPES = {"E4M3": ml_dtypes.float8_e4m3fn, "E5M2": ml_dtypes.float8_e5m2}


def element_of(block_format):
    return oracle.ELEMENTS[block_format.element.name]


# ---- formats ----


@pytest.mark.clause("formats.element", "formats.mxfp8", "formats.fp8", "formats.e2m1")
@EVERY
def test_the_numbers_of_an_element_are_the_oracles(block_format):
    ours, theirs = block_format.element, element_of(block_format)
    assert (ours.bits, ours.sign, ours.specials) == (theirs.bits, theirs.sign, theirs.specials)
    assert (ours.max_exponent, ours.max_code) == (theirs.largest_exponent, theirs.top)
    assert (ours.max_value, ours.prescale) == (float(theirs.largest), float(theirs.prescale))
    assert list(ours.magnitudes) == [float(value) for value in theirs.grid]
    for code, value in enumerate(ours.values):
        kind = theirs.kind(code)
        assert kind == ("nan" if np.isnan(value) else "infinite" if np.isinf(value) else "finite")
        if kind == "finite":
            assert Fraction(value) == theirs.value(code)
        if kind != "nan":
            assert np.signbit(value) == (code >= theirs.sign)


@pytest.mark.clause("formats.mxfp8", evidence="known answer")
def test_the_block_formats_of_the_standard():
    """OCP MX v1.0, table 1: MXFP8 has FP8 (E5M2 or E4M3) elements, block size 32 and an 8-bit E8M0 scale."""
    for name, element in (("mxfp8_e4m3", "E4M3"), ("mxfp8_e5m2", "E5M2")):
        block_format = BLOCK_FORMATS[name]
        assert (block_format.element.name, block_format.scale, block_format.k) == (element, E8M0, 32)
        assert str(block_format) == name
        assert FORMATS[name] is block_format
        assert block_format.code_bytes(96) == 96
    assert MXFP4.code_bytes(96) == 48


# ---- scales ----


@pytest.mark.clause(
    "scale.rule.floor", "scale.rule.ceil", "scale.rule.rceil", "scale.rule.even", "scale.clamp"
)
@pytest.mark.parametrize("rule", ScaleRule)
@MXFP8
def test_every_exponent_and_turning_mantissa_matches_the_oracle(rule, block_format):
    element = element_of(block_format)
    turns = {m + d for m in strategies.amax_mantissas(element) for d in (-1, 0, 1)}
    mantissas = [m for m in sorted(turns) if 0 <= m < 1 << 23]
    bits = [e << 23 | m for e in range(255) for m in mantissas if e or m]
    got = scale_code(np.array(bits, np.uint32), rule, block_format.element)
    assert got.dtype == np.uint8
    assert got.tolist() == [oracle.shared_scale(b, rule.value, element) for b in bits]


@pytest.mark.clause(
    "scale.rule.floor", "scale.rule.ceil", "scale.rule.rceil", "scale.rule.even", evidence="known answer"
)
@pytest.mark.parametrize(
    ("block_format", "rule", "low", "high"),
    [
        (MXFP8_E4M3, "floor", 256, 512),
        (MXFP8_E4M3, "ceil", 128, 256),
        (MXFP8_E4M3, "rceil", 224, 448),
        (MXFP8_E4M3, "even", 248, 496),
        (MXFP8_E5M2, "floor", 2**15, 2**16),
        (MXFP8_E5M2, "ceil", 2**14, 2**15),
        (MXFP8_E5M2, "rceil", 28672, 57344),
        (MXFP8_E5M2, "even", 30720, 61440),
    ],
    ids=str,
)
def test_amax_lands_in_the_documented_range(block_format, rule, low, high):
    bits = np.random.default_rng(0).integers(16 << 23, 0x7F800000, 20000, dtype=np.uint32)
    codes = scale_code(bits, ScaleRule(rule), block_format.element)
    ratio = bits.view(np.float32).astype(np.float64) / scale_value(codes)
    upper_ends = rule in ("ceil", "rceil")
    inside = (ratio > low) & (ratio <= high) if upper_ends else (ratio >= low) & (ratio < high)
    assert inside.all()


# ---- elements ----


def turns(element):
    """Every grid point and tie with its neighbours, beyond the largest, and draws of every binade."""
    grid = np.array([float(v) for v in element.grid])
    exact = np.concatenate([grid, (grid[1:] + grid[:-1]) / 2, grid[-1] * np.array([1.03, 1.0714286, 2.0])])
    exact = exact.astype(np.float32)
    rng = np.random.default_rng(1)
    spread = np.ldexp(rng.uniform(1, 2, 1500), rng.integers(-20, element.largest_exponent + 2, 1500))
    near = [np.nextafter(exact, np.float32(d)) for d in (0, 1e9)]
    tiny = np.array([1e-45, 1.1754944e-38, 2.0**-40], np.float32)
    return np.concatenate([exact, *near, spread.astype(np.float32), tiny])


@pytest.mark.clause("rounding.rne", "rounding.rna", "rounding.rtz", "rounding.saturate")
@pytest.mark.parametrize("rounding", [Rounding.RNE, Rounding.RNA, Rounding.RTZ])
@MXFP8
def test_rounding_matches_the_oracle_at_and_beside_every_turn(block_format, rounding):
    element = element_of(block_format)
    v = turns(element)
    want = [oracle.round_element(Fraction(float(x)), rounding.value, element=element) for x in v]
    assert round_magnitude(v, rounding, block_format.element).tolist() == want


@pytest.mark.clause("rounding.rne", "rounding.rna", "rounding.saturate", evidence="known answer")
@pytest.mark.parametrize(
    ("block_format", "ties", "rne", "rna"),
    [
        (MXFP8_E4M3, [2.0**-10, 1.0625, 1.1875, 432, 480], [0, 1, 1.25, 448, 448], [2.0**-9, 1.125, 1.25, 448, 448]),
        (MXFP8_E5M2, [2.0**-17, 1.125, 1.375, 61440], [0, 1, 1.5, 57344], [2.0**-16, 1.25, 1.5, 57344]),
    ],
    ids=str,
)  # fmt: skip
def test_ties(block_format, ties, rne, rna):
    for rounding, values in ((Rounding.RNE, rne), (Rounding.RNA, rna)):
        codes = round_magnitude(np.array(ties, np.float32), rounding, block_format.element)
        assert [block_format.element.values[c] for c in codes] == values


@pytest.mark.clause("rounding.rne", evidence="peer")
@MXFP8
def test_rne_inside_the_range_is_the_cast_of_ml_dtypes(block_format):
    v = turns(element_of(block_format))
    v = v[v <= block_format.element.max_value]
    want = v.astype(TYPES[block_format.element.name]).view(np.uint8)
    assert round_magnitude(v, Rounding.RNE, block_format.element).tolist() == want.tolist()


@pytest.mark.clause("rounding.sr", "rounding.saturate")
@pytest.mark.parametrize("bits", [1, 8, 16, 22])
@MXFP8
def test_sr_matches_the_oracle(block_format, bits):
    element = element_of(block_format)
    v, rng = turns(element), np.random.default_rng(bits)
    top = (1 << bits) - 1
    for r in (np.zeros(v.size), np.full(v.size, top), rng.integers(0, top + 1, v.size)):
        r = r.astype(np.uint32)
        pairs = zip(v, r.tolist(), strict=True)
        want = [oracle.round_element(Fraction(float(x)), "sr", i, bits, element) for x, i in pairs]
        assert round_magnitude(v, Rounding.SR, block_format.element, r, bits).tolist() == want


@pytest.mark.clause("rounding.prescale", "conventions.arithmetic")
@MXFP8
def test_the_prescale_is_one_float32_multiply_by_7_8(block_format):
    v = np.random.default_rng(3).integers(0, 0x48000000, 3000, dtype=np.uint32).view(np.float32)
    want = [oracle.f32_mul(int(b), 0x3F600000) for b in v.view(np.uint32)]
    assert apply_prescale(v, block_format.element).view(np.uint32).tolist() == want


# ---- whole quantizations ----

TREATMENTS = (
    *(OperandSpec(scale_rule=rule) for rule in ScaleRule),
    OperandSpec(scale_rule="rceil", rounding="rna", zero_scale=127),
    OperandSpec(scale_rule="even", rounding="rtz"),
    OperandSpec(rounding="sr", prescale=True),
    OperandSpec(rounding="sr", sr_bits=22),
)


@pytest.mark.clause(
    "formats.mxfp8",
    "quantize.order",
    "scale.amax",
    "scale.zero",
    "scale.nonfinite",
    "scale.clamp",
    "scale.block.row",
    "rounding.scaled",
    "rounding.sign",
    "rounding.prescale",
    "rounding.saturate",
)
@pytest.mark.parametrize("treatment", TREATMENTS, ids=lambda s: f"{s.scale_rule}-{s.rounding}-{s.sr_bits}")
@MXFP8
def test_crafted_blocks_match_the_oracle(block_format, treatment):
    spec = replace(treatment, format=block_format)
    element = element_of(block_format)
    x, names = strategies.crafted_blocks(element), strategies.crafted_names(element)
    q = quantize(x, spec, placement=Placement(STREAM))
    want = oracle_quantize(x, spec, STREAM)
    assert_same_blocks(unpack(q.codes, block_format.element), q.scales, *want, names)


specs = st.builds(
    OperandSpec,
    format=st.sampled_from([MXFP8_E4M3, MXFP8_E5M2]),
    scale_rule=st.sampled_from(ScaleRule),
    rounding=st.sampled_from(Rounding),
    sr_bits=st.integers(1, 22),
    zero_scale=st.sampled_from([0, 127]),
    prescale=st.booleans(),
    hadamard=st.sampled_from([0, 0, 16, 32]),
)


@pytest.mark.clause("quantize.order", "rounding.scaled", "scale.amax")
@settings(max_examples=150, deadline=None)
@given(spec=specs, data=st.data())
def test_drawn_blocks_match_the_oracle(spec, data):
    x = data.draw(strategies.any_blocks(element=element_of(spec.format)))[None]
    with np.errstate(all="ignore"):
        q = quantize(x, spec, placement=Placement(STREAM))
    want = oracle_quantize(x, spec, STREAM)
    assert_same_blocks(unpack(q.codes, spec.format.element), q.scales, *want)


@pytest.mark.clause("scale.block.tile", "quantize.axis", "quantize.padding", "quantize.parts", "random.index")
@pytest.mark.parametrize("block", BlockShape)
@pytest.mark.parametrize("hadamard", [0, 64])
@MXFP8
def test_tiles_axes_padding_and_parts_match_the_oracle(block_format, hadamard, block):
    spec = OperandSpec(
        format=block_format, rounding="sr", sr_bits=20, block=block, hadamard=hadamard, scale_rule="even",
        signs=SignPolicy.PER_STEP_LAYER if hadamard else SignPolicy.NONE,
    )  # fmt: skip
    x = np.random.default_rng(2).standard_t(2, (40, 2, 32)).astype(np.float32)
    where = {"origin": (64, 1, 32), "global_shape": (104, 4, 96)}
    q = quantize(x, spec, axis=0, placement=Placement(STREAM, **where), pad=True)
    codes, scales = oracle_quantize_array(x, spec, STREAM, axis=0, pad=True, **where)
    assert q.codes.shape == (2, 32, 64)
    assert_same_blocks(unpack(q.codes, block_format.element), q.scales, codes, scales)
    if block is BlockShape.TILE:
        assert (q.scales == q.scales[:, :1]).all()


@pytest.mark.clause("scale.nonfinite", evidence="known answer")
@MXFP8
def test_nan_and_infinity_are_the_policys_affair(block_format):
    x = np.ones((1, 64), np.float32)
    x[0, 5] = np.inf
    q = quantize(x, OperandSpec(format=block_format))
    assert q.scales[0].tolist() == [255, 127 - block_format.element.max_exponent]
    assert not q.codes[0, :32].any()
    with pytest.raises(NonfiniteError):
        quantize(x, OperandSpec(format=block_format, nonfinite=Nonfinite.RAISE))


@pytest.mark.clause("quantize.length", "quantize.parts", evidence="known answer")
@MXFP8
def test_lengths_that_do_not_fit_are_refused(block_format):
    with pytest.raises(ShapeError, match="40"):
        quantize(np.ones((2, 40), np.float32), OperandSpec(format=block_format))
    placement = Placement(origin=(0, 16), global_shape=(2, 64))
    with pytest.raises(ShapeError, match="16"):
        quantize(np.ones((2, 32), np.float32), OperandSpec(format=block_format), placement=placement)


# ---- storage and the way back ----


@pytest.mark.clause("packing.bytes", "packing.scales", evidence="known answer")
@MXFP8
def test_a_code_of_8_bits_is_a_byte(block_format):
    codes = np.arange(256, dtype=np.uint8).reshape(4, 64)
    stored = pack(codes, block_format.element)
    np.testing.assert_array_equal(stored, codes)
    np.testing.assert_array_equal(unpack(stored, block_format.element), codes)
    q = quantize(np.ones((3, 96), np.float32), OperandSpec(format=block_format))
    one = block_format.element.magnitudes.index(2.0**block_format.element.max_exponent)
    assert (q.codes.shape, q.scales.shape) == ((3, 96), (3, 3))
    assert (q.codes == one).all()


@pytest.mark.clause("dequantize.value", "dequantize.overflow", "dequantize.nan", "conventions.nan")
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
@MXFP8
def test_every_code_under_every_byte_decodes_as_the_oracle_does(block_format, dtype):
    element = element_of(block_format)
    codes = np.tile(np.arange(256, dtype=np.uint8), (256, 1))
    scales = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 8, axis=1)
    values = dequantize(MXArray(codes, scales, codes.shape, 1, format=block_format), dtype)
    if dtype == "float64":
        real = np.array(block_format.element.values)
        with np.errstate(invalid="ignore"):
            want = real[None, :] * scale_value(scales[:, :1])
        np.testing.assert_array_equal(values, want)
        return
    value = oracle.dequantize_f32 if dtype == "float32" else oracle.dequantize_bf16
    want = [[value(byte, code, element) for code in range(256)] for byte in range(256)]
    words = np.uint32 if dtype == "float32" else np.uint16
    assert values.view(words).tolist() == want


@pytest.mark.clause("dequantize.value", evidence="known answer")
def test_the_smallest_values_round_in_bfloat16():
    # 2^-9 under byte 0 is 2^-136, and the smallest bfloat16 is 2^-133: 5 of them round to it, 4 tie to 0.
    codes = np.zeros((1, 32), np.uint8)
    codes[0, :3] = 4, 5, 0x85
    q = MXArray(codes, np.zeros((1, 1), np.uint8), (1, 32), 1, format=MXFP8_E4M3)
    assert bits_of(dequantize(q, "bfloat16"))[0, :3].tolist() == [0, 1, 0x8001]
    assert bits_of(dequantize(q, "float32"))[0, :3].tolist() == [4 << 13, 5 << 13, 0x80000000 | 5 << 13]
