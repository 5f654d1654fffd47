"""Which of two scales of a block errs less, exactly, in plain Numba.

Float64 holds each error: a magnitude is at most ten times its divisor, so that its steps and those of the value that it
becomes, of 30 bits, are few binades apart. Sums of errors are rounded. Where two are too near for that, they are summed
again in fixed point.
"""

# Kernels have no annotations: Numba infers their types.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

import numpy as np

from mxref.steps.four_over_six import FourOverSix
from mxref_numba.kernels import kernel
from mxref_numba.scalar.rounding import quotient, round_even, rounded_to_odd

ERRORS = tuple(FourOverSix)
"""A job has the index of one; 0 is `off`."""
_SQUARED, _LARGEST = ERRORS.index(FourOverSix.SQUARED), ERRORS.index(FourOverSix.LARGEST)
_NEAR = 2.0**-40
"""Share of two sums below which their difference may be that of their rounding."""

LIMBS = 24
"""Numbers of 32 bits, int64 that carries are not yet taken from, of a sum in units of 2^-400."""
_LOWEST = 400
_M32 = np.uint64(0xFFFFFFFF)


@kernel
def _rounded(x, divisor, grid, values):
    """Return what a magnitude becomes under a scale, rounded to nearest: float64, exact."""
    return np.float64(values[round_even(rounded_to_odd(quotient(x, divisor, grid.top)), grid)]) * divisor


@kernel
def _integer(a):
    """Return a positive float64 of at most 32 significant bits as an integer of 32 bits and an exponent."""
    bits = np.float64(a).view(np.int64)
    integer = np.int64(np.int64(bits & np.int64((1 << 52) - 1)) | np.int64(1 << 52)) >> np.int64(21)
    return np.uint64(integer), np.int64(bits >> np.int64(52)) - np.int64(1054)


@kernel
def _add_part(limbs, place, part, shift, sign):
    moved = np.uint64(part << np.uint64(shift))
    limbs[place] += sign * np.int64(moved & _M32)
    limbs[place + 1] += sign * np.int64(moved >> np.uint64(32))


@kernel
def _add_product(limbs, a, b, sign):
    """Add a product of two such float64, or subtract it if `sign` is -1."""
    if a == 0 or b == 0:
        return
    (first, first_exponent), (second, second_exponent) = _integer(a), _integer(b)
    product, at = np.uint64(first * second), first_exponent + second_exponent + _LOWEST
    _add_part(limbs, at >> 5, np.uint64(product & _M32), at & 31, sign)
    _add_part(limbs, (at >> 5) + 1, np.uint64(product >> np.uint64(32)), at & 31, sign)


@kernel
def _negative(limbs):
    carry = np.int64(0)
    for i in range(LIMBS):
        carry = np.int64(np.int64(limbs[i] + carry) >> np.int64(32))
    return carry < 0


@kernel
def _sums_less(magnitudes, six, four, grid, values, by, limbs):
    limbs[:] = 0
    for r in range(magnitudes.shape[0]):
        for j in range(magnitudes.shape[1]):
            x = abs(magnitudes[r, j])
            wide, v6, v4 = np.float64(x), _rounded(x, six, grid, values), _rounded(x, four, grid, values)
            if by == _SQUARED:  # without x^2, which both have
                _add_product(limbs, v4, v4, 1)
                _add_product(limbs, 2 * wide, v4, -1)
                _add_product(limbs, v6, v6, -1)
                _add_product(limbs, 2 * wide, v6, 1)
            else:
                sign4, sign6 = 1 if wide >= v4 else -1, 1 if wide >= v6 else -1
                _add_product(limbs, wide, 1.0, sign4 - sign6)
                _add_product(limbs, v4, 1.0, -sign4)
                _add_product(limbs, v6, 1.0, sign6)
    return _negative(limbs)


@kernel
def four_errs_less(magnitudes, six, four, grid, values, by, limbs):
    """Return whether the error of the second scale is the smaller one, of elements that share a scale.

    Args:
        magnitudes: their float32, finite, of any sign [rows, k].
        six: the first scale times that of the tensor, float64.
        four: the second.
        grid: the element's `Grid`.
        values: of the element's codes.
        by: index of the error among `ERRORS`.
        limbs: scratch, int64 [LIMBS].
    """
    error6, error4 = 0.0, 0.0
    for r in range(magnitudes.shape[0]):
        for j in range(magnitudes.shape[1]):
            x = abs(magnitudes[r, j])
            e6 = abs(np.float64(x) - _rounded(x, six, grid, values))
            e4 = abs(np.float64(x) - _rounded(x, four, grid, values))
            if by == _LARGEST:
                error6, error4 = max(error6, e6), max(error4, e4)
            elif by == _SQUARED:
                error6, error4 = error6 + e6 * e6, error4 + e4 * e4
            else:
                error6, error4 = error6 + e6, error4 + e4
    if by == _LARGEST or error6 == 0 or abs(error6 - error4) > (error6 + error4) * _NEAR:
        return error4 < error6
    return _sums_less(magnitudes, six, four, grid, values, by, limbs)
