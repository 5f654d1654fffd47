"""Bit equality with independently written implementations, at the releases that constraints.txt pins.

Every test states the domain where a peer agrees. Known faults of the installed release are excluded from that domain,
and tests assert that they still exist. A release that repairs one fails here, and then the exclusion must be removed.
"""

from copy import deepcopy
from importlib import import_module

import ml_dtypes
import numpy as np
import pytest
import torch
from gfloat import (
    RoundMode,
    compute_scale_amax,
    decode_block,
    decode_float,
    encode_block,
    encode_ndarray,
    round_ndarray,
)
from gfloat.formats import format_info_mxfp4_e2m1, format_info_ocp_e2m1, format_info_ocp_e8m0
from hypothesis import given, settings
from hypothesis import strategies as st

from bench.records import newest, read
from differential import assert_same_blocks, bits_of
from mxref import MXArray, OperandSpec, Rounding, ScaleRule, Stream, dequantize, quantize
from mxref.dialects import dialect
from mxref.formats import E2M1, MXFP4, MXFP8_E4M3, MXFP8_E5M2
from mxref.layouts.packed import pack, unpack
from mxref.placement import Placement
from mxref.steps.random import random_integers
from mxref.steps.rounding import round_magnitude
from mxref.steps.scale import EXPONENT_RULES, MAGNITUDE_MASK, scale_value
from peers import cases
from peers.measure import peer_results
from peers.pages import sources
from peers.render import StaleNoteError, render
from places import ROOT
from strategies import FLT_MAX, crafted_blocks, crafted_names, finite_blocks

RESULTS = read(newest("peers"))
BLOCKS = crafted_blocks()
NAMES = np.array(crafted_names())
AMAX = (BLOCKS.view(np.uint32) & MAGNITUDE_MASK).max(axis=-1)
FINITE = AMAX <= FLT_MAX
ULPS_OF_LOG2 = 64
"""Float32 log2 of 6 x 2^e (1 + n ulp) can round down to an integer for n up to 44; torch's does up to 34."""


def heavy_tailed(dtype=np.float32):
    """A matrix [256, 1024] whose rows differ in scale by lognormal factors, with outliers inside each row."""
    rng = np.random.default_rng(7)
    rows = np.exp(2 * rng.standard_normal((256, 1)))
    return (rng.standard_t(2, (256, 1024)) * rows).astype(dtype)


def torchao_quantize(x, rule, made=MXFP4):
    """Codes and scale bytes of torchao for float32 or bfloat16 rows."""
    from torchao.prototype.mx_formats.config import ScaleCalculationMode
    from torchao.prototype.mx_formats.mx_tensor import to_mx

    mode = ScaleCalculationMode[rule.name]
    tensor = torch.from_numpy(x.astype(np.float32))
    if x.dtype == ml_dtypes.bfloat16:
        tensor = tensor.to(torch.bfloat16)
    element = torch.float4_e2m1fn_x2 if made is MXFP4 else getattr(torch, made.element.dtype)
    scales, packed = to_mx(tensor, element, 32, mode)
    return unpack(packed.view(torch.uint8).numpy(), made.element), scales.view(torch.uint8).numpy()


def tiny(amax, scales):
    """Blocks that have scale byte 0 and are not zero: torchao stores the byte and applies another scale."""
    return (amax > 0) & (scales == 0)


def just_above_6(amax, rule):
    """Blocks whose amax is so little above 6 x 2^e that float32 log2 may not see it: RCEIL alone takes a log2."""
    ulps = (amax & 0x7FFFFF).astype(np.int64) - 0x400000
    return (ulps > 0) & (ulps <= ULPS_OF_LOG2) & (rule is ScaleRule.RCEIL)


def row_amax(x):
    return (x.view(np.uint32) & MAGNITUDE_MASK).reshape(len(x), -1, 32).max(axis=-1)


# ---- torchao: finite blocks of scale byte 1 to 253, and zero; under RCEIL, amax not just above 6 x 2^e ----


