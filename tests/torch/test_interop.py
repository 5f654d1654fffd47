"""Exchange with torch's FP4 and E8M0 types: the same bytes both ways."""

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from mxref import (
    MXArray,
    OperandSpec,
    Stream,
    dequantize,
    quantize,
)
from mxref.errors import (
    DtypeError,
    ShapeError,
)
from mxref.formats import (
    E2M1,
    E8M0,
    MXFP4_E1M2,
    MXFP6_E2M3,
    MXFP8_E4M3,
    MXFP8_E5M2,
    UE4M3,
    BlockFormat,
    ElementFormat,
    Specials,
)
from mxref.layouts.packed import pack
from mxref.placement import Placement
from mxref_torch.interop import (
    from_torch,
    to_torch,
)


@pytest.mark.clause("packing.exchange", "formats.e8m0", evidence="peer")
def test_every_byte_survives_both_ways():
    codes = np.arange(256, dtype=np.uint8).reshape(16, 16)
    scales = np.arange(0, 256, 16, dtype=np.uint8).reshape(16, 1)
    scales[-1] = 255
    q = MXArray(codes, scales, (16, 32), 1)
    elements, shared = to_torch(q)
    assert elements.dtype == torch.float4_e2m1fn_x2
    assert shared.dtype == torch.float8_e8m0fnu
    assert from_torch(elements, shared) == q
    np.testing.assert_array_equal(elements.view(torch.uint8).numpy(), codes)
    np.testing.assert_array_equal(shared.to(torch.float32).numpy()[:-1], np.exp2(scales[:-1] - 127.0))
    assert shared.to(torch.float32)[-1].isnan()


@pytest.mark.clause("packing.exchange", "packing.bytes", "formats.fp8", evidence="peer")
@pytest.mark.parametrize("block_format", [MXFP8_E4M3, MXFP8_E5M2], ids=str)
def test_mxfp8_has_torchs_type_of_its_element(block_format):
    codes = np.arange(256, dtype=np.uint8).reshape(4, 64)
    q = MXArray(codes, np.full((4, 2), 127, np.uint8), codes.shape, 1, format=block_format)
    elements, shared = to_torch(q)
    assert (
        elements.dtype == {"E4M3": torch.float8_e4m3fn, "E5M2": torch.float8_e5m2}[block_format.element.name]
    )
    assert from_torch(elements, shared) == q
    assert np.shares_memory(from_torch(elements, shared).codes, codes)
    np.testing.assert_array_equal(elements.to(torch.float32).numpy(), dequantize(q))


@pytest.mark.clause("packing.exchange", evidence="peer")
def test_nvfp4_has_torchs_type_of_its_scales_and_keeps_the_scale_of_the_tensor():
    q = quantize(np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32), OperandSpec("nvfp4"))
    elements, shared = to_torch(q)
    assert (elements.dtype, shared.dtype) == (torch.float4_e2m1fn_x2, torch.float8_e4m3fn)
    np.testing.assert_array_equal(shared.to(torch.float64).numpy(), np.array(UE4M3.values)[q.scales])
    assert from_torch(elements, shared, tensor_scale=q.tensor_scale) == q
    with pytest.raises(ShapeError, match="scale of the tensor"):
        from_torch(elements, shared)


def test_mxint8_has_torchs_own_integers():
    q = quantize(np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32), OperandSpec("mxint8"))
    elements, shared = to_torch(q)
    assert (elements.dtype, from_torch(elements, shared)) == (torch.int8, q)


def test_an_element_that_torch_has_no_type_for_is_refused():
    element = ElementFormat("E3M4", 3, 4, bias=3, specials=Specials.NONE)
    q = MXArray(
        np.zeros((1, 32), np.uint8), np.zeros((1, 1), np.uint8), (1, 32), 1,
        format=BlockFormat("mxe3m4", element, E8M0, k=32),
    )  # fmt: skip
    with pytest.raises(DtypeError, match="no type for the elements of MXE3M4"):
        to_torch(q)


def test_torch_reads_element_2i_in_the_low_nibble():
    values = [0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0]
    codes = pack(np.tile(np.arange(16, dtype=np.uint8), 2)[None], E2M1)
    elements, _ = to_torch(MXArray(codes, np.full((1, 1), 127, np.uint8), (1, 32), 1))
    packed = elements.view(torch.uint8)
    low, high = packed & 15, packed >> 4
    in_order = torch.stack([low, high], -1).reshape(-1)[:16]
    table = torch.tensor(values + [-v for v in values])
    assert table[in_order.long()].tolist() == table.tolist()


def test_metadata_and_the_transposed_layout_come_back():
    x = np.random.default_rng(0).standard_normal((64, 3)).astype(np.float32)
    spec = OperandSpec(prescale=True, hadamard=64)
    q = quantize(x, spec, axis=0, placement=Placement(Stream(1)))
    back = from_torch(*to_torch(q), shape=q.shape, axis=q.axis, prescale=q.prescale, rotation=q.rotation)
    assert back == q
    np.testing.assert_array_equal(dequantize(back), dequantize(q))
    assert np.shares_memory(back.codes, q.codes)


def test_a_read_only_array_is_exchanged_too():
    q = quantize(np.ones((1, 32), np.float32))
    q.codes.flags.writeable = False
    assert from_torch(*to_torch(q)) == q


@pytest.mark.parametrize("block_format", [MXFP6_E2M3, MXFP4_E1M2], ids=str)
def test_elements_that_torch_has_no_type_for_are_refused(block_format):
    with pytest.raises(DtypeError, match=f"no type for the elements of {block_format.title}"):
        to_torch(quantize(np.ones((1, 32), np.float32), OperandSpec(format=block_format)))


@pytest.mark.clause("packing.exchange", evidence="known answer")
def test_values_are_refused():
    with pytest.raises(
        DtypeError, match=r"expected torch\.float4_e2m1fn_x2 and torch\.float8_e8m0fnu; torch"
    ):
        from_torch(torch.zeros(1, 16), torch.zeros(1, 1))
    with pytest.raises(DtypeError, match="view the bytes"):
        from_torch(torch.zeros(1, 16, dtype=torch.uint8), torch.zeros(1, 1, dtype=torch.uint8))
    elements, shared = to_torch(quantize(np.ones((2, 64), np.float32)))
    with pytest.raises(ShapeError, match="scales have shape"):
        from_torch(elements, shared[:, :1])
