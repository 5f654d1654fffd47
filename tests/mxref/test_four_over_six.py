"""Four over six: of two scales of a block the one that errs less, against the oracle and known answers."""

import numpy as np
import pytest

import oracle
from differential import assert_same_blocks, oracle_quantize_tensor
from mxref import NVFP4, FourOverSix, OperandSpec, Placement, Stream, dequantize, quantize
from mxref.errors import RecipeError, UnsupportedError
from mxref.explain import explain_block, explorer_link
from mxref.formats import E2M1, UE5M3, BlockFormat
from mxref.layouts.packed import unpack
from oracle import E2M1 as ORACLE_E2M1
from oracle import UE4M3 as ORACLE_UE4M3
from scale_blocks import Blocks, arrays

CHOICES = list(FourOverSix)[1:]
STREAM = Stream(7, step=3, layer=2, operand=1)
UNIT = 6 * 256.0
"""Amax of a tensor whose scale is 1."""


def placed(amax: float) -> Placement:
    return Placement(STREAM, amax=np.array([amax], np.float32))


def assert_as_the_oracle(x, spec, amax, names=None):
    q = quantize(x, spec, placement=Placement(STREAM, amax=np.array([amax], np.uint32).view(np.float32)))
    *want, tensor = oracle_quantize_tensor(x, spec, STREAM, amax=amax)
    if spec.format.tensor_scale:
        assert hex(q.tensor_scale.view(np.uint32)[0]) == hex(tensor)
    assert_same_blocks(unpack(q.codes, spec.format.element), q.scales, *want, names=names)
    return q


@pytest.mark.clause("scale.four_over_six", "scale.tensor", "scale.underflow", "scale.nonfinite", "scale.zero")
@pytest.mark.parametrize("by", CHOICES)
@pytest.mark.parametrize("amax", [0x44C00000, 0x43820000, 0x3EB7A2C5, 0x7F7FFFFF, 5000, 1, 0], ids=hex)
def test_crafted_blocks(by, amax):
    rng = np.random.default_rng(amax)
    t = oracle.tensor_scale(amax, ORACLE_E2M1, ORACLE_UE4M3, True)
    crafted = Blocks(ORACLE_E2M1, ORACLE_UE4M3, 16, t)
    rows = [
        *crafted.scale_turns(rng, 12), *crafted.element_turns(rng, [1, 2, 8, 9, 57, 118]), *crafted.special(rng),
        *crafted.drawn(rng, 24),
    ]  # fmt: skip
    names, x = arrays(rows)
    assert_as_the_oracle(x, OperandSpec(NVFP4, four_over_six=by), amax, names)


@pytest.mark.clause("scale.four_over_six", "scale.block.tile", "rounding.sr", "rounding.rtz")
@pytest.mark.parametrize("by", CHOICES)
@pytest.mark.parametrize("rounding", ["rne", "rtz", "sr"])
@pytest.mark.parametrize("block", ["1x16", "2x16", "16x16"])
def test_tiles_and_other_roundings(by, rounding, block):
    """The errors are those of RNE, whatever the rounding, and those of a tile are of all its rows."""
    x = np.random.default_rng(4).standard_normal((32, 48)).astype(np.float32)
    x[3, 5], x[20:22] = np.nan, 0
    spec = OperandSpec(NVFP4, four_over_six=by, rounding=rounding, block=block)
    q = assert_as_the_oracle(x, spec, 0x41200000)
    nearest = assert_as_the_oracle(x, OperandSpec(NVFP4, four_over_six=by, block=block), 0x41200000)
    assert np.array_equal(q.scales, nearest.scales)


