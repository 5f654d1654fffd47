"""Variance and mean over draws of the random bits, and the growth of the variance with the length."""

from __future__ import annotations

import math
from itertools import pairwise

import numpy as np
import pytest
import torch
from torch import nn

import mxref
import mxref_torch
from mxref.discovery import get_backend
from mxref.formats import E2M1, E4M3, E8M0, BlockFormat
from mxref.placement import Placement
from mxref.recipe import BF16_RECIPE, OperandSpec
from mxref.recipe_files import load_recipe, recipe_from_table
from mxref.roles import GemmRole
from mxref.steps.random import Stream
from mxref_torch.layer.linear import MXLinear
from mxref_training.probe.draws import LayerDraws, Spread, lengths, plain_bound, relative_gap, rotated_bound
from mxref_training.probe.layer import Captured

DRAWS = 64


def captured(x: torch.Tensor, w: torch.Tensor, dy: torch.Tensor) -> Captured:
    model = nn.Sequential(nn.Linear(w.shape[1], w.shape[0], bias=False))
    model[0].weight = nn.Parameter(w)
    mxref_torch.convert(model, BF16_RECIPE, backend=get_backend("reference"), seed=4)
    layer = model[0]
    assert isinstance(layer, MXLinear)
    return Captured("layer", layer, x, dy, 10)


@pytest.fixture(scope="module")
def gaussian() -> Captured:
    generator = torch.Generator().manual_seed(2)
    x, w, dy = (torch.randn(shape, generator=generator) for shape in ((64, 64), (64, 64), (64, 64)))
    return captured(x, w, dy)


def test_a_spread_is_mean_and_variance_of_its_draws() -> None:
    values = torch.randn(9, 5, generator=torch.Generator().manual_seed(1))
    found = Spread()
    for row in values:
        found.add(row)
    torch.testing.assert_close(found.mean, values.double().mean(dim=0))
    torch.testing.assert_close(found.variance, values.double().var(dim=0))


def test_only_recipes_with_random_bits_have_rows(gaussian: Captured) -> None:
    drawn = LayerDraws(gaussian, 2)
    recipes = {name: load_recipe(name) for name in ("fp8", "mxfp4", "mxfp4_h16", "tseng")}
    found = [(row["recipe"], row["role"]) for row in drawn.variances(recipes)]
    assert found == [("tseng", "dgrad"), ("tseng", "wgrad")]
    operands = [(row["role"], row["operand"]) for row in drawn.unbiased(recipes)]
    assert operands == [("dgrad", "dy"), ("dgrad", "w"), ("wgrad", "dy"), ("wgrad", "x")]
    assert not list(drawn.unbiased({"signs": recipe_from_table(SIGNS)}))
    assert len(list(drawn.variances({"signs": recipe_from_table(SIGNS)}))) == 3


SIGNS = {"all": {"hadamard": 16, "signs": "per_step"}}
SR = {"all": {"rounding": "sr"}}
SR_PRESCALED = {"all": {"rounding": "sr", "prescale": True}}


@pytest.mark.parametrize(
    "table", [SR_PRESCALED, {"all": SR_PRESCALED["all"] | SIGNS["all"]}], ids=["plain", "rht"]
)
def test_sr_with_the_prescale_is_unbiased(gaussian: Captured, table: dict[str, object]) -> None:
    drawn = LayerDraws(gaussian, DRAWS)
    recipe = {"sr": recipe_from_table(table)}
    for row in drawn.unbiased(recipe):
        assert row["excess"] == pytest.approx(1, abs=0.12), row
        assert row["bias"] == pytest.approx(0, abs=2e-3), row
    for row in drawn.variances(recipe):
        assert 0.01 < row["variance"] < 0.1
        assert abs(row["bias_energy"]) < 0.05 * row["variance"], row


def test_the_error_of_a_mean_over_few_draws_is_no_bias(gaussian: Captured) -> None:
    """The mean of two unbiased draws has half of their variance as its error: of products it is subtracted, of operands
    it is what the error is held against.
    """
    drawn, recipe = LayerDraws(gaussian, 2), {"sr": recipe_from_table(SR_PRESCALED)}
    products, operands = list(drawn.variances(recipe)), list(drawn.unbiased(recipe))
    assert (len(products), len(operands)) == (3, 6)
    for row in products:
        assert abs(row["bias_energy"]) < 0.1 * row["variance"], row
    for row in operands:
        assert row["excess"] == pytest.approx(1, abs=0.2), row


def test_sr_that_saturates_is_biased_towards_zero(gaussian: Captured) -> None:
    found = list(LayerDraws(gaussian, DRAWS).unbiased({"sr": recipe_from_table(SR)}))
    assert len(found) == 6
    for row in found:
        assert row["excess"] > 1.2, row
        assert row["bias"] < -3e-3, row


