"""The three GEMMs of a linear layer, each operand quantized from its source along its contraction axis."""

import numpy as np
import pytest

from mxref import GemmRole, OperandSpec, Stream, get_backend, linear_gemm, quantize, scaled_gemm
from mxref.placement import Placement
from mxref.recipe_files import recipe_from_table

RNG = np.random.default_rng(0)
X = RNG.standard_normal((96, 64)).astype(np.float32)  # [tokens, inputs]
W = RNG.standard_normal((32, 64)).astype(np.float32)  # [outputs, inputs]
DY = RNG.standard_normal((96, 32)).astype(np.float32)  # [tokens, outputs]
STREAM = Stream(1, step=2, layer=3)
RECIPE = recipe_from_table(
    {
        "gemm": "ordered",
        "dialect": "amd",
        "all": {"hadamard": 16, "signs": "per_step"},
        "wgrad": {"dy": {"rounding": "sr"}},
    }
)


@pytest.mark.clause("linear.roles", "linear.source")
@pytest.mark.parametrize(
    ("role", "a", "b", "axes", "ids", "exact"),
    [
        (GemmRole.FPROP, X, W, (1, 1), (0, 1), X @ W.T),
        (GemmRole.DGRAD, DY, W, (1, 0), (2, 3), DY @ W),
        (GemmRole.WGRAD, DY, X, (0, 0), (4, 5), DY.T @ X),
    ],
)
def test_each_gemm_is_its_two_quantizations_and_one_product(role, a, b, axes, ids, exact):
    got = linear_gemm(role, a, b, RECIPE, get_backend("reference"), STREAM)
    operands = [
        quantize(x, spec, axis=axis, placement=Placement(Stream(1, 2, 3, operand)))
        for x, spec, axis, operand in zip((a, b), RECIPE.operands(role), axes, ids, strict=True)
    ]
    np.testing.assert_array_equal(got, scaled_gemm(*operands, profile="ordered"))
    cosine = (got * exact).sum() / np.linalg.norm(got) / np.linalg.norm(exact)
    assert got.shape == exact.shape
    assert cosine > 0.97


@pytest.mark.clause("random.stream")
def test_operands_of_different_gemms_draw_different_random_bits():
    spec = OperandSpec(rounding="sr")
    codes = [
        quantize(DY, spec, axis=1, placement=Placement(Stream(1, 2, 3, operand))).codes for operand in (2, 4)
    ]
    assert (codes[0] != codes[1]).mean() > 0.1
