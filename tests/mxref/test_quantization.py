"""The reference's quantize and dequantize against the oracle, and every policy around them."""

import itertools
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import oracle
from differential import assert_same_blocks, bits_of, oracle_quantize, oracle_quantize_array
from mxref import (
    BlockShape,
    OperandSpec,
    Rounding,
    ScaleRule,
    SignPolicy,
    Stream,
    dequantize,
    hadamard,
    quantize,
)
from mxref.errors import DtypeError, NonfiniteError, RecipeError, ShapeError
from mxref.formats import BLOCK_FORMATS, E2M1, E8M0, MXFP4, MXFP8_E4M3, MXINT8, BlockFormat
from mxref.layouts.packed import pack, unpack
from mxref.mxarray import MXArray
from mxref.placement import Placement
from mxref.steps.hadamard import Rotation
from mxref.steps.scale import EXPONENT_RULES, scale_value
from strategies import any_blocks, crafted_blocks, crafted_names

STREAM = Stream(0x0123456789ABCDEF, step=11, layer=5, operand=2)


EVERY = pytest.mark.parametrize(
    "made", [made for made in BLOCK_FORMATS.values() if made.scale.powers], ids=str
)


def check(x, spec, names=None, **kwargs):
    q = quantize(x, spec, placement=Placement(STREAM), **kwargs)
    want = oracle_quantize(x, spec, STREAM)
    assert_same_blocks(unpack(q.codes, q.format.element), q.scales, *want, names=names)


