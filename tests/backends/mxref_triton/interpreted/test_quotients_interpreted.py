"""Scales with a mantissa, blocks of 16 and a scale of the tensor under the interpreter, against the reference."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch

from interpreted.gemm_operands import on
from interpreted.test_quantize_interpreted import (
    BACKEND,
    OTHER,
    REFERENCE,
    STREAM,
    assert_same,
    bits_of,
    heavy,
)
from mxref import MXArray, OperandSpec
from mxref.conformance.requests.crafted import crafted_tensors
from mxref.errors import RecipeError, ShapeError, UnsupportedError
from mxref.formats import E2M1, E2M3, E4M3, E8M0, INT8, NVFP4, UE4M3, UE5M3, BlockFormat
from mxref.layouts.packed import pack
from mxref.placement import Placement
from mxref.reference import ReferenceBackend
from mxref.steps.quotient import tensor_scale
from mxref_triton import TritonBackend

# The interpreter computes in NumPy, which warns of what a GPU does silently.
pytestmark = pytest.mark.filterwarnings(
    "ignore:(overflow|invalid value|underflow|divide by zero) encountered:RuntimeWarning"
)
TENSORS = crafted_tensors(NVFP4, full=False)
MADE = {
    "E8M0, 16": BlockFormat("mxfp4_k16", E2M1, E8M0, k=16),
    "six bits, 16": BlockFormat("mxfp6_k16", E2M3, E8M0, k=16),
    "INT8, 16": BlockFormat("mxint8_k16", INT8, E8M0, k=16),
    "UE5M3": BlockFormat("fp4_ue5m3", E2M1, UE5M3, k=16),
    "UE4M3, 32": BlockFormat("fp4_ue4m3", E2M1, UE4M3, k=32),
    "E4M3": BlockFormat("nvfp8", E4M3, UE4M3, k=32, tensor_scale=True),
    "INT8": BlockFormat("nvint8", INT8, UE4M3, k=16, tensor_scale=True),
}
"""Formats that are in no table."""


def widened(backend, made):
    """A backend that declares one format more, with its tiles."""
    caps = backend.capabilities
    blocks = caps.blocks | {made.row, made.tile}
    backend.capabilities = replace(caps, formats=caps.formats | {made}, blocks=blocks)
    return backend


def check(x, spec, *, amax=None, axis=-1, pad=False, backends=(BACKEND, REFERENCE), **where):
    """Hold a quantization to the reference's bits, those of the scale of the tensor included, and return those."""
    got, want = (
        backend.quantize(
            backend.from_numpy(x), spec, axis=axis, pad=pad,
            placement=Placement(
                STREAM, **where,
                amax=None if amax is None else backend.from_numpy(np.array([amax], np.float32)),
            ),
        )
        for backend in backends
    )  # fmt: skip
    assert_same(got, want)
    return want


