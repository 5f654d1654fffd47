"""What a second quantization of the dequantized values keeps, and casts to E8M0."""

from itertools import product

import numpy as np
import pytest
import torch

from mxref import BlockFormat, OperandSpec, Placement, Rounding, Stream, dequantize, quantize
from mxref.conformance.requests.crafted import crafted_blocks, crafted_tensors
from mxref.formats import BLOCK_FORMATS, NVFP4, Negatives
from mxref.layouts.packed import unpack
from mxref.steps.scale import ScaleCast, ScaleRule, cast_to_e8m0, rules_of

POWERS = [made for made in BLOCK_FORMATS.values() if made.scale.powers]
STREAM = Stream(3)


def twice(x: np.ndarray, spec: OperandSpec, amax: float | None = None):
    """An array quantized once and twice, with the values after each."""
    at = Placement(STREAM, amax=None if amax is None else np.array([amax], np.float32))
    with np.errstate(all="ignore"):
        q = quantize(x, spec, placement=at)
        y = dequantize(q)
        again = quantize(y, spec, placement=at)
        return q, again, y, dequantize(again)


def kept(made: BlockFormat, x: np.ndarray, q, y: np.ndarray) -> np.ndarray:
    """Blocks [R, B] that the clause speaks of: values in float32, not all of them lost, and amax not too small."""
    shape = (*q.scales.shape, made.k)
    nan = q.scales == made.scale.nan_code
    finite = np.isfinite(y).reshape(shape).all(axis=-1) | nan
    lost = (y.reshape(shape) == 0).all(axis=-1) & (x.reshape(shape) != 0).any(axis=-1)
    amax = np.abs(np.nan_to_num(x)).reshape(shape).max(axis=-1)
    subnormal = (amax > 0) & (amax < 2.0**-126) & (made.element.max_exponent == 0)
    return finite & (~lost | nan) & ~subnormal


def same(made: BlockFormat, q, again) -> np.ndarray:
    """Blocks [R, B] of the same byte and codes; in two's complement -0 was lost the first time."""
    codes = [unpack(each.codes, made.element).reshape(*each.scales.shape, made.k) for each in (q, again)]
    return (q.scales == again.scales) & (codes[0] == codes[1]).all(axis=-1)


@pytest.mark.clause("quantize.again")
@pytest.mark.parametrize("made", POWERS, ids=str)
def test_under_powers_of_two(made):
    normal = np.random.default_rng(0).standard_normal((64, 4 * made.k)).astype(np.float32)
    for x, rule, rounding in product(
        (crafted_blocks(made, full=False).x, normal), rules_of(made.scale), Rounding
    ):
        zero = made.scale.one_code if rule is ScaleRule.EVEN else 0
        q, again, y, z = twice(x, OperandSpec(made, scale_rule=rule, rounding=rounding, zero_scale=zero))
        blocks, unchanged = kept(made, x, q, y), same(made, q, again)
        equal = np.array([a.tobytes() == b.tobytes() for a, b in zip(y + 0, z + 0, strict=True)])
        if rule is ScaleRule.FLOOR or (rule is ScaleRule.EVEN and rounding in ("rne", "rna")):
            assert unchanged[blocks].all(), (rule, rounding)
        elif rule in (ScaleRule.CEIL, ScaleRule.RCEIL):
            down = q.scales.astype(int) - again.scales
            assert set(down[blocks].ravel().tolist()) <= {0, 1}, (rule, rounding)
            assert equal[blocks.all(axis=1)].all(), (rule, rounding)


@pytest.mark.clause("quantize.again", evidence="known answer")
@pytest.mark.parametrize(
    ("made", "changed"),
    [("mxfp4", [0, 44.6, 13.0, 0]), ("mxfp8_e4m3", [0, 11.1, 3.5, 0]), ("mxfp8_e5m2", [0, 22.8, 7.2, 0]),
     ("mxfp6_e2m3", [0, 11.1, 4.5, 0]), ("mxfp6_e3m2", [0, 22.8, 7.2, 0]), ("mxint8", [0, 2.6, 0, 0])],
)  # fmt: skip
def test_the_shares_that_the_specification_tells(made, changed):
    x = np.random.default_rng(0).standard_normal((512, 1024)).astype(np.float32)
    for rule, share in zip(rules_of(BLOCK_FORMATS[made].scale), changed, strict=True):
        q, again, y, z = twice(x, OperandSpec(made, scale_rule=rule))
        assert round(100 * (q.scales != again.scales).mean(), 1) == share
        assert np.array_equal(y, z)


