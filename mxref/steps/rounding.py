"""Rounding to the E2M1 grid: RNE, RNA, RTZ and stochastic rounding (SR) as a function of given bits.

All four act on magnitudes already divided by the shared scale; the sign is put back by the caller.
"""

from __future__ import annotations

from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from mxref.errors import RecipeError
from mxref.formats import E2M1_MAGNITUDES

MAX_SR_BITS = 22

_GRID = np.array(E2M1_MAGNITUDES)
_MIDPOINTS = (_GRID[:-1] + _GRID[1:]) / 2
_GAPS = np.diff(_GRID)
_TOP = len(_GRID) - 1


class Rounding(StrEnum):
    """The rounding of an element to the grid; what is above the largest magnitude saturates to it."""

    RNE = "rne"
    """To nearest, ties to the even code."""
    RNA = "rna"
    """To nearest, ties away from zero."""
    RTZ = "rtz"
    """Toward zero."""
    SR = "sr"
    """Stochastic: up with probability floor(f * 2^R) / 2^R, f being the position in the gap."""


def round_magnitude(
    v: NDArray[np.float32],
    rounding: Rounding,
    random: NDArray[np.uint32] | None = None,
    bits: int = 16,
) -> NDArray[np.uint8]:
    """Return the magnitude codes (0 to 7) of scaled magnitudes.

    Args:
        v: finite magnitudes |x| / X, float32, any shape.
        rounding: the rounding mode.
        random: for SR, integers r in [0, 2^bits), uint32, the shape of `v`.
        bits: R, the number of random bits per element, 1 to 22.

    Returns:
        Codes, uint8, the shape of `v`.

    Raises:
        RecipeError: SR without random integers, or R out of range.

    Implements: rounding.rne, rounding.rna, rounding.rtz, rounding.sr, rounding.saturate
    """
    below = np.searchsorted(_GRID, v, side="right") - 1
    if rounding is Rounding.RTZ:
        code = below
    elif rounding is Rounding.RNA:
        code = np.searchsorted(_MIDPOINTS, v, side="right")
    elif rounding is Rounding.RNE:
        code = np.searchsorted(_MIDPOINTS, v, side="left")
        tie = np.append(_MIDPOINTS, np.inf)[code] == v
        code = code + (tie & (code % 2 == 1))
    else:
        if random is None or not 1 <= bits <= MAX_SR_BITS:
            raise RecipeError(f"SR needs random integers of 1 to {MAX_SR_BITS} bits, got bits = {bits}")
        lower = np.minimum(below, _TOP - 1)
        fraction = (v.astype(np.float64) - _GRID[lower]) / _GAPS[lower]
        threshold = np.floor(np.ldexp(np.minimum(fraction, 1.0), bits)).astype(np.int64)
        code = lower + (threshold + random.astype(np.int64) >= 1 << bits)
    return code.astype(np.uint8)


def prescale_three_quarters(v: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return fl32(0.75 * v), the prescale that keeps FLOOR from saturating (arXiv 2502.20586).

    Implements: rounding.prescale
    """
    scaled: NDArray[np.float32] = np.float32(0.75) * v
    return scaled
