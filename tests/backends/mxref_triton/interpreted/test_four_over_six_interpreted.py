"""Four over six under the interpreter, against the reference: which of two scales a block gets, by every error."""

from dataclasses import replace
from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest
import torch

from interpreted.test_quantize_interpreted import (
    BACKEND,
    OTHER,
    REFERENCE,
    STREAM,
    assert_same,
    bits_of,
    heavy,
)
from interpreted.test_quotients_interpreted import MADE, as_rows, check, widened
from mxref import FourOverSix, OperandSpec
from mxref.conformance.requests.crafted import crafted_tensors
from mxref.formats import E2M1, NVFP4, UE4M3, BlockFormat
from mxref.placement import Placement
from mxref.reference import ReferenceBackend
from mxref.steps.quotient import tensor_scale
from mxref.steps.random import random_integers
from mxref_triton import TritonBackend

# The interpreter computes in NumPy, which warns of what a GPU does silently.
pytestmark = [
    pytest.mark.filterwarnings(
        "ignore:(overflow|invalid value|underflow|divide by zero) encountered:RuntimeWarning"
    ),
    pytest.mark.clause("scale.four_over_six"),
]
CHOICES = list(FourOverSix)[1:]
BLOCKS = [NVFP4.row, NVFP4.tile]
UNIT = 6 * 256.0
"""Amax of a tensor whose scale is 1."""


