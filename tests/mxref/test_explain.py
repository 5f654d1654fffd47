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
from mxref.errors import DtypeError, NonfiniteError, RecipeError, ShapeError
from mxref.explain import BlockExplanation, Case, explain_block
from mxref.explain.text import notes, reason, scale_steps
from mxref.formats import BLOCK_FORMATS, Negatives, Nonfinite
from mxref.placement import Placement
from mxref.quantization import dequantize
from mxref.steps.scale import EXPONENT_RULES, rules_of, scale_code

STREAM = Stream(seed=7, step=3, layer=2, operand=4)


def one(
    values, spec: OperandSpec | None = None, rng: Stream | None = STREAM, amax: float | None = None
) -> BlockExplanation:
    x = np.zeros(32 if spec is None else spec.format.k, np.float32)
    x[: len(values)] = values
    return explain_block(x, spec, rng, amax=amax)


@st.composite
def specs(draw):
    made = BLOCK_FORMATS[draw(st.sampled_from(list(BLOCK_FORMATS)))]
    hadamard = draw(st.sampled_from([0, 4, 16, 64]))
    return OperandSpec(
        format=made,
        scale_rule=draw(st.sampled_from(rules_of(made.scale))),
        rounding=draw(st.sampled_from(Rounding)),
        sr_bits=draw(st.sampled_from([1, 5, 16, 17, 22])),
        block=draw(st.sampled_from([made.row, made.tile, BlockShape(f"2x{made.k}")])),
        zero_scale=draw(st.sampled_from([0, made.scale.one_code])),
        prescale=made.scale.powers and draw(st.booleans()),
        hadamard=hadamard,
        signs=draw(st.sampled_from(SignPolicy)) if hadamard else SignPolicy.NONE,
    )


@settings(max_examples=80, deadline=None)
@given(spec=specs(), axis=st.sampled_from([0, 1, 2]), data=st.data())
def test_explains_exactly_what_quantize_stores(spec, axis, data):
    shape, k = [32, 32, 32], spec.format.k
    shape[axis] = 96  # not a multiple of 64, so H64 pads
    g = np.random.default_rng(data.draw(st.integers(0, 99)))
    x = (g.standard_normal(shape) * np.exp2(g.integers(-140, 120))).astype(np.float32)
    x[:, :, ::7] *= np.exp2(g.integers(-25, 3))  # blocks far below the tensor's amax
    x[g.random(shape) < 0.001] = np.nan
    amax = data.draw(st.sampled_from([None, 0.0, 1e-40, 260.0, 3e38])) if spec.format.tensor_scale else None
    placement = Placement(STREAM, amax=None if amax is None else np.array([amax], np.float32))
    q = quantize(x, spec, axis=axis, placement=placement, pad=True)
    index = data.draw(st.integers(0, q.scales.size - 1))
    block = explain_block(x, spec, STREAM, axis=axis, index=index, pad=True, amax=amax)
    assert block.blocks == q.scales.size
    assert block.scale.byte == q.scales.reshape(-1)[index]
    assert block.packed == q.codes.reshape(-1, q.format.code_bytes(k))[index].tobytes()
    assert block.scale.tensor_scale == (q.tensor_scale if q.tensor_scale is None else q.tensor_scale[0])
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
        assert block.scale.byte == block.format.scale.nan_code
        assert e.code == 0
        assert math.isnan(e.value)
        return
    magnitude, spec, element = abs(e.element), block.spec, block.format.element
    top = element.max_value
    assert e.element == element.values[e.code]
    if element.negatives is Negatives.SIGN:
        assert bool(e.code & element.sign) == (math.copysign(1, e.y) < 0)
    else:
        assert e.element * e.y >= 0
    if block.scale.value == 0 and e.y != 0:
        assert (e.v, e.case, magnitude) == (None, Case.DOWN, 0)
        return
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


@pytest.mark.parametrize("format", [name for name, made in BLOCK_FORMATS.items() if made.scale.powers])
@pytest.mark.parametrize("rule", EXPONENT_RULES)
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
        ScaleRule.EVEN: mantissa >= (1 << 23) - (1 << 22 - element.precision),
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


