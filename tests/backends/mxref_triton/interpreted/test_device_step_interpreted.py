"""A step in the memory of the device gives the bits of the same step in the stream, in every kernel that draws."""

from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch

from mxref import BlockShape, OperandSpec, Stream, get_backend
from mxref.errors import ShapeError, UnsupportedError
from mxref.placement import Placement

BACKEND = get_backend("triton")
REFERENCE = get_backend("reference")
STREAM = Stream(seed=0xFEDCBA9876543210, step=0, layer=300, operand=4)
SR = OperandSpec(rounding="sr")
SPECS = {
    "sr": SR,
    "sr, 22 bits, prescale": replace(SR, sr_bits=22, prescale=True),
    "signs per step": OperandSpec(hadamard=16, signs="per_step"),
    "signs per layer, two words": OperandSpec(hadamard=64, signs="per_step_layer", scale_rule="even"),
    "both": replace(SR, hadamard=32, signs="per_step_layer"),
    "both, fixed signs": replace(SR, hadamard=64, signs="fixed"),
    "a long transform": replace(SR, hadamard=256, signs="per_step"),
    "tiles": replace(SR, block=BlockShape.TILE, hadamard=4, signs="per_step_layer"),
    "neither": OperandSpec(hadamard=16),
}


def heavy(*shape, dtype=ml_dtypes.bfloat16):
    rng = np.random.default_rng(0)
    return (rng.standard_t(2, shape) * np.exp2(rng.integers(-9, 9, shape))).astype(dtype)


def word(step):
    return torch.tensor([step], dtype=torch.int64)


def same(got, want):
    return np.array_equal(BACKEND.to_numpy(got.codes), want.codes) and np.array_equal(
        BACKEND.to_numpy(got.scales), want.scales
    )


@pytest.mark.clause("conformance.capabilities", "hadamard.policy", "random.stream")
@pytest.mark.parametrize(
    ("name", "axis"), [*((name, i % 2) for i, name in enumerate(SPECS)), ("sr", 1), ("both", 1)]
)
def test_a_step_on_the_device_draws_the_bits_of_that_step(name, axis):
    x = heavy(*((256, 32), (32, 256))[axis], dtype=(np.float32, ml_dtypes.bfloat16)[axis])
    region, step, drawn = ((256, 256), (1024, 1024)), word(0), []
    for number in (70_000, 0xFFFFFFFF):  # one tensor, changed in place as between replays of a graph
        step.fill_(number)
        plain = Placement(replace(STREAM, step=number), *region)
        want = REFERENCE.quantize(x, SPECS[name], axis=axis, placement=plain)
        late = Placement(STREAM, *region, step=step)
        got = BACKEND.quantize(BACKEND.from_numpy(x), SPECS[name], axis=axis, placement=late)
        assert same(got, want)
        drawn.append(want.codes)
    assert np.array_equal(drawn[0], drawn[1]) == (name == "neither")


@pytest.mark.parametrize(
    "names", [("signs per step", "neither"), ("neither", "signs per step"), ("sr", "both")]
)
def test_both_orientations_and_values_read_the_step(names):
    x, specs = heavy(256, 128), tuple(SPECS[name] for name in names)
    late, plain = Placement(STREAM, step=word(3)), Placement(replace(STREAM, step=3))
    tensor = BACKEND.from_numpy(x)
    got = BACKEND.quantize_dual(tensor, specs, placements=(late, late))
    want = REFERENCE.quantize_dual(x, specs, placements=(plain, plain))
    assert all(same(g, w) for g, w in zip(got, want, strict=True))
    values = [BACKEND.fake_quantize(tensor, specs[0], dtype="bfloat16", placement=p) for p in (late, plain)]
    assert torch.equal(*values)


def test_operands_whose_signs_the_device_drew_multiply_with_each_other_alone():
    spec = SPECS["signs per step"]
    x = BACKEND.from_numpy(heavy(32, 64))
    late = [Placement(Stream(1, operand=which), step=word(3)) for which in (0, 1, 2)]
    a, b, other = (BACKEND.quantize(x, spec, placement=p) for p in late)
    host = [BACKEND.quantize(x, spec, placement=Placement(Stream(1, 3, operand=which))) for which in (0, 1)]
    assert torch.equal(BACKEND.scaled_gemm(a, b), BACKEND.scaled_gemm(*host))
    for right in (other, host[1]):  # another GEMM's signs; signs that nobody can compare with the device's
        with pytest.raises(ShapeError, match="different Hadamard transforms"):
            BACKEND.scaled_gemm(a, right)
    assert "signs drawn on the device" in repr(a)


def test_an_array_whose_signs_the_device_drew_is_not_saved(tmp_path):
    q = BACKEND.quantize(
        BACKEND.from_numpy(heavy(32, 64)), SPECS["signs per step"], placement=Placement(STREAM, step=word(3))
    )
    with pytest.raises(UnsupportedError, match="a file cannot hold them"):
        q.save(tmp_path / "q.npz")


def test_a_step_that_lies_elsewhere_is_refused():
    x = BACKEND.from_numpy(heavy(32, 64))
    late = Placement(STREAM, step=np.zeros(1, np.int64))
    with pytest.raises(UnsupportedError, match="a step on the host for an input on cpu"):
        BACKEND.quantize(x, SR, placement=late)
    with pytest.raises(UnsupportedError, match="a step on meta"):
        BACKEND.quantize_dual(x, (SR, SR), placements=(Placement(STREAM, step=word(0).to("meta")),) * 2)