@pytest.mark.clause(
    "scale.rule.floor",
    "scale.rule.ceil",
    "scale.rule.rceil",
    "scale.rule.even",
    "scale.zero",
    "rounding.rne",
    "rounding.saturate",
    "rounding.sign",
    "quantize.order",
    evidence="peer",
)
@pytest.mark.parametrize("rule", EXPONENT_RULES)
def test_torchao_stores_the_same_crafted_blocks(rule):
    q = quantize(BLOCKS, OperandSpec(scale_rule=rule))
    same = FINITE & ~tiny(AMAX, q.scales[:, 0]) & ~just_above_6(AMAX, rule)
    assert same.sum() > 2500
    got = torchao_quantize(BLOCKS[same], rule)
    assert_same_blocks(*got, unpack(q.codes, E2M1)[same], q.scales[same], NAMES[same])


@pytest.mark.clause(
    "scale.rule.floor",
    "scale.rule.ceil",
    "scale.rule.rceil",
    "scale.rule.even",
    "rounding.rne",
    evidence="peer",
)
@pytest.mark.parametrize("rule", EXPONENT_RULES)
@settings(max_examples=50, deadline=None)
@given(data=st.data())
def test_torchao_stores_the_same_drawn_blocks(rule, data):
    x = data.draw(finite_blocks())[None]
    q = quantize(x, OperandSpec(scale_rule=rule))
    if not (tiny(row_amax(x), q.scales) | just_above_6(row_amax(x), rule)).any():
        assert_same_blocks(*torchao_quantize(x, rule), unpack(q.codes, E2M1), q.scales)


@pytest.mark.clause(
    "dialect.ocp", "dialect.amd", "dialect.nvidia", "packing.nibbles", "quantize.axis", evidence="peer"
)
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16])
@pytest.mark.parametrize("name", ["ocp", "amd", "nvidia", "ceil"])
def test_torchao_stores_the_same_matrix(name, dtype):
    """A dialect and torchao's mode of its scale rule: no block of this matrix is left out, and none is zero."""
    x = heavy_tailed(dtype)
    spec = OperandSpec(scale_rule="ceil") if name == "ceil" else dialect(name).spec
    q = quantize(x, spec)
    codes, scales = torchao_quantize(x, spec.scale_rule)
    assert_same_blocks(codes, scales, unpack(q.codes, E2M1), q.scales)
    assert np.unique(q.scales).size > 20


@pytest.mark.clause(
    "dequantize.value", "dequantize.overflow", "dequantize.nan", "formats.mxfp4", evidence="peer"
)
def test_torchao_decodes_every_code_at_every_scale_byte():
    codes = np.tile(np.arange(16, dtype=np.uint8), (256, 2))
    q = MXArray(pack(codes, E2M1), np.arange(256, dtype=np.uint8)[:, None], (256, 32), 1)
    scales = torch.from_numpy(q.scales).view(torch.float8_e8m0fnu)
    from torchao.prototype.mx_formats.mx_tensor import to_dtype

    got = to_dtype(torch.from_numpy(q.codes), scales, torch.float4_e2m1fn_x2, 32, torch.float32)
    np.testing.assert_array_equal(bits_of(got.numpy()), bits_of(dequantize(q)))


@pytest.mark.clause(
    "formats.mxfp8",
    "scale.rule.floor",
    "scale.rule.rceil",
    "scale.rule.even",
    "rounding.saturate",
    evidence="peer",
)
@pytest.mark.parametrize("made", [MXFP8_E4M3, MXFP8_E5M2], ids=str)
@pytest.mark.parametrize("rule", EXPONENT_RULES)
def test_torchao_stores_the_same_crafted_blocks_of_mxfp8(rule, made):
    q = quantize(BLOCKS, OperandSpec(format=made, scale_rule=rule))
    same = FINITE & ~tiny(AMAX, q.scales[:, 0])
    assert same.sum() > 2500
    got = torchao_quantize(BLOCKS[same], rule, made)
    assert_same_blocks(*got, q.codes[same], q.scales[same], NAMES[same])


# ---- what torchao's release gets wrong ----


