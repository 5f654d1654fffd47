"""The check of gfx950's own conversions, which a backend runs before it uses them: it passes the reference alone."""

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from mxref.formats import E2M1
from mxref.steps.rounding import Rounding, round_magnitude
from mxref_triton.quantizer.native import DIVISORS, first_difference


def words_of(values, factors, spoil=None):
    """Return the results of the reference's conversions, changed by `spoil`."""
    with np.errstate(all="ignore"):
        wide = np.abs(values.astype(np.float64)) * factors.astype(np.float64)[:, None]
    magnitude = np.minimum(np.nan_to_num(wide, nan=8, posinf=8), 8).astype(np.float32)
    codes = round_magnitude(magnitude.ravel(), Rounding.RNE, E2M1).reshape(magnitude.shape)
    codes |= np.signbit(values).astype(np.uint8) << 3
    if spoil is not None:
        codes = spoil(values, magnitude, codes.copy())
    return (codes.astype(np.uint32) << (4 * np.arange(8, dtype=np.uint32))).sum(1, dtype=np.uint32)


def spoiled(where, code):
    def spoil(values, magnitude, codes):
        return np.where(where(values, magnitude), code(codes), codes).astype(np.uint8)

    return lambda values, factors: words_of(values, factors, spoil)


def test_the_check_of_the_conversions_passes_the_reference():
    assert first_difference(words_of) is None
    assert first_difference(words_of, stochastic=True) is None
    assert {0, 127, 253} <= set(DIVISORS)


@pytest.mark.parametrize(
    ("where", "code"),
    [
        (lambda v, m: (v == 0) & np.signbit(v), lambda c: c & 7),
        (lambda v, m: m == 2.5, lambda c: (c & 8) | 5),
        (lambda v, m: (np.abs(v) < 2.0**-126) & (v != 0), lambda c: c & 8),
        (lambda v, m: m == np.nextafter(np.float32(0.25), np.float32(1)), lambda c: c & 8),
        (lambda v, m: m == 8, lambda c: c ^ 1),
        (lambda v, m: (v.view(np.uint32) == 0xC0FF0000) & (m == 3.984375), lambda c: c ^ 8),
    ],
    ids=["-0", "tie", "subnormal", "above a tie", "saturation", "one pattern under one divisor"],
)
def test_the_check_of_the_conversions_finds_one_wrong_bit(where, code):
    difference = first_difference(spoiled(where, code))
    assert difference is not None
    assert difference.got not in difference.wanted
    assert "became code" in str(difference)


def test_stochastic_conversions_must_stay_at_the_neighbours():
    up = spoiled(lambda v, m: m < 0.25, lambda c: (c & 8) | 1)
    assert str(first_difference(up, stochastic=True)).endswith("became code 1, not 0")
    past = spoiled(lambda v, m: m == 2.5, lambda c: (c & 8) | 6)
    assert first_difference(past, stochastic=True).wanted in ((4, 5), (12, 13))
