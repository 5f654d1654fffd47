"""The Triton quantizers under the interpreter: what the conformance kit asks, other formats, and strides."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch

import taken_arrays
from gfx950.inputs import corners
from interpreted.gemm_operands import on
from mxref import MXArray, OperandSpec, ScaleRule, Stream, conformance, get_backend
from mxref.errors import UnsupportedError
from mxref.formats import BLOCK_FORMATS, CANONICAL_NAN, MXFP4
from mxref.layouts.packed import pack
from mxref.placement import Placement
from mxref.steps.scale import EXPONENT_RULES
from strategies import crafted_blocks

BACKEND = get_backend("mxref_triton.backend:backend")
REFERENCE = get_backend("reference")
STREAM = Stream(seed=0xFEDCBA9876543210, step=70_000, layer=300, operand=4)
OTHER = Stream(seed=0xFEDCBA9876543210, step=70_000, layer=300, operand=5)
DTYPES = (np.float32, ml_dtypes.bfloat16, np.float16)
DECLARED = [f for f in BLOCK_FORMATS.values() if f in BACKEND.capabilities.formats and f.scale.powers]
"""Those with other scales have `test_quotients_interpreted`."""
EVERY = pytest.mark.parametrize("made", DECLARED, ids=str)
OTHERS = pytest.mark.parametrize("made", [f for f in DECLARED if f is not MXFP4], ids=str)

# The interpreter computes in NumPy, which warns of what a GPU does silently.
pytestmark = pytest.mark.filterwarnings(
    "ignore:(overflow|invalid value|underflow|divide by zero) encountered:RuntimeWarning"
)


def at_bounds(made, rule, exponents, length=64):
    """Blocks at the bounds of a rule and of a format's elements as rows, a multiple of 32 of them."""
    blocks = corners(made, ScaleRule(rule), exponents)
    return np.resize(blocks, -(-blocks.size // (32 * length)) * 32 * length).reshape(-1, length)


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


@pytest.mark.timeout(900)
@pytest.mark.clause("conformance.capabilities", "conformance.dual")
def test_conformance_of_all_but_products():
    report = conformance.check(
        BACKEND, ops=["quantize", "dequantize", "hadamard"], level="quick", shrink=False, formats=["mxfp4"]
    )
    assert report.ok, "\n\n".join(str(f) for f in report.failures)
    assert report.total("passed") > 1400


# ---- other formats ----


@pytest.mark.clause("conformance.capabilities", "quantize.order", "rounding.rne", "rounding.prescale")
@pytest.mark.parametrize("rule", [*EXPONENT_RULES, ">1.3", ">=1", ">=1.9"])
@EVERY
def test_scale_rules(made, rule):
    x = at_bounds(made, rule, (0, 1, 5, 9, 17, 127, 254))
    check(x, OperandSpec(made, rule))
    check(x, OperandSpec(made, rule, prescale=True, zero_scale=127), axis=0)


@pytest.mark.clause("rounding.rna", "rounding.rtz", "rounding.sr", "rounding.prescale", "random.elements")
@pytest.mark.parametrize(
    ("rounding", "bits"), [("rna", 16), ("rtz", 16), *(("sr", r) for r in (1, 8, 16, 17, 22))]
)
@OTHERS
def test_roundings(made, rounding, bits):
    spec = OperandSpec(made, rounding=rounding, sr_bits=bits)
    x = at_bounds(made, "floor", (3, 120))
    check(x, spec)
    check(x.astype(ml_dtypes.bfloat16), replace(spec, scale_rule="even", prescale=True), axis=0)


@pytest.mark.clause("quantize.order", "scale.zero", "scale.nonfinite", "scale.block.tile", "hadamard.order")
@OTHERS
def test_other_treatments(made):
    x = at_bounds(made, "rceil", (100, 101))[:64]
    x[3, 5], x[9, 40], x[17] = np.nan, -np.inf, -0.0
    for dtype, axis, how in (
        (np.float32, 1, {"zero_scale": 127}),
        (ml_dtypes.bfloat16, 0, {"hadamard": 16, "signs": "per_step"}),
        (np.float16, 1, {"block": "32x32"}),
        (np.float32, 0, {"block": "32x32", "hadamard": 64, "rounding": "sr"}),
        (ml_dtypes.bfloat16, 1, {"hadamard": 64, "scale_rule": "rceil"}),
        (np.float32, 0, {"hadamard": 128, "rounding": "sr"}),
    ):
        values = np.resize(x, (128, 64) if axis == 0 else (64, 128)).astype(dtype)
        check(values, OperandSpec(made, **how), axis=axis)
    check(x[:40, :50], OperandSpec(made), axis=0, pad=True)


@pytest.mark.clause("conformance.dual")
@OTHERS
def test_both_orientations_and_values_at_once(made):
    x = np.resize(at_bounds(made, "ceil", (120,)), (96, 64)).astype(ml_dtypes.bfloat16)
    specs = OperandSpec(made, "rceil"), OperandSpec(made, hadamard=16)
    mixed = OperandSpec(MXFP4), OperandSpec(made, rounding="sr")
    how = {"placements": (Placement(STREAM), Placement(OTHER))}
    for pair in (specs, mixed, mixed[::-1]):
        got = BACKEND.quantize_dual(BACKEND.from_numpy(x), pair, **how)
        for g, w in zip(got, REFERENCE.quantize_dual(x, pair, **how), strict=True):
            assert_same(g, w)
    tiny = corners(made, ScaleRule.FLOOR, (0, 1, 2, 254))[:64]
    for values in (x, tiny):
        arguments = {"axis": 0, "dtype": "bfloat16", "pad": True}
        got = BACKEND.to_numpy(BACKEND.fake_quantize(BACKEND.from_numpy(values), specs[0], **arguments))
        assert np.array_equal(bits_of(got), bits_of(REFERENCE.fake_quantize(values, specs[0], **arguments)))


@pytest.mark.clause(
    "dequantize.value", "dequantize.overflow", "dequantize.nan", "formats.fp8", "formats.e8m0"
)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@OTHERS
def test_every_code_under_every_scale(made, dtype):
    codes = np.tile((np.arange(256) % (1 << made.element.bits)).astype(np.uint8), (256, 1))
    scales = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 8, axis=1)
    q = MXArray(pack(codes, made.element), scales, (256, 256), 1, format=made)
    got = BACKEND.to_numpy(BACKEND.dequantize(on("cpu", q), dtype))
    want = REFERENCE.dequantize(q, dtype)
    assert np.array_equal(got.view(f"u{got.itemsize}"), want.view(f"u{want.itemsize}"))


# ---- layouts and devices ----


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


@pytest.mark.clause("conformance.unsupported")
def test_a_tensor_elsewhere_is_refused():
    with pytest.raises(UnsupportedError, match="devices"):
        BACKEND.quantize(torch.empty(32, 32, device="meta"), OperandSpec())
