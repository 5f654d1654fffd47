"""The number formats, as data, against the oracle and ml_dtypes."""

import copy
import pickle
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest

import oracle
from mxref import OperandSpec, dequantize, quantize
from mxref.errors import RecipeError
from mxref.formats import (
    BF16,
    BLOCK_FORMATS,
    E1M2,
    E2M1,
    E2M3,
    E3M2,
    E4M3,
    E5M2,
    E8M0,
    FORMATS,
    FP8,
    INT8,
    MXFP4,
    MXFP4_E1M2,
    MXFP6_E2M3,
    MXFP6_E3M2,
    MXFP8_E4M3,
    MXFP8_E5M2,
    MXINT8,
    NVFP4,
    UE4M3,
    UE5M3,
    BlockFormat,
    ElementFormat,
    Specials,
)
from mxref.steps.scale import ScaleRule, bump_above


@pytest.mark.clause("formats.e8m0", "formats.mxfp4", evidence="known answer")
def test_blocks_and_scales_are_those_of_the_standard():
    """OCP MX v1.0, table 1: MXFP4 has FP4 (E2M1) elements, block size 32 and an 8-bit E8M0 scale."""
    assert (MXFP4.element, MXFP4.scale, MXFP4.k) == (E2M1, E8M0, 32)
    assert (E8M0.bias, E8M0.min_exponent, E8M0.max_exponent, E8M0.nan_code) == (127, -127, 127, 255)


@pytest.mark.clause("formats.fp8", evidence="peer")
@pytest.mark.parametrize("format", [E4M3, E5M2])
def test_the_oracle_decodes_fp8_as_ml_dtypes_does(format):
    codes = np.arange(256, dtype=np.uint8)
    want = codes.view(getattr(ml_dtypes, format.dtype)).astype(np.float64)
    for code, value in zip(codes.tolist(), want.tolist(), strict=True):
        got = oracle.fp8_value(code, format.name)
        assert np.isnan(value) or abs(value) == np.inf if got is None else float(got) == value


@pytest.mark.clause("formats.element", "formats.e2m1", "formats.fp8", "formats.fp6", evidence="peer")
@pytest.mark.parametrize("element", [E2M1, E4M3, E5M2, E2M3, E3M2], ids=lambda e: e.name)
def test_every_code_has_the_value_that_ml_dtypes_gives_it(element):
    codes = np.arange(1 << element.bits, dtype=np.uint8)
    want = codes.view(getattr(ml_dtypes, element.dtype)).astype(np.float64)
    np.testing.assert_array_equal(np.array(element.values), want)
    finite = ~np.isnan(want)
    assert (np.signbit(element.values) == np.signbit(want))[finite].all()
    assert element.magnitudes == element.values[: element.max_code + 1]
    assert np.isfinite(element.magnitudes).all()
    assert not np.isfinite(element.values[element.max_code + 1 : element.sign]).any()


@pytest.mark.clause("formats.element", "formats.fp6", "formats.e1m2", evidence="known answer")
@pytest.mark.parametrize(
    ("element", "bits", "sign", "emax", "largest", "max_code", "smallest", "prescale"),
    [
        (E2M1, 4, 0x8, 2, 6, 0x7, 0.5, 0.75),
        (E4M3, 8, 0x80, 8, 448, 0x7E, 2.0**-9, 0.875),
        (E5M2, 8, 0x80, 15, 57344, 0x7B, 2.0**-16, 0.875),
        (E2M3, 6, 0x20, 2, 7.5, 0x1F, 1 / 8, 15 / 16),
        (E3M2, 6, 0x20, 4, 28, 0x1F, 1 / 16, 7 / 8),
        (E1M2, 4, 0x8, 0, 1.75, 0x7, 1 / 4, 7 / 8),
    ],
    ids=lambda value: getattr(value, "name", None),
)
def test_numbers_that_follow_from_the_bits(element, bits, sign, emax, largest, max_code, smallest, prescale):
    """OCP MX v1.0, section 5.3; OCP 8-bit Floating Point v1.0."""
    assert (element.bits, element.sign, element.max_exponent) == (bits, sign, emax)
    assert (element.max_value, element.max_code) == (largest, max_code)
    assert element.magnitudes[1] == 2.0**element.unit_exponent == smallest
    assert element.prescale == prescale


@pytest.mark.clause("formats.element", evidence="known answer")
def test_a_format_without_mantissa_has_powers_of_two():
    powers = ElementFormat("E3M0", 3, 0, bias=3, specials=Specials.NONE)
    assert powers.magnitudes == (0, 0.25, 0.5, 1, 2, 4, 8, 16)
    assert (powers.bits, powers.max_exponent, powers.prescale, powers.dtype) == (4, 4, 0.5, None)
    assert powers.precision == 0
    assert bump_above(ScaleRule.EVEN, powers) == 0x3FFFFF  # up from t = 2^23 - 2^22


