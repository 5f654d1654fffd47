"""Folding of short formats: each code at each gap, scales of any size, and the rows that do not fit."""

import itertools
from dataclasses import replace

import ml_dtypes
import numpy as np
import pytest
import torch

from interpreted.gemm_operands import matrix, on
from interpreted.test_formats_interpreted import drawn, values
from mxref import MXArray
from mxref.formats import MXFP4, MXFP4_E1M2, MXFP6_E2M3, MXFP6_E3M2
from mxref.gemm import bounded_tolerance, scaled_gemm
from mxref.layouts.packed import pack
from mxref_triton.launch import DEVICE
from mxref_triton.products import fold as folding
from mxref_triton.products.fold import Fold, fits_wide, fold, fold_both
from mxref_triton.products.misfits import multiply_misfits

ORDER = [*range(0, 32, 2), *range(1, 32, 2)]
SHORT = (MXFP4, MXFP4_E1M2, MXFP6_E2M3, MXFP6_E3M2)
FOLDS = [(made, wide) for made in SHORT for wide in (False, True) if not wide or fits_wide(made.element)]
by_fold = pytest.mark.parametrize(("made", "wide"), FOLDS, ids=str)


def as_values(f):
    """The folded elements, float64 [rows, K] in the folded order; NaN in a row whose scale is NaN."""
    fp8 = ml_dtypes.float8_e5m2 if f.values.dtype is torch.float8_e5m2 else ml_dtypes.float8_e4m3fn
    elements = f.values.view(torch.uint8).numpy().view(fp8)
    return elements.astype(np.float64), f.scale.numpy().astype(np.float64)


def listed(f):
    return sorted(f.misfits[1 : 1 + int(f.misfits[0])].tolist())


def check(q, wide):
    """Hold a folded operand to its values, and return which rows fit: of rows without NaN, no other than exact ones.

    E2M1 in E5M2 has normal numbers alone, so that rows with smaller elements are listed though they are exact.
    """
    f = fold(on(DEVICE, q), wide=wide)
    elements, scale = as_values(f)
    got = elements * scale
    want = values(q).reshape(*q.scales.shape, 32)[..., ORDER].reshape(got.shape)
    spoiled = (q.scales == 255).any(axis=1)
    exact = (got == want).all(axis=1)
    fits = ~np.isin(np.arange(len(exact)), listed(f))
    assert np.isnan(scale[spoiled]).all()
    assert not (fits & ~exact & ~spoiled).any()
    assert (wide and q.format is MXFP4) or (fits == exact)[~spoiled].all()
    assert (np.signbit(elements) == np.signbit(want))[exact[:, None] & (want == 0)].all()
    if not wide:
        g = fold(on(DEVICE, q), by_block=True)
        assert torch.equal(g.values.view(torch.uint8).transpose(0, 1).flatten(1), f.values.view(torch.uint8))
        assert listed(g) == listed(f)
    return fits


def test_the_gap_that_every_element_fits():
    assert {(made.name, wide): Fold.of(made.element, wide).gap for made, wide in FOLDS} == {
        ("mxfp4", False): 14, ("mxfp4", True): 26, ("mxfp4_e1m2", False): 15, ("mxfp4_e1m2", True): 29,
        ("mxfp6_e2m3", False): 11, ("mxfp6_e3m2", False): 9, ("mxfp6_e3m2", True): 23,
    }  # fmt: skip


@by_fold
def test_every_code_at_every_gap(made, wide):
    """The largest element at scale 140 sets the top; each code alone lies a gap below it."""
    element, gaps = made.element, range(48)
    rows = list(itertools.product(gaps, range(1 << element.bits)))
    codes = np.zeros((len(rows), 64), np.uint8)
    codes[:, 5] = element.max_code
    codes[:, 32:] = np.array([code for _, code in rows])[:, None]
    scales = np.array([(140, 140 - gap) for gap, _ in rows], np.uint8)
    fits = check(MXArray(pack(codes, element), scales, codes.shape, 1, format=made), wide)
    largest = Fold.of(element, wide).gap
    assert fits.reshape(len(gaps), -1).all(axis=1).tolist() == [gap <= largest for gap in gaps]


def test_blocks_of_zeros_set_no_top_and_stay_zero():
    zeros = [8, 0] * 16
    q = matrix([[(254, zeros), (100, [1] * 32), (0, zeros)], [(254, zeros), (13, zeros), (3, zeros)]])
    assert check(q, False).all()
    f = fold(on(DEVICE, q))
    got = f.values.view(torch.uint8).numpy()
    assert set(got[0, :32].tolist()) == set(got[0, 64:].tolist()) == {0, 0x80}
    assert f.scale.numpy()[1, 0] == 2.0**-6  # nothing live: that of scale 1


