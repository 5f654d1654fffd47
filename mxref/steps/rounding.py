"""Rounding to the grid of an element format: RNE, RNA, RTZ and stochastic rounding (SR) as a function of given bits.

All four act on magnitudes already divided by the shared scale; the sign is put back by the caller.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from functools import lru_cache
from typing import Any

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
    v: NDArray[np.float32] | NDArray[np.float64],
    rounding: Rounding,
    element: ElementFormat,
    random: NDArray[np.uint32] | None = None,
    bits: int = 16,
) -> NDArray[np.uint8]:
    """Return the magnitude codes (0 to the element's `max_code`) of scaled magnitudes.

    Args:
        v: finite magnitudes |x| / X, any shape; float64 where X has a mantissa.
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
    grid, midpoints = _grid(element)
    if rounding is Rounding.RTZ:
        code = _not_above(grid, v) - 1
    elif rounding in (Rounding.RNA, Rounding.RNE):
        code = _not_above(midpoints, v)
        if rounding is Rounding.RNE:
            code = _even_at_ties(code, midpoints.values, v)
    else:
        if random is None or not 1 <= bits <= MAX_SR_BITS:
            raise RecipeError(f"SR needs random integers of 1 to {MAX_SR_BITS} bits, got bits = {bits}")
        lower = np.minimum(_not_above(grid, v) - 1, element.max_code - 1)
        fraction = (v.astype(np.float64) - grid.values[lower]) / np.diff(grid.values)[lower]
        threshold = np.floor(np.ldexp(np.minimum(fraction, 1.0), bits)).astype(np.int64)
        code = lower + (threshold + random.astype(np.int64) >= 1 << bits)
    return code.astype(np.uint8)


def nearest_code(v: NDArray[np.float64], grid: NDArray[np.float64]) -> NDArray[np.uint8]:
    """Return the code of the grid point nearest to each magnitude, ties to the even code, beyond the end the last."""
    midpoints = (grid[:-1] + grid[1:]) / 2
    return _even_at_ties(np.searchsorted(midpoints, v, side="right"), midpoints, v).astype(np.uint8)


def _even_at_ties(
    code: NDArray[np.intp], midpoints: NDArray[np.float64], v: NDArray[Any]
) -> NDArray[np.intp]:
    """Return codes of which those at a tie, which are the upper ones, become even."""
    even: NDArray[np.intp] = code - ((midpoints[code - 1] == v) & code & 1)
    return even


@dataclass(frozen=True)
class _Steps:
    """Ascending values, which are float32 with few mantissa bits, and a table that finds a magnitude among them."""

    values: NDArray[np.float64]
    counts: NDArray[np.intp]
    """How many values are not above a float32 magnitude, by the upper 16 bits of the magnitude."""

    @classmethod
    def of(cls, values: NDArray[np.float64]) -> _Steps:
        """Return the steps of values with at most 8 significant bits, as codes of a byte and midpoints have.

        The lower 16 bits of a float32 are 0 in all of them, so they do not decide which values are not above it.
        """
        upper = values.astype(np.float32).view(np.uint32) >> 16
        return cls(values, np.searchsorted(upper, np.arange(1 << 15), side="right"))


@lru_cache
def _grid(element: ElementFormat) -> tuple[_Steps, _Steps]:
    """Return the magnitudes of a format, and the midpoints between them."""
    grid = np.array(element.magnitudes)
    return _Steps.of(grid), _Steps.of((grid[:-1] + grid[1:]) / 2)


def _not_above(steps: _Steps, v: NDArray[Any]) -> NDArray[np.intp]:
    """Return how many steps are not above each magnitude."""
    if v.dtype == np.float64:
        return np.searchsorted(steps.values, v, side="right")
    found: NDArray[np.intp] = steps.counts[np.abs(v).view(np.uint32) >> 16]
    return found


def apply_prescale(v: NDArray[np.float32], element: ElementFormat) -> NDArray[np.float32]:
    """Return fl32(p * v), p the element's prescale, which keeps FLOOR from saturating (arXiv 2502.20586).

    Implements: rounding.prescale
    """
    scaled: NDArray[np.float32] = np.float32(element.prescale) * v
    return scaled
