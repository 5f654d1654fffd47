"""Four over six: of two scales of a block, from its largest magnitude over M or over 4, the one that errs less.

On the grid of E2M1 the gap from 4 to 6 is the widest. A block whose largest magnitude becomes 4 does not use it.

Source: arXiv 2512.02010, which computes the errors in float32.

Implements: scale.four_over_six
"""

from __future__ import annotations

from enum import StrEnum
from fractions import Fraction

import numpy as np
from numpy.typing import NDArray

from mxref.formats import BlockFormat
from mxref.steps.quotient import TensorScale, quotient
from mxref.steps.rounding import Rounding, round_magnitude
from mxref.steps.scale import scale_value

Codes = NDArray[np.uint8]


class FourOverSix(StrEnum):
    """By which error a block chooses between a scale for its largest magnitude over M and one for it over 4."""

    OFF = "off"
    """Always over M."""
    ABSOLUTE = "absolute"
    """The sum of the errors."""
    SQUARED = "squared"
    """The sum of their squares."""
    LARGEST = "largest"
    """The largest error."""


def lower_largest(made: BlockFormat) -> float:
    """Return the largest power of two among the elements, 4 for E2M1, which a block may take in place of M."""
    return 2.0**made.element.max_exponent


def choose(
    magnitude: NDArray[np.float32], six: Codes, four: Codes, made: BlockFormat, tensor: TensorScale,
    by: FourOverSix, rows: int,
) -> Codes:  # fmt: skip
    """Return of two scale codes of each block the one whose real error is smaller; `six` where both are equal.

    Args:
        magnitude: float32 [..., K], 0 in NaN blocks.
        six: scale codes for amax over M, uint8 [..., K / k].
        four: those for amax over 4.
        made: the block format.
        tensor: the tensor's A and t.
        by: which error; not `off`.
        rows: rows that share a scale.

    Implements: scale.four_over_six
    """
    values = [_values(magnitude, scales, made, tensor) for scales in (six, four)]
    errors = [_by_scale(_joined(np.abs(magnitude - v), by, made.k), by, rows) for v in values]
    # Sums of float64 err by less than 2^-40 of themselves; where that could decide, fractions do.
    doubtful = (np.abs(errors[0] - errors[1]) <= (errors[0] + errors[1]) * 2.0**-40) & (errors[0] > 0)
    better = errors[1] < errors[0]
    cells = [_cells(each, made.k, rows) for each in (magnitude.astype(np.float64), *values)]
    for at in np.argwhere(doubtful):
        x, *both = (cell[tuple(at)].tolist() for cell in cells)
        first, second = (_exact(x, v, by) for v in both)
        better[tuple(at)] = second < first
    return np.where(np.repeat(better, rows, axis=-2) if rows > 1 else better, four, six)


def _values(
    magnitude: NDArray[np.float32], scales: Codes, made: BlockFormat, tensor: TensorScale
) -> NDArray[np.float64]:
    """Return what magnitudes become under scales, rounded to nearest: P X t, exact in float64."""
    each = np.repeat(scales, made.k, axis=-1)
    codes = round_magnitude(quotient(magnitude, each, made, tensor), Rounding.RNE, made.element)
    found: NDArray[np.float64] = (
        np.array(made.element.magnitudes)[codes] * scale_value(each, made.scale) * float(tensor.scale)
    )
    return found


def _joined(error: NDArray[np.float64], by: FourOverSix, k: int) -> NDArray[np.float64]:
    blocks = error.reshape(*error.shape[:-1], error.shape[-1] // k, k)
    if by is FourOverSix.LARGEST:
        return np.asarray(blocks.max(axis=-1))
    return np.asarray((blocks if by is FourOverSix.ABSOLUTE else blocks**2).sum(axis=-1))


def _by_scale(error: NDArray[np.float64], by: FourOverSix, rows: int) -> NDArray[np.float64]:
    """Return the errors of tiles from those of their rows' blocks."""
    if rows == 1:
        return error
    tiles = error.reshape(*error.shape[:-2], error.shape[-2] // rows, rows, error.shape[-1])
    return np.asarray(tiles.max(axis=-2) if by is FourOverSix.LARGEST else tiles.sum(axis=-2))


def _cells(values: NDArray[np.float64], k: int, rows: int) -> NDArray[np.float64]:
    """Return elements by the scale that they share: float64 [..., K / k, rows * k], the axis before K / k by tiles."""
    blocks = values.reshape(*values.shape[:-1], values.shape[-1] // k, k)
    if rows == 1:
        return blocks
    tiles = blocks.reshape(*blocks.shape[:-3], blocks.shape[-3] // rows, rows, *blocks.shape[-2:])
    moved = np.moveaxis(tiles, -3, -2)
    return moved.reshape(*moved.shape[:-2], rows * k)


def _exact(x: list[float], values: list[float], by: FourOverSix) -> Fraction:
    errors = [abs(Fraction(a) - Fraction(b)) for a, b in zip(x, values, strict=True)]
    if by is FourOverSix.LARGEST:
        return max(errors)
    return sum((e if by is FourOverSix.ABSOLUTE else e * e for e in errors), Fraction(0))
