"""What the page beside OCP MX and P3109 says of formats and rounding, from P3109's own formulas."""

from __future__ import annotations

import math
import re
from fractions import Fraction

import numpy as np
import pytest

import mxref
from mxref import E2M1, E8M0, Rounding
from mxref.steps.rounding import round_magnitude
from mxref.steps.scale import cast_to_e8m0
from places import ROOT

PAGE = (ROOT / "docs" / "reference" / "crosswalk.rst").read_text(encoding="utf-8")


def decoded(code: int, k: int, p: int, *, signed: bool) -> Fraction | None:
    """Return the value of a code of a finite format of P3109 (3.1 and 4.7.2); None is NaN."""
    bias = 2 ** (k - p - 1) if signed else 2 ** (k - p)
    if code == (2 ** (k - 1) if signed else 2**k - 1):
        return None
    if signed and code > 2 ** (k - 1):
        value = decoded(code - 2 ** (k - 1), k, p, signed=True)
        assert value is not None
        return -value
    exponent, trailing = divmod(code, 2 ** (p - 1))
    if exponent == 0:
        return Fraction(trailing, 2 ** (p - 1)) * Fraction(2) ** (1 - bias)
    return (1 + Fraction(trailing, 2 ** (p - 1))) * Fraction(2) ** (exponent - bias)


def test_e2m1_is_twice_binary4p2sf_but_for_code_8():
    pairs = [(Fraction(float(E2M1.values[c])), decoded(c, 4, 2, signed=True)) for c in range(16)]
    assert [c for c, (ours, theirs) in enumerate(pairs) if theirs is None or ours != 2 * theirs] == [8]
    assert pairs[8] == (0, None)
    assert math.copysign(1, E2M1.values[8]) == -1
    assert max(theirs for _, theirs in pairs if theirs is not None) == 3


def test_e8m0_is_binary8p1uf_one_code_higher():
    for code in range(254):
        assert Fraction(float(E8M0.values[code])) == decoded(code + 1, 8, 1, signed=False)
    assert (decoded(0, 8, 1, signed=False), decoded(255, 8, 1, signed=False)) == (0, None)
    assert math.isnan(E8M0.values[255])
    assert max(decoded(c, 8, 1, signed=False) for c in range(255)) == Fraction(2) ** 126


def test_amax_over_the_scale_of_p3109_lies_below_two():
    """5.2.3 rounds amax to the scale's format, here toward zero; FLOOR keeps amax / X in [4, 8)."""
    for amax in (1.0, 1.999, 6.0, 7.5, 2.0**-100):
        theirs = Fraction(2) ** math.floor(math.log2(amax))
        assert 1 <= Fraction(amax) / theirs < 2
        q = mxref.quantize(np.full((1, 32), amax, np.float32), "ocp")
        assert 4 <= amax / float(E8M0.values[q.scales.view(np.uint8)[0, 0]]) < 8


@pytest.mark.parametrize("bits", [1, 3, 8])
@pytest.mark.parametrize("value", [0.1, 0.3, 1.2, 2.4, 3.6, 5.3])
def test_stochastic_a_is_the_rounding_of_this_specification(value, bits):
    """4.7.4: up if floor(nu * 2^N) + R >= 2^N, with nu the part above the grid point below."""
    v, r = np.full(2**bits, value, np.float32), np.arange(2**bits)
    grid = [float(g) for g in E2M1.magnitudes]
    below = max(c for c, g in enumerate(grid) if g <= v[0])
    nu = (Fraction(float(v[0])) - Fraction(grid[below])) / (Fraction(grid[below + 1]) - Fraction(grid[below]))
    theirs = below + (math.floor(nu * 2**bits) + r >= 2**bits)
    assert np.array_equal(round_magnitude(v, Rounding.SR, E2M1, r, bits), theirs)


def test_ties_between_powers_of_two_all_go_up_here_and_every_second_one_there():
    exponents = np.arange(-3, 5)
    ours = cast_to_e8m0((1.5 * 2.0**exponents).astype(np.float32))
    assert (ours == exponents + 128).all()
    theirs = exponents + 128  # the code of 2^n in Binary8p1uf, which stays if it is even
    theirs += theirs % 2
    assert [decoded(int(c), 8, 1, signed=False) > 2.0**n for c, n in zip(theirs, exponents, strict=True)] == [
        True, False, True, False, True, False, True, False
    ]  # fmt: skip


def test_the_page_names_a_clause_of_every_chapter_on_bits():
    named = set(re.findall(r":clause:`([a-z0-9_.]+)`", PAGE))
    chapters = {clause.partition(".")[0] for clause in named}
    assert chapters >= {"formats", "scale", "rounding", "random", "quantize", "packing", "gemm", "dequantize"}
