"""Codes of magnitudes and of quotients, in plain Numba, by the numbers of a `Grid`.

RNE is one addition, which rounds to the steps of a binade. The other modes take the position on the grid in fixed point
with 22 bits, rounded down, which is all that SR with up to 22 bits looks at; RTZ and RNA are then SR with the constants
0 and one half.
"""

# Kernels have no annotations: Numba infers their types.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import numpy as np

from mxref_numba.grids import FRACTION_BITS, SCALE_CODE
from mxref_numba.kernels import bits_of, float_of, kernel

_FRACTION = np.int32(FRACTION_BITS)
_EXPONENT_FIELD, _CODE = np.int32(0x7F800000), np.int32(SCALE_CODE)


@kernel
def round_even(v, grid):
    """Return the code of a finite magnitude, float32, under RNE to a `Grid`: int32."""
    held = min(v, grid.top)
    binade = max(np.int32(bits_of(held) & _EXPONENT_FIELD), grid.smallest_normal)
    # The product is exact. Adding it to v rounds once, to the steps of the binade, with ties to even steps.
    steps = bits_of(float_of(binade) * grid.even_unit + held)
    return np.int32(np.int32(steps + np.int32(binade >> grid.step_shift)) & _CODE)


@kernel
def round_by(v, random, grid):
    """Return the code of such a magnitude: rounded up if the fraction, in units of 2^-22, plus `random` carries."""
    held = min(v, grid.top)
    smallest = grid.smallest_normal
    # The position of v if it is below the smallest normal magnitude, else of that magnitude, plus the distance from it.
    line = np.int32(min(held, float_of(smallest)) * grid.line_unit)
    above = np.int32(np.int32(max(bits_of(held), smallest) - smallest) << grid.position_shift)
    return np.int32(np.int32(np.int32(line + above) + random) >> _FRACTION)


# ---- quotients by scales with a mantissa ----
#
# In float64 a quotient lies on the same side of every step as the real one. As a float32 it stays there for RNE if it
# is rounded to odd.


@kernel
def _rounded_down(v):
    """Return a float64, not negative and within the range of float32, rounded toward zero: float32."""
    near = np.float32(v)
    return float_of(np.int32(bits_of(near) - np.int32(1))) if np.float64(near) > v else near


@kernel
def rounded_to_odd(v):
    """Return such a float64 if float32 has it, else the neighbour whose last bit is set."""
    down = _rounded_down(v)
    return down if np.float64(down) == v else float_of(np.int32(bits_of(down) | np.int32(1)))


_STEP_BIAS = np.int32(127 - 23)
"""Makes the bits of 2^-p of a `Grid`'s step shift, p the mantissa bits."""


@kernel
def round_quotient_by(v, random, grid):
    """Do what `round_by` does with such a float64, whose place between two steps may not fit a float32."""
    down = _rounded_down(v)
    binade = max(np.int32(bits_of(down) & _EXPONENT_FIELD), grid.smallest_normal)
    step = float_of(np.int32(np.int32(grid.step_shift + _STEP_BIAS) << np.int32(23)))
    steps = v / (np.float64(float_of(binade)) * step)  # exact
    fraction = np.int32((steps - np.floor(steps)) * (1 << FRACTION_BITS))
    carry = np.int32(np.int32(fraction + random) >> _FRACTION)
    return np.int32(round_by(down, np.int32(0), grid) + carry)


@kernel
def quotient(magnitude, divisor, top):
    """Return a quotient in float64, `top` at most; 0 where the divisor is 0."""
    v = np.float64(magnitude) / divisor if divisor != 0 else 0.0
    return min(v, np.float64(top))
