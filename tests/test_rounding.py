"""Element rounding against the oracle and ml_dtypes: ties, their neighbours, and every outcome of SR."""

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

import oracle
from mxref.errors import RecipeError
from mxref.formats import E2M1, E4M3, E5M2
from mxref.rounding import Rounding, apply_prescale, round_magnitude

GRID = (0, 0.5, 1, 1.5, 2, 3, 4, 6)
TIES = (0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5)


def _points():
    rng = np.random.default_rng(1)
    turns = np.array([*GRID, *TIES, 7, 8], np.float32)
    neighbours = [np.nextafter(turns, np.float32(d)) for d in (0, 100)]
    spread = rng.uniform(0, 8, 3000).astype(np.float32)
    tiny = np.array([1e-45, 1.1754944e-38, 1e-40, 2.0**-24], np.float32)
    return np.concatenate([turns, *neighbours, spread, tiny])


@pytest.mark.clause("rounding.rne", "rounding.rna", "rounding.rtz", "rounding.saturate")
@pytest.mark.parametrize("rounding", [Rounding.RNE, Rounding.RNA, Rounding.RTZ])
def test_matches_the_oracle_at_and_beside_every_turn(rounding):
    v = _points()
    want = [oracle.round_element(Fraction(float(x)), rounding.value) for x in v]
    assert round_magnitude(v, rounding, E2M1).tolist() == want


@pytest.mark.clause("rounding.rne", "rounding.rna", "rounding.rtz", evidence="known answer")
@pytest.mark.parametrize(
    ("rounding", "codes"),
    [
        (Rounding.RNE, [0, 2, 2, 4, 4, 6, 6]),
        (Rounding.RNA, [1, 2, 3, 4, 5, 6, 7]),
        (Rounding.RTZ, [0, 1, 2, 3, 4, 5, 6]),
    ],
)
def test_ties(rounding, codes):
    assert round_magnitude(np.array(TIES, np.float32), rounding, E2M1).tolist() == codes


@pytest.mark.clause("rounding.rne", "rounding.saturate", evidence="peer")
def test_rne_matches_ml_dtypes():
    v = _points()
    assert (
        round_magnitude(v, Rounding.RNE, E2M1).tolist()
        == v.astype(ml_dtypes.float4_e2m1fn).view(np.uint8).tolist()
    )


@pytest.mark.clause("rounding.sr", "rounding.saturate")
@pytest.mark.parametrize("bits", [1, 2, 8, 16, 17, 22])
def test_sr_matches_the_oracle(bits):
    v = _points()
    rng = np.random.default_rng(bits)
    for r in (
        np.zeros(len(v)),
        np.ones(len(v)),
        np.full(len(v), 2**bits - 1),
        rng.integers(0, 2**bits, len(v)),
    ):
        r = r.astype(np.uint32) & np.uint32(2**bits - 1)
        want = [
            oracle.round_element(Fraction(float(x)), "sr", int(i), bits) for x, i in zip(v, r, strict=True)
        ]
        assert round_magnitude(v, Rounding.SR, E2M1, r, bits).tolist() == want


@pytest.mark.clause("rounding.sr", evidence="known answer")
@pytest.mark.parametrize("v", [0.125, 0.3, 1.1, 2.4, 5.999, 1e-30])
def test_sr_goes_up_for_exactly_floor_f_2r_of_the_integers(v):
    bits = 10
    r = np.arange(2**bits, dtype=np.uint32)
    x = np.float32(v)
    codes = round_magnitude(np.full(2**bits, x), Rounding.SR, E2M1, r, bits)
    low = max(i for i, g in enumerate(GRID) if g <= x)
    f = Fraction(float(x) - GRID[low]) / Fraction(GRID[low + 1] - GRID[low])
    assert int((codes == low + 1).sum()) == int(f * 2**bits)
    assert set(codes.tolist()) <= {low, low + 1}


@pytest.mark.clause("rounding.saturate", evidence="known answer")
def test_sr_saturates_at_6_for_every_integer():
    v = np.array([6, 6.5, 7.999], np.float32)
    for r in (0, 2**16 - 1):
        assert round_magnitude(v, Rounding.SR, E2M1, np.full(3, r, np.uint32), 16).tolist() == [7, 7, 7]


