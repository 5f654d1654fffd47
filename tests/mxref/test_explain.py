"""mxref.explain: every explained block is the block that mxref.quantize makes."""

from __future__ import annotations

import math
import re

import ml_dtypes
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mxref import BlockShape, OperandSpec, Rounding, ScaleRule, SignPolicy, Stream, quantize
from mxref.errors import DtypeError, NonfiniteError, ShapeError
from mxref.explain import BlockExplanation, Case, explain_block
from mxref.explain.text import notes, reason, scale_steps
from mxref.formats import BLOCK_FORMATS, Nonfinite
from mxref.placement import Placement
from mxref.quantization import dequantize
from mxref.steps.scale import scale_code

STREAM = Stream(seed=7, step=3, layer=2, operand=4)


def one(values, spec: OperandSpec | None = None, rng: Stream | None = STREAM) -> BlockExplanation:
    x = np.zeros(32, np.float32)
    x[: len(values)] = values
    return explain_block(x, spec, rng)


specs = st.builds(
    OperandSpec,
    scale_rule=st.sampled_from(ScaleRule),
    rounding=st.sampled_from(Rounding),
    sr_bits=st.sampled_from([1, 5, 16, 17, 22]),
    block=st.sampled_from(BlockShape),
    zero_scale=st.sampled_from([0, 127]),
    prescale=st.booleans(),
    hadamard=st.sampled_from([0, 4, 16, 64]),
    format=st.sampled_from(list(BLOCK_FORMATS)),
)


@settings(max_examples=60, deadline=None)
@given(spec=specs, signs=st.sampled_from(SignPolicy), axis=st.sampled_from([0, 1, 2]), data=st.data())
def test_explains_exactly_what_quantize_stores(spec, signs, axis, data):
    spec = OperandSpec(**{**spec.__dict__, "signs": signs if spec.hadamard else SignPolicy.NONE})
    shape = [32, 32, 32]
    shape[axis] = 96  # not a multiple of 64, so H64 pads
    g = np.random.default_rng(data.draw(st.integers(0, 99)))
    x = (g.standard_normal(shape) * np.exp2(g.integers(-140, 120))).astype(np.float32)
    x[g.random(shape) < 0.001] = np.nan
    q = quantize(x, spec, axis=axis, placement=Placement(STREAM), pad=True)
    index = data.draw(st.integers(0, q.scales.size - 1))
    block = explain_block(x, spec, STREAM, axis=axis, index=index, pad=True)
    assert block.blocks == q.scales.size
    assert block.scale.byte == q.scales.reshape(-1)[index]
    assert block.packed == q.codes.reshape(-1, q.format.code_bytes(32))[index].tobytes()
    values = dequantize(q, "float64") * (1 / q.format.element.prescale if spec.prescale else 1)
    for i, e in enumerate(block.elements):
        place = list(block.start)
        place[axis] += i
        assert e.padded == (place[axis] >= 96)
        if not e.padded:
            assert e.x_bits == x.view(np.uint32)[tuple(place)]
            np.testing.assert_equal(e.value, values[tuple(place)])
        check_steps(e, block)


def check_steps(e, block):
    """The steps that an element shows lead to the code that it shows."""
    if e.case is Case.NAN:
        assert block.scale.byte == 255
        assert e.code == 0
        assert math.isnan(e.value)
        return
    magnitude, spec, element = abs(e.element), block.spec, block.format.element
    top = element.max_value
    assert magnitude == element.magnitudes[e.code & ~element.sign]
    assert bool(e.code & element.sign) == (math.copysign(1, e.y) < 0)
    assert e.lower <= min(e.v, top) <= e.upper
    if spec.rounding is Rounding.SR and e.v < top:
        assert e.threshold == math.floor(e.fraction * 2**spec.sr_bits)
        assert 0 <= e.random < 2**spec.sr_bits
        assert magnitude == (e.upper if e.threshold + e.random >= 2**spec.sr_bits else e.lower)
    expected = {Case.EXACT: e.v, Case.UP: e.upper, Case.DOWN: e.lower, Case.SATURATED: top}
    if e.case is Case.TIE:
        assert e.fraction == 0.5
        assert e.code % 2 == 0 or spec.rounding is Rounding.RNA
    else:
        assert magnitude == expected[e.case]