TREATMENTS = (
    *(OperandSpec(scale_rule=rule) for rule in EXPONENT_RULES),
    OperandSpec(scale_rule="rceil", rounding="rna", zero_scale=127),
    OperandSpec(scale_rule="even", rounding="rtz", prescale=True),
    OperandSpec(rounding="sr", prescale=True),
    OperandSpec(scale_rule="even", rounding="sr", sr_bits=22),
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
@EVERY
@pytest.mark.parametrize("spec", TREATMENTS, ids=lambda s: f"{s.scale_rule}-{s.rounding}-{s.sr_bits}")
def test_crafted_blocks(spec, made):
    element = oracle.ELEMENTS[made.element.name]
    check(crafted_blocks(element), replace(spec, format=made), crafted_names(element))


@pytest.mark.clause("scale.block.row", "random.elements")
@pytest.mark.parametrize("k", [8, 16, 64])
@pytest.mark.parametrize("spec", TREATMENTS[-2:], ids=lambda s: f"{s.scale_rule}-{s.rounding}-{s.sr_bits}")
def test_crafted_blocks_of_other_lengths(spec, k):
    x = crafted_blocks()[: len(crafted_blocks()) // 4 * 2].reshape(-1, k)
    check(x, replace(spec, format=BlockFormat("mxfp4_of_k", E2M1, E8M0, k), block=f"1x{k}"))


@pytest.mark.clause("scale.zero", "rounding.sign", evidence="known answer")
@pytest.mark.parametrize("zero_scale", [0, 127])
def test_all_zero_blocks_keep_their_signs(zero_scale):
    x = np.zeros((2, 64), np.float32)
    x[0, ::2] = -0.0
    q = quantize(x, OperandSpec(zero_scale=zero_scale))
    assert (q.scales == zero_scale).all()
    assert unpack(q.codes, E2M1)[0].tolist() == [8, 0] * 32
    assert not unpack(q.codes, E2M1)[1].any()


@pytest.mark.clause("rounding.sign", evidence="known answer")
def test_negative_underflow_keeps_the_sign():
    x = np.full((1, 32), -1e-30, np.float32)
    x[0, 0] = 4
    assert unpack(quantize(x).codes, E2M1)[0].tolist() == [6, *[8] * 31]


@pytest.mark.clause("scale.nonfinite", "scale.block.row", "dequantize.nan", evidence="known answer")
@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_nan_block_spoils_its_own_block_only(bad):
    x = np.ones((2, 64), np.float32)
    x[1, 40] = bad
    q = quantize(x)
    assert q.scales.tolist() == [[125, 125], [125, 255]]
    assert not unpack(q.codes, E2M1)[1, 32:].any()
    assert np.isnan(dequantize(q)[1, 32:]).all()
    assert (dequantize(q)[1, :32] == 1).all()
    with pytest.raises(NonfiniteError, match=r"1 blocks, the first at \(1, 1\)"):
        quantize(x, OperandSpec(nonfinite="raise"))


@pytest.mark.clause("hadamard.nonfinite", "scale.nonfinite", evidence="known answer")
def test_infinity_made_by_the_hadamard_is_nonfinite():
    x = np.full((1, 32), np.finfo(np.float32).max, np.float32)
    assert quantize(x).scales[0, 0] == 252
    assert quantize(x, OperandSpec(hadamard=16)).scales[0, 0] == 255


@pytest.mark.clause("quantize.order", "scale.amax", "scale.zero", "rounding.scaled", "rounding.prescale")
@EVERY
@settings(max_examples=60, deadline=None)
@given(
    data=st.data(),
    rule=st.sampled_from(EXPONENT_RULES),
    rounding=st.sampled_from(Rounding),
    prescale=st.booleans(),
    sr_bits=st.integers(1, 22),
    zero_scale=st.sampled_from([0, 127]),
    hadamard=st.sampled_from([0, 0, 16, 32]),
)
def test_drawn_blocks(made, data, **fields):
    block = data.draw(any_blocks(element=oracle.ELEMENTS[made.element.name]))
    with np.errstate(all="ignore"):
        check(block[None], OperandSpec(made, fields.pop("rule"), **fields))


@pytest.mark.clause("scale.block.tile", "quantize.axis", "quantize.padding", "quantize.parts", "random.index")
@pytest.mark.parametrize("block", [BlockShape.ROW, BlockShape.TILE])
@pytest.mark.parametrize("n", [0, 64])
@pytest.mark.parametrize("made", [MXFP4, MXFP8_E4M3, MXINT8], ids=str)
def test_tiles_axes_padding_and_parts_match_the_oracle(made, n, block):
    signs = SignPolicy.PER_STEP_LAYER if n else SignPolicy.NONE
    spec = OperandSpec(made, "even", "sr", sr_bits=20, block=block, hadamard=n, signs=signs)
    x = np.random.default_rng(2).standard_t(2, (40, 2, 32)).astype(np.float32)
    where = {"origin": (64, 1, 32), "global_shape": (104, 4, 96)}
    q = quantize(x, spec, axis=0, placement=Placement(STREAM, **where), pad=True)
    want = oracle_quantize_array(x, spec, STREAM, axis=0, pad=True, **where)
    assert_same_blocks(unpack(q.codes, made.element), q.scales, *want)


@pytest.mark.clause("hadamard.float32", "hadamard.size", "hadamard.signs", "quantize.order")
@pytest.mark.parametrize("n", [2, 16, 32, 64, 128])
@pytest.mark.parametrize("signs", [SignPolicy.NONE, SignPolicy.PER_STEP_LAYER])
def test_hadamard_goes_into_the_scale_in_float32(n, signs):
    x = np.random.default_rng(n).standard_normal((6, 128)).astype(np.float32)
    x[1] *= 1e-38
    x[2, 64:] *= 1e30
    check(x, OperandSpec(scale_rule=ScaleRule.EVEN, hadamard=n, signs=signs))


@pytest.mark.clause("scale.block.tile", "packing.scales")
@pytest.mark.parametrize("rounding", [Rounding.RNE, Rounding.SR])
def test_tiles_share_scale_zero_and_nan_policies(rounding):
    x = np.random.default_rng(2).standard_normal((96, 128)).astype(np.float32)
    x[:32, :32] = 0
    x[40, 70] = np.nan
    x[64:, 96:] *= np.float32(1e-38)
    spec = OperandSpec(block=BlockShape.TILE, rounding=rounding, zero_scale=127)
    check(x, spec)
    q = quantize(x, spec, placement=Placement(STREAM))
    assert (q.scales[:32, 0] == 127).all()
    assert (q.scales[32:64, 2] == 255).all()
    tiles = q.scales.reshape(3, 32, 4)
    assert (tiles == tiles[:, :1]).all()


@pytest.mark.clause("scale.block.tile", "packing.scales", "quantize.padding")
@pytest.mark.parametrize("block", ["16x16", "2x16", "1x16", "2x8", "64x8"])
def test_tiles_of_any_height(block):
    x = np.random.default_rng(3).standard_t(2, (64, 3, 60)).astype(np.float32)
    x[:16, :, :16], x[17, 2, 40], x[40, 1, 3] = 0, np.nan, np.inf
    x = np.moveaxis(x, 0, 1)
    made = BlockFormat("short", E2M1, E8M0, k=int(block.partition("x")[2]))
    spec = OperandSpec(made, "even", "sr", block=block, zero_scale=127)
    q = quantize(x, spec, placement=Placement(STREAM), pad=True)
    want = oracle_quantize_array(x, spec, STREAM, pad=True)
    assert_same_blocks(unpack(q.codes, E2M1), q.scales, *want)


@pytest.mark.clause("conventions.inputs", evidence="peer")
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16])
def test_narrow_inputs_are_their_exact_float32_values(dtype):
    with np.errstate(over="ignore", invalid="ignore"):
        x = crafted_blocks().astype(dtype)
        wide = x.astype(np.float32)
    assert quantize(x) == quantize(wide)