@pytest.mark.parametrize("rule", EXPONENT_RULES)
def test_torchao_still_applies_another_scale_than_it_stores_in_tiny_blocks(rule):
    """Byte 0 is 2^-127; FLOOR, CEIL and EVEN divide by 2^-126, so that values halve, and RCEIL by 1."""
    q = quantize(BLOCKS, OperandSpec(scale_rule=rule))
    which = FINITE & tiny(AMAX, q.scales[:, 0])
    codes, scales = torchao_quantize(BLOCKS[which], rule)
    want = unpack(q.codes, E2M1)[which]
    assert not scales[~just_above_6(AMAX[which], rule)].any()
    divisor = 1.0 if rule is ScaleRule.RCEIL else 2.0**-126
    applied = round_magnitude(
        (np.abs(BLOCKS[which].astype(np.float64)) / divisor).astype(np.float32), Rounding.RNE, E2M1
    )
    np.testing.assert_array_equal(codes & 7, applied)
    nonzero = (want & 7).any(axis=-1)
    assert nonzero.sum() > 30
    np.testing.assert_array_equal((codes != want).any(axis=-1), nonzero)


@pytest.mark.parametrize(("made", "furthest"), [(MXFP4, 34), (MXFP8_E4M3, 40), (MXFP8_E5M2, 40)], ids=str)
def test_torchao_still_takes_a_float32_log2_under_rceil(made, furthest):
    """The byte is then one too small, and the largest elements saturate: just above M x 2^e for large |e|."""
    largest = int(np.float32(made.element.max_value).view(np.uint32)) & 0x7FFFFF
    biased = np.repeat(np.arange(2, 255), ULPS_OF_LOG2)
    ulps = np.tile(np.arange(1, ULPS_OF_LOG2 + 1), 253)
    x = np.zeros((len(biased), 32), np.float32)
    x[:, 0] = (biased << 23 | largest + ulps).astype(np.uint32).view(np.float32)
    want = quantize(x, OperandSpec(format=made, scale_rule="rceil")).scales[:, 0].astype(int)
    lag = want - torchao_quantize(x, ScaleRule.RCEIL, made)[1][:, 0]
    assert set(lag.tolist()) == {0, 1}
    assert ulps[lag == 1].max() == furthest
    # |log2(amax / 6)| >= 64 is a multiple of 2^-17: one ulp above an integer is lost by any rounding.
    far = (ulps == 1) & (np.abs(biased - 127 - made.element.max_exponent) > 64) & (want > 1)
    assert far.sum() > 100
    assert lag[far].all()


@pytest.mark.parametrize("rule", EXPONENT_RULES)
def test_torchao_still_stores_a_finite_scale_for_infinity_and_agrees_on_nan(rule):
    """A NaN makes the byte 255, as here, with codes that mean nothing; an Inf makes it 253, or 254 under RCEIL."""
    _, scales = torchao_quantize(BLOCKS, rule)
    nan = np.isnan(BLOCKS).any(axis=-1)
    infinite = ~FINITE & ~nan
    assert nan.sum() > 30
    assert infinite.sum() > 5
    assert (scales[nan] == 255).all()
    assert (scales[infinite] == (254 if rule is ScaleRule.RCEIL else 253)).all()
    block = np.zeros((2, 32), np.float32)
    block[:, :3] = [[np.nan, 1, -2], [np.inf, 1, -2]]
    for made, byte, largest in ((MXFP8_E4M3, 0xF7, 0x7E), (MXFP8_E5M2, 0xF0, 0x7B)):
        codes, scales = torchao_quantize(block, rule, made)
        assert scales[:, 0].tolist() == [255, 254 if rule is ScaleRule.RCEIL else byte]
        assert codes[:, 0].tolist() == [0x7F, largest]


# ---- gfloat in float64: finite blocks. (In float32 its log2 is inexact; it refuses NaN.) ----


@pytest.mark.clause(
    "dialect.ocp", "scale.rule.floor", "scale.clamp", "scale.zero", "rounding.rne", evidence="peer"
)
def test_gfloat_stores_the_same_crafted_blocks():
    x = BLOCKS[FINITE][::3]
    got = []
    for block in x.astype(np.float64):
        scale = compute_scale_amax(format_info_ocp_e2m1.emax, block)
        got.append(list(encode_block(format_info_mxfp4_e2m1, scale, block / scale)))
    stored = np.array(got, np.uint8)
    q = quantize(x)
    assert_same_blocks(stored[:, 1:], stored[:, :1], unpack(q.codes, E2M1), q.scales, NAMES[FINITE][::3])


