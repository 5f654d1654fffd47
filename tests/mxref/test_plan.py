"""Equal requests share one plan, and the second request is checked like the first."""

import numpy as np
import pytest

from mxref import OperandSpec, Stream, get_backend
from mxref.errors import DtypeError, RecipeError, ShapeError
from mxref.formats import MXFP4
from mxref.mxarray import MXArray
from mxref.placement import Placement
from mxref.plan import check_input, plan_quantize
from mxref.steps.hadamard import SignPolicy, draw_rotation
from mxref.steps.random import first_bits, stream_words

SR = OperandSpec(rounding="sr", hadamard=16, signs="per_step_layer")


def test_equal_requests_share_a_plan_and_others_do_not():
    plan = plan_quantize((64, 96), OperandSpec(), 1)
    assert plan_quantize((64, 96), OperandSpec(), 1) is plan
    assert plan_quantize([64, 96], OperandSpec(), 1) is plan
    others = (
        plan_quantize((96, 64), OperandSpec(), 1),
        plan_quantize((64, 96), OperandSpec(), 0),
        plan_quantize((64, 96), OperandSpec(scale_rule="even"), 1),
        plan_quantize((64, 96), OperandSpec(hadamard=32), 1),
        plan_quantize(
            (64, 96), OperandSpec(), 1, placement=Placement(origin=(0, 32), global_shape=(64, 128))
        ),
    )
    assert len({id(other) for other in (plan, *others)}) == 6
    assert all(other != plan for other in others)


def test_a_shared_plan_has_the_bits_of_its_own_stream():
    for step in (1, 2, 1):
        for layer in (3, 4):
            stream = Stream(7, step, layer, 5)
            plan = plan_quantize((64, 96), SR, 1, Placement(stream))
            assert plan.stream == stream
            assert plan.rotation == draw_rotation(16, SR.signs, stream)
    plain = plan_quantize((64, 96), OperandSpec(hadamard=16), 1, Placement(Stream(7)))
    assert plain.stream is None
    assert plain.rotation.signs == 0


@pytest.mark.parametrize(
    ("spec", "options", "error", "message"),
    [
        (SR, {}, RecipeError, "needs a random stream"),
        (OperandSpec(), {"origin": (0, 32.0), "global_shape": (64, 128)}, ShapeError,
         r"origin must hold integers, one for each axis, got \(0, 32.0\)"),
        (OperandSpec(), {"global_shape": (64, "96")}, ShapeError, "global_shape must hold integers"),
    ],
)  # fmt: skip
def test_what_is_refused_is_refused_each_time(spec, options, error, message):
    for _ in range(3):
        with pytest.raises(error, match=message):
            plan_quantize((64, 96), spec, 1, Placement(**options))


@pytest.mark.clause("random.stream", "random.range", "hadamard.signs")
@pytest.mark.parametrize("operand", [6, 7, 8])
@pytest.mark.parametrize(
    "spec",
    [OperandSpec(rounding="sr"), OperandSpec(hadamard=16, signs="fixed"), SR],
    ids=["sr", "signs", "both"],
)
def test_a_stream_of_signs_quantizes_nothing(spec, operand):
    x = np.ones((2, 64), np.float32)
    message = rf"operand = {operand} is the stream of a GEMM's Hadamard signs.*0 \.\. 5"
    for call in (
        lambda rng: plan_quantize((2, 64), spec, 1, Placement(rng)),
        lambda rng: get_backend("reference").quantize(x, spec, placement=Placement(rng)),
        lambda rng: get_backend("reference").quantize_dual(
            np.ones((64, 64), np.float32), (spec, spec), placements=(Placement(Stream(1)), Placement(rng))
        ),
    ):
        with pytest.raises(RecipeError, match=message):
            call(Stream(7, 1, 2, operand))
    with pytest.raises(RecipeError, match=message):
        draw_rotation(16, SignPolicy.FIXED, Stream(7, 1, 2, operand))


def test_a_stream_that_nothing_asks_is_not_looked_at():
    assert plan_quantize((2, 64), OperandSpec(), 1, Placement(Stream(7, operand=8))).stream is None
    assert draw_rotation(16, SignPolicy.NONE, Stream(7, operand=8)).signs == 0


def test_a_plan_holds_python_s_integers_whoever_asks_first():
    shape = 64, 160
    plan = plan_quantize(
        shape,
        SR,
        1,
        Placement(Stream(1), origin=np.array([0, 32]), global_shape=np.array([64, 192])),
    )
    again = plan_quantize(shape, SR, 1, Placement(Stream(1), origin=(0, 32), global_shape=(64, 192)))
    for found in (plan, again):
        assert {type(n) for n in (*found.origin, *found.global_shape, found.first)} == {int}
    assert plan == again
    assert plan_quantize(np.array([32, 224]), OperandSpec(), np.int64(1)).shape == (32, 224)
    other = plan_quantize((32, 224), OperandSpec(), 1)
    assert {type(n) for n in (*other.shape, other.axis)} == {int}
    for _ in range(2):  # equal to the axis of a plan that was kept
        with pytest.raises(ShapeError, match="axis must be an integer, got 1.0"):
            plan_quantize((32, 224), OperandSpec(), 1.0)


def test_inputs_are_checked_each_time():
    for _ in range(2):
        check_input(np.zeros(32, np.float32))
        for wrong in (np.zeros(32), np.zeros(32, np.float32).astype(">f4"), [1.0]):
            with pytest.raises(DtypeError):
                check_input(wrong)


@pytest.mark.parametrize("count", [1, 16, 32, 33, 128, 129, 256])
@pytest.mark.parametrize(
    "stream", [Stream(0), Stream(2**64 - 1, 2**32 - 1, 2**24 - 1, 8), Stream(12345, 6, 7, 5)]
)
def test_first_bits_are_those_of_the_words_in_order(count, stream):
    words = stream_words(np.arange(4), stream).reshape(-1)
    bits = "".join(f"{word:032b}"[::-1] for word in words)[:count]
    assert first_bits(count, stream) == int(bits[::-1], 2)


def test_signs_do_not_depend_on_whose_integers_name_the_stream():
    named = Stream(np.uint64(2**64 - 1), np.int64(2**30), np.int64(2**24 - 1), np.int64(4))
    plain = Stream(2**64 - 1, 2**30, 2**24 - 1, 4)
    for count in (64, 256):
        assert first_bits(count, named) == first_bits(count, plain)


@pytest.mark.parametrize("axis", [1, -1])
def test_an_array_of_wrong_codes_is_refused_each_time(axis):
    codes, scales = np.zeros((3, 32), np.uint8), np.zeros((3, 2), np.uint8)
    for _ in range(2):
        assert MXArray(codes, scales, (3, 64), axis).axis == 1
        for wrong in (
            (codes.view(np.int8), scales),
            (codes, scales.astype(np.int32)),
            (codes, scales[:, :1]),
            (codes[:2], scales),
            (codes[:, : MXFP4.k // 2 - 1], scales),
        ):
            with pytest.raises(ShapeError):
                MXArray(*wrong, (3, 64), axis)