@pytest.mark.clause("conventions.inputs", evidence="known answer")
@pytest.mark.parametrize("dtype", [np.float64, np.int32, np.uint8, ">f4"])
def test_other_inputs_are_refused(dtype):
    with pytest.raises(DtypeError, match="cast it yourself"):
        quantize(np.zeros((1, 32), dtype))


@pytest.mark.clause("conventions.inputs", evidence="known answer")
def test_lists_are_refused():
    with pytest.raises(DtypeError, match="expected an array, got list"):
        quantize([0.0] * 32)


@pytest.mark.clause("quantize.axis", "packing.scales")
@pytest.mark.parametrize("axis", [0, 1, 2, -1, -3])
def test_the_block_axis_is_stored_last(axis):
    x = np.random.default_rng(0).standard_normal((64, 32, 96)).astype(np.float32)
    q = quantize(x, axis=axis)
    moved = np.ascontiguousarray(np.moveaxis(x, axis, -1))
    codes, scales = oracle_quantize(moved.reshape(-1, moved.shape[-1]), OperandSpec())
    assert unpack(q.codes, E2M1).shape == moved.shape
    np.testing.assert_array_equal(unpack(q.codes, E2M1).reshape(codes.shape), codes)
    np.testing.assert_array_equal(q.scales.reshape(scales.shape), scales)
    assert dequantize(q).shape == x.shape
    assert np.abs(dequantize(q) - x).max() < 1


@pytest.mark.clause("quantize.strides")
def test_strides_do_not_matter():
    x = np.random.default_rng(0).standard_normal((64, 256)).astype(np.float32)
    want = quantize(x[::2, 64:192].copy())
    assert quantize(x[::2, 64:192]) == want
    assert quantize(np.asfortranarray(x[::2, 64:192])) == want
    backwards = x[::-2, 191:63:-1]
    assert quantize(backwards) == quantize(backwards.copy())


@pytest.mark.clause("quantize.padding", "quantize.order")
@pytest.mark.parametrize(
    ("length", "n", "stored"), [(33, 0, 64), (1, 16, 32), (40, 64, 64), (70, 128, 128), (32, 16, 32)]
)
def test_padding_appends_zeros_before_the_hadamard(length, n, stored):
    x = np.random.default_rng(0).standard_normal((3, length)).astype(np.float32)
    spec = OperandSpec(hadamard=n)
    q = quantize(x, spec, pad=True)
    assert q.length == stored
    padded = np.zeros((3, stored), np.float32)
    padded[:, :length] = x
    want = quantize(padded, spec)
    np.testing.assert_array_equal(q.codes, want.codes)
    np.testing.assert_array_equal(q.scales, want.scales)
    assert dequantize(q).shape == x.shape


