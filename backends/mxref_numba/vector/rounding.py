"""Rounding to the grid of an element, on lanes: E2M1 by special arithmetic, all others by their numbers.

All leave the magnitude's code in the low three or seven bits of each lane, under other bits.
"""

# Emitters work on IR values, which llvmlite does not annotate.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from typing import Any

from llvmlite import ir

from mxref_numba.elements import FRACTION_BITS, Grid
from mxref_numba.native import FIELD
from mxref_numba.vector.lanes import F32, I32, Lanes, broadcast
from mxref_numba.vector.target import lanes_of

TOP_VALUE = 6.0
"""The largest value of an element."""

# Between 2^22 and 2^23 the last bit of a float32 is worth a half, above 2^23 one.
_BELOW_TWO = 2.0**23 - 2
_FROM_FOUR = 2.0**23


def round_even(v: Lanes) -> Lanes:
    """Return codes of magnitudes in [0, 6], float32, under RNE, with bit 2 flipped."""
    # One sum rounds to halves while v is below 2, and to ones from there, and its bits count on across 2^23;
    # the other rounds to twos. v / 2 is exact, or too small to matter, so that a fused operation rounds once.
    # Code 0 has bits that end in 100, which keeps ties even and flips bit 2.
    fine, coarse = (v + _BELOW_TWO).cast(I32), v.call("fma", 0.5, _FROM_FOUR).cast(I32)
    return fine.call("umin", coarse)


def round_by(v: Lanes, random: Lanes) -> Lanes:
    """Return codes of v in [0, 6]: rounded up if the fraction, in units of 2^-22, plus `random` carries."""
    line = (v * 2.0 ** (FRACTION_BITS + 1)).convert("fptosi", I32)
    second = (line >> 1) + (2 << FRACTION_BITS)
    third = (line >> 2) + (4 << FRACTION_BITS)
    position = line.call("umin", second.call("umin", third)) + random
    return position >> FRACTION_BITS


_EXPONENT_FIELD = 0x7F800000


class GridLanes:
    """A `Grid` in every lane, from its address. Each use reads memory: kept in registers, the fields would push others
    out.
    """

    def __init__(self, builder: ir.IRBuilder, address: Any) -> None:
        self._builder, self._address = builder, address
        self.top = self._of("top").cast(F32)
        """The largest magnitude."""

    def _of(self, field: str) -> Lanes:
        place = FIELD * Grid._fields.index(field)
        return broadcast(self._builder, I32, lanes_of(self._builder), self._address, place)

    def round_even(self, v: Lanes) -> Lanes:
        """Return codes of magnitudes up to the largest one, float32, under RNE."""
        binade = (v.cast(I32) & _EXPONENT_FIELD).call("umax", self._of("smallest_normal"))
        # The product is exact. Adding it to v rounds once, to the steps of the binade, with ties to even steps.
        steps = binade.cast(F32).call("fma", self._of("even_unit").cast(F32), v)
        return steps.cast(I32) + (binade >> self._of("step_shift"))

    def round_by(self, v: Lanes, random: Lanes) -> Lanes:
        """Return codes of such magnitudes: rounded up if the fraction, in units of 2^-22, plus `random` carries."""
        bits, smallest = v.cast(I32), self._of("smallest_normal")
        # The position of v if it is below the smallest normal magnitude, else of that magnitude, plus the distance from
        # it.
        low = bits.call("umin", smallest).cast(F32) * self._of("line_unit").cast(F32)
        above = (bits.call("umax", smallest) - smallest) << self._of("position_shift")
        return (low.convert("fptosi", I32) + above + random) >> FRACTION_BITS