@pytest.mark.clause("quantize.again")
@pytest.mark.parametrize("rounding", ["rne", "rna"])
def test_under_scales_with_a_mantissa(rounding):
    first_normal = 1 << NVFP4.scale.mantissa_bits
    for tensor in crafted_tensors(NVFP4):
        if tensor.amax is None or tensor.amax < 2.0**-100:
            continue
        q, again, y, _ = twice(tensor.x, OperandSpec(NVFP4, rounding=rounding), tensor.amax)
        tiny = (np.abs(y) < 2.0**-126) & (y != 0)
        told = (q.scales >= first_normal) & ~tiny.reshape(*q.scales.shape, 16).any(axis=-1)
        assert told.sum() > 100
        assert same(NVFP4, q, again)[told & kept(NVFP4, tensor.x, q, y)].all(), tensor.where


@pytest.mark.clause("quantize.again", evidence="known answer")
def test_a_tensor_keeps_its_scale_and_rtz_shrinks():
    x = np.random.default_rng(0).standard_normal((256, 512)).astype(np.float32)
    q, again, y, z = twice(x, OperandSpec(NVFP4))
    assert q == again
    q, again, y, z = twice(x, OperandSpec(NVFP4, rounding="rtz"), float(np.abs(x).max()))
    assert 0.55 < (y != z).mean() < 0.6
    assert (np.abs(z) <= np.abs(y)).all()


@pytest.mark.clause("quantize.again", evidence="known answer")
def test_a_block_under_the_smallest_scale_is_lost_the_second_time():
    x = np.zeros((1, 16), np.float32)
    x[0, 0] = 3.25 * 2.0**-9  # under the scale 2^-9, in a tensor whose scale is 1
    q, again, y, z = twice(x, OperandSpec(NVFP4), 2688.0)
    assert (q.scales.item(), y[0, 0]) == (1, 3 * 2.0**-9)
    assert (again.scales.item(), z[0, 0]) == (0, 0)


@pytest.mark.clause("quantize.again")
def test_two_s_complement_has_lost_the_sign_of_zero_already():
    made = BLOCK_FORMATS["mxint8"]
    assert made.element.negatives is Negatives.TWOS_COMPLEMENT
    q, again, y, _ = twice(np.full((1, 32), -0.0, np.float32), OperandSpec(made))
    assert q == again
    assert not np.signbit(y).any()


EDGES = np.array(
    [0, 1, 0x3FFFFF, 0x400000, 0x400001, 0x7FFFFF, 0x800000, 0xBFFFFF, 0xC00000, 0x3F800000, 0x3FBFFFFF, 0x3FC00000,
     0x7F3FFFFF, 0x7F400000, 0x7F7FFFFF, 0x7F800000, 0x7FC00000, 0xBF800000, 0xFF800000], np.uint32,
).view(np.float32)  # fmt: skip


@pytest.mark.clause("formats.e8m0.cast", evidence="known answer")
def test_the_two_casts_to_e8m0():
    down = [0, 0, 0, 0, 0, 0, 1, 1, 1, 127, 127, 127, 254, 254, 254, 255, 255, 127, 255]
    near = [0, 0, 0, 0, 1, 1, 1, 1, 2, 127, 127, 128, 254, 255, 255, 255, 255, 127, 255]
    assert cast_to_e8m0(EDGES, ScaleCast.DOWN).tolist() == down
    assert cast_to_e8m0(EDGES).tolist() == near
    assert cast_to_e8m0(np.array([1.5, 3], np.float16), ScaleCast("down")).tolist() == [127, 128]


@pytest.mark.clause("formats.e8m0.cast", evidence="peer")
def test_pytorch_casts_to_the_nearest():
    drawn = np.random.default_rng(0).integers(0, 2**32, 200_000, np.uint32).view(np.float32)
    for x in (EDGES, drawn):
        cast = torch.from_numpy(x.copy()).to(torch.float8_e8m0fnu).view(torch.uint8).numpy()
        assert np.array_equal(cast_to_e8m0(x, ScaleCast.NEAREST), cast)
