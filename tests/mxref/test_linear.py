"""The three GEMMs of a linear layer, each operand quantized from its source along its contraction axis."""

import ml_dtypes
import numpy as np
import pytest

from mxref import (
    GemmRole,
    OperandSpec,
    Stream,
    dequantize,
    get_backend,
    linear_gemm,
    quantize,
    scaled_gemm,
)
from mxref.placement import Placement
from mxref.recipe_files import recipe_from_table
from mxref.steps.scale import EXPONENT_RULES

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


@pytest.mark.clause("linear.source")
@pytest.mark.parametrize(
    ("role", "a", "b", "axis", "ids"),
    [(GemmRole.DGRAD, DY, W, 1, (2, 3, 1)), (GemmRole.WGRAD, DY, X, 0, (4, 5, 0))],
)
def test_the_backward_operand_is_made_of_the_values_of_fprops(role, a, b, axis, ids):
    recipe = recipe_from_table(
        {
            "fprop": {
                "rounding": "sr",
                "x": {"format": "mxfp8_e4m3", "scale_rule": "rceil"},
                "w": {"block": "32x32"},
            },
            role: {"source": "fprop", "rounding": "sr", "hadamard": 16, "signs": "per_step"},
        }
    )
    (a_id, b_id, fprop_id), tensor = ids, {3: "w", 5: "x"}[ids[1]]
    place = {i: Placement(Stream(1, 2, 3, i)) for i in ids}
    values = dequantize(quantize(b, getattr(recipe.fprop, tensor), axis=1, placement=place[fprop_id]))
    first, second = recipe.operands(role)
    want = scaled_gemm(
        quantize(a, first, axis=axis, placement=place[a_id]),
        quantize(values, second, axis=0, placement=place[b_id]),
        profile="ordered",
    )
    got = linear_gemm(role, a, b, recipe, get_backend("reference"), STREAM)
    np.testing.assert_array_equal(got, want)
    plain = recipe_from_table({role: {"hadamard": 16}})
    assert (linear_gemm(role, a, b, plain, get_backend("reference"), STREAM) != want).any()


@pytest.mark.clause("linear.source", evidence="known answer")
@pytest.mark.parametrize("rule", EXPONENT_RULES)
def test_tiles_that_fprop_quantized_are_quantized_without_a_change(rule):
    spec = OperandSpec(block="32x32", scale_rule=rule)
    w = np.random.default_rng(4).standard_t(2, (256, 192)).astype(np.float32)
    once = dequantize(quantize(w, spec, axis=1))
    np.testing.assert_array_equal(dequantize(quantize(once, spec, axis=0)), once)


@pytest.mark.clause("linear.gain", "linear.out", evidence="known answer")
@pytest.mark.parametrize("out_dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("profile", ["ordered", "exact"])
def test_gain_is_one_multiplication_and_out_one_rounding(profile, out_dtype):
    wide = ml_dtypes.bfloat16 if out_dtype == "bfloat16" else np.float32

    def product(**keys):
        recipe = recipe_from_table({"gemm": profile, "wgrad": {"prescale": True} | keys})
        found = linear_gemm(GemmRole.WGRAD, DY, X, recipe, get_backend("reference"), STREAM, out_dtype)
        assert found.dtype == wide
        return found

    spec = OperandSpec(prescale=True)
    operands = [quantize(t, spec, axis=0) for t in (DY, X)]
    c32, c16 = (scaled_gemm(*operands, profile=profile, out_dtype=t) for t in ("float32", "bfloat16"))
    np.testing.assert_array_equal(product(out="bf16"), c16.astype(wide))
    gained = c32 * np.float32(0.3)
    np.testing.assert_array_equal(product(gain=0.3), gained.astype(wide))
    both = gained.astype(ml_dtypes.bfloat16).astype(wide)
    np.testing.assert_array_equal(product(gain=0.3, out="bf16"), both)
    if out_dtype == "float32":
        assert (both != gained).any()
        assert (c16.astype(np.float32) * np.float32(0.3) != gained).any()