@pytest.mark.clause("formats.int8")
def test_every_code_of_int8_has_the_oracle_s_value():
    same = oracle.ELEMENTS["INT8"]
    assert list(INT8.values) == [same.value(code) for code in range(256)]
    assert list(INT8.magnitudes) == same.grid
    assert (INT8.max_code, INT8.max_exponent, INT8.precision) == (same.top, same.largest_exponent, 6)
    assert INT8.prescale == same.prescale


@pytest.mark.clause("formats.scale", "formats.e8m0")
@pytest.mark.parametrize("scale", [E8M0, UE4M3, UE5M3], ids=lambda scale: scale.name)
def test_every_byte_of_a_scale_has_the_oracle_s_value(scale):
    same = oracle.SCALES[scale.name]
    want = [oracle.scale_value(byte, same) for byte in range(256)]
    assert [None if np.isnan(value) else value for value in scale.values] == want
    assert (scale.nan_code, scale.one_code, scale.max_value) == (same.nan, same.one, same.largest)


@pytest.mark.clause("formats.nvfp4", "formats.mxint8", evidence="known answer")
def test_nvfp4_and_mxint8():
    assert (NVFP4.element, NVFP4.scale, NVFP4.k, NVFP4.tensor_scale) == (E2M1, UE4M3, 16, True)
    assert (MXINT8.element, MXINT8.scale, MXINT8.k, MXINT8.tensor_scale) == (INT8, E8M0, 32, False)


@pytest.mark.clause("formats.e1m2", evidence="known answer")
def test_the_grid_of_e1m2_is_uniform():
    assert E1M2.values == tuple(sign * code / 4 for sign in (1, -1) for code in range(8))


@pytest.mark.clause("formats.mxfp8", "formats.mxfp6", "formats.mxfp4_e1m2", evidence="known answer")
@pytest.mark.parametrize(
    ("made", "title", "element", "size"),
    [
        (MXFP4, "MXFP4", E2M1, 48),
        (MXFP8_E4M3, "MXFP8 E4M3", E4M3, 96),
        (MXFP8_E5M2, "MXFP8 E5M2", E5M2, 96),
        (MXFP6_E2M3, "MXFP6 E2M3", E2M3, 72),
        (MXFP6_E3M2, "MXFP6 E3M2", E3M2, 72),
        (MXFP4_E1M2, "MXFP4 E1M2", E1M2, 48),
    ],
    ids=str,
)
def test_the_block_formats_have_32_elements_and_an_e8m0_scale(made, title, element, size):
    """OCP MX v1.0, table 1, for all but E1M2."""
    assert (made.title, made.element, made.scale, made.k) == (title, element, E8M0, 32)
    assert made.code_bytes(96) == size
    assert FORMATS[made.name] is made is BLOCK_FORMATS[made.name]


def test_the_formats_by_name():
    assert FORMATS == {"bf16": BF16, "fp8": FP8, **BLOCK_FORMATS}
    assert [f.kind for f in FORMATS.values()] == ["bf16", "fp8", *["block"] * len(BLOCK_FORMATS)]
    assert [str(f) for f in FORMATS.values()] == list(FORMATS)


@pytest.mark.parametrize("made", FORMATS.values(), ids=str)
def test_a_copy_of_a_format_is_the_format(made):
    assert pickle.loads(pickle.dumps(made)) is copy.deepcopy(made) is copy.copy(made) is made
    assert hash(made) == hash(made.name)


def test_a_copy_of_an_unregistered_format_is_equal_to_it():
    mine = BlockFormat("mine", E3M2, E8M0, k=16)
    assert pickle.loads(pickle.dumps(mine)) == copy.deepcopy(mine) == mine
    assert mine != BlockFormat("mine", E3M2, E8M0, k=32)


@pytest.mark.clause("formats.mxfp4")
@pytest.mark.parametrize(
    ("numbers", "problem"),
    [
        ({"k": 24}, "k = 24"), ({"k": 2}, "k = 2"), ({"tensor_scale": True}, "E8M0"),
        ({"element": ElementFormat("E3M1", 3, 1, bias=3, specials=Specials.NONE)}, "the 5 bits of E3M1"),
    ],
)  # fmt: skip
def test_a_block_format_that_means_nothing_is_refused_where_it_is_made(numbers, problem):
    with pytest.raises(RecipeError, match=problem):
        replace(MXFP4, name="mine", **numbers)


@pytest.mark.clause("scale.clamp")
def test_powers_of_two_of_another_bias_are_read_whole():
    shifted = replace(MXFP4, name="mine", scale=replace(E8M0, name="E8M0B126", bias=126))
    x = np.full((1, 32), 6.0, np.float32)
    assert quantize(x, OperandSpec(format=shifted)).scales == quantize(x).scales - 1
    assert np.array_equal(dequantize(quantize(x, OperandSpec(format=shifted))), x)