@pytest.mark.clause("random.index")
@pytest.mark.parametrize("bits", [16, 20])
@pytest.mark.parametrize("axis", [0, 1])
def test_shards_get_the_random_bits_of_the_whole(axis, bits):
    x = np.random.default_rng(0).standard_normal((96, 128)).astype(np.float32)
    spec = OperandSpec(rounding=Rounding.SR, sr_bits=bits)
    whole = quantize(x, spec, axis=axis, placement=Placement(STREAM))
    for top, left in itertools.product((0, 32, 64), (0, 64)):
        shard = quantize(
            x[top : top + 32, left : left + 64],
            spec,
            axis=axis,
            placement=Placement(STREAM, origin=(top, left), global_shape=x.shape),
        )
        rows, columns = (slice(top, top + 32), slice(left, left + 64))[:: 1 if axis else -1]
        np.testing.assert_array_equal(unpack(shard.codes, E2M1), unpack(whole.codes, E2M1)[rows, columns])


@pytest.mark.clause("quantize.strides", evidence="known answer")
@pytest.mark.parametrize("shape", [(0, 32), (3, 0), (0, 0), (2, 0, 64)])
def test_empty_in_empty_out(shape):
    q = quantize(np.zeros(shape, np.float32))
    assert dequantize(q).shape == shape
    assert q.scales.shape == (*shape[:-1], shape[-1] // 32)


@pytest.mark.clause("quantize.length", evidence="known answer")
@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({"axis": 2}, "axis 2 is out of range"),
        ({"axis": 0}, "axis 0 has length 50, not a multiple of 32"),
        ({"spec": OperandSpec(hadamard=128)}, "axis 1 has length 64, not a multiple of 128"),
        ({"placement": Placement(origin=(0, 32))}, "pass its global_shape too"),
        ({"placement": Placement(None, (0, 32), (50, 64))}, r"origin 32 \+ length 64 does not lie within"),
        ({"placement": Placement(None, (0,), (50,))}, "must have the 2 axes"),
        ({"spec": OperandSpec(block="32x32")}, "block 32x32: axis 0"),
    ],
)
def test_shapes_that_do_not_fit_say_why(kwargs, message):
    spec = kwargs.pop("spec", OperandSpec())
    with pytest.raises(ShapeError, match=message):
        quantize(np.zeros((50, 64), np.float32), spec, **kwargs)


@pytest.mark.clause("quantize.parts", evidence="known answer")
@pytest.mark.parametrize("pad", [False, True])
@pytest.mark.parametrize(
    ("n", "length", "origin", "total"),
    [(0, 64, 16, 96), (0, 32, 48, 96), (64, 64, 32, 128), (64, 128, 96, 256)],
)
def test_parts_that_would_cut_a_block_are_refused(n, length, origin, total, pad):
    x = np.zeros((3, length), np.float32)
    message = f"axis 1: .*straddle shards, so origin {origin} and length {length}"
    with pytest.raises(ShapeError, match=message):
        quantize(
            x,
            OperandSpec(hadamard=n),
            placement=Placement(origin=(0, origin), global_shape=(3, total)),
            pad=pad,
        )


@pytest.mark.clause("quantize.parts", evidence="known answer")
def test_only_the_last_part_may_be_of_any_length_and_only_with_padding():
    x, spec = np.zeros((3, 40), np.float32), OperandSpec()
    with pytest.raises(ShapeError, match="axis 1: .*straddle shards, so origin 64 and length 40"):
        quantize(x, spec, placement=Placement(origin=(0, 64), global_shape=(3, 105)), pad=True)
    with pytest.raises(ShapeError, match="axis 1 has length 40, not a multiple of 32"):
        quantize(x, spec, placement=Placement(origin=(0, 64), global_shape=(3, 104)))
    assert (
        quantize(x, spec, placement=Placement(origin=(0, 64), global_shape=(3, 104)), pad=True).length == 64
    )