@pytest.mark.parametrize("format", BLOCK_FORMATS)
@pytest.mark.parametrize("rule", ScaleRule)
@pytest.mark.parametrize(
    "mantissa",
    [0, 1, 0x400000, 0x400001, 0x5FFFFF, 0x600000, 0x600001, 0x6FFFFF, 0x700000, 0x780000, 0x7FFFFF],
)
def test_scale_words_state_the_rule_that_the_code_follows(format, rule, mantissa):
    amax = np.array(130 << 23 | mantissa, np.uint32)
    element = BLOCK_FORMATS[format].element
    block = one([amax.view(np.float32)], OperandSpec(scale_rule=rule, format=format))
    mantissa_of_largest = int(np.float32(element.max_value).view(np.uint32)) & 0x7FFFFF
    bumps = {
        ScaleRule.FLOOR: False,
        ScaleRule.CEIL: mantissa != 0,
        ScaleRule.RCEIL: mantissa > mantissa_of_largest,
        ScaleRule.EVEN: mantissa >= (1 << 23) - (1 << 22 - element.mantissa_bits),
    }
    assert block.scale.bump == bumps[rule]
    assert block.scale.unclamped == 130 - 127 - element.max_exponent + bumps[rule]
    assert block.scale.byte == scale_code(amax, rule, element)
    text = " ".join(scale_steps(block))
    low, high = (float(end) for end in re.search(r"keeps in [\[(]([\d.]+), ([\d.]+)[\])]", text).groups())
    ratio = block.scale.amax / block.scale.value
    assert low <= ratio <= high <= 2 * low
    assert ("saturates" in text) == (high > element.max_value)
    assert f"m = 0x{mantissa:06x}" in text
    if rule is not ScaleRule.FLOOR:
        condition = re.search(r"\+1 when (.*?): (holds|does not hold)", text)
        assert eval(condition[1], {"m": mantissa}) == bumps[rule]
        assert (condition[2] == "holds") == bumps[rule]


def test_zero_block():
    block = one([0.0, -0.0], OperandSpec(zero_scale=127))
    assert (block.scale.byte, block.packed[0], block.sqnr_db) == (127, 0x80, None)
    assert "policy zero_scale = 127" in " ".join(scale_steps(block))


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nan_block_names_its_culprit(bad):
    block = one([1.0, bad])
    assert block.scale.byte == 255
    assert not any(block.packed)
    assert block.max_error is None
    assert ("NaN" if math.isnan(bad) else "Inf") + " at element 1" in scale_steps(block)[0]
    assert any("element 1" in note for note in notes(block))
    assert {reason(e, block) for e in block.elements} == {"NaN block: code 0"}


def test_nan_that_the_transform_made_is_told_from_one_in_the_input():
    big = np.full(32, 3e38, np.float32)
    block = explain_block(big, OperandSpec(hadamard=16))
    assert block.scale.byte == 255
    assert any("came out of its Hadamard group" in note for note in notes(block))


def test_nan_elsewhere_in_a_tile():
    x = np.ones((32, 32), np.float32)
    x[5, 5] = np.nan
    block = explain_block(x, OperandSpec(block=BlockShape.TILE), index=1)
    assert block.scale.amax_at is None
    assert any("another row of the 32x32 tile" in note for note in notes(block))
    assert explain_block(x, OperandSpec(block=BlockShape.TILE), index=5).scale.amax_at == 5


def test_clamped_scale_is_explained():
    block = one([np.float32(2.0**-130)])
    assert block.scale.unclamped == -129
    assert block.scale.byte == 0
    assert "clamped to e = -127" in " ".join(scale_steps(block))
    assert any("clamped" in note for note in notes(block))


def test_saturation_underflow_and_ties_are_explained():
    block = one([7.0, -0.1, 1.25, 1.3, 2.0])
    cases = [e.case for e in block.elements[:5]]
    assert cases == [Case.SATURATED, Case.DOWN, Case.TIE, Case.UP, Case.EXACT]
    assert reason(block.elements[0], block) == "above 6: saturates"
    assert reason(block.elements[2], block) == "halfway: to the even code"
    assert reason(block.elements[3], block) == "nearer to 1.5"
    text = " ".join(notes(block))
    assert "1 saturated to 6, element 0" in text
    assert "1 nonzero became zero, element 1;" in text
    away = one([7.0, 1.25], OperandSpec(rounding=Rounding.RNA))
    assert reason(away.elements[1], away) == "halfway: away from zero"
    assert away.elements[1].element == 1.5


def test_sqnr_and_largest_error():
    block = one([4.0, 1.1], OperandSpec())
    error = abs(1.0 - float(np.float32(1.1)))
    assert block.max_error == error
    assert block.sqnr_db == pytest.approx(10 * math.log10((16 + np.float32(1.1) ** 2) / error**2))
    assert one([4.0, 1.0]).sqnr_db == math.inf


def test_bfloat16_is_taken_as_the_value_it_holds():
    x = np.linspace(-3, 3, 32).astype(ml_dtypes.bfloat16)
    assert explain_block(x) == explain_block(x.astype(np.float32))


def test_reads_only_what_the_block_depends_on():
    x = np.full((4, 128), np.nan, np.float32)
    x[2, 64:] = 1.0
    spec = OperandSpec(hadamard=64)
    assert explain_block(x, spec, index=10).scale.byte != 255
    assert explain_block(x, spec, index=9).scale.byte == 255


def test_bad_requests():
    x = np.zeros((2, 64), np.float32)
    with pytest.raises(ShapeError, match="block 4 does not exist: .* has 4 blocks"):
        explain_block(x, index=4)
    with pytest.raises(ShapeError, match="does not exist"):
        explain_block(x, index=-1)
    with pytest.raises(ShapeError, match="pass pad=True"):
        explain_block(x[:, :40])
    with pytest.raises(DtypeError, match="cast it yourself"):
        explain_block(x.astype(np.float64))
    with pytest.raises(NonfiniteError):
        one([math.nan], OperandSpec(nonfinite=Nonfinite.RAISE))
