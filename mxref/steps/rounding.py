"""Rounding to the grid of an element format: RNE, RNA, RTZ and stochastic rounding (SR) as a function of given bits.

All four act on magnitudes already divided by the shared scale; the sign is put back by the caller.
"""

from __future__ import annotations

from enum import StrEnum

import numpy as np
from numpy.typing import NDArray

from mxref.errors import RecipeError
from mxref.formats import ElementFormat

MAX_SR_BITS = 22


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
    element: ElementFormat,
    random: NDArray[np.uint32] | None = None,
    bits: int = 16,
) -> NDArray[np.uint8]:
    """Return the magnitude codes (0 to the element's `max_code`) of scaled magnitudes.

    Args:
        v: finite magnitudes |x| / X, float32, any shape.
        rounding: the rounding mode.
        element: the format whose magnitudes are the grid.
        random: for SR, integers r in [0, 2^bits), uint32, the shape of `v`.
        bits: R, the number of random bits per element, 1 to 22.

    Returns:
        Codes, uint8, the shape of `v`.

    Raises:
        RecipeError: SR without random integers, or R out of range.

    Implements: rounding.rne, rounding.rna, rounding.rtz, rounding.sr, rounding.saturate
    """
    grid = np.array(element.magnitudes)
    midpoints = (grid[:-1] + grid[1:]) / 2
    below = np.searchsorted(grid, v, side="right") - 1
    if rounding is Rounding.RTZ:
        code = below
    elif rounding is Rounding.RNA:
        code = np.searchsorted(midpoints, v, side="right")
    elif rounding is Rounding.RNE:
        code = np.searchsorted(midpoints, v, side="left")
        tie = np.append(midpoints, np.inf)[code] == v
        code = code + (tie & (code % 2 == 1))
    else:
        if random is None or not 1 <= bits <= MAX_SR_BITS:
            raise RecipeError(f"SR needs random integers of 1 to {MAX_SR_BITS} bits, got bits = {bits}")
        lower = np.minimum(below, element.max_code - 1)
        fraction = (v.astype(np.float64) - grid[lower]) / np.diff(grid)[lower]
        threshold = np.floor(np.ldexp(np.minimum(fraction, 1.0), bits)).astype(np.int64)
        code = lower + (threshold + random.astype(np.int64) >= 1 << bits)
    return code.astype(np.uint8)


def apply_prescale(v: NDArray[np.float32], element: ElementFormat) -> NDArray[np.float32]:
    """Return fl32(p * v), p the element's prescale, which keeps FLOOR from saturating (arXiv 2502.20586).

    Implements: rounding.prescale
    """
    scaled: NDArray[np.float32] = np.float32(element.prescale) * v
    return scaled