@pytest.mark.clause("scale.block.tile", evidence="known answer")
def test_a_tile_needs_two_axes():
    with pytest.raises(ShapeError, match=r"block 32x32 needs two axes, got shape \(64,\)"):
        quantize(np.zeros(64, np.float32), OperandSpec(block="32x32"))


def test_sr_and_signs_need_a_stream():
    x = np.zeros((1, 32), np.float32)
    with pytest.raises(RecipeError, match="needs a random stream"):
        quantize(x, OperandSpec(rounding=Rounding.SR))
    with pytest.raises(RecipeError, match="needs a random stream"):
        quantize(x, OperandSpec(hadamard=16, signs=SignPolicy.FIXED))
    with pytest.raises(RecipeError, match="format is bf16"):
        quantize(x, OperandSpec(format="bf16"))


@pytest.mark.clause(
    "dequantize.value",
    "dequantize.overflow",
    "dequantize.nan",
    "formats.e2m1",
    "formats.e8m0",
    "formats.mxfp4",
    "conventions.nan",
)
@EVERY
@pytest.mark.parametrize("dtype", ["float64", "float32", "bfloat16"])
def test_every_code_under_every_scale_decodes_as_the_oracle_says(dtype, made):
    element = oracle.ELEMENTS[made.element.name]
    codes = np.tile(
        np.resize(np.arange(1 << element.bits, dtype=np.uint8), max(32, 1 << element.bits)), (256, 1)
    )
    scales = np.repeat(np.arange(256, dtype=np.uint8)[:, None], codes.shape[1] // 32, axis=1)
    q = MXArray(pack(codes, made.element), scales, codes.shape, 1, format=made)
    if dtype == "float64":
        with np.errstate(invalid="ignore"):
            want = np.array(made.element.values)[codes] * scale_value(scales[:, :1])
        np.testing.assert_array_equal(dequantize(q, dtype), want)
        return
    decode = oracle.dequantize_f32 if dtype == "float32" else oracle.dequantize_bf16
    want = [[decode(byte, code, element) for code in codes[byte].tolist()] for byte in range(256)]
    assert dequantize(q, dtype).view("u4" if dtype == "float32" else "u2").tolist() == want


@pytest.mark.clause("dequantize.value", evidence="known answer")
def test_the_smallest_values_round_in_bfloat16():
    # 2^-9 under byte 0 is 2^-136, and the smallest bfloat16 is 2^-133: 5 of them round to it, 4 tie to 0.
    codes = np.zeros((1, 32), np.uint8)
    codes[0, :3] = 4, 5, 0x85
    q = MXArray(codes, np.zeros((1, 1), np.uint8), (1, 32), 1, format=MXFP8_E4M3)
    assert bits_of(dequantize(q, "bfloat16"))[0, :3].tolist() == [0, 1, 0x8001]
    assert bits_of(dequantize(q, "float32"))[0, :3].tolist() == [4 << 13, 5 << 13, 0x80000000 | 5 << 13]


@pytest.mark.clause("dequantize.value", evidence="known answer")
def test_float16_output_is_refused():
    with pytest.raises(DtypeError, match="not float16"):
        dequantize(quantize(np.zeros((1, 32), np.float32)), "float16")


@pytest.mark.clause("dequantize.value")
def test_hadamard_is_not_undone():
    x = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
    q = quantize(x, OperandSpec(hadamard=16))
    assert np.abs(dequantize(q) - hadamard(x, Rotation(16))).max() < 0.8
    assert (
        bits_of(dequantize(q)).tolist() == bits_of(dequantize(quantize(hadamard(x, Rotation(16))))).tolist()
    )