def test_the_steps_of_a_scale_with_a_mantissa():
    """The numbers of the specification's example, and a tie."""
    spec = OperandSpec(format="nvfp4")
    block = one([1.5234375, -0.75, 0.1], spec, amax=260)
    assert (block.scale.tensor_amax, block.scale.tensor_scale) == (260, float(np.float32(260 / 2688)))
    assert block.scale.quotient == 1.5234375 / (6 * block.scale.tensor_scale)
    assert (block.scale.lower, block.scale.upper, block.scale.value, block.scale.byte) == (
        2.5,
        2.75,
        2.5,
        0x42,
    )
    text = " ".join(scale_steps(block))
    for words in (
        "tensor's amax A = 260", "t = A / (6 * 448) = 0.096726194", "amax / (6 t) = 2.624999903716",
        "between the scales 2.5 (0x42) and 2.75 (0x43) of UE4M3, the nearer one: byte 66 (0x42)",
    ):  # fmt: skip
        assert words in text
    assert block.elements[1].v == 0.75 / (2.5 * block.scale.tensor_scale)
    assert block.elements[1].value == -3 * 2.5 * block.scale.tensor_scale
    tie = one([6 * 2.625, -3 * 1.25 * 1.5], spec, amax=2688)  # t = 1
    assert "halfway, so the even code: byte 66 (0x42)" in " ".join(scale_steps(tie))
    assert (tie.elements[0].case, tie.elements[1].v) == (Case.SATURATED, 2.25)
    halfway = one([6.0, 2.5, -0.25], spec, amax=2688)
    assert [e.case for e in halfway.elements[:3]] == [Case.EXACT, Case.TIE, Case.TIE]
    assert "that is a scale of UE4M3: byte 56 (0x38), shared scale X = 1" in " ".join(scale_steps(halfway))


def test_a_number_beside_a_tie_is_not_shown_as_the_tie():
    block = one([np.nextafter(np.float32(6 * 2.625), np.float32(99))], OperandSpec(format="nvfp4"), amax=2688)
    assert block.scale.byte == 0x43
    assert "amax / (6 t) = 2.625000158946" in " ".join(scale_steps(block))


def test_a_scale_that_underflows_is_explained():
    spec = OperandSpec(format="nvfp4", rounding=Rounding.SR)
    block = one([6 * 2.0**-10, -(2.0**-30), 0.0], spec, amax=2688)
    assert (block.scale.quotient, block.scale.lower, block.scale.byte) == (2.0**-10, 0, 0)
    assert block.packed == bytes([0x80, *[0] * 7])
    assert "underflows to 0" in " ".join(scale_steps(block))
    assert any("at most 0.0009765625, half the smallest scale" in note for note in notes(block))
    assert [(e.case, e.v) for e in block.elements[:3]] == [
        (Case.DOWN, None),
        (Case.DOWN, None),
        (Case.EXACT, 0),
    ]
    assert reason(block.elements[0], block) == "the scale is 0: code 0"
    above = one([np.nextafter(np.float32(6 * 2.0**-10), np.float32(1))], spec, amax=2688)
    assert (above.scale.byte, above.scale.value) == (1, 2.0**-9)


def test_a_block_above_the_amax_of_its_tensor_is_said_to_be():
    block = one([300.0, 1.0], OperandSpec(format="nvfp4"), amax=260)
    assert block.scale.byte == 0x7E
    assert "448 is the largest scale of UE4M3: byte 126" in " ".join(scale_steps(block))
    assert any("above the tensor's amax" in note for note in notes(block))


def test_without_an_amax_the_array_is_the_tensor():
    x = np.full((3, 64), np.nan, np.float32)
    x[:, ::2] = np.random.default_rng(2).normal(size=(3, 32))
    x[2, 62], x[1, 3] = -77, -np.inf
    x[0, :16] = 1
    spec = OperandSpec(format="nvfp4")
    assert explain_block(x, spec).scale.tensor_amax == 77
    assert explain_block(x, spec) == explain_block(x, spec, amax=77)


@pytest.mark.parametrize("amax", [math.nan, math.inf, -1.0, 1e39])
def test_an_amax_that_is_none_is_refused(amax):
    with pytest.raises(RecipeError, match="no finite magnitude"):
        one([1.0], OperandSpec(format="nvfp4"), amax=amax)


@pytest.mark.parametrize("format", [name for name, made in BLOCK_FORMATS.items() if not made.tensor_scale])
def test_an_amax_that_decides_nothing_is_refused(format):
    with pytest.raises(RecipeError, match=f"amax = 7.0 with the format {format}"):
        one([1.0], OperandSpec(format=format), amax=7.0)


def test_codes_in_twos_complement_are_explained():
    block = one([1.0, -1.0, -0.0, -(2.0**-20)], OperandSpec(format="mxint8"))
    assert block.packed[:4] == bytes([0x40, 0xC0, 0, 0])
    assert [e.element for e in block.elements[:4]] == [1, -1, 0, 0]
    text = " ".join(notes(block))
    assert "codes are two's complement" in text
    assert "1 nonzero became zero, element 3" in text
    assert "keeps its sign" not in text
    assert "keep the signs" not in " ".join(scale_steps(one([-0.0], OperandSpec(format="mxint8"))))


def test_zero_block_under_a_scale_of_the_tensor():
    for zero_scale, value in ((0, 0), (56, 1)):
        block = one([0.0, -0.0], OperandSpec(format="nvfp4", zero_scale=zero_scale), amax=5)
        assert (block.scale.byte, block.scale.value, block.packed[0]) == (zero_scale, value, 0x80)
        assert (
            f"policy zero_scale = {zero_scale}: byte {zero_scale} (0x{zero_scale:02x}), X = {value};"
            in scale_steps(block)[1]
        )
        assert {e.case for e in block.elements} == {Case.EXACT}


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