def gfloat_matrix(x, mode, **random):
    """Codes and scale bytes of gfloat's array functions, in float64 throughout."""
    blocks = x.astype(np.float64).reshape(-1, 32)
    scales = np.array([compute_scale_amax(format_info_ocp_e2m1.emax, block) for block in blocks])
    rounded = round_ndarray(format_info_ocp_e2m1, blocks / scales[:, None], mode, sat=True, **random)
    codes = encode_ndarray(format_info_ocp_e2m1, rounded).astype(np.uint8)
    return codes.reshape(x.shape), (np.log2(scales) + 127).astype(np.uint8).reshape(len(x), -1)


@pytest.mark.clause(
    "dialect.ocp", "rounding.rne", "rounding.rna", "rounding.rtz", "quantize.order", evidence="peer"
)
@pytest.mark.parametrize("x", [heavy_tailed(), BLOCKS[FINITE]], ids=["matrix", "crafted"])
@pytest.mark.parametrize(
    ("rounding", "mode"),
    [("rne", RoundMode.TiesToEven), ("rna", RoundMode.TiesToAway), ("rtz", RoundMode.TowardZero)],
)
def test_gfloat_stores_the_same_under_every_deterministic_rounding(rounding, mode, x):
    q = quantize(x, OperandSpec(rounding=rounding))
    assert_same_blocks(*gfloat_matrix(x, mode), unpack(q.codes, E2M1), q.scales)


@pytest.mark.clause("rounding.sr", evidence="peer")
@pytest.mark.parametrize("bits", [1, 8, 16, 22])
@pytest.mark.parametrize("x", [heavy_tailed()[:32], BLOCKS[FINITE]], ids=["matrix", "crafted"])
def test_gfloat_rounds_stochastically_to_the_same_codes_given_the_same_bits(x, bits):
    """Its StochasticFastest goes up where f + r / 2^R >= 1, which is this specification's SR."""
    stream = Stream(seed=5, step=1, layer=2, operand=3)
    integers = random_integers(np.arange(len(x)), 0, x.shape[1], x.shape[1], stream, bits)
    random = {"srbits": integers.reshape(-1, 32).astype(np.int64), "srnumbits": bits}
    q = quantize(x, OperandSpec(rounding="sr", sr_bits=bits), placement=Placement(stream))
    got = gfloat_matrix(x, RoundMode.StochasticFastest, **random)
    assert_same_blocks(*got, unpack(q.codes, E2M1), q.scales)


@pytest.mark.clause("dequantize.value", "dequantize.nan", "formats.e8m0", "formats.e2m1", evidence="peer")
def test_gfloat_decodes_every_code_at_every_scale_byte():
    codes = np.tile(np.arange(16, dtype=np.uint8), (256, 2))
    q = MXArray(pack(codes, E2M1), np.arange(256, dtype=np.uint8)[:, None], (256, 32), 1)
    want = [list(decode_block(format_info_mxfp4_e2m1, [b, *row])) for b, row in enumerate(codes.tolist())]
    values = dequantize(q, "float64")
    np.testing.assert_array_equal(values, np.array(want))
    np.testing.assert_array_equal(np.signbit(values[:255]), np.signbit(want[:255]))
    assert [decode_float(format_info_ocp_e8m0, b).fval for b in (0, 254)] == scale_value(
        np.uint8([0, 254])
    ).tolist()


# ---- compressed-tensors ----


@pytest.mark.clause("formats.mxfp8", "scale.rule.rceil", evidence="peer")
@pytest.mark.parametrize(("dtype", "differ"), [(np.float32, 0), (ml_dtypes.bfloat16, 266)])
def test_compressed_tensors_scales_mxfp8_as_rceil_but_for_one_amax(dtype, differ):
    """It takes the next larger scale from 1.75 x 2^e on, RCEIL above it; normal blocks have that amax in bfloat16."""
    x = cases.normal_blocks(65536).astype(dtype)
    run = import_module("peers.compressed_tensors").mxfp8
    scales, codes = run(x.astype(np.float32), torch.float32 if dtype is np.float32 else torch.bfloat16)
    q = quantize(x, OperandSpec(format=MXFP8_E4M3, scale_rule="rceil"))
    at_bound = (row_amax(x.astype(np.float32))[:, 0] & 0x7FFFFF) == 0x600000
    assert at_bound.sum() == differ
    assert_same_blocks(codes[~at_bound], scales[~at_bound, None], q.codes[~at_bound], q.scales[~at_bound])
    np.testing.assert_array_equal(scales[at_bound], q.scales[at_bound, 0] + 1)


