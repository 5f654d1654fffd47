"""Quantization under scales with a mantissa and scales of tensors, and dequantization, against the oracle."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
from differential import assert_same_blocks, oracle_quantize_tensor
from mxref import MXArray, OperandSpec, Rounding, SignPolicy, Stream, dequantize, quantize
from mxref.errors import MxrefError, NonfiniteError, RecipeError, ShapeError
from mxref.formats import E2M1, E2M3, E4M3, E5M2, INT8, NVFP4, UE4M3, UE5M3, BlockFormat
from mxref.layouts.packed import pack, unpack
from mxref.placement import Placement
from oracle import random as oracle_random
from scale_blocks import Blocks, arrays
from strategies import FLT_MAX, any_blocks, raw_bit_blocks

STREAM = Stream(0x0123456789ABCDEF, step=11, layer=5, operand=2)
SINGLE = BlockFormat("e2m1_ue5m3", E2M1, UE5M3, k=16)
WIDE = BlockFormat("e2m3_ue4m3", E2M3, UE4M3, k=16, tensor_scale=True)
SHORT = BlockFormat("int8_ue4m3", INT8, UE4M3, k=8, tensor_scale=True)
LONG = BlockFormat("e4m3_ue5m3", E4M3, UE5M3, k=64, tensor_scale=True)
EIGHTS = BlockFormat("e2m1_ue4m3", E2M1, UE4M3, k=8)
MADE = (NVFP4, SINGLE, WIDE, SHORT, LONG, EIGHTS)
EVERY = pytest.mark.parametrize("made", MADE, ids=str)
ROUNDINGS = (("rne", 16), ("rna", 16), ("rtz", 16), ("sr", 1), ("sr", 8), ("sr", 16), ("sr", None))


def element_of(made):
    return oracle.ELEMENTS[made.element.name]


def scale_of(made):
    return oracle.SCALES[made.scale.name]


def most_bits(made):
    """The largest R of a format: 22, under a scale of the tensor 23 - p."""
    return min(22, 23 - element_of(made).fraction_bits) if made.tensor_scale else 22


def spec_of(made, rounding="rne", bits=16, **fields):
    return OperandSpec(made, rounding=rounding, sr_bits=most_bits(made) if bits is None else bits, **fields)


def amaxes(made):
    """Largest magnitudes of tensors as float32 bits: t = 1, full mantissas, and the ends of float32."""
    full = element_of(made).largest * scale_of(made).largest
    tie = oracle.round_f32(full * Fraction(3, 2**150))  # t lies halfway between two subnormals
    names = {
        "t is 1": oracle.round_f32(full),
        "260": 0x43820000,
        "a full mantissa": 0x3EB7A2C5,
        "FLT_MAX": FLT_MAX,
        "the smallest": 1,
        "t halfway between subnormals": tie,
        "just above": tie + 1,
        "a subnormal t": oracle.round_f32(full * Fraction(37, 2**149)),
        "zero": 0,
    }
    return names if made.tensor_scale else {"none": None}


def float32(bits):
    return np.array([bits], np.uint32).view(np.float32)


def check(x, spec, names=None, amax=None, **where):
    """Quantize as the oracle does, with `amax` given by its bits; return the array."""
    given_amax = None if amax is None else float32(amax)
    place = {name: where[name] for name in ("origin", "global_shape") if name in where}
    rest = {name: where[name] for name in ("axis", "pad") if name in where}
    with np.errstate(all="ignore"):
        q = quantize(x, spec, placement=Placement(STREAM, amax=given_amax, **place), **rest)
    *want, tensor = oracle_quantize_tensor(x, spec, STREAM, amax=amax, **where)
    if tensor is None:
        assert q.tensor_scale is None
    else:
        assert (q.tensor_scale.shape, q.tensor_scale.dtype) == ((1,), np.float32)
        assert hex(q.tensor_scale.view(np.uint32)[0]) == hex(tensor)
    assert_same_blocks(unpack(q.codes, q.format.element), q.scales, *want, names=names)
    return q


def blocks_of(made, amax):
    tensor = oracle.ONE if amax is None else oracle.tensor_scale(amax, element_of(made), scale_of(made))
    return Blocks(element_of(made), scale_of(made), made.k, tensor)


CASES = [(made, name) for made in MADE for name in amaxes(made)]


@pytest.mark.clause(
    "formats.nvfp4", "formats.scale", "scale.rule.nearest", "scale.tensor", "scale.tensor.amax", "scale.underflow",
    "scale.zero", "scale.nonfinite", "scale.amax", "scale.block.row", "rounding.quotient", "rounding.rne",
    "rounding.saturate", "rounding.sign",
)  # fmt: skip
@pytest.mark.parametrize(("made", "name"), CASES, ids=[f"{made}-{name}" for made, name in CASES])
def test_crafted_blocks(made, name):
    amax, rng = amaxes(made)[name], np.random.default_rng(1)
    blocks, scale = blocks_of(made, amax), scale_of(made)
    count = scale.nan if name in ("none", "a full mantissa") else 12
    codes = [1, 2, 7, 8, 9, *rng.integers(1, scale.nan, 10).tolist(), scale.nan - 1]
    rows = [
        *blocks.scale_turns(rng, count),
        *blocks.element_turns(rng, codes),
        *blocks.special(rng),
        *blocks.drawn(rng, 16),
    ]
    names, x = arrays(rows)
    check(x, spec_of(made), names, amax)


@pytest.mark.clause(
    "rounding.quotient", "rounding.rna", "rounding.rtz", "rounding.sr", "rounding.saturate", "scale.underflow",
    "random.elements", "scale.zero",
)  # fmt: skip
@EVERY
@pytest.mark.parametrize(("rounding", "bits"), ROUNDINGS[1:])
def test_every_rounding_at_its_turns(made, rounding, bits):
    rng, scale = np.random.default_rng(2), scale_of(made)
    spec = spec_of(made, rounding, bits, zero_scale=scale.one)
    where = (STREAM.seed, STREAM.step, STREAM.layer, STREAM.operand)
    for amax in [
        a for name, a in amaxes(made).items() if name in ("none", "a full mantissa", "a subnormal t")
    ]:
        blocks = blocks_of(made, amax)
        codes = [1, 3, 8, *rng.integers(1, scale.nan, 6).tolist()]
        rows = []
        if rounding == "sr":

            def random(index):
                return oracle_random.sr_integer(*where, index, spec.sr_bits)

            rows = blocks.random_turns(rng, codes * 2, random, spec.sr_bits)
        rows += blocks.element_turns(rng, codes)
        rows += [*blocks.scale_turns(rng, 4), *blocks.special(rng)]
        names, x = arrays(rows)
        check(x, spec, names, amax)


@pytest.mark.clause("scale.tensor", "scale.tensor.amax")
@pytest.mark.parametrize("made", [made for made in MADE if made.tensor_scale], ids=str)
@pytest.mark.parametrize(
    "name", ["260", "FLT_MAX", "the smallest", "t halfway between subnormals", "a subnormal t"]
)
def test_the_tensor_s_own_amax(made, name):
    """The largest finite magnitude of the array, in a NaN block as well; no scale lies above the largest."""
    amax, rng = amaxes(made)[name], np.random.default_rng(3)
    names, x = arrays(blocks_of(made, amax).below(rng, amax, 24))
    x[3] = x[4] = 0
    x[5, 1] = np.nan
    x[6, ::2] = float32(amax | oracle.SIGN32)
    x[6, 1] = -np.inf
    q = check(x, spec_of(made), names)
    assert q.scales[6, 0] == scale_of(made).nan
    assert q == check(x, spec_of(made), names, amax)


@pytest.mark.clause("scale.tensor", "scale.zero", "scale.nonfinite", evidence="known answer")
@EVERY
def test_a_tensor_without_a_finite_number_above_zero_has_the_scale_1(made):
    x = np.zeros((4, made.k), np.float32)
    x[1], x[2], x[3, 2] = -0.0, np.inf, np.nan
    q = check(x, spec_of(made))
    assert q.scales[:, 0].tolist() == [0, 0, scale_of(made).nan, scale_of(made).nan]
    if made.tensor_scale:
        assert q.tensor_scale.tolist() == [1]
    assert check(np.zeros((0, made.k), np.float32), spec_of(made)).scales.shape == (0, 1)


@pytest.mark.clause("scale.tensor", "scale.rule.nearest")
@EVERY
@settings(max_examples=25, deadline=None)
@given(
    data=st.data(),
    rounding=st.sampled_from(Rounding),
    bits=st.sampled_from([1, 8, 16, None]),
    hadamard=st.sampled_from([0, 0, 8, 64]),
    own=st.booleans(),
)
def test_drawn_blocks(made, data, rounding, bits, hadamard, own):
    n = max(64, made.k)
    kinds = any_blocks(n, element_of(made)) if data.draw(st.booleans()) else raw_bit_blocks(n)
    x = np.stack([data.draw(kinds), data.draw(kinds)])
    amax = None
    if made.tensor_scale and not own:
        amax = data.draw(st.one_of(st.integers(0, FLT_MAX), st.integers(0, 4096)))
    check(x, spec_of(made, rounding, bits, hadamard=hadamard), amax=amax)


@pytest.mark.clause(
    "scale.block.tile", "scale.block.row", "quantize.axis", "quantize.padding", "random.index"
)
@EVERY
@pytest.mark.parametrize("rows", [1, 2, 16])
@pytest.mark.parametrize("n", [0, 16])
def test_tiles_of_every_height_on_padded_axes(made, rows, n):
    signs = SignPolicy.PER_STEP_LAYER if n else SignPolicy.NONE
    spec = spec_of(
        made, "sr", 16, block=f"{rows}x{made.k}", hadamard=n, signs=signs, zero_scale=scale_of(made).one
    )
    x = np.random.default_rng(4).standard_t(1, (70, 2, 16)).astype(np.float32)
    x[:64, 0, 2:4], x[3, 1, 5], x[66, 1, 0] = 0, np.nan, np.inf
    x[:, :, 8:] *= np.float32(1e-7)
    q = check(x, spec, axis=0, pad=True)
    tiles = q.scales.reshape(2, 16 // rows, rows, -1)
    assert (tiles == tiles[:, :, :1]).all()
    assert dequantize(q).shape == x.shape


@pytest.mark.clause("quantize.parts", "scale.tensor.amax", "scale.block.tile", "random.index")
@EVERY
@pytest.mark.parametrize("rows", [1, 2, 16])
def test_parts_that_are_given_the_amax_are_parts_of_the_whole(made, rows):
    spec = spec_of(made, "sr", 16, block=f"{rows}x{made.k}")
    whole = np.random.default_rng(5).standard_t(2, (64, 128)).astype(np.float32)
    whole[40, 70] = np.nan
    amax = oracle.tensor_amax(whole.view(np.uint32).ravel().tolist())
    q = check(whole, spec, origin=(0, 0), global_shape=whole.shape)
    for top, left in ((0, 0), (16, 64), (48, 0)):
        part = whole[top : top + 16, left : left + 64]
        where = {"origin": (top, left), "global_shape": whole.shape}
        got = check(part, spec, amax=amax if made.tensor_scale else None, **where)
        want = unpack(q.codes, made.element)[top : top + 16, left : left + 64]
        np.testing.assert_array_equal(unpack(got.codes, made.element), want)
        if made.tensor_scale:
            assert got.tensor_scale == q.tensor_scale
            with pytest.raises(MxrefError, match="amax"):
                quantize(part, spec, placement=Placement(STREAM, **where))


@pytest.mark.clause("scale.block.tile", evidence="known answer")
def test_tiles_that_are_not_whole_are_refused():
    for shape, where in (
        ((20, 64), {}),
        ((64,), {}),
        ((16, 64), {"origin": (8, 0), "global_shape": (64, 64)}),
    ):
        with pytest.raises(ShapeError, match="16x16"):
            quantize(
                np.ones(shape, np.float32),
                OperandSpec(NVFP4, block="16x16"),
                placement=Placement(amax=float32(oracle.ONE), **where),
            )


@pytest.mark.clause("scale.tensor.amax", evidence="known answer")
@pytest.mark.parametrize("amax", [np.nan, np.inf, -np.inf, -1.0, -1e-45])
def test_an_amax_that_is_none_is_refused(amax):
    with pytest.raises(MxrefError, match="amax"):
        quantize(
            np.ones((1, 16), np.float32),
            OperandSpec(NVFP4),
            placement=Placement(amax=np.array([amax], np.float32)),
        )


@pytest.mark.clause("rounding.sr", "random.range", evidence="known answer")
@EVERY
def test_more_random_bits_than_a_format_has_are_refused(made):
    most = most_bits(made)
    assert most == {"nvfp4": 22, "e2m3_ue4m3": 20, "int8_ue4m3": 17, "e4m3_ue5m3": 20}.get(made.name, 22)
    with pytest.raises(MxrefError, match="sr_bits"):
        quantize(np.ones((1, 64), np.float32), spec_of(made, "sr", most + 1), placement=Placement(STREAM))


@pytest.mark.clause("rounding.prescale", "scale.zero", "scale.rule.nearest", evidence="known answer")
@EVERY
def test_choices_of_scales_that_are_powers_of_two_are_refused(made):
    one = scale_of(made).one
    assert OperandSpec(made, zero_scale=one).zero_scale == one
    for fields in ({"prescale": True}, {"zero_scale": 127}, {"scale_rule": "even"}, {"scale_rule": ">1.5"}):
        with pytest.raises(RecipeError):
            OperandSpec(made, **fields)
    with pytest.raises(RecipeError):
        OperandSpec("mxfp4", scale_rule="nearest")


@pytest.mark.clause("scale.nonfinite", evidence="known answer")
@EVERY
def test_nonfinite_blocks_raise_where_the_spec_says_so(made):
    x = np.ones((2, 64), np.float32)
    x[1, 5] = np.nan
    with pytest.raises(NonfiniteError):
        quantize(x, OperandSpec(made, nonfinite="raise"))


@pytest.mark.clause("scale.rule.nearest", "scale.tensor", evidence="known answer")
def test_the_quotient_of_a_scale_is_rounded_once():
    """An amax of 260 and one of 1.5234375, whose scale implementations with two roundings put on a tie."""
    x = np.zeros((2, 16), np.float32)
    x[0, 0], x[1, 0] = 260, 1.5234375
    q = quantize(x, OperandSpec(NVFP4))
    t = Fraction(float(q.tensor_scale[0]))
    assert t == Fraction(float(np.float32(260 / 2688)))
    quotient = Fraction(1.5234375) / (6 * t)
    assert (
        0 < abs(quotient - Fraction(21, 8)) < Fraction(1, 2**20)
    )  # between 0x42, which is 2.5, and 0x43, 2.75
    assert q.scales[:, 0].tolist() == [0x7E, 0x43 if quotient > Fraction(21, 8) else 0x42]


# ---- dequantization ----


@pytest.mark.clause(
    "dequantize.value", "dequantize.nan", "dequantize.overflow", "formats.scale", "formats.int8"
)
@EVERY
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_every_code_under_every_scale(made, dtype):
    element, scale = element_of(made), scale_of(made)
    count = 2 * element.sign
    tensors = (oracle.ONE, 1, 0x3DC6_18C3, 0x0000_0155, 0x7800_0001) if made.tensor_scale else (None,)
    for tensor in tensors:
        # Every byte under the elements of few codes, once; else those of subnormals, every 23rd, and around NaN.
        some = {*range(9), *range(9, 256, 23), scale.one, scale.nan - 1, scale.nan, 255}
        bytes_ = range(256) if count < 256 and tensor in (None, oracle.ONE) else sorted(some)
        scale_codes = np.array(bytes_, np.uint8)
        codes = np.tile((np.arange(max(count, made.k)) % count).astype(np.uint8), (len(scale_codes), 1))
        scales = np.repeat(scale_codes[:, None], codes.shape[1] // made.k, axis=1)
        held = None if tensor is None else float32(tensor)
        q = MXArray(pack(codes, made.element), scales, codes.shape, 1, format=made, tensor_scale=held)
        got = dequantize(q, dtype)[:, :count]
        want = [
            [decoded(byte, code, element, scale, tensor, dtype) for code in range(count)] for byte in bytes_
        ]
        if dtype == "float64":
            np.testing.assert_array_equal(got, want)
            numbers = ~np.isnan(got)
            assert (np.signbit(got) == np.signbit(want))[numbers].all()
        else:
            assert got.view("u4" if dtype == "float32" else "u2").tolist() == want


def decoded(byte, code, element, scale, tensor, dtype):
    """The oracle's bits of a code; in float64 the exact number."""
    if dtype == "bfloat16":
        return oracle.dequantize_bf16(byte, code, element, scale, tensor)
    if dtype == "float32":
        return oracle.dequantize_f32(byte, code, element, scale, tensor)
    if oracle.scale_value(byte, scale) is None or element.kind(code) == "nan":
        return np.nan
    sign = -1.0 if code & element.sign else 1.0
    real = oracle.dequantize_real(byte, code, element, scale, oracle.ONE if tensor is None else tensor)
    value = np.copysign(np.inf if real is None else float(abs(real)), sign)
    assert real is None or Fraction(abs(float(value))) == abs(real)
    return float(value)


