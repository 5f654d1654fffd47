"""The Hadamard transform, operation by operation, and its signs."""

import numpy as np
import pytest

from differential import bits_of
from mxref import OperandSpec, quantize
from mxref.errors import RecipeError, ShapeError
from mxref.steps.hadamard import (
    SIZES,
    Rotation,
    SignPolicy,
    draw_rotation,
    hadamard,
    inverse_hadamard,
    norm_factor,
)
from mxref.steps.random import Stream
from oracle import random as oracle_random
from strategies import crafted_blocks


def _matrix(n):
    h = np.array([[1.0]])
    while len(h) < n:
        h = np.block([[h, h], [h, -h]])
    return h


@pytest.mark.clause("hadamard.size", "hadamard.order", "hadamard.factor")
@pytest.mark.parametrize("n", SIZES)
def test_matches_the_oracle_bit_for_bit(n):
    rng = np.random.default_rng(n)
    x = (
        (rng.standard_normal(256 * 3) * np.exp2(rng.integers(-3, 4, 256 * 3)))
        .astype(np.float32)
        .reshape(3, 256)
    )
    rotation = Rotation(n, int.from_bytes(rng.bytes(32), "little") & (1 << n) - 1)
    signs = rotation.vector().tolist()
    want = [
        [b for i in range(0, 256, n) for b in oracle_random.hadamard(row[i : i + n], signs)]
        for row in x.view(np.uint32).tolist()
    ]
    assert hadamard(x, rotation).view(np.uint32).tolist() == want


@pytest.mark.clause("hadamard.order", "hadamard.nonfinite", "conventions.arithmetic")
def test_matches_the_oracle_on_crafted_blocks():
    x = crafted_blocks()
    got = bits_of(hadamard(x, Rotation(16)))
    ones = [1] * 16
    want = [
        [b for i in (0, 16) for b in oracle_random.hadamard(row[i : i + 16], ones)]
        for row in x.view(np.uint32).tolist()
    ]
    assert got.tolist() == want


@pytest.mark.clause("hadamard.order", evidence="known answer")
@pytest.mark.parametrize("n", SIZES)
def test_is_the_sylvester_matrix_over_sqrt_n(n):
    identity = np.eye(n, dtype=np.float32)
    np.testing.assert_array_equal(
        hadamard(identity, Rotation(n)), (_matrix(n) * norm_factor(n)).astype(np.float32)
    )


@pytest.mark.clause("hadamard.factor")
@pytest.mark.parametrize("n", SIZES)
def test_the_factor_is_correctly_rounded(n):
    assert norm_factor(n).view(np.uint32) == oracle_random.inverse_sqrt_f32(n)


