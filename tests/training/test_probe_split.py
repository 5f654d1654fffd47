"""The error of an operand by cause and by the mean of groups: known blocks, and parts that add up to the whole."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import mxref
from mxref.formats import MXFP4, MXFP8_E4M3
from mxref.placement import Placement
from mxref.recipe import OperandSpec
from mxref.steps.hadamard import Rotation, hadamard, inverse_hadamard
from mxref.steps.random import Stream
from mxref_torch.checks.measures import Slab
from mxref_training.probe.errors import GROUP, ErrorSplit, MeanSplit, ProductError, Sums, exact_product
from mxref_training.probe.results import CAUSES

PLAIN = OperandSpec()


def slab(values: np.ndarray, spec: OperandSpec = PLAIN) -> Slab:
    """An operand as the reference rounds it, beside its source."""
    q = mxref.quantize(values.astype(np.float32), spec, placement=Placement(Stream(3, 1, 2, 4)))
    factor = spec.format.element.prescale if spec.prescale else 1.0
    scales = q.scales.astype(np.int64)[:, :, None]
    limit = np.ldexp(spec.format.element.max_value / factor, scales - 127)
    rows = (values.astype(np.float64), mxref.dequantize(q, "float64") / factor)
    v, found = (torch.from_numpy(t.reshape(len(t), -1, spec.format.k)) for t in rows)
    return v, found, torch.from_numpy(limit), torch.from_numpy(scales != 255)


def split_of(block: list[float], spec: OperandSpec = PLAIN) -> ErrorSplit:
    values = np.zeros((1, 32))
    values[0, : len(block)] = block
    found = ErrorSplit(True)
    found.add(slab(values, spec))
    return found


def shares(found: ErrorSplit) -> dict[str, float]:
    return {cause: value for cause, value in found.energies().items() if value > 1e-20}


def test_a_block_on_the_grid_has_no_error() -> None:
    found = split_of([4, 3, -1.5, 0.5, 0])
    assert not shares(found)
    assert found.row()["noise"] == 0


def test_a_value_that_becomes_zero_is_the_dead_zone() -> None:
    found = split_of([4, 0.2, -0.1])
    square = float(np.float32(0.2)) ** 2 + float(np.float32(0.1)) ** 2
    assert shares(found) == {"dead": pytest.approx(square, rel=1e-6)}
    assert found.row()["bias"] == found.row()["bias_dead"] == pytest.approx(-square / (16 + square), rel=1e-6)
    assert found.row()["zeroed"] == pytest.approx(200 / 3)


def test_a_value_above_the_largest_magnitude_is_clipped() -> None:
    found = split_of([-7, 1, 2])  # FLOOR: X = 1, and 7 becomes 6
    assert shares(found) == {"clip": 1.0}
    assert found.row()["bias_clip"] == pytest.approx(-7 / (49 + 1 + 4))
    assert found.row()["clipped"] == pytest.approx(100 / 3)


def test_a_block_that_shrinks_as_a_whole_is_scale_bias() -> None:
    found = split_of([4.5, -4.5, 4.5])  # all become 4: another scale would mend it
    assert shares(found) == {"scale": pytest.approx(3 * 0.25)}
    assert found.row()["bias_scale"] == pytest.approx(4 / 4.5 - 1)


def test_errors_without_a_projection_on_the_block_are_grid_noise() -> None:
    # 2.4 becomes 2 and y becomes 3, with 0.4 * 2.4 = (3 - y) y.
    y = (3 + math.sqrt(9 - 4 * 0.4 * 2.4)) / 2
    found = split_of([4, 2.4, y])
    assert shares(found)["grid"] == pytest.approx(0.4**2 + (3 - y) ** 2, rel=1e-5)
    assert found.energies()["scale"] < 1e-12
    assert found.row()["bias"] == pytest.approx(0, abs=1e-6)


def test_all_four_causes_in_one_block() -> None:
    values = [7, 0.2, 2.4, 4.4]
    found = split_of(values).energies()
    a = (2 * 2.4 + 4 * 4.4) / (2.4**2 + 4.4**2)
    expected = {
        "clip": 1, "dead": 0.04, "scale": (a - 1) ** 2 * (2.4**2 + 4.4**2),
        "grid": (2 - a * 2.4) ** 2 + (4 - a * 4.4) ** 2,
    }  # fmt: skip
    assert found == pytest.approx(expected, rel=1e-6)


SPECS = st.builds(
    OperandSpec,
    format=st.sampled_from([MXFP4, MXFP8_E4M3]),
    scale_rule=st.sampled_from(["floor", "ceil", "rceil", "even"]),
    rounding=st.sampled_from(["rne", "rna", "rtz", "sr"]),
    prescale=st.booleans(),
)


@settings(max_examples=60, deadline=None)
@given(spec=SPECS, seed=st.integers(0, 1000), spread=st.sampled_from([0.0, 1.0, 3.0]))
def test_the_parts_add_up_in_each_element_and_as_energies(
    spec: OperandSpec, seed: int, spread: float
) -> None:
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((4, 64)) * np.exp(spread * rng.standard_normal((4, 64)))
    v, q, limit, _ = (
        each.flatten(1).numpy() for each in slab(values.astype(np.float32).astype(np.float64), spec)
    )
    limit = np.repeat(limit, 32, axis=1)
    dead, clipped = (q == 0) & (v != 0), np.abs(v) > limit
    inner = ~(dead | clipped)
    blocks = [np.where(inner, each, 0).reshape(4, 2, 32).sum(axis=2) for each in (q * v, v * v)]
    a = np.repeat(np.divide(*blocks, out=np.ones((4, 2)), where=blocks[1] > 0), 32, axis=1)
    parts = {
        "scale": np.where(inner, (a - 1) * v, 0), "dead": np.where(dead, -v, 0),
        "clip": np.where(clipped & ~dead, q - v, 0), "grid": np.where(inner, q - a * v, 0),
    }  # fmt: skip
    np.testing.assert_allclose(sum(parts.values()), q - v, rtol=0, atol=1e-12 * np.abs(v).max())
    found = ErrorSplit(True)
    found.add(slab(values.astype(np.float32).astype(np.float64), spec))
    scale = (v * v).sum()
    for cause in CAUSES:
        assert found.energies()[cause] == pytest.approx((parts[cause] ** 2).sum(), abs=1e-12 * scale)
        assert found.projections()[cause] == pytest.approx((parts[cause] * v).sum(), abs=1e-12 * scale)
    assert sum(found.energies().values()) == pytest.approx(((q - v) ** 2).sum(), rel=1e-9, abs=1e-12 * scale)
    assert sum(found.projections().values()) == pytest.approx(
        ((q - v) * v).sum(), rel=1e-6, abs=1e-12 * scale
    )


def test_a_tile_is_one_block_of_32_rows() -> None:
    values = np.zeros((32, 32))
    values[0, 0], values[1, 0] = 4.5, -4.5
    found = ErrorSplit(True, 32)
    found.add(slab(values, OperandSpec(block="32x32")))
    assert shares(found) == {"scale": pytest.approx(0.5)}


def test_a_tensor_with_one_scale_may_come_in_parts() -> None:
    rng = np.random.default_rng(1)
    v = torch.from_numpy(rng.standard_normal((6, 8)))
    q, limit = (v * 0.9).round(decimals=1), torch.tensor(1.5, dtype=torch.float64)
    whole, parts = ErrorSplit(False), ErrorSplit(False)
    valid = torch.ones_like(v, dtype=torch.bool)
    whole.add((v, q, limit, valid))
    for rows in (slice(0, 2), slice(2, 6)):
        parts.add((v[rows], q[rows], limit, valid[rows]))
    assert parts.row() == pytest.approx(whole.row())
    assert sum(whole.energies().values()) == pytest.approx(((q - v) ** 2).sum().item())


def test_a_block_with_nan_does_not_count() -> None:
    values = np.zeros((2, 32))
    values[0, :2], values[1, :2] = (4, 0.2), (math.nan, 7)
    found = ErrorSplit(True)
    found.add(slab(values))
    assert found.sums.invalid == 32
    assert found.sums.signal == pytest.approx(16.04, rel=1e-6)
    assert set(shares(found)) == {"dead"}


def mean_of(source: np.ndarray, error: np.ndarray, rotation: Rotation | None) -> dict[str, float | None]:
    """The split of an operand whose source and error are given as they are before the rotation."""
    turned = [hadamard(t.astype(np.float32), rotation) if rotation else t for t in (source, error)]
    v, e = (np.asarray(t, np.float64) for t in turned)
    return mean_row(v, e, rotation)


def mean_row(v: np.ndarray, e: np.ndarray, rotation: Rotation | None) -> dict[str, float | None]:
    found = MeanSplit(rotation)
    found.add(torch.from_numpy(v), torch.from_numpy(e))
    return found.row(Sums(signal=(v * v).sum(), noise=(e * e).sum(), cross=(v * e).sum()))


@pytest.mark.parametrize("rotation", [None, Rotation(16), Rotation(16, 0b1010011011010001), Rotation(32)])
def test_constant_groups_are_all_mean_and_alternating_ones_none(rotation: Rotation | None) -> None:
    n = rotation.n if rotation else GROUP
    constant, alternating = np.repeat([[2.0, -1.0]], n, axis=1), np.tile([[1.0, -1.0]], n)
    found = mean_of(constant, 0.25 * alternating, rotation)
    assert found["group"] == n
    assert found["dc_source"] == pytest.approx(1, abs=1e-6)
    assert found["dc_noise"] == pytest.approx(0, abs=1e-6)
    found = mean_of(alternating, -0.5 * alternating + 0.125, rotation)
    assert found["dc_source"] == pytest.approx(0, abs=1e-6)
    assert found["dc_noise"] == pytest.approx(0.125**2 / (0.25 + 0.125**2), rel=1e-5)
    assert found["rest_bias"] == pytest.approx(-0.5, rel=1e-6)


def test_the_deterministic_transform_gathers_the_mean_in_the_first_coefficient() -> None:
    constant = np.full((1, 32), 3.0)
    assert mean_of(constant, constant, Rotation(16))["dc_first"] == pytest.approx(1, abs=1e-6)
    signs = Rotation(16, 0b0000000011111111)
    assert mean_of(constant, constant, signs)["dc_first"] == pytest.approx(0, abs=1e-6)
    assert mean_of(constant, constant, None)["dc_first"] is None


@settings(max_examples=30, deadline=None)
@given(seed=st.integers(0, 1000), n=st.sampled_from([2, 16, 64]), signs=st.integers(0, 2**16 - 1))
def test_the_mean_is_that_of_the_groups_before_the_rotation(seed: int, n: int, signs: int) -> None:
    rng = np.random.default_rng(seed)
    rotation = Rotation(n, signs % (1 << n))
    v, e = (rng.standard_normal((2, 128)).astype(np.float32) for _ in range(2))
    row = mean_row(v.astype(np.float64), e.astype(np.float64), rotation)
    source, error = (inverse_hadamard(t, rotation).astype(np.float64).reshape(-1, n) for t in (v, e))
    means = [t.mean(axis=1, keepdims=True) for t in (source, error)]
    assert row["dc_source"] == pytest.approx(n * (means[0] ** 2).sum() / (source**2).sum(), rel=1e-4)
    assert row["dc_noise"] == pytest.approx(n * (means[1] ** 2).sum() / (error**2).sum(), rel=1e-4)
    rest = [t - m for t, m in zip((source, error), means, strict=True)]
    expected = (rest[0] * rest[1]).sum() / (rest[0] ** 2).sum()
    assert row["rest_bias"] == pytest.approx(expected, rel=1e-3, abs=1e-4)


def test_the_error_of_a_product() -> None:
    exact = torch.tensor([[3.0, 4.0]], dtype=torch.float64)
    found = ProductError.of(exact, exact * 1.1).row()
    assert found["bias"] == pytest.approx(0.1)
    assert found["snr"] == pytest.approx(20)
    assert found["cosine"] == pytest.approx(1)
    assert found["mean_error"] == pytest.approx(0.35 / math.sqrt(12.5))
    turned = ProductError.of(exact, torch.tensor([[-4.0, 3.0]])).row()
    assert turned["cosine"] == pytest.approx(0)
    assert turned["bias"] == pytest.approx(-1)
    none = ProductError.of(torch.zeros(2, 2, dtype=torch.float64), torch.zeros(2, 2)).row()
    assert none == {"snr": None, "cosine": None, "bias": None, "mean_error": None}


def test_the_exact_products_contract_over_each_roles_axis() -> None:
    x, w, dy = (torch.arange(float(a * b)).reshape(a, b) for a, b in ((5, 3), (2, 3), (5, 2)))
    for role, a, b, expected in (
        ("fprop", x, w, x @ w.T), ("dgrad", dy, w, dy @ w), ("wgrad", dy, x, dy.T @ x),
    ):  # fmt: skip
        found = exact_product(mxref.GemmRole(role), a, b)
        assert found.dtype is torch.float64
        assert torch.equal(found, expected.double())
