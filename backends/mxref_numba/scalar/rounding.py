"""Rounding to the grid of an element: E2M1 without comparisons, and any other format from its numbers.

The grid position of a magnitude v in [0, 8), code plus fraction, is min(2v, v + 2, v / 2 + 4): three
lines, each exact on its binades. RNE rounds each line by adding 1.5 * 2^23 (the offsets are even, so ties
go to even codes). The other modes take the position in fixed point with 22 bits, rounded down, which is
all that SR with up to 22 bits looks at; RTZ and RNA are then SR with the constants 0 and one half.
Kernels of one rounding take the same arguments; E2M1 needs no grid.
"""

# Kernels have no annotations: Numba infers their types.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import numpy as np

from mxref.steps.rounding import Rounding
from mxref_numba.compiled import bits_of, float_of, kernel
from mxref_numba.elements import FRACTION_BITS, MAGNITUDE_CODE

CONSTANTS = {Rounding.RTZ: 0, Rounding.RNA: 1 << (FRACTION_BITS - 1)}
"""The random integer that makes SR with all its bits the rounding mode."""

_ROUNDER = np.float32(1.5 * 2**23)
_ROUNDER_BITS = np.int32(0x4B400000)
_POSITION_UNITS = np.float32(2.0 ** (FRACTION_BITS + 1))
_TWO = np.int32(2 << FRACTION_BITS)
_FOUR = np.int32(4 << FRACTION_BITS)
_TOP_CODE = np.int32(7)
_EXPONENT_FIELD, _CODE = np.int32(0x7F800000), np.int32(MAGNITUDE_CODE)


@kernel
def round_even(v, grid):
    """Return the code of a magnitude v in [0, 8), float32, under RNE: int32."""
    first = bits_of(v + v + _ROUNDER)
    second = np.int32(bits_of(v + _ROUNDER) + np.int32(2))
    third = np.int32(bits_of(v * np.float32(0.5) + _ROUNDER) + np.int32(4))
    return min(np.int32(min(first, min(second, third)) - _ROUNDER_BITS), _TOP_CODE)


@kernel
def round_by(v, random, bits, grid):
    """Return the code of v in [0, 8): rounded up if the fraction, in units of 2^-bits, plus `random` carries."""
    line = np.int32(v * _POSITION_UNITS)
    second = np.int32((line >> np.int32(1)) + _TWO)
    third = np.int32((line >> np.int32(2)) + _FOUR)
    position = np.int32(min(line, min(second, third)) >> np.int32(np.int32(FRACTION_BITS) - bits))
    return min(np.int32(np.int32(position + random) >> bits), _TOP_CODE)


@kernel
def round_even_byte(v, grid):
    """Return the code of a finite magnitude, float32, under RNE to a `Grid`: int32."""
    held = min(v, grid.top)
    binade = max(np.int32(bits_of(held) & _EXPONENT_FIELD), grid.smallest_normal)
    # The product is exact. Adding it to v rounds once, to the steps of the binade, with ties to even steps.
    steps = bits_of(float_of(binade) * grid.even_unit + held)
    return np.int32(np.int32(steps + np.int32(binade >> grid.step_shift)) & _CODE)


@kernel
def round_byte_by(v, random, bits, grid):
    """Return the code of such a magnitude: rounded up if the fraction, in units of 2^-bits, plus `random` carries."""
    held = min(v, grid.top)
    smallest = grid.smallest_normal
    # The position of v if it is below the smallest normal magnitude, else of that magnitude, plus the distance from it.
    line = np.int32(min(held, float_of(smallest)) * grid.line_unit)
    above = np.int32(np.int32(max(bits_of(held), smallest) - smallest) << grid.position_shift)
    position = np.int32(line + above)
    shifted = np.int32(position >> np.int32(np.int32(FRACTION_BITS) - bits))
    return np.int32(np.int32(shifted + random) >> bits)
