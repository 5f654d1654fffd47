"""Nibbles, and exchange with ml_dtypes."""

import ml_dtypes
import numpy as np
import pytest

import oracle
from mxref.errors import DtypeError, ShapeError
from mxref.formats import (
    E2M1,
    E2M3,
    E4M3,
    E5M2,
    E8M0,
    MXFP4,
    MXFP6_E2M3,
    MXFP6_E3M2,
    MXFP8_E4M3,
    MXFP8_E5M2,
    BlockFormat,
    ElementFormat,
    Specials,
)
from mxref.layouts.packed import from_ml_dtypes, pack, to_ml_dtypes, unpack


@pytest.mark.clause("packing.nibbles", evidence="known answer")
def test_element_2i_is_in_the_low_nibble():
    assert pack(np.array([1, 2, 15, 0], np.uint8), E2M1).tolist() == [0x21, 0x0F]
    assert unpack(np.array([0x21, 0x0F], np.uint8), E2M1).tolist() == [1, 2, 15, 0]


@pytest.mark.clause("packing.nibbles")
def test_every_byte_survives_a_round_trip():
    packed = np.arange(256, dtype=np.uint8).reshape(4, 64)
    assert unpack(packed, E2M1).shape == (4, 128)
    np.testing.assert_array_equal(pack(unpack(packed, E2M1), E2M1), packed)


@pytest.mark.clause("packing.exchange", "packing.nibbles", "formats.e2m1", evidence="peer")
def test_ml_dtypes_reads_the_same_values():
    codes = pack(np.arange(32, dtype=np.uint8)[None] % 16, E2M1)
    scales = np.array([[130]], np.uint8)
    elements, shared = to_ml_dtypes(codes, scales, MXFP4)
    assert elements.dtype == ml_dtypes.float4_e2m1fn
    assert elements.astype(np.float64)[0].tolist() == [float(oracle.element_value(i % 16)) for i in range(32)]
    assert shared.astype(np.float64).tolist() == [[8.0]]
    back = from_ml_dtypes(elements, shared, MXFP4)
    np.testing.assert_array_equal(back[0], codes)
    np.testing.assert_array_equal(back[1], scales)


@pytest.mark.clause("packing.exchange", evidence="known answer")
def test_errors():
    with pytest.raises(ShapeError, match="cannot pack 3 codes"):
        pack(np.zeros(3, np.uint8), E2M1)
    with pytest.raises(DtypeError, match="code 16 does not fit"):
        pack(np.array([16, 0], np.uint8), E2M1)
    with pytest.raises(DtypeError, match="view the codes"):
        from_ml_dtypes(np.zeros(32, np.float32), np.zeros(1, np.float32), MXFP4)


@pytest.mark.clause("packing.bytes", evidence="known answer")
@pytest.mark.parametrize("element", [E4M3, E5M2], ids=lambda element: element.name)
def test_a_code_of_8_bits_is_a_byte_of_its_own(element):
    codes = np.arange(256, dtype=np.uint8).reshape(4, 64)
    packed = pack(codes, element)
    assert packed.tolist() == unpack(packed, element).tolist() == codes.tolist()
    assert not np.shares_memory(packed, codes)


@pytest.mark.clause("packing.sixes", evidence="known answer")
def test_codes_of_6_bits_fill_three_bytes_by_four():
    element = E2M3
    codes = np.array([0x01, 0x3F, 0x20, 0x15, 0, 0, 0, 0x3F], np.uint8)
    word = 0x01 | 0x3F << 6 | 0x20 << 12 | 0x15 << 18
    packed = pack(codes, element)
    assert packed.tolist() == [word & 255, word >> 8 & 255, word >> 16, 0, 0, 0xFC]
    assert unpack(packed, element).tolist() == codes.tolist()
    with pytest.raises(ShapeError, match="cannot pack 6 codes of E2M3: 4 go into 3 bytes"):
        pack(codes[:6], element)


@pytest.mark.clause(
    "packing.exchange", "packing.bytes", "packing.sixes", "formats.mxfp8", "formats.mxfp6", evidence="peer"
)
@pytest.mark.parametrize("block_format", [MXFP8_E4M3, MXFP8_E5M2, MXFP6_E2M3, MXFP6_E3M2], ids=str)
def test_ml_dtypes_reads_the_values_of_mxfp8_and_mxfp6(block_format):
    bits = block_format.element.bits
    codes = pack(np.arange(1 << bits, dtype=np.uint8).reshape(-1, 32), block_format.element)
    scales = np.full((len(codes), 1), 130, np.uint8)
    elements, shared = to_ml_dtypes(codes, scales, block_format)
    assert elements.dtype == getattr(ml_dtypes, block_format.element.dtype)
    np.testing.assert_array_equal(
        elements.astype(np.float64).reshape(-1), np.array(block_format.element.values)
    )
    assert shared.dtype == ml_dtypes.float8_e8m0fnu
    back = from_ml_dtypes(elements, shared, block_format)
    np.testing.assert_array_equal(back[0], codes)
    np.testing.assert_array_equal(back[1], scales)
    with pytest.raises(DtypeError, match="expected float4_e2m1fn and float8_e8m0fnu, got float[68]"):
        from_ml_dtypes(elements, shared, MXFP4)


@pytest.mark.clause("packing.exchange", evidence="known answer")
def test_a_format_that_ml_dtypes_lacks_is_refused():
    powers = ElementFormat("E3M0", 3, 0, bias=3, specials=Specials.NONE)
    with pytest.raises(DtypeError, match="no type for E3M0 of MXE3M0"):
        to_ml_dtypes(np.zeros(16, np.uint8), np.zeros(1, np.uint8), BlockFormat("mxe3m0", powers, E8M0, 32))
