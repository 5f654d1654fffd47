"""Steps that lie in the memory of a device: what a placement takes, and who refuses it."""

import numpy as np
import pytest

import mxref
from mxref import OperandSpec, Placement, Stream, get_backend
from mxref.errors import RecipeError, UnsupportedError
from mxref.plan import plan_quantize
from mxref.steps.hadamard import Rotation

STEP = np.array([7], np.int64)
STREAM = Stream(seed=1, step=3, layer=5, operand=4)


@pytest.mark.parametrize(
    "step", [7, np.array([7], np.int32), np.array([7], np.uint64), np.array(7), np.zeros(2, np.int64)]
)
def test_a_step_that_is_no_int64_array_of_one_is_refused(step):
    with pytest.raises(RecipeError, match=r"step must be an int64 array \[1\]"):
        Placement(STREAM, step=step)


def test_a_step_without_a_stream_is_refused():
    with pytest.raises(RecipeError, match="there is no stream"):
        Placement(step=STEP)


@pytest.mark.parametrize("name", ["reference", "numba"])
def test_backends_on_the_host_refuse_a_step_on_a_device(name):
    backend, late = get_backend(name), Placement(STREAM, step=STEP)
    x, sr = np.ones((32, 32), np.float32), OperandSpec(rounding="sr")
    for call in (
        lambda: backend.quantize(x, sr, placement=late),
        lambda: backend.quantize(x, OperandSpec(), placement=late),
        lambda: backend.quantize_dual(x, (sr, sr), placements=(Placement(STREAM), late)),
        lambda: backend.fake_quantize(x, sr, placement=late),
    ):
        with pytest.raises(UnsupportedError, match="does not declare device_steps"):
            call()
    with pytest.raises(UnsupportedError, match=r"takes no placement\.step"):
        mxref.quantize(x, sr, placement=late)


def test_a_plan_has_the_step_only_where_bits_depend_on_it():
    late = Placement(STREAM, step=STEP)

    def plan(**treatment):
        return plan_quantize((32, 64), OperandSpec(**treatment), placement=late)

    assert plan(hadamard=16).step is None
    assert plan(hadamard=16, signs="fixed").step is None
    assert (
        plan(hadamard=16, signs="fixed").rotation
        == plan_quantize(
            (32, 64), OperandSpec(hadamard=16, signs="fixed"), placement=Placement(STREAM)
        ).rotation
    )
    assert plan(rounding="sr").step is STEP
    assert plan(rounding="sr").signs is None
    drawn = plan(hadamard=16, signs="per_step_layer")
    assert drawn.step is STEP
    assert drawn.rotation == Rotation(16)
    assert drawn.signs == Stream(seed=1, step=0, layer=5, operand=8)
    assert plan(hadamard=16, signs="per_step").signs == Stream(seed=1, step=0, layer=0, operand=8)