def near(rows=96, columns=64):
    """Blocks of few grid points: many have two errors that are equal, or differ by less than float64 can add."""
    rng = np.random.default_rng(1)
    x = (rng.integers(-96, 97, (rows, columns)) / 16).astype(np.float32)
    x[::2] += np.where(rng.random((rows // 2, columns)) < 0.1, np.float32(2.0**-20), np.float32(0))
    x[1::4, 3::7] = 2.0**-70
    return x


def drawn(rows=96, columns=64):
    x = np.random.default_rng(2).standard_normal((rows, columns)).astype(np.float32)
    x[3, 5], x[40, 9], x[20:22], x[64:80, 16:32] = np.nan, -np.inf, 0, -0.0
    return x


def amax_of_scale(t):
    """The amax of a tensor whose scale is t."""
    near = np.float32(t * UNIT)
    both = np.nextafter(near, np.float32(0)), np.nextafter(near, np.float32(np.inf))
    return next(a for a in (near, *both) if float(tensor_scale(a, NVFP4, top=256.0).scale) == t)


@pytest.mark.clause("scale.tensor", "scale.tensor.amax", "scale.block.tile", "scale.nonfinite", "scale.zero")
@pytest.mark.parametrize("by", CHOICES)
@pytest.mark.parametrize("block", BLOCKS)
def test_errors_that_are_equal_or_near(by, block):
    spec, taken = OperandSpec(NVFP4, four_over_six=by, block=block), 0
    for x in (near(), drawn()):
        for amax in (UNIT, 96, 1e-3, 3e38, None):
            check(x, spec, amax=amax)
            plain = REFERENCE.quantize(x, OperandSpec(NVFP4, block=block), placement=Placement(STREAM))
            taken += np.any(REFERENCE.quantize(x, spec, placement=Placement(STREAM)).scales != plain.scales)
        check(x.astype(ml_dtypes.bfloat16), spec, axis=0)  # two lines in a thread
        check(x.astype(np.float16), spec)
    assert taken


@pytest.mark.clause("scale.tensor", "scale.underflow", "rounding.quotient")
@pytest.mark.parametrize("by", CHOICES)
def test_blocks_beside_every_turn_of_a_scale(by):
    """Zero and subnormal scales, scales that saturate, and tensors' scales from 2^-149 on."""
    spec = OperandSpec(NVFP4, four_over_six=by)
    for tensor in crafted_tensors(NVFP4, full=False):
        x = as_rows(tensor.x)
        check(x, spec, amax=tensor.amax)
        check(x, replace(spec, block=NVFP4.tile), amax=tensor.amax, axis=0)
    for amax in (0.0, 1e-45, 2e-42, 1.2e-38, 3.4e38):
        small = drawn() * np.float32(max(amax, 1e-45) / 4)
        check(small, spec, amax=amax)
        check(small, replace(spec, block=NVFP4.tile), amax=amax)


@pytest.mark.parametrize("by", CHOICES)
@pytest.mark.parametrize("block", BLOCKS)
@pytest.mark.parametrize("mantissa", [0x7FFFFF, 0x123457])
def test_the_largest_errors_under_every_scale(by, block, mantissa):
    """All elements but the largest are at 5 X t, in the middle of the widest gap, for any X, and for subnormal t."""
    values = np.array(NVFP4.scale.values[: NVFP4.scale.max_code + 1])
    for field in (1, 127, 200, 0):
        bits = field << 23 | (mantissa if field else 3)
        t = float(np.array([bits], np.uint32).view(np.float32)[0])
        amax = amax_of_scale(t)
        for over in (6, 6.3, 4.9, 8.9):
            rows = np.repeat(values * t, 16)[:, None] * np.where(np.arange(16) == 0, over, 5.0)
            check(rows.astype(np.float32), OperandSpec(NVFP4, four_over_six=by, block=block), amax=amax)


@pytest.mark.parametrize("by", [FourOverSix.ABSOLUTE, FourOverSix.SQUARED])
@pytest.mark.parametrize("block", BLOCKS)
def test_sums_that_float64_rounds_apart_are_equal(by, block):
    """Errors are b, four small ones and 2 - b for amax / 6, and 2 - b, the same and b for amax / 4."""
    b = 2.0**-21
    small = 0.45 * 2.0**-52 if by is FourOverSix.ABSOLUTE else 0.4**0.5 * 2.0**-25.5
    x = np.zeros((16, 16), np.float32)
    x[0, :7] = [48, 8 - b, small, small, small, small, 6 + b]
    check(x, OperandSpec(NVFP4, four_over_six=by, block=block), amax=UNIT)
    x[0, 1] += 2.0**-20
    check(x, OperandSpec(NVFP4, four_over_six=by, block=block), amax=UNIT)
    x[0, 1] -= 2.0**-19
    check(x, OperandSpec(NVFP4, four_over_six=by, block=block), amax=UNIT)


def rounded(x, divisor):
    """Magnitudes rounded to E2M1 under a divisor, float64."""
    grid = np.array(E2M1.magnitudes)
    return grid[np.abs(x[:, None] / divisor - grid).argmin(axis=1)] * divisor


def nearly_equal(rng, t):
    """Three blocks whose sums of squares are as near as the last bit of one element allows, on either side.

    Where the two values of an element differ, the difference of the sums is linear in its magnitude.
    """
    scales = np.array(NVFP4.scale.values[: NVFP4.scale.max_code + 1])
    while True:
        x = (np.abs(rng.standard_normal(16)) * t * rng.choice([0.01, 1, 64])).astype(np.float32)
        x = x.astype(np.float64)
        six, four = (rounded(x, scales[np.abs(scales - x.max() / m / t).argmin()] * t) for m in (6, 4))
        errors = [
            sum((Fraction(y) - Fraction(v)) ** 2 for y, v in zip(x, each, strict=True))
            for each in (six, four)
        ]
        for i in np.flatnonzero((six != four) & (x < x.max())):
            moved = Fraction(x[i]) + (errors[1] - errors[0]) / (2 * (Fraction(four[i]) - Fraction(six[i])))
            if abs(float(moved) - x[i]) < 0.1 * abs(six[i] - four[i]):
                blocks = np.tile(x.astype(np.float32), (3, 1))
                blocks[:, i] = float(moved)
                blocks[0, i] = np.nextafter(blocks[1, i], np.float32(0))
                blocks[2, i] = np.nextafter(blocks[1, i], np.float32(np.inf))
                return blocks


@pytest.mark.parametrize("t", [1.0, float(np.float32(0.1)), float(np.float32(2.0**-119 / 3)), 3 * 2.0**-149])
def test_sums_of_squares_that_the_last_bit_of_an_element_decides(t):
    rng = np.random.default_rng(3)
    x = np.concatenate([nearly_equal(rng, t) for _ in range(64)]).reshape(-1, 48)
    q = check(x, OperandSpec(NVFP4, four_over_six="squared"), amax=amax_of_scale(t))
    turns = q.scales != q.scales[:, :1]
    assert t < 1e-40 or np.count_nonzero(turns.any(axis=1)) > 32


def test_halves_of_the_last_bit_of_a_subnormal_scale_count():
    """Sums of errors are equal, and two magnitudes have a bit below the last one of X t / 2, where X is 2^-9."""
    whole = (1 << 23) + 1
    first, second = 5 << 20, (1 << 23) - 8
    largest = 13 * whole + first + second + 1
    largest, second = largest + -largest % 8, second + -largest % 8
    x = np.zeros((16, 16), np.float32)
    x[0, :3] = largest, first + 0.5, second + 0.5
    assert x[0, :3].tolist() == [largest, first + 0.5, second + 0.5]
    x *= np.float32(2.0**-33)
    amax = amax_of_scale(whole * 2.0**-23)
    for change, code in ((0, 1), (1, 1), (-1, 2)):
        y = x.copy()
        y[0, 1] += np.float32(change * 2.0**-34)
        q = check(y, OperandSpec(NVFP4, four_over_six="absolute"), amax=amax)
        assert q.scales[0, 0] == code


@pytest.mark.clause("rounding.sr", "rounding.rna", "rounding.rtz")
@pytest.mark.parametrize("by", CHOICES)
@pytest.mark.parametrize("rounding", ["rna", "rtz", "sr"])
def test_the_choice_is_by_errors_of_rounding_to_nearest(by, rounding):
    for bits in (1, 22) if rounding == "sr" else (16,):
        for block in BLOCKS:
            spec = OperandSpec(NVFP4, four_over_six=by, block=block, rounding=rounding, sr_bits=bits)
            for x in (near(), drawn()):
                check(x, spec, amax=UNIT)
                check(x, spec, axis=0)


@pytest.mark.clause("rounding.sr", "rounding.quotient")
@pytest.mark.parametrize("by", FourOverSix)
def test_quotients_for_sr_are_cut_off(by):
    """Elements lie just above the last place from which the random integer does not lift them to the next code."""
    t, bits = float(np.float32(0.1)), 22
    amax = amax_of_scale(t) if by is not FourOverSix.OFF else np.float32(t * 6 * 448)
    t = float(tensor_scale(amax, NVFP4, top=None if by is FourOverSix.OFF else 256.0).scale)
    r = random_integers(np.arange(64), 0, 64, 64, STREAM, bits).reshape(64, 4, 16)
    over = 6 if by is FourOverSix.OFF else 4
    below = np.random.default_rng(5).choice([0.5, 1, 1.5, 2, 3], r.shape)
    gap = np.where(below < 2, 0.5, 1)
    quotients = below + gap * ((1 << bits) - 1 - r + 0.4) / (1 << bits)
    quotients[..., 0] = over
    x = (np.minimum(quotients, over) * 8 * t).astype(np.float32).reshape(64, 64)
    q = check(x, OperandSpec(NVFP4, four_over_six=by, rounding="sr", sr_bits=bits), amax=amax)
    assert np.mean(np.array(NVFP4.scale.values)[q.scales] == 8) > 0.2


@pytest.mark.clause("quantize.order", "hadamard.order", "quantize.padding", "quantize.parts")
@pytest.mark.parametrize("dtype", [np.float32, ml_dtypes.bfloat16, np.float16])
@pytest.mark.parametrize(
    "how",
    [
        {"hadamard": 16, "sign_vector": "+++-+------+-+--"},
        {"hadamard": 64, "signs": "per_step", "rounding": "sr"},
        {"hadamard": 8, "four_over_six": "largest"},
        {"hadamard": 128, "signs": "per_step_layer", "four_over_six": "absolute"},
        {"block": "16x16", "hadamard": 32, "zero_scale": 56},
    ],
    ids=lambda how: ", ".join(map(str, how.values())),
)
def test_treatments(dtype, how):
    x = heavy(48, 128, dtype=dtype)
    x[3, 5], x[9, 40], x[17], x[32:, 16:32] = np.nan, -np.inf, -0.0, 0
    spec = OperandSpec(NVFP4, **{"four_over_six": "squared"} | how)
    check(x, spec)
    check(np.resize(x, (128, 80)), spec, axis=0)
    odd = x[:, :100] if spec.hadamard != 8 else x[:40, :100]
    check(odd, spec, pad=True)
    check(x[::-1, ::2], spec, pad=True)
    check(x, spec, amax=7e4, origin=(32, 128), global_shape=(128, 256))


@pytest.mark.clause("conformance.dual")
def test_both_orientations_and_values_at_once():
    x = heavy(96, 64)
    rne = OperandSpec(NVFP4, four_over_six="squared")
    tiles, h16 = replace(rne, block="16x16"), replace(rne, hadamard=16, sign_vector="+-" * 8)
    sr = OperandSpec(NVFP4, rounding="sr")
    how = {"placements": (Placement(STREAM), Placement(OTHER))}
    for pair in (
        (rne, h16),
        (tiles, tiles),
        (OperandSpec(NVFP4), rne),
        (sr, rne),
        (OperandSpec("mxfp4"), rne),
    ):
        got = BACKEND.quantize_dual(BACKEND.from_numpy(x), pair, **how)
        for g, w in zip(got, REFERENCE.quantize_dual(x, pair, **how), strict=True):
            assert_same(g, w)
    for spec, kind in ((tiles, "bfloat16"), (h16, "bfloat16"), (h16, "float32")):
        arguments = {"axis": 0, "dtype": kind, "pad": True}
        got = BACKEND.to_numpy(BACKEND.fake_quantize(BACKEND.from_numpy(x[:70]), spec, **arguments))
        assert np.array_equal(bits_of(got), bits_of(REFERENCE.fake_quantize(x[:70], spec, **arguments)))
    late = Placement(replace(STREAM, step=0), step=torch.tensor([70_000]))
    spec = replace(rne, hadamard=16, signs="per_step")
    got = BACKEND.quantize(BACKEND.from_numpy(x), spec, placement=late)
    want = REFERENCE.quantize(x, spec, placement=Placement(STREAM))
    assert np.array_equal(got.codes.numpy(), want.codes)
    assert np.array_equal(got.scales.numpy(), want.scales)


@pytest.mark.clause("formats.scale")
@pytest.mark.parametrize("by", CHOICES)
@pytest.mark.parametrize("name", ["UE5M3", "UE4M3, 32"])
def test_without_a_scale_of_the_tensor(name, by):
    made = MADE[name]
    backends = [widened(TritonBackend(), made), widened(ReferenceBackend(), made)]
    for x in (near() * np.float32(100), drawn() * np.float32(2.0**-9), near() * np.float32(2.0**-14)):
        check(x, OperandSpec(made, four_over_six=by), backends=backends)
        check(x, OperandSpec(made, four_over_six=by, block=made.tile), axis=0, backends=backends)


def test_blocks_whose_sums_would_not_fit_are_refused():
    """32 squared errors have less than 63 bits; 64 of them need not."""
    made = BlockFormat("fp4_k64", E2M1, UE4M3, k=64)
    with pytest.raises(Exception, match="the sums of 32 elements"):
        widened(TritonBackend(), made).quantize(
            torch.zeros(16, 64), OperandSpec(made, four_over_six="squared")
        )
