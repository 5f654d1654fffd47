"""Rounding to the E2M1 grid, on lanes.

Both functions leave the magnitude's code in the low three bits of each lane, under other bits.
"""

# Emitters work on IR values, which llvmlite does not annotate.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from mxref_numba.scalar.rounding import FRACTION_BITS
from mxref_numba.vector.lanes import I32, Lanes

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
    """Return codes of v in [0, 6]: up iff the fraction, in 2^-22 and rounded down, plus `random` carries."""
    line = (v * 2.0 ** (FRACTION_BITS + 1)).convert("fptosi", I32)
    second = (line >> 1) + (2 << FRACTION_BITS)
    third = (line >> 2) + (4 << FRACTION_BITS)
    position = line.call("umin", second.call("umin", third)) + random
    return position >> FRACTION_BITS
