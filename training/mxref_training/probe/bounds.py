"""Bounds on the variance of a product of two vectors under stochastic rounding, with their constants.

Tseng et al. (arXiv 2502.20586, theorem 3.2) state, for vectors of length b and the largest gap D between representable
values, O(b D^4 |A|inf |B|inf) without a transform. With a random Hadamard transform they state, with probability
(1 - eps)^2, O(D^4 |A| |B| log(2b/eps)). The bounds below grow with b in the same way. Their norms are squared, as a
variance is, and `docs/how-to/probe.rst` derives their constants.
"""

from __future__ import annotations

import math

from mxref.formats import ElementFormat

EPSILON = 0.05
"""The probability with which a vector's largest transformed element may be above its bound."""


def relative_gap(element: ElementFormat) -> float:
    """Return the largest gap between two results over the block's amax, under FLOOR and the prescale.

    An element v in units of X is at most 2^(emax + 1) f, with f the prescale: the largest magnitude M. The gap below M
    is 2^(emax - m) in units of X / f, and amax is at least 2^emax X.
    """
    gap = math.ldexp(1.0, element.max_exponent - element.mantissa_bits)
    return gap / element.prescale / math.ldexp(1.0, element.max_exponent)


def plain_bound(gap: float, length: int, a_peak: float, b_peak: float) -> float:
    """Return the bound without a transform: b |A|inf^2 |B|inf^2 (g^2 / 2 + g^4 / 16).

    Args:
        gap: g, of `relative_gap`.
        length: b.
        a_peak: the square of A's largest magnitude, or its mean over vectors.
        b_peak: that of B.
    """
    return length * a_peak * b_peak * (gap**2 / 2 + gap**4 / 16)


def rotated_bound(gap: float, length: int, group: int, norms: float, epsilon: float = EPSILON) -> float:
    """Return the bound with random signs and a Hadamard transform of groups: S (g^2 L + g^4 L^2 / 4) / n.

    Args:
        gap: g, of `relative_gap`.
        length: b; L = log(2 b / epsilon).
        group: n.
        norms: S, the sum over the groups of |A|^2 |B|^2, or its mean over pairs of vectors.
        epsilon: the bound holds with probability (1 - epsilon)^2 over the signs.
    """
    grown = math.log(2 * length / epsilon)
    return norms * (gap**2 * grown + gap**4 * grown**2 / 4) / group
