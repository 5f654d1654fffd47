"""The number formats, as data, against the oracle and ml_dtypes."""

import ml_dtypes
import numpy as np
import pytest

import oracle
from mxref.formats import E2M1, E4M3, E5M2, E8M0, MXFP4


@pytest.mark.clause("formats.e2m1")
def test_the_table_of_magnitudes_is_the_formats():
    values = [*E2M1.magnitudes, *(-v for v in E2M1.magnitudes)]
    assert values == [float(oracle.element_value(code)) for code in range(16)]
    assert E2M1.sign == 0b1000
    assert E2M1.max_value == max(E2M1.magnitudes)


@pytest.mark.clause("formats.e8m0", "formats.mxfp4", evidence="known answer")
def test_blocks_and_scales_are_those_of_the_standard():
    """OCP MX v1.0, table 1: MXFP4 has FP4 (E2M1) elements, block size 32 and an 8-bit E8M0 scale."""
    assert (MXFP4.element, MXFP4.scale, MXFP4.k) == (E2M1, E8M0, 32)
    assert (E8M0.bias, E8M0.min_exponent, E8M0.max_exponent, E8M0.nan_code) == (127, -127, 127, 255)


@pytest.mark.clause("formats.fp8", evidence="peer")
@pytest.mark.parametrize("format", [E4M3, E5M2])
def test_fp8_formats_are_those_of_ml_dtypes(format):
    info = ml_dtypes.finfo(format.dtype)
    assert format.max_value == float(info.max)
    assert (info.nmant, info.nexp) == (format.mantissa_bits, format.exponent_bits)
    assert float(info.smallest_normal) == 2.0 ** (1 - format.bias)


@pytest.mark.clause("formats.fp8", evidence="peer")
@pytest.mark.parametrize("format", [E4M3, E5M2])
def test_the_oracle_decodes_fp8_as_ml_dtypes_does(format):
    codes = np.arange(256, dtype=np.uint8)
    want = codes.view(getattr(ml_dtypes, format.dtype)).astype(np.float64)
    for code, value in zip(codes.tolist(), want.tolist(), strict=True):
        got = oracle.fp8_value(code, format.name)
        assert np.isnan(value) or abs(value) == np.inf if got is None else float(got) == value
