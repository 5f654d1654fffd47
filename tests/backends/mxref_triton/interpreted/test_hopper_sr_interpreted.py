"""SR of Hopper, its truncated sum done in NumPy, against the reference, bit for bit."""

import ml_dtypes
import numpy as np
import pytest
import triton.language as tl
from triton.runtime.interpreter import TensorHandle

from interpreted.test_quantize_interpreted import (
    BACKEND,
    REFERENCE,
    STREAM,
    assert_same,
    crafted,
    heavy,
    tiny,
)
from mxref import OperandSpec
from mxref.placement import Placement
from mxref_triton.lane import hopper_sr, unit
from mxref_triton.quantizer import dispatch


def truncated_sum(a, b):
    """Float64 holds enough of the sum to say on which side of a float32 it lies."""
    with np.errstate(all="ignore"):
        exact = a.handle.data.astype(np.float64) + b.handle.data
        nearest = exact.astype(np.float32)
        out = np.where(nearest > exact, np.nextafter(nearest, np.float32(0)), nearest)
    return tl.tensor(TensorHandle(out.astype(np.float32), tl.float32), a.type)


@pytest.fixture(autouse=True)
def hopper(monkeypatch):
    """A machine that has the instruction; returns whether it was narrow at each word that was made."""
    ran, function = [], unit.sum_stochastic_word

    def noted(*arguments, **named):
        ran.append(arguments[-1].narrow)
        return function(*arguments, **named)

    monkeypatch.setattr(dispatch, "packs_bfloat16", lambda device: True)
    monkeypatch.setattr(hopper_sr, "_truncated_sum", truncated_sum)
    monkeypatch.setattr(unit, "sum_stochastic_word", noted)
    return ran


def check(x, spec, axis, placement=Placement(STREAM)):
    got = BACKEND.quantize(BACKEND.from_numpy(x), spec, axis=axis, placement=placement)
    assert_same(got, REFERENCE.quantize(x, spec, axis=axis, placement=placement))


@pytest.mark.clause("rounding.sr", "random.elements", "scale.nonfinite")
@pytest.mark.parametrize(
    ("rule", "bits", "axis", "prescale"),
    [
        ("floor", 16, 1, False),
        ("even", 22, 0, False),
        ("rceil", 17, 1, False),
        ("floor", 5, 0, True),
        ("ceil", 1, 1, False),
    ],
)
def test_every_place_between_grid_points(rule, bits, axis, prescale, hopper):
    spec = OperandSpec(rounding="sr", scale_rule=rule, sr_bits=bits, prescale=prescale)
    for x in (crafted(np.float32), tiny(np.float32)):
        check(x, spec, axis)
    assert hopper
    assert all(hopper)


@pytest.mark.clause("rounding.sr", "hadamard.order", "scale.block.tile")
@pytest.mark.parametrize("axis", [0, 1])
def test_after_a_transform_and_in_tiles(axis, hopper):
    check(heavy(64, 64), OperandSpec(rounding="sr", hadamard=16, scale_rule="even"), axis)
    check(tiny(ml_dtypes.bfloat16), OperandSpec(rounding="sr", hadamard=64, signs="per_step"), axis)
    check(heavy(64, 32, dtype=np.float16), OperandSpec(rounding="sr", block="32x32"), axis)
    assert hopper


@pytest.mark.clause("random.index")
@pytest.mark.parametrize("axis", [0, 1])
@pytest.mark.parametrize(("rows", "narrow"), [(1 << 19, True), (1 << 21, False)])
def test_numbers_of_calls_at_the_end_of_a_large_tensor(rows, narrow, axis, hopper):
    """2^35 elements are 2^32 calls, whose numbers fill 32 bits; of more the upper word counts too."""
    whole = (rows, 1 << 16) if axis else (1 << 16, rows)
    shape = (16, 64) if axis else (64, 16)
    end = tuple(total - own for total, own in zip(whole, shape, strict=True))
    check(heavy(*shape), OperandSpec(rounding="sr"), axis, Placement(STREAM, end, whole))
    assert set(hopper) == {narrow}