def test_compressed_tensors_drops_the_sign_of_what_underflows():
    """-2^-60 divided by the scale 2^100 is -0 in float32, and the sign of -0 is lost."""
    x = np.zeros((1, 32), np.float32)
    x[0, :3] = 4 * 2.0**100, -(2.0**-60), 2.0**-60
    scales, codes = import_module("peers.compressed_tensors").FLOAT32.run(x)
    q = quantize(x, OperandSpec(scale_rule="even"))
    assert scales[0] == q.scales[0, 0]
    assert (pack(codes, E2M1)[0, 0], q.codes[0, 0]) == (0x06, 0x86)


# ---- ml_dtypes ----


def test_ml_dtypes_casts_to_e8m0_are_still_no_way_to_make_a_scale():
    cast = np.float32([0, -1, 1.5]).astype(ml_dtypes.float8_e8m0fnu).view(np.uint8)
    assert cast.tolist() == [255, 255, 128]
    assert np.float32([np.nan, np.inf]).astype(ml_dtypes.float4_e2m1fn).view(np.uint8).tolist() == [8, 7]


# ---- the table of differences in the documentation: all peers, measured by `make peers` ----


def portable(results):
    """Leave out the release, and what is the machine's own: NaN and Inf as integers, float32 log2 beside an integer."""
    results = deepcopy(results)
    del results["version"]
    results["blocks"].pop("gfloat float32", None)
    for column in results["blocks"].values():
        del column["stored"]["NaN"], column["stored"]["Inf"]
    return results


def test_the_table_names_the_releases_that_are_pinned():
    pinned = (ROOT / "constraints.txt").read_text().split()
    assert {f"{name}=={peer['version']}" for name, peer in RESULTS["peers"].items()} <= set(pinned)


@pytest.mark.parametrize("name", ["torchao", "gfloat", "ml_dtypes", "torch"])
def test_the_table_shows_what_the_installed_peers_give_now(name):
    """Where this fails on a new version: `make peers`."""
    assert portable(peer_results(import_module(f"peers.{name}").PEER)) == portable(RESULTS["peers"][name])


@pytest.mark.parametrize("name", ["torchao", "gfloat", "compressed_tensors"])
def test_the_pages_show_what_the_installed_peers_store_now(name):
    """The separating blocks of the pages, but for those whose bytes the record says are the machine's own."""
    quantizers = import_module(f"peers.{name}").PEER.quantizers
    shown = {
        (side["recorded"], case["block"])
        for peer in sources()
        for case in peer.get("separates", ())
        for side in (case["theirs"], case["other"])
        if side.get("recorded") in quantizers and side["recorded"] != "gfloat float32"
    }
    assert len(shown) >= 3
    for column, block in shown:
        (measured,) = (p["blocks"][column] for p in RESULTS["peers"].values() if column in p["blocks"])
        x = cases.block_array()[[list(cases.BLOCKS).index(block)]]
        (scale,), (codes,) = quantizers[column].run(x)
        assert f"{scale:02X} {''.join(f'{code:X}' for code in codes)}" == measured["stored"][block]


def test_transformers_decodes_as_its_page_says():
    (recorded,) = RESULTS["peers"]["transformers"]["decoders"].values()
    values = (
        import_module("peers.transformers").PEER.decoders["transformers"].run(np.uint8(cases.SCALE_BYTES))
    )
    assert [str(float(value)) for value in values] == recorded["values"]


@pytest.mark.parametrize(
    ("block", "stored", "message"),
    [
        ("zero", "7F " + "1" * 32, "no note says why"),
        ("Inf", "FF " + "0" * 32, "a note explains a difference that does not exist"),
    ],
)
def test_a_difference_without_a_note_and_a_note_without_a_difference_are_refused(block, stored, message):
    results = deepcopy(RESULTS)
    results["peers"]["gguf"]["blocks"]["gguf"]["stored"][block] = stored
    with pytest.raises(StaleNoteError, match=message):
        render(results)
