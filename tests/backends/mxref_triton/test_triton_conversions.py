"""The check of gfx950's own conversions, which a backend runs before it uses them: it passes the reference alone."""

import numpy as np
import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

from mxref.formats import E2M1
from mxref.layouts.packed import pack
from mxref.steps.rounding import Rounding, round_magnitude
from mxref_triton.lane.gfx950 import NEAREST, STOCHASTIC
from mxref_triton.quantizer.native import DIVISORS, first_difference

TO_E2M1 = (E2M1, Rounding.RNE)


def converting(element=E2M1, spoil=None):
    """Return the reference's conversion, whose codes are changed by `spoil`."""
    beyond = 2.0 ** (element.max_exponent + 1)

    def words_of(values, factors):
        with np.errstate(all="ignore"):
            wide = np.abs(values.astype(np.float64)) * factors.astype(np.float64)[:, None]
        magnitude = np.minimum(np.nan_to_num(wide, nan=8, posinf=beyond), beyond).astype(np.float32)
        codes = round_magnitude(magnitude.ravel(), Rounding.RNE, element).reshape(magnitude.shape)
        codes |= np.signbit(values).astype(np.uint8) << (element.bits - 1)
        if spoil is not None:
            codes = spoil(values, magnitude, codes.copy())
        return pack(codes, element).view(np.uint32)

    return words_of


def spoiled(where, code, element=E2M1):
    def spoil(values, magnitude, codes):
        return np.where(where(values, magnitude), code(codes), codes).astype(np.uint8)

    return converting(element, spoil)


@pytest.mark.parametrize("made", [*NEAREST, STOCHASTIC])
def test_the_check_of_the_conversions_passes_the_reference(made):
    assert first_difference(converting(made[0]), made) is None
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
    difference = first_difference(spoiled(where, code), TO_E2M1)
    assert difference is not None
    assert difference.got not in difference.wanted
    assert "became code" in str(difference)


@pytest.mark.parametrize("made", NEAREST[1:])
@pytest.mark.parametrize("end", ["-0", "tie", "subnormal", "above a tie", "saturation"])
def test_the_check_of_conversions_to_six_bits_finds_one_wrong_bit(made, end):
    element = made[0]
    last, smallest = np.float32(element.max_value), np.float32(element.magnitudes[1])
    tie = np.float32((element.magnitudes[9] + element.magnitudes[10]) / 2)
    where = {
        "-0": lambda v, m: (v == 0) & np.signbit(v),
        "tie": lambda v, m: m == tie,
        "subnormal": lambda v, m: (np.abs(v) < 2.0**-126) & (m >= smallest),
        "above a tie": lambda v, m: m == np.nextafter(smallest / 2, np.float32(1)),
        "saturation": lambda v, m: m > last,
    }[end]
    difference = first_difference(spoiled(where, lambda c: c ^ (32 if end == "-0" else 1), element), made)
    assert difference.got not in difference.wanted
    assert f"of {element.name}, not" in str(difference)


def test_stochastic_conversions_must_stay_at_the_neighbours():
    up = spoiled(lambda v, m: m < 0.25, lambda c: (c & 8) | 1)
    assert str(first_difference(up, STOCHASTIC)).endswith("became code 1 of E2M1, not 0")
    past = spoiled(lambda v, m: m == 2.5, lambda c: (c & 8) | 6)
    assert first_difference(past, STOCHASTIC).wanted in ((4, 5), (12, 13))