def test_the_variance_is_that_of_the_rounding() -> None:
    """X W^T with W on the grid: the variance of a product is the sum of w^2 g^2 p (1 - p) over the elements of X."""
    x, w = torch.full((64, 32), 2.5), torch.zeros(32, 32)
    x[:, 0], w[:, 0], w[:, 1], w[:, 2] = 4, 4, 2, -1
    recipe = recipe_from_table(
        {"all": {"format": "bf16"}, "fprop": {"format": "mxfp4", "x": {"rounding": "sr"}}}
    )
    own = captured(x, w, torch.ones(64, 32))
    (row,) = LayerDraws(own, DRAWS).variances({"sr": recipe})
    # 2.5 lies in the middle of 2 and 3, so that a quarter of w^2 is left; W has only two elements beside the first.
    assert row["role"] == GemmRole.FPROP.value
    assert row["variance"] * (16 + 5 - 2.5) ** 2 == pytest.approx((4 + 1) / 4, rel=0.05)


def test_lengths_double_from_the_shortest() -> None:
    assert lengths(63) == []
    assert lengths(64) == [64]
    assert lengths(384) == [64, 128, 256]


def test_the_largest_gap_follows_from_the_format() -> None:
    assert relative_gap(E2M1) == pytest.approx(2 / 3)  # 4 to 6 under X * 4/3, and amax from 4 X on
    assert relative_gap(E4M3) == pytest.approx(32 / (7 / 8) / 256)


def test_measured_variances_lie_below_the_bounds() -> None:
    generator = torch.Generator().manual_seed(3)
    x, w, dy = (torch.randn(shape, generator=generator) for shape in ((128, 128), (64, 128), (128, 64)))
    x[:, 5] *= 30  # a channel of outliers
    found = list(LayerDraws(captured(x, w, dy), 16).growth())
    assert [(row["role"], row["length"]) for row in found] == [
        ("fprop", 64), ("fprop", 128), ("dgrad", 64), ("wgrad", 64), ("wgrad", 128),
    ]  # fmt: skip
    for row in found:
        assert 0 < row["plain"] < row["plain_bound"], row
        assert 0 < row["rotated"] < row["rotated_bound"], row
    fprop = found[1]
    assert fprop["rotated"] < 0.6 * fprop["plain"]
    assert fprop["rotated_bound"] < fprop["plain_bound"]


def variance_of_one_block(a: np.ndarray, b: np.ndarray, hadamard: int, draws: int = 24) -> float:
    """Variance of the product of two vectors, each rounded stochastically under one scale."""
    spec = OperandSpec(
        format=BlockFormat(f"one_block_{len(a)}", E2M1, E8M0, len(a)),
        rounding="sr",
        prescale=True,
        hadamard=hadamard,
        signs="per_step" if hadamard else "none",
    )
    found = []
    for draw in range(draws):
        sides = []
        for operand, vector in ((4, a), (5, b)):
            copies = np.tile(vector.astype(np.float32), (64, 1))  # each row draws bits of its own
            q = mxref.quantize(copies, spec, placement=Placement(Stream(1, draw, 0, operand)))
            sides.append(mxref.dequantize(q, "float64") / 0.75)
        found.append((sides[0] * sides[1]).sum(axis=1).var())
    return float(np.mean(found))


SIZES = (32, 64, 128, 256)


def test_without_a_transform_the_variance_of_the_worst_vectors_grows_like_b_and_with_it_like_log_b() -> None:
    """One outlier and values half way to the first step, against a constant vector."""
    plain, rotated = [], []
    for b in SIZES:
        outlier, constant = np.full(b, 1 / 3 / 2), np.ones(b)
        outlier[0] = 4
        plain.append(variance_of_one_block(outlier, constant, 0))
        rotated.append(variance_of_one_block(outlier, constant, b))
        assert plain[-1] < plain_bound(relative_gap(E2M1), b, 16, 1)
        norms = float((outlier**2).sum() * b)
        assert rotated[-1] < rotated_bound(relative_gap(E2M1), b, b, norms)
    steps = [second / first for first, second in pairwise(plain)]
    assert all(1.8 < step < 2.2 for step in steps), steps
    added = [second - first for first, second in pairwise(rotated)]
    assert max(added) < 1.5 * min(added), added  # the same for each doubling
    assert rotated[-1] < 2.5 * rotated[0]


def test_of_gaussian_vectors_with_outliers_the_transform_lowers_the_variance() -> None:
    rng = np.random.default_rng(7)
    shares = []
    for b in SIZES:
        a, c = (rng.standard_normal(b) * np.where(rng.random(b) < 0.02, 12, 1) for _ in range(2))
        a[0] = c[1] = 24
        shares.append(variance_of_one_block(a, c, b) / variance_of_one_block(a, c, 0))
    assert all(share < 1 for share in shares), shares
    assert shares[-1] < 0.8 * shares[0], shares


def test_the_bounds_grow_as_the_theorem_says() -> None:
    gap = relative_gap(E2M1)
    assert plain_bound(gap, 512, 3, 2) == pytest.approx(8 * plain_bound(gap, 64, 3, 2))
    grown = [math.log(2 * b / 0.05) for b in (64, 4096)]
    leading = [
        rotated_bound(gap, b, b, b) - gap**4 * grow**2 / 4 for b, grow in zip((64, 4096), grown, strict=True)
    ]
    assert leading[1] / leading[0] == pytest.approx(grown[1] / grown[0])