@pytest.mark.clause("scale.four_over_six", evidence="known answer")
@pytest.mark.parametrize("by", CHOICES)
def test_the_smaller_error_decides_and_six_where_both_are_equal(by):
    """Blocks that are exact over 4 alone, over 6 alone, and over both, in a tensor whose scale is 1."""
    x = np.zeros((4, 16), np.float32)
    x[0, :3] = 4, 2, 3  # over 4: scale 1, exact; over 6: scale 0.6875
    x[1, :3] = 6, 4, 0.5  # over 6: scale 1, exact
    x[2, 0] = 12  # exact under 2 and under 3
    q = quantize(x, OperandSpec(NVFP4, four_over_six=by), placement=placed(UNIT))
    assert q.tensor_scale.tolist() == [1]
    assert q.scales.ravel().tolist() == [0x38, 0x38, 0x40, 0]
    assert np.array_equal(dequantize(q), x)


@pytest.mark.clause("scale.four_over_six", evidence="known answer")
def test_the_three_errors_choose_differently():
    x = np.random.default_rng(0).standard_normal((64, 512)).astype(np.float32)
    error = {}
    for by in FourOverSix:
        e = np.abs(dequantize(quantize(x, OperandSpec(NVFP4, four_over_six=by)), "float64") - x).reshape(
            -1, 16
        )
        error[by] = {"absolute": e.sum(), "squared": (e**2).sum(), "largest": e.max(axis=-1).sum()}
    for by in CHOICES:
        assert error[by][by.value] == min(each[by.value] for each in error.values())
        assert error[by][by.value] < 0.97 * error[FourOverSix.OFF][by.value]


@pytest.mark.clause("scale.four_over_six")
def test_equal_errors_are_compared_exactly():
    """Errors that differ by less than float64 can add: many blocks of few grid points, some of them exactly equal."""
    rng = np.random.default_rng(1)
    x = (rng.integers(-96, 97, (96, 64)) / 16).astype(np.float32)
    x += np.where(rng.random(x.shape) < 0.1, np.float32(2.0**-20), np.float32(0))
    for by in CHOICES:
        assert_as_the_oracle(x, OperandSpec(NVFP4, four_over_six=by), 0x44C00000)


@pytest.mark.clause("scale.four_over_six")
@pytest.mark.parametrize("by", CHOICES)
def test_without_a_scale_of_the_tensor(by):
    made = BlockFormat("e2m1_ue5m3", E2M1, UE5M3, k=32)
    x = np.random.default_rng(2).standard_normal((16, 64)).astype(np.float32) * 100
    assert_as_the_oracle(x, OperandSpec(made, four_over_six=by), 0)


@pytest.mark.clause("scale.four_over_six", "recipe.unknown")
def test_what_has_no_such_choice_is_refused_by_name():
    with pytest.raises(RecipeError, match="four_over_six = 'squared' with the format mxfp4"):
        OperandSpec(four_over_six="squared")
    with pytest.raises(RecipeError, match="arithmetic = 'te'"):
        OperandSpec(NVFP4, arithmetic="te", four_over_six="squared")
    with pytest.raises(RecipeError, match="is not one of off, absolute, squared, largest"):
        OperandSpec(NVFP4, four_over_six="mse")
    with pytest.raises(UnsupportedError, match="four_over_six = 'squared'"):
        explorer_link(
            np.ones((16, 16), np.float32), OperandSpec(NVFP4, four_over_six="squared", block="16x16")
        )


@pytest.mark.clause("scale.four_over_six")
@pytest.mark.parametrize("by", CHOICES)
@pytest.mark.parametrize("block", ["1x16", "16x16"])
def test_an_explanation_has_the_bytes(by, block):
    x = np.random.default_rng(3).standard_normal((16, 32)).astype(np.float32)
    spec = OperandSpec(NVFP4, four_over_six=by, block=block)
    q, taken = quantize(x, spec), set()
    for index in range(0, 32, 3):
        found = explain_block(x, spec, index=index)
        row, block_of_row = divmod(index, 2)
        assert found.scale.byte == q.scales[row, block_of_row]
        assert found.packed == q.codes[row, 8 * block_of_row : 8 * block_of_row + 8].tobytes()
        taken.add(found.scale.over)
    assert block != "1x16" or taken == {4.0, 6.0}