def as_rows(blocks, rows=32):
    """Blocks as rows of a matrix."""
    length = -(-blocks.size // (16 * rows)) * 16
    return np.resize(blocks, rows * length).reshape(rows, length)


@pytest.mark.clause(
    "scale.rule.nearest", "scale.tensor", "scale.tensor.amax", "scale.underflow", "rounding.quotient"
)
@pytest.mark.parametrize("tensor", TENSORS, ids=lambda each: each.where.strip(", "))
@pytest.mark.parametrize(
    ("rounding", "bits"), [("rne", 16), ("rna", 16), ("rtz", 16), *(("sr", r) for r in (1, 16, 17, 22))]
)
def test_crafted_blocks(tensor, rounding, bits):
    spec = OperandSpec(NVFP4, rounding=rounding, sr_bits=bits)
    x = as_rows(tensor.x)
    check(x, spec, amax=tensor.amax)
    check(x.T, replace(spec, zero_scale=56), amax=tensor.amax, axis=0)


@pytest.mark.clause("scale.rule.nearest", "scale.tensor", "rounding.quotient")
@pytest.mark.parametrize("rounding", ["rne", "rtz", "sr"])
def test_elements_beside_every_tie_of_any_tensor_scale(rounding):
    """A quotient that is off by the last bit of a float32 gives another code here."""
    rng = np.random.default_rng(7)
    scales = np.array(NVFP4.scale.values[1 : NVFP4.scale.max_code + 1])
    turns = np.array([0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5, 0.5, 1, 1.5, 2, 3, 4])
    for amax in (*np.exp2(rng.uniform(-120, 120, 8)), 2.0**-133, 3.0e38):
        t = float(tensor_scale(np.float32(amax), NVFP4).scale)
        divisors = rng.choice(scales, 256)[:, None] * t
        with np.errstate(over="ignore", under="ignore"):
            near = (turns * divisors).astype(np.float32)
            near = np.nextafter(near, rng.choice(np.float32([0, np.inf]), near.shape)).astype(np.float32)
            exact = (turns * divisors).astype(np.float32)
            x = np.where(rng.random(near.shape) < 0.3, exact, near)
            top = (6 * divisors).astype(np.float32)
        x = np.concatenate([x, top, np.nextafter(top, np.float32(0)), -top], 1)
        x[~np.isfinite(x)] = 0
        check(x, OperandSpec(NVFP4, rounding=rounding, sr_bits=22), amax=np.float32(amax))


@pytest.mark.clause(
    "quantize.order", "scale.nonfinite", "scale.block.tile", "hadamard.order", "quantize.padding"
)
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize(
    "how",
    [
        {"hadamard": 16, "sign_vector": "+++-+------+-+--"},
        {"hadamard": 64, "signs": "per_step", "rounding": "sr"},
        {"hadamard": 8, "rounding": "sr", "sr_bits": 20},
        {"hadamard": 128, "signs": "per_step_layer"},
        {"block": "16x16"},
        {"block": "16x16", "hadamard": 32, "rounding": "sr", "zero_scale": 56},
    ],
    ids=lambda how: ", ".join(map(str, how.values())),
)
def test_treatments(dtype, how):
    """The tensor's largest magnitude is its own, after the transform; NaN and infinity are none."""
    x = heavy(48, 128, dtype=dtype)
    x[3, 5], x[9, 40], x[17], x[32:, 16:32] = np.nan, -np.inf, -0.0, 0
    spec = OperandSpec(NVFP4, **how)
    check(x, spec)
    check(np.resize(x, (128, 80)), spec, axis=0)
    odd = x[:, :100] if spec.hadamard != 8 else x[:40, :100]
    check(odd, spec, pad=True)
    check(x[::-1, ::2], spec, pad=True)


@pytest.mark.clause("quantize.parts", "scale.tensor.amax")
def test_parts_and_empty_arrays():
    x = heavy(64, 96)
    for axis in (0, 1):
        where = {"origin": (32, 64), "global_shape": (128, 192), "amax": 7e4}
        check(x, OperandSpec(NVFP4, rounding="sr", hadamard=16), axis=axis, **where)
    check(x[:0], OperandSpec(NVFP4))
    check(heavy(3, 5, 64)[:, :, ::2], OperandSpec(NVFP4, rounding="sr"), axis=2)
    check(np.full((4, 32), np.nan, np.float32), OperandSpec(NVFP4))
    part = Placement(STREAM, (0, 0), (128, 96))
    with pytest.raises(ShapeError, match="give placement.amax"):
        BACKEND.quantize(BACKEND.from_numpy(x), OperandSpec(NVFP4), placement=part)
    for amax in (np.nan, np.inf, -1.0):
        place = Placement(STREAM, amax=torch.tensor([amax]))
        with pytest.raises(RecipeError, match=f"amax = {amax} is no finite magnitude"):
            BACKEND.quantize(BACKEND.from_numpy(x), OperandSpec(NVFP4), placement=place)
    place = Placement(STREAM, amax=np.array([2], np.float32))
    with pytest.raises(UnsupportedError, match="got an amax on the host for an input on cpu"):
        BACKEND.quantize(BACKEND.from_numpy(x), OperandSpec(NVFP4), placement=place)
    check(x, OperandSpec(NVFP4), amax=-0.0)
    place = Placement(STREAM, amax=torch.ones(1, device="meta"))
    with pytest.raises(UnsupportedError, match="does not declare meta in devices"):
        BACKEND.quantize(BACKEND.from_numpy(x), OperandSpec(NVFP4), placement=place)


@pytest.mark.clause("conformance.dual")
def test_both_orientations_and_values_at_once():
    x = heavy(96, 64)
    tiles, h16 = OperandSpec(NVFP4, block="16x16"), OperandSpec(NVFP4, hadamard=16, sign_vector="+-" * 8)
    sr = OperandSpec(NVFP4, rounding="sr")
    how = {"placements": (Placement(STREAM), Placement(OTHER))}
    for pair in ((tiles, h16), (tiles, tiles), (OperandSpec("mxfp4"), h16), (sr, OperandSpec(NVFP4))):
        got = BACKEND.quantize_dual(BACKEND.from_numpy(x), pair, **how)
        for g, w in zip(got, REFERENCE.quantize_dual(x, pair, **how), strict=True):
            assert_same(g, w)
    for spec, kind in ((tiles, "bfloat16"), (h16, "bfloat16"), (h16, "float32")):
        arguments = {"axis": 0, "dtype": kind, "pad": True}
        got = BACKEND.to_numpy(BACKEND.fake_quantize(BACKEND.from_numpy(x[:70]), spec, **arguments))
        assert np.array_equal(bits_of(got), bits_of(REFERENCE.fake_quantize(x[:70], spec, **arguments)))


@pytest.mark.clause("dequantize.value", "dequantize.overflow", "dequantize.nan", "formats.nvfp4")
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("made", [NVFP4, *MADE.values()], ids=str)
def test_every_code_under_every_scale(made, dtype):
    codes = np.tile((np.arange(256) % (1 << made.element.bits)).astype(np.uint8), (256, 1))
    scales = np.repeat(np.arange(256, dtype=np.uint8)[:, None], 256 // made.k, axis=1)
    backends = [widened(TritonBackend(), made), widened(ReferenceBackend(), made)]
    for bits in (0x3F800000, 1, 0x3F812345, 0x007FFFFF, 0x7F7FFFFF) if made.tensor_scale else (0,):
        tensor = np.array([bits], np.uint32).view(np.float32) if made.tensor_scale else None
        q = MXArray(pack(codes, made.element), scales, (256, 256), 1, format=made, tensor_scale=tensor)
        got = backends[0].to_numpy(backends[0].dequantize(on("cpu", q), dtype))
        want = backends[1].dequantize(q, dtype)
        assert np.array_equal(got.view(f"u{got.itemsize}"), want.view(f"u{want.itemsize}"))


@pytest.mark.clause("formats.scale", "conformance.capabilities")
@pytest.mark.parametrize("name", MADE)
def test_formats_that_are_in_no_table(name):
    made = MADE[name]
    backends = [widened(TritonBackend(), made), widened(ReferenceBackend(), made)]
    most = 23 - made.element.precision if made.tensor_scale else 22
    tensors = crafted_tensors(made, full=False)
    for tensor, how in zip(
        [*tensors, *tensors[:1] * 5],
        [{}, {"rounding": "sr"}, {"rounding": "rna"}, {"rounding": "sr", "sr_bits": most}, {"hadamard": 16}]
        * 3,
        strict=False,
    ):
        x = np.resize(tensor.x, -(-tensor.x.size // 2048) * 2048).reshape(-1, 64)
        check(x, OperandSpec(made, **how), amax=tensor.amax, backends=backends)
        check(x, OperandSpec(made, block=made.tile, **how), amax=tensor.amax, axis=0, backends=backends)


@pytest.mark.clause("conformance.capabilities")
def test_a_step_on_the_device_draws_signs_before_amax():
    x, spec = heavy(64, 64), OperandSpec(NVFP4, hadamard=16, signs="per_step", rounding="sr")
    for axis in (0, 1):
        late = Placement(replace(STREAM, step=0), step=torch.tensor([70_000]))
        got = BACKEND.quantize(BACKEND.from_numpy(x), spec, axis=axis, placement=late)
        want = REFERENCE.quantize(x, spec, axis=axis, placement=Placement(STREAM))
        assert np.array_equal(got.codes.numpy(), want.codes)
        assert np.array_equal(got.scales.numpy(), want.scales)
        assert np.array_equal(got.tensor_scale.numpy(), want.tensor_scale)