@pytest.mark.parametrize("shape", [(0, 64), (3, 0), (0, 0)])
def test_nothing_to_fold(shape):
    codes, scales = (np.zeros((shape[0], shape[1] // per), np.uint8) for per in (2, 32))
    q = on(DEVICE, MXArray(codes, scales, shape, 1))
    f, g = fold(q), fold(q, by_block=True)
    assert (tuple(f.values.shape), tuple(g.values.shape)) == (shape, (shape[1] // 32, shape[0], 32))
    assert f.misfits[0] == g.misfits[0] == 0


@pytest.mark.parametrize(
    ("made", "wide", "tile"), [(MXFP4, False, 1 << 14), *((*each, 4) for each in FOLDS)], ids=str
)
def test_drawn_rows_of_any_scale(made, wide, tile, monkeypatch):
    monkeypatch.setattr(folding, "_TILE", tile)  # a longer row is read in pieces
    monkeypatch.setattr(folding, "_WIDEST_BY_BLOCK", tile)
    for rows, k, low, high in ((40, 96, 120, 128), (33, 288, 100, 140), (70, 64, 0, 254)):
        q = drawn(made, rows, k, low, high, k)
        q.codes.reshape(rows, k // 32, -1)[::3, 1] = 0
        q.scales[7, 1] = 255
        check(q, wide)


@pytest.mark.parametrize("tile", [16, 1 << 14])
@pytest.mark.parametrize(
    "pair", [(MXFP4, MXFP4), (MXFP4, MXFP6_E2M3), (MXFP6_E3M2, MXFP4_E1M2), (MXFP6_E2M3, MXFP6_E2M3)], ids=str
)
def test_two_operands_in_one_kernel_are_folded_as_each_alone(pair, tile, monkeypatch):
    """Rows that share no program, of different lengths, with misfits, NaN, and more or fewer than a tile."""
    monkeypatch.setattr(folding, "_TILE", tile)
    for shapes in (((33, 288), (48, 288)), ((5, 64), (70, 64)), ((70, 1024), (1, 1024))):
        a, b = (drawn(made, *shape, 60, 180, shape[0]) for made, shape in zip(pair, shapes, strict=True))
        a.scales[2, 1] = 255
        b.scales[0] = 100
        wide = fits_wide(a.format.element)
        one, two = (on(DEVICE, q) for q in (a, b))
        found, alone = fold_both(one, two, wide), (fold(one, wide=wide), fold(two))
        assert listed(alone[0])
        for f, g in zip(found, alone, strict=True):
            assert f.values.dtype == g.values.dtype
            assert torch.equal(f.values.view(torch.uint8), g.values.view(torch.uint8))
            assert torch.equal(f.scale.view(torch.int32), g.scale.view(torch.int32))
            assert f.misfits.shape == g.misfits.shape
            assert listed(f) == listed(g)
            assert not f.done.any()


def test_one_of_two_operands_may_be_empty():
    empty, some = (on(DEVICE, drawn(MXFP4, rows, 64, 100, 120, 1)) for rows in (0, 8))
    for pair in ((empty, some), (some, empty), (empty, empty)):
        for f, q, wide in zip(fold_both(*pair, True), pair, (True, False), strict=True):
            alone = fold(q, wide=wide)
            assert torch.equal(f.values.view(torch.uint8), alone.values.view(torch.uint8))
            assert torch.equal(f.scale, alone.scale)


@pytest.mark.clause("gemm.bounded", "gemm.nan", "gemm.prescale")
@pytest.mark.parametrize(
    "pair", [*itertools.product(SHORT, repeat=2)][1:], ids=lambda pair: "-".join(map(str, pair))
)
def test_folded_products_and_those_of_misfits_are_of_their_class(pair):
    """The product of folded operands as FP8 units see them, overwritten where a row does not fit."""
    a, b = (
        replace(drawn(made, rows, 288, 85, 135, rows), prescale=rows == 33)
        for made, rows in zip(pair, (33, 48), strict=True)
    )
    a.scales[10], a.scales[11:], b.scales[5:] = 90, 128, 126  # most rows fit
    a.scales[20, 3] = 255
    a.scales[0], b.scales[0] = 120, 121
    left, right = fold(on(DEVICE, a), wide=fits_wide(a.format.element)), fold(on(DEVICE, b))
    assert 0 < len(listed(left)) < 33
    assert 0 < len(listed(right)) < 48
    (first, first_scale), (second, second_scale) = as_values(left), as_values(right)
    factor = 1 / a.format.element.prescale
    with np.errstate(all="ignore"):
        product = (first @ second.T) * first_scale * second_scale.T * factor
        out = torch.from_numpy(product.astype(np.float32))
    multiply_misfits(on(DEVICE, a), on(DEVICE, b), left, right, out)
    want = scaled_gemm(a, b, profile="exact").astype(np.float64)
    got = out.numpy().astype(np.float64)
    bound = bounded_tolerance(a, b, "fp32") + 2.0**-24 * np.abs(want)
    assert np.isnan(got[20]).all()
    assert ((np.abs(got - want) <= bound) | np.isnan(got) & np.isnan(want)).all()