@pytest.mark.clause("hadamard.signs", "hadamard.policy", "random.stream")
@pytest.mark.parametrize("policy", SignPolicy)
@pytest.mark.parametrize("n", [16, 64, 256])
def test_signs_match_the_oracle(policy, n):
    for operand in range(6):
        stream = Stream(12345678901234567890, step=7, layer=9, operand=operand)
        want = oracle_random.sign_vector(n, stream.seed, 7, 9, 6 + operand // 2, policy.value)
        assert draw_rotation(n, policy, stream).vector().tolist() == want


@pytest.mark.clause("hadamard.policy", evidence="known answer")
def test_policies_say_when_signs_are_redrawn():
    def draw(policy, step, layer):
        return draw_rotation(64, policy, Stream(5, step=step, layer=layer, operand=4))

    assert draw(SignPolicy.FIXED, 1, 2) == draw(SignPolicy.FIXED, 0, 0)
    assert (
        draw(SignPolicy.PER_STEP, 1, 2) == draw(SignPolicy.PER_STEP, 1, 0) != draw(SignPolicy.PER_STEP, 2, 0)
    )
    assert draw(SignPolicy.PER_STEP_LAYER, 1, 2) != draw(SignPolicy.PER_STEP_LAYER, 1, 3)
    assert draw(SignPolicy.NONE, 1, 2).signs == 0


@pytest.mark.clause("hadamard.signs", "linear.rotation", evidence="known answer")
def test_both_operands_of_a_gemm_share_signs_and_gemms_do_not():
    rotations = [draw_rotation(64, SignPolicy.PER_STEP, Stream(5, 1, 1, operand)) for operand in range(6)]
    assert rotations[0] == rotations[1]
    assert rotations[2] == rotations[3]
    assert rotations[4] == rotations[5]
    assert len(set(rotations)) == 3


EVEN_SIGNS = "+++-+++-+++----+"


@pytest.mark.clause("hadamard.vector", evidence="known answer")
def test_given_signs_are_those_of_the_text_at_every_step_and_layer():
    want = [1, 1, 1, -1, 1, 1, 1, -1, 1, 1, 1, -1, -1, -1, -1, 1]
    for stream in (None, Stream(5), Stream(6, step=3, layer=2, operand=4)):
        rotation = draw_rotation(16, SignPolicy.NONE, stream, EVEN_SIGNS)
        assert rotation.vector().tolist() == want
    assert rotation == Rotation(16, 0b0111_1000_1000_1000)


@pytest.mark.clause("hadamard.vector", "linear.rotation")
def test_given_signs_reach_the_quantizer():
    x = np.random.default_rng(0).standard_normal((4, 64)).astype(np.float32)
    spec = OperandSpec(hadamard=16, sign_vector=EVEN_SIGNS)
    signs = draw_rotation(16, SignPolicy.NONE, None, EVEN_SIGNS).vector()
    got = quantize(x, spec)
    want = quantize(x * np.tile(signs, 4), OperandSpec(hadamard=16))
    assert got.codes.tolist() == want.codes.tolist() != quantize(x, OperandSpec(hadamard=16)).codes.tolist()
    assert got.rotation == Rotation(16, 0b0111_1000_1000_1000)


@pytest.mark.clause("hadamard.vector", evidence="known answer")
def test_the_signs_of_the_specification_give_no_row_more_of_the_mean_than_another():
    signs = [1 if sign == "+" else -1 for sign in EVEN_SIGNS]
    sums = [round(sum(h * d for h, d in zip(row, signs, strict=True))) for row in _matrix(16)]
    assert {abs(total) for total in sums} == {4}


@pytest.mark.clause("hadamard.inverse")
@pytest.mark.parametrize("n", SIZES)
def test_inverse(n):
    x = np.random.default_rng(n).standard_normal((4, 256)).astype(np.float32)
    rotation = draw_rotation(n, SignPolicy.FIXED, Stream(3))
    np.testing.assert_allclose(inverse_hadamard(hadamard(x, rotation), rotation), x, atol=1e-5)


@pytest.mark.clause("hadamard.inverse")
@pytest.mark.parametrize("n", [2, 16, 64])
def test_the_inverse_is_the_transform_and_then_the_signs(n):
    y = np.random.default_rng(n).standard_normal((2, 128)).astype(np.float32)
    rotation = draw_rotation(n, SignPolicy.FIXED, Stream(3))
    flips = [0x80000000 if d < 0 else 0 for d in rotation.vector()] * (128 // n)
    want = []
    for row in y.view(np.uint32).tolist():
        plain = [b for i in range(0, 128, n) for b in oracle_random.hadamard(row[i : i + n], [1] * n)]
        want.append([b ^ flip for b, flip in zip(plain, flips, strict=True)])
    assert inverse_hadamard(y, rotation).view(np.uint32).tolist() == want


@pytest.mark.clause("hadamard.nonfinite", evidence="known answer")
def test_overflow_and_nan_spoil_their_whole_group_only():
    x = np.ones((1, 64), np.float32)
    x[0, 3] = np.nan
    x[0, 32:34] = np.finfo(np.float32).max
    y = hadamard(x, Rotation(16))
    assert np.isnan(y[0, :16]).all()
    assert np.isfinite(y[0, 16:32]).all()
    assert not np.isfinite(y[0, 32:48]).all()
    assert np.isfinite(y[0, 48:]).all()


@pytest.mark.clause("hadamard.size", evidence="known answer")
def test_errors():
    with pytest.raises(ShapeError, match="length 48 is not a multiple of the size 32"):
        hadamard(np.zeros((2, 48), np.float32), Rotation(32))
    with pytest.raises(RecipeError, match="size 24 is not one of"):
        Rotation(24)
    with pytest.raises(RecipeError, match="do not fit in 16 bits"):
        Rotation(16, 1 << 16)
    with pytest.raises(RecipeError, match="needs a random stream"):
        draw_rotation(16, SignPolicy.FIXED, None)
