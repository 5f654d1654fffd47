"""What kernels need of an element or scale format, as numbers; vectors round to E2M1 by arithmetic of its own.

Let p be the mantissa bits of the format. A code counts the steps of the grid, and a step is 2^-p of its binade, so
the upper bits of a float32 are a code already, but for a shift and for the smallest binade, which is even.
"""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from mxref.formats import ElementFormat, ScaleFormat, Specials

FRACTION_BITS = 22
"""Bits of the fraction of a step that the roundings other than RNE look at."""
SCALE_CODE = 0xFF
"""The bits of a scale code, which has no sign."""


class Grid(NamedTuple):
    """What rounds to the grid of an element."""

    top: np.float32
    """The largest magnitude."""
    smallest_normal: np.int32
    """Bits of the smallest normal magnitude."""
    even_unit: np.float32
    """By which a binade is multiplied, so that adding the product rounds to the binade's steps and leaves the code."""
    step_shift: np.int32
    """The shift right from bits of a float32 to a code."""
    position_shift: np.int32
    """The shift left from such bits to a code with `FRACTION_BITS` fraction bits."""
    line_unit: np.float32
    """By which a magnitude below the smallest normal one is multiplied for the same."""


class Digits(NamedTuple):
    """What decodes an element through float16."""

    shift: np.int32
    """From a magnitude code to a float16 of the same digits."""
    unit: np.float32
    """By which that float16 is multiplied."""
    last_number: np.int32
    """The last magnitude code that is no NaN."""


_MANTISSA_BITS, _BIAS = 23, 127


def held_bits(element: ElementFormat) -> int:
    """Return the bits in which tables look a code up: those of 6 bits in a byte, all others as they are stored."""
    return 4 if element.bits == 4 else 8


@cache
def grid_of(element: ElementFormat | ScaleFormat) -> Grid:
    """Return what rounds to the grid of an element or of a scale with a mantissa."""
    shift = _MANTISSA_BITS - element.mantissa_bits
    smallest = (1 - element.bias + _BIAS) << _MANTISSA_BITS
    # The last bits of the sum are a code without its exponent field; `offset` prepares for adding that field.
    offset = -(smallest >> shift) & SCALE_CODE
    return Grid(
        top=np.float32(element.max_value),
        smallest_normal=np.int32(smallest),
        even_unit=np.float32(np.ldexp(1 + np.ldexp(float(offset), -_MANTISSA_BITS), shift)),
        step_shift=np.int32(shift),
        position_shift=np.int32(FRACTION_BITS - shift),
        line_unit=np.float32(2.0 ** (FRACTION_BITS - element.unit_exponent)),
    )


@cache
def digits_of(element: ElementFormat) -> Digits:
    """Return what decodes an element through float16."""
    half_mantissa_bits, half_bias = 10, 15
    return Digits(
        shift=np.int32(half_mantissa_bits - element.mantissa_bits),
        unit=np.float32(2.0 ** (half_bias - element.bias)),
        last_number=np.int32(element.max_code + (element.specials is Specials.IEEE)),
    )


@cache
def decoded(element: ElementFormat) -> NDArray[np.float32]:
    """Return the values of all codes that `held_bits` has, float32, read-only; NaN for what is none."""
    values = np.full(1 << held_bits(element), np.nan, np.float32)
    values[: len(element.values)] = element.values
    values.flags.writeable = False
    return values
