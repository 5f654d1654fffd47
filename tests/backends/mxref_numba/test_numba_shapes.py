"""Every set of Numba kernels on many axes, carries of the counter, many rows, and results of many megabytes."""

import numpy as np
import pytest

pytest.importorskip("numba")

from differential import assert_same_blocks, oracle_quantize_array
from every_path import EveryPath
from mxref import GemmProfile, MXArray, OperandSpec, Rounding, Stream, get_backend
from mxref.formats import E2M1
from mxref.layouts.packed import unpack
from mxref.placement import Placement

REFERENCE = get_backend("reference")
STREAM = Stream(seed=0xFEDCBA9876543210, step=3, layer=9, operand=2)


@pytest.fixture(scope="module")
def kernels():
    return EveryPath()


def drawn(shape, axis, length, scales=(100, 150), seed=0):
    """An MXArray of drawn codes; `length` is that of its block axis as stored."""
    rng = np.random.default_rng(seed)
    rows = [n for i, n in enumerate(shape) if i != axis]
    codes = rng.integers(0, 256, (*rows, length // 2), np.uint8)
    return MXArray(codes, rng.integers(*scales, (*rows, length // 32)).astype(np.uint8), shape, axis)


def same_bits(got, want):
    assert got.dtype == want.dtype
    assert got.shape == want.shape
    words = f"u{want.dtype.itemsize}"
    np.testing.assert_array_equal(
        np.ascontiguousarray(got).view(words), np.ascontiguousarray(want).view(words)
    )


SHAPES = (
    ((64, 2, 3), 0, 64),
    ((45, 3, 2), 0, 64),
    ((96, 3, 2, 2), 0, 96),
    ((2, 64, 3), 1, 64),
    ((3, 2, 70), 2, 96),
)


@pytest.mark.clause("quantize.axis", "dequantize.value")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(("shape", "axis", "length"), SHAPES)
def test_values_of_many_axes(kernels, shape, axis, length, dtype):
    q = drawn(shape, axis, length)
    same_bits(kernels.dequantize(q, dtype), REFERENCE.dequantize(q, dtype))


@pytest.mark.clause("quantize.axis", "hadamard.size")
@pytest.mark.parametrize("n", [2, 16, 64])
@pytest.mark.parametrize(
    ("shape", "axis"), [((128, 2, 3), 0), ((64, 3, 2, 2), 0), ((2, 64, 3), 1), ((3, 2, 64), 2)]
)
def test_transforms_of_many_axes(kernels, shape, axis, n):
    x = np.random.default_rng(n).standard_normal(shape).astype(np.float32)
    for given in (x, np.asfortranarray(x)):
        same_bits(kernels.hadamard(given, n, 2, axis=axis), REFERENCE.hadamard(x, n, 2, axis=axis))


@pytest.mark.clause("random.counter", "random.index")
@pytest.mark.parametrize("length", [96, 544])
@pytest.mark.parametrize(("bits", "per_call"), [(16, 8), (20, 4)])
@pytest.mark.parametrize("axis", [0, 1])
def test_a_counter_that_carries_within_a_row(kernels, axis, bits, per_call, length):
    turn = per_call << 32
    row = turn // length
    assert turn % length  # so the carry lies within row 1 of 3
    shape, origin, whole = (3, length), (row - 1, 0), (row + 2, length)
    if axis == 0:
        shape, origin, whole = shape[::-1], origin[::-1], whole[::-1]
    x = np.random.default_rng(bits).uniform(-6, 6, shape).astype(np.float32)
    where = {"axis": axis, "origin": origin, "global_shape": whole}
    spec = OperandSpec(rounding=Rounding.SR, sr_bits=bits)
    placement = Placement(STREAM, origin, whole)
    q = kernels.quantize(x, spec, axis=axis, placement=placement)
    assert_same_blocks(unpack(q.codes, E2M1), q.scales, *oracle_quantize_array(x, spec, STREAM, **where))


@pytest.mark.clause("quantize.strides")
@pytest.mark.parametrize("axis", [0, 1])
def test_more_than_65535_rows(kernels, axis):
    rng = np.random.default_rng(0)
    x = rng.standard_normal((65569, 32)).astype(np.float32)
    given, spec = x if axis else x.T.copy(), OperandSpec()
    assert kernels.quantize(given, spec, axis=axis) == REFERENCE.quantize(given, spec, axis=axis)


@pytest.mark.clause("quantize.strides")
@pytest.mark.parametrize(("dtype", "columns"), [("float32", 512), ("float32", 515), ("bfloat16", 1024)])
def test_values_beyond_the_caches(kernels, dtype, columns):
    q = drawn((4099, columns), 1, -(-columns // 32) * 32)
    want = REFERENCE.dequantize(q, dtype)
    assert want.nbytes > 8 << 20
    same_bits(kernels.dequantize(q, dtype), want)


@pytest.mark.clause("gemm.operands")
@pytest.mark.parametrize(("m", "n"), [(1030, 3), (3, 1030), (1543, 1447)])
def test_products_of_many_rows(kernels, m, n):
    a, b = drawn((m, 64), 1, 64, (126, 129)), drawn((n, 64), 1, 64, (126, 129), seed=1)
    want = REFERENCE.scaled_gemm(a, b, profile=GemmProfile.ORDERED)
    same_bits(kernels.scaled_gemm(a, b, profile=GemmProfile.ORDERED), want)
