"""Element rounding against the oracle and ml_dtypes: ties, their neighbours, and every outcome of SR."""

from fractions import Fraction

import ml_dtypes
import numpy as np
import pytest

import oracle
from mxref.errors import RecipeError
from mxref.formats import E1M2, E2M1, E2M3, E3M2, E4M3, E5M2
from mxref.steps.rounding import Rounding, apply_prescale, round_magnitude

ELEMENTS = pytest.mark.parametrize("element", [E2M1, E4M3, E5M2, E2M3, E3M2, E1M2], ids=lambda e: e.name)


def points(element):
    """Every grid point and tie, their float32 neighbours, magnitudes beyond the largest, tiny ones, and drawn ones."""
    grid = np.array(element.magnitudes)
    turns = np.array([*grid, *(grid[:-1] + grid[1:]) / 2, 1.04 * grid[-1], 1.2 * grid[-1], 1e9], np.float32)
    beside = [np.nextafter(turns, np.float32(to)) for to in (0, np.inf)]
    drawn = np.random.default_rng(1).uniform(0, 1.3, 500) * np.exp2(np.arange(500) % 12 - 11) * grid[-1]
    tiny = np.array([1e-45, 1.1754944e-38, 1e-40, 2.0**-24], np.float32)
    return np.concatenate([turns, *beside, drawn.astype(np.float32), tiny])


@pytest.mark.clause("rounding.rne", "rounding.rna", "rounding.rtz", "rounding.saturate", "formats.mxfp8")
@ELEMENTS
@pytest.mark.parametrize("rounding", [Rounding.RNE, Rounding.RNA, Rounding.RTZ])
def test_matches_the_oracle_at_and_beside_every_turn(rounding, element):
    v, same = points(element), oracle.ELEMENTS[element.name]
    want = [oracle.round_element(Fraction(float(x)), rounding.value, element=same) for x in v]
    got = round_magnitude(v, rounding, element)
    assert got.tolist() == want
    assert got.max() == element.max_code  # never NaN or Inf


@pytest.mark.clause(
    "rounding.rne", "rounding.rna", "rounding.rtz", "rounding.saturate", evidence="known answer"
)
@pytest.mark.parametrize(
    ("element", "ties", "rne", "rna", "rtz"),
    [
        (E2M1, [0.25, 0.75, 1.25, 1.75, 2.5, 3.5, 5], [0, 1, 1, 2, 2, 4, 4], [0.5, 1, 1.5, 2, 3, 4, 6],
         [0, 0.5, 1, 1.5, 2, 3, 4]),
        (E4M3, [2.0**-10, 1.0625, 1.1875, 432, 480], [0, 1, 1.25, 448, 448], [2.0**-9, 1.125, 1.25, 448, 448],
         [0, 1, 1.125, 416, 448]),
        (E5M2, [2.0**-17, 1.125, 1.375, 61440], [0, 1, 1.5, 57344], [2.0**-16, 1.25, 1.5, 57344],
         [0, 1, 1.25, 57344]),
    ],
    ids=lambda value: getattr(value, "name", ""),
)  # fmt: skip
def test_ties(element, ties, rne, rna, rtz):
    for rounding, values in ((Rounding.RNE, rne), (Rounding.RNA, rna), (Rounding.RTZ, rtz)):
        codes = round_magnitude(np.array(ties, np.float32), rounding, element)
        assert [element.values[code] for code in codes] == values


@pytest.mark.clause("rounding.rne", evidence="peer")
@pytest.mark.parametrize("element", [E2M1, E4M3, E5M2, E2M3, E3M2], ids=lambda e: e.name)
def test_rne_is_the_cast_of_ml_dtypes_up_to_the_largest_value(element):
    v = points(element)
    v = v[v <= element.max_value]
    want = v.astype(getattr(ml_dtypes, element.dtype)).view(np.uint8)
    assert round_magnitude(v, Rounding.RNE, element).tolist() == want.tolist()


@pytest.mark.clause("rounding.sr", "rounding.saturate")
@ELEMENTS
@pytest.mark.parametrize("bits", [1, 8, 16, 22])
def test_sr_matches_the_oracle(bits, element):
    v, same = points(element), oracle.ELEMENTS[element.name]
    for r in (
        np.zeros(len(v)),
        np.ones(len(v)),
        np.full(len(v), 2**bits - 1),
        np.random.default_rng(bits).integers(0, 2**bits, len(v)),
    ):
        r = r.astype(np.uint32)
        pairs = zip(v, r, strict=True)
        want = [oracle.round_element(Fraction(float(x)), "sr", int(i), bits, element=same) for x, i in pairs]
        assert round_magnitude(v, Rounding.SR, element, r, bits).tolist() == want


@pytest.mark.clause("rounding.sr", evidence="known answer")
@pytest.mark.parametrize("v", [0.125, 0.3, 1.1, 2.4, 5.999, 1e-30])
def test_sr_goes_up_for_exactly_floor_f_2r_of_the_integers(v):
    bits, grid = 10, E2M1.magnitudes
    r = np.arange(2**bits, dtype=np.uint32)
    x = np.float32(v)
    codes = round_magnitude(np.full(2**bits, x), Rounding.SR, E2M1, r, bits)
    low = max(i for i, g in enumerate(grid) if g <= x)
    f = Fraction(float(x) - grid[low]) / Fraction(grid[low + 1] - grid[low])
    assert int((codes == low + 1).sum()) == int(f * 2**bits)
    assert set(codes.tolist()) <= {low, low + 1}


@pytest.mark.clause("rounding.saturate", evidence="known answer")
@ELEMENTS
@pytest.mark.parametrize("rounding", Rounding)
def test_saturates_to_the_largest_value_and_never_to_nan_or_infinity(rounding, element):
    v = np.array([1, 1.001, 1.0625, 1.15, 2, 1e30], np.float32) * np.float32(element.max_value)
    for r in (0, 2**16 - 1):
        codes = round_magnitude(v, rounding, element, np.full(len(v), r, np.uint32), 16)
        assert codes.tolist() == [element.max_code] * len(v)


@pytest.mark.clause("random.range", evidence="known answer")
def test_sr_needs_bits_in_range():
    v = np.ones(1, np.float32)
    with pytest.raises(RecipeError, match="1 to 22 bits"):
        round_magnitude(v, Rounding.SR, E2M1)
    with pytest.raises(RecipeError, match="bits = 23"):
        round_magnitude(v, Rounding.SR, E2M1, np.zeros(1, np.uint32), 23)


@pytest.mark.clause("rounding.prescale", "conventions.arithmetic")
@ELEMENTS
def test_the_prescale_is_one_float32_multiply(element):
    v = np.random.default_rng(3).integers(0, 0x47800000, 2000, dtype=np.uint32).view(np.float32)
    factor = oracle.round_f32(oracle.ELEMENTS[element.name].prescale)
    want = [oracle.f32_mul(int(b), factor) for b in v.view(np.uint32)]
    assert apply_prescale(v, element).view(np.uint32).tolist() == want
