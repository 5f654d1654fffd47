"""The Triton kernels under the interpreter against the reference, bit for bit, on every treatment and layout."""

import ml_dtypes
import numpy as np
import pytest
import torch

import taken_arrays
from mxref import BlockShape, MXArray, OperandSpec, Rounding, ScaleRule, Stream, get_backend
from mxref.errors import NonfiniteError, UnsupportedError
from mxref.formats import CANONICAL_NAN
from mxref.placement import Placement
from mxref.steps.hadamard import SIZES
from strategies import crafted_blocks

BACKEND = get_backend("mxref_triton.backend:backend")
REFERENCE = get_backend("reference")
STREAM = Stream(seed=0xFEDCBA9876543210, step=70_000, layer=300, operand=4)
OTHER = Stream(seed=0xFEDCBA9876543210, step=70_000, layer=300, operand=5)
DTYPES = (np.float32, ml_dtypes.bfloat16, np.float16)


def bits_of(x):
    """Bit patterns, every NaN made the same: those of a transform have no canonical payload."""
    bits = np.array(x).view(f"u{x.dtype.itemsize}")
    bits[np.isnan(x.astype(np.float64))] = CANONICAL_NAN >> (32 - 8 * x.dtype.itemsize)
    return bits


def crafted(dtype, length=64):
    """Every seventh of the crafted blocks as rows, a multiple of 32 of them, in a type that may round them."""
    blocks = crafted_blocks()[::7].reshape(-1)
    size = -(-blocks.size // (32 * length)) * 32 * length
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        return np.resize(blocks, size).reshape(-1, length).astype(dtype)


def tiny(dtype, shape=(64, 64)):
    """Blocks whose largest exponent field is 0, 1 or 2, where a scale of 2^-127 and subnormals meet."""
    rng = np.random.default_rng(1)
    mantissas = rng.integers(0, 1 << 23, shape, dtype=np.uint32)
    exponents = rng.integers(0, 1 + np.arange(shape[0])[:, None] % 3, shape, endpoint=True).astype(np.uint32)
    signs = rng.integers(0, 2, shape, dtype=np.uint32)
    x = (signs << 31 | exponents << 23 | mantissas).view(np.float32)
    return x.astype(dtype) if dtype is not np.float16 else (x * np.float32(2.0**112)).astype(np.float16)


def heavy(*shape, dtype=ml_dtypes.bfloat16, seed=0):
    rng = np.random.default_rng(seed)
    x = rng.standard_t(2, shape) * np.exp2(rng.integers(-9, 9, shape))
    x.reshape(-1)[:32] = -0.0
    return np.clip(x, -60000, 60000).astype(dtype)


def assert_same(got, want):
    codes, scales = BACKEND.to_numpy(got.codes), BACKEND.to_numpy(got.scales)
    wrong = scales != want.scales
    assert not wrong.any(), f"{wrong.sum()} scales differ, first at {np.argwhere(wrong)[0]}"
    wrong = codes != want.codes
    assert not wrong.any(), f"{wrong.sum()} bytes of codes differ, first at {np.argwhere(wrong)[0]}"
    assert got == want


def check(x, spec, place=Placement(STREAM), **options):
    got, want = (
        backend.quantize(backend.from_numpy(x), spec, placement=place, **options)
        for backend in (BACKEND, REFERENCE)
    )
    assert_same(got, want)


@pytest.mark.clause("conventions.inputs", "conformance.arrays")
@pytest.mark.filterwarnings("ignore:The PyTorch API of MaskedTensors:UserWarning")
def test_every_operation_takes_and_refuses_the_same_arrays():
    taken_arrays.hold(BACKEND)


# ---- every treatment ----


@pytest.mark.clause("conformance.capabilities", "quantize.order", "rounding.rne")
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rule", [*ScaleRule, ">1.3", ">=1", ">=1.9"])
def test_scale_rules(rule, dtype, axis):
    check(crafted(dtype), OperandSpec(scale_rule=rule, zero_scale=127 * axis), axis=axis)
    check(tiny(dtype), OperandSpec(scale_rule=rule), axis=axis)


@pytest.mark.clause("rounding.rna", "rounding.rtz", "rounding.sr", "random.elements")
@pytest.mark.parametrize(
    ("rounding", "bits"), [("rna", 16), ("rtz", 16), *(("sr", r) for r in (1, 8, 16, 17, 22))]
)
def test_roundings(rounding, bits):
    spec = OperandSpec(rounding=rounding, sr_bits=bits)
    for axis, x in ((1, crafted(np.float32)), (0, heavy(64, 96)), (1, tiny(np.float32))):
        check(x, spec, axis=axis)


@pytest.mark.clause("rounding.prescale")
@pytest.mark.parametrize("rounding", Rounding)
def test_prescale(rounding):
    check(crafted(np.float32), OperandSpec(rounding=rounding, prescale=True))


@pytest.mark.clause("scale.block.tile")
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize("hadamard", [0, 64])
def test_tiles(hadamard, axis):
    check(crafted(np.float32, 128), OperandSpec(block=BlockShape.TILE, hadamard=hadamard), axis=axis)
    check(heavy(3, 64, 32), OperandSpec(block=BlockShape.TILE, rounding="sr"), axis=1 + axis)


@pytest.mark.clause("hadamard.order", "hadamard.factor", "hadamard.policy", "hadamard.nonfinite")
@pytest.mark.parametrize("n", SIZES)
def test_hadamard_before_quantization(n):
    for axis, dtype in ((1, np.float32), (0, ml_dtypes.bfloat16), (1, ml_dtypes.bfloat16)):
        x = np.resize(crafted(dtype), (64, 256) if axis == 1 else (256, 64))
        check(x, OperandSpec(hadamard=n, signs="per_step", scale_rule="even"), axis=axis)
    check(tiny(ml_dtypes.bfloat16, (32, 256)), OperandSpec(hadamard=n))
    check(tiny(np.float32, (256, 32)), OperandSpec(hadamard=n), axis=0)


@pytest.mark.clause("hadamard.float32", "hadamard.signs")
@pytest.mark.parametrize("n", SIZES)
def test_hadamard_alone(n):
    signs = 0x9E3779B97F4A7C15F39CC0605CEDC834 >> 3 & ((1 << n) - 1)
    for axis, x in (
        (0, crafted(np.float32)[:256]),
        (1, heavy(32, 256)),
        (2, heavy(3, 2, 256, dtype=np.float16)),
        (0, heavy(256, 2, 3, dtype=np.float32)),
        (1, heavy(2, 256, 3, dtype=np.float32)),
    ):
        x = x[: x.shape[0] // n * n] if axis == 0 else x
        got = BACKEND.to_numpy(BACKEND.hadamard(BACKEND.from_numpy(x), n, signs, axis=axis))
        assert np.array_equal(bits_of(got), bits_of(REFERENCE.hadamard(x, n, signs, axis=axis)))


# ---- layouts and placement ----


@pytest.mark.clause("quantize.strides", "quantize.axis", "quantize.padding")
@pytest.mark.parametrize("rounding", ["rne", "sr"])
def test_views_of_any_strides(rounding):
    spec = OperandSpec(rounding=rounding, hadamard=16)
    big = heavy(4, 32, 66)
    for view, axis in (
        (big[:, :, :64], 2), (big[:, :, 1:65], 2), (big[:2, ::2, :3], 1), (big[::2, :, :32], 2),
        (big.transpose(2, 0, 1)[:2], 2), (big[:, :, ::-1][..., :64], 1), (big[0], 1), (big[1, 3], 0), (big, 2),
    ):  # fmt: skip
        want = REFERENCE.quantize(view, spec, axis=axis, placement=Placement(STREAM), pad=True)
        whole = BACKEND.from_numpy(big)
        if (view.base if view.base is not None else view) is big and min(view.strides) > 0:
            offset = (
                view.__array_interface__["data"][0] - big.__array_interface__["data"][0]
            ) // big.itemsize
            x = whole.as_strided(view.shape, [s // big.itemsize for s in view.strides], offset)
        else:
            x = BACKEND.from_numpy(view)
        assert_same(BACKEND.quantize(x, spec, axis=axis, placement=Placement(STREAM), pad=True), want)


@pytest.mark.clause("quantize.padding", "quantize.strides")
def test_padding_and_empty():
    for shape in ((5, 1), (33, 95), (0, 64), (64, 0), (3, 0, 32)):
        for axis in range(len(shape)):
            check(heavy(*shape, dtype=np.float32) if 0 not in shape else np.zeros(shape, np.float32),
                  OperandSpec(hadamard=8), axis=axis, pad=True)  # fmt: skip


@pytest.mark.clause("random.index", "random.counter", "quantize.parts")
@pytest.mark.parametrize("bits", [16, 20])
def test_parts_get_the_bits_of_the_whole(bits):
    spec = OperandSpec(rounding="sr", sr_bits=bits, hadamard=32)
    far = (1 << 33, 1 << 33)
    for axis in (0, 1):
        check(heavy(64, 96), spec, Placement(STREAM, (32, 64), (160, 256)), axis=axis)
        check(heavy(64, 96), spec, Placement(STREAM, (far[0] - 96, far[1] - 96), far), axis=axis)
    for axis in (1, 2):
        check(heavy(2, 32, 64), spec, Placement(STREAM, (3, 32, 64), (7, 96, 192)), axis=axis)
    check(heavy(64, 2, 3), spec, Placement(STREAM, (32, 1, 2), (96, 7, 9)), axis=0)


@pytest.mark.clause("random.index", "random.counter")
@pytest.mark.parametrize(("bits", "per_call"), [(16, 8), (20, 4)])
def test_a_counter_that_carries_within_a_row(bits, per_call):
    spec = OperandSpec(rounding="sr", sr_bits=bits)
    for length in (96, 544):
        row = (per_call << 32) // length
        assert (per_call << 32) % length
        check(heavy(3, length), spec, Placement(STREAM, (row - 1, 0), (row + 2, length)), axis=1)
        check(heavy(length, 3), spec, Placement(STREAM, (0, row - 1), (length, row + 2)), axis=0)


@pytest.mark.clause("scale.nonfinite")
def test_nonfinite_raise_names_the_block():
    x = heavy(4, 64)
    x[2, 40] = np.nan
    with pytest.raises(NonfiniteError, match=r"\(2, 1\)"):
        BACKEND.quantize(BACKEND.from_numpy(x), OperandSpec(nonfinite="raise"))


# ---- both orientations, values, decoding ----


@pytest.mark.clause("conformance.dual")
@pytest.mark.parametrize(
    ("row", "column", "shape"),
    [
        ({}, {}, (96, 160)),
        ({"hadamard": 16}, {"hadamard": 16, "zero_scale": 127}, (64, 128)),
        ({"hadamard": 64, "signs": "per_step"}, {"hadamard": 8}, (128, 192)),
        ({"rounding": "sr"}, {"rounding": "sr", "sr_bits": 20, "hadamard": 64}, (128, 64)),
        ({"block": "32x32"}, {"block": "32x32", "scale_rule": "even"}, (96, 64)),
        ({"hadamard": 128}, {}, (64, 128)),
    ],
)
def test_dual(row, column, shape):
    specs = OperandSpec(**row), OperandSpec(**column)
    for dtype in DTYPES:
        x = np.resize(crafted(dtype), shape)
        placements = tuple(Placement(stream, (64, 128), (1024, 2048)) for stream in (STREAM, OTHER))
        got = BACKEND.quantize_dual(BACKEND.from_numpy(x), specs, placements=placements)
        for g, w in zip(got, REFERENCE.quantize_dual(x, specs, placements=placements), strict=True):
            assert_same(g, w)


@pytest.mark.clause("conformance.dual")
def test_dual_of_what_has_to_be_padded():
    x, specs = heavy(40, 70), (OperandSpec(), OperandSpec(rounding="sr"))
    got = BACKEND.quantize_dual(
        BACKEND.from_numpy(x), specs, placements=(Placement(), Placement(OTHER)), pads=(True, True)
    )
    for g, w in zip(
        got,
        REFERENCE.quantize_dual(x, specs, placements=(Placement(), Placement(OTHER)), pads=(True, True)),
        strict=True,
    ):
        assert_same(g, w)


@pytest.mark.clause("conformance.dual")
@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("axis", [0, 1])
def test_fake_quantize(axis, dtype):
    for x, rule in ((crafted(np.float32), "ceil"), (heavy(70, 90), "floor")):
        arguments = {"axis": axis, "dtype": dtype, "pad": True}
        got = BACKEND.to_numpy(
            BACKEND.fake_quantize(BACKEND.from_numpy(x), OperandSpec(scale_rule=rule), **arguments)
        )
        assert got.shape == x.shape
        assert np.array_equal(
            bits_of(got), bits_of(REFERENCE.fake_quantize(x, OperandSpec(scale_rule=rule), **arguments))
        )


@pytest.mark.clause("dequantize.value", "dequantize.overflow", "dequantize.nan", "formats.e8m0")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_dequantize_every_code_under_every_scale(dtype):
    codes = np.tile(
        np.array([lo | hi << 4 for lo, hi in zip(range(16), range(15, -1, -1), strict=True)], np.uint8),
        (256, 1),
    )
    scales = np.arange(256, dtype=np.uint8)[:, None]
    for axis, shape in ((1, (256, 32)), (1, (256, 27)), (0, (32, 256)), (0, (32, 64, 4)), (1, (4, 32, 64))):
        rows = shape[:axis] + shape[axis + 1 :]
        stored = codes.reshape(*rows, 16), scales.reshape(*rows, 1)
        q = MXArray(*stored, shape, axis)
        given = MXArray(*map(BACKEND.from_numpy, stored), shape, axis)
        got, want = BACKEND.to_numpy(BACKEND.dequantize(given, dtype)), REFERENCE.dequantize(q, dtype)
        assert got.shape == want.shape
        assert got.dtype == want.dtype
        nan = np.isnan(want.astype(np.float32))
        assert np.array_equal(np.ascontiguousarray(got).view(f"u{got.itemsize}")[nan],
                              np.ascontiguousarray(want).view(f"u{got.itemsize}")[nan])  # fmt: skip
        assert np.array_equal(bits_of(got), bits_of(want))


@pytest.mark.clause("conformance.unsupported")
def test_a_tensor_elsewhere_is_refused():
    with pytest.raises(UnsupportedError, match="devices"):
        BACKEND.quantize(torch.empty(32, 32, device="meta"), OperandSpec())