@pytest.mark.clause("random.range", evidence="known answer")
def test_sr_needs_bits_in_range():
    v = np.ones(1, np.float32)
    with pytest.raises(RecipeError, match="1 to 22 bits"):
        round_magnitude(v, Rounding.SR, E2M1)
    with pytest.raises(RecipeError, match="bits = 23"):
        round_magnitude(v, Rounding.SR, E2M1, np.zeros(1, np.uint32), 23)


@pytest.mark.clause("rounding.prescale", "conventions.arithmetic")
def test_prescale_is_one_float32_multiply():
    v = np.random.default_rng(3).integers(0, 0x41000000, 5000, dtype=np.uint32).view(np.float32)
    want = [oracle.f32_mul(int(b), 0x3F400000) for b in v.view(np.uint32)]
    assert apply_prescale(v, E2M1).view(np.uint32).tolist() == want


FP8 = pytest.mark.parametrize("element", [E4M3, E5M2], ids=lambda element: element.name)


def _fp8_points(element):
    """Every grid point and tie, their float32 neighbours, magnitudes beyond the largest, and tiny ones."""
    grid = np.array(element.magnitudes)
    turns = np.array([*grid, *(grid[:-1] + grid[1:]) / 2, 1.04 * grid[-1], 1e9], np.float32)
    beside = [np.nextafter(turns, np.float32(to)) for to in (0, np.inf)]
    return np.concatenate([turns, *beside, np.array([1e-45, 1e-40, 1.1754944e-38], np.float32)])


@pytest.mark.clause("rounding.rne", "rounding.rna", "rounding.rtz", "rounding.saturate", "formats.mxfp8")
@FP8
@pytest.mark.parametrize("rounding", [Rounding.RNE, Rounding.RNA, Rounding.RTZ])
def test_fp8_matches_the_oracle_at_and_beside_every_turn(rounding, element):
    v, same = _fp8_points(element), oracle.ELEMENTS[element.name]
    want = [oracle.round_element(Fraction(float(x)), rounding.value, element=same) for x in v]
    got = round_magnitude(v, rounding, element)
    assert got.tolist() == want
    assert got.max() == element.max_code  # never NaN or Inf


@pytest.mark.clause("rounding.rne", evidence="peer")
@FP8
def test_fp8_rne_matches_ml_dtypes_up_to_the_largest_value(element):
    v = _fp8_points(element)
    v = v[v <= element.max_value]
    want = v.astype(getattr(ml_dtypes, element.dtype)).view(np.uint8)
    assert round_magnitude(v, Rounding.RNE, element).tolist() == want.tolist()


@pytest.mark.clause("rounding.saturate", evidence="known answer")
@FP8
@pytest.mark.parametrize("rounding", Rounding)
def test_fp8_saturates_to_the_largest_value_and_never_to_nan_or_infinity(rounding, element):
    v = np.array([1, 1.001, 1.0625, 1.15, 2, 1e30], np.float32) * np.float32(element.max_value)
    for r in (0, 2**16 - 1):
        codes = round_magnitude(v, rounding, element, np.full(len(v), r, np.uint32), 16)
        assert codes.tolist() == [element.max_code] * len(v)


@pytest.mark.clause("rounding.sr", "rounding.saturate")
@FP8
@pytest.mark.parametrize("bits", [1, 16, 22])
def test_fp8_sr_matches_the_oracle(bits, element):
    v, same = _fp8_points(element), oracle.ELEMENTS[element.name]
    for r in (
        np.zeros(len(v)),
        np.full(len(v), 2**bits - 1),
        np.random.default_rng(bits).integers(0, 2**bits, len(v)),
    ):
        r = r.astype(np.uint32)
        pairs = zip(v, r, strict=True)
        want = [oracle.round_element(Fraction(float(x)), "sr", int(i), bits, element=same) for x, i in pairs]
        assert round_magnitude(v, Rounding.SR, element, r, bits).tolist() == want


@pytest.mark.clause("rounding.prescale", "conventions.arithmetic")
@FP8
def test_the_prescale_of_fp8_is_seven_eighths(element):
    v = np.random.default_rng(3).integers(0, 0x47800000, 2000, dtype=np.uint32).view(np.float32)
    want = [oracle.f32_mul(int(b), 0x3F600000) for b in v.view(np.uint32)]
    assert apply_prescale(v, element).view(np.uint32).tolist() == want