@pytest.mark.clause("dequantize.nan", "dequantize.value", evidence="known answer")
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_special_codes_under_every_kind_of_scale(dtype):
    made = BlockFormat("e5m2_ue5m3", E5M2, UE5M3, k=16)
    codes = np.tile(np.array([0x7C, 0xFC, 0x7D, 0xFF, 0x3C, 0x80], np.uint8), (3, 8))
    scales = np.repeat(np.array([[1], [0x78], [0xFF]], np.uint8), 3, axis=1)
    got = dequantize(MXArray(codes, scales, codes.shape, 1, format=made), dtype).astype(np.float64)
    inf, nan = np.inf, np.nan
    want = [[inf, -inf, nan, nan, 2.0**-17, -0.0], [inf, -inf, nan, nan, 1, -0.0], [nan] * 6]
    np.testing.assert_array_equal(got[:, :6], want)


@pytest.mark.clause("dequantize.nan", evidence="known answer")
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_an_infinity_under_a_scale_of_zero_is_that_infinity(dtype):
    made = BlockFormat("e5m2_ue5m3", E5M2, UE5M3, k=16)
    codes = np.tile(np.array([0x7C, 0xFC], np.uint8), (1, 8))
    q = MXArray(codes, np.zeros((1, 1), np.uint8), codes.shape, 1, format=made)
    assert dequantize(q, dtype).astype(np.float64).tolist() == [[np.inf, -np.inf] * 8]
