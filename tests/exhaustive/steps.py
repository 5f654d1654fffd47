"""Where the exact oracle's answers change: functions of ordered bit patterns, written as their steps.

Magnitudes order as their bit patterns do, a shared scale does not fall when amax grows, and no rounding to the
grid turns the order of two magnitudes around. So the first pattern that gives each value or more says all
about such a function, and a binary search over the oracle's fractions finds it.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cache

import numpy as np

import oracle
from exhaustive.sweep import FLT_MAX, Codes, Patterns
from oracle.elements import round_ratio
from oracle.floats import UNIT, units


@dataclass(frozen=True)
class Steps:
    """A function of bit patterns that never falls: value k from pattern starts[k - 1] on, 0 before."""

    starts: Patterns

    def values(self, base: int, count: int) -> Codes | int:
        """Its values at `count` patterns from `base` on; one number where they are all the same."""
        low, high = np.searchsorted(self.starts, np.array([base, base + count - 1], np.uint32), side="right")
        return int(low) if low == high else self.at(np.arange(base, base + count, dtype=np.uint32))

    def at(self, patterns: Patterns) -> Codes:
        """Its values at any patterns."""
        return np.searchsorted(self.starts, patterns, side="right").astype(np.uint8)


def steps_of(function: Callable[[int], int], first: int, last: int, highest: int) -> Steps:
    """The steps of a function over the patterns `first` to `last`; what it never reaches starts after `last`."""
    known = cache(function)
    starts = []
    low = first
    for value in range(1, highest + 1):
        high = last + 1
        while low < high:
            middle = (low + high) // 2
            if known(middle) >= value:
                high = middle
            else:
                low = middle + 1
        starts.append(low)
    return Steps(np.array(starts, np.uint32))


@cache
def code_steps(
    byte: int,
    rounding: oracle.Rounding,
    r: int | None = None,
    bits: int = 16,
    element: oracle.Element = oracle.E2M1,
) -> Steps:
    """The magnitude code of |x| under a shared scale, as a function of the float32 bits of |x|."""
    return steps_of(lambda p: oracle_code(p, byte, rounding, r, bits, element), 0, FLT_MAX, element.top)


def oracle_code(
    magnitude: int, byte: int, rounding: oracle.Rounding, r: int | None, bits: int, element: oracle.Element
) -> int:
    """The magnitude code of |x|, given by its float32 bits, under a shared scale."""
    scale = oracle.scale_value(byte)
    assert scale is not None
    num, den = units(magnitude) * scale.denominator, UNIT * scale.numerator
    return round_ratio(num, den, rounding, r, bits, element)


@cache
def scale_steps(rule: oracle.Rule, element: oracle.Element = oracle.E2M1) -> Steps:
    """The shared scale as a function of the float32 bits of amax, from the smallest subnormal on."""
    return steps_of(lambda p: oracle.shared_scale(p, rule, element), 1, FLT_MAX, 254)


def largest_amax(byte: int, rule: oracle.Rule, element: oracle.Element = oracle.E2M1) -> int:
    """The float32 bits of the largest amax that gets this scale byte."""
    starts = scale_steps(rule, element).starts
    last = int(starts[byte]) - 1
    assert oracle.shared_scale(last, rule, element) == byte
    return last
