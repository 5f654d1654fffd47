"""What kernels need of an element format, as numbers: all formats but E2M1 share the code that takes them.

Let p be the mantissa bits of the format. A code counts the steps of the grid, and a step is 2^-p of its binade, so
the upper bits of a float32 are a code already, but for a shift and for the smallest binade, which is even.
"""

from __future__ import annotations

from functools import cache

import numpy as np
from numpy.typing import NDArray

from mxref.formats import E2M1, ElementFormat, Specials

FRACTION_BITS = 22
"""Bits of the fraction of a step that the roundings other than RNE look at."""
MAGNITUDE_CODE = 0x7F
"""The bits of a code that are not its sign."""
TOP, SMALLEST_NORMAL, EVEN_UNIT, STEP_SHIFT, POSITION_SHIFT, LINE_UNIT = range(6)
"""Where `rounding_numbers` has: bits of the largest magnitude; bits of the smallest normal magnitude; bits of the
float32 by which a binade is multiplied, so that adding the product rounds to the binade's steps and leaves the code;
the shift right from bits of a float32 to a code; the shift left from such bits to a code with `FRACTION_BITS`
fraction bits; bits of the float32 by which a magnitude below the smallest normal one is multiplied for the same."""

_MANTISSA_BITS, _BIAS = 23, 127


def held_bits(element: ElementFormat) -> int:
    """Return the bits in which kernels hold a code: four of E2M1, as stored; else a byte, the sign on top."""
    return 4 if element is E2M1 else 8


def _word(value: float) -> int:
    return int(np.float32(value).view(np.int32))


@cache
def rounding_numbers(element: ElementFormat) -> NDArray[np.int32]:
    """Return what rounds to the grid of an element, int32 [6] as the constants above name them, read-only."""
    shift = _MANTISSA_BITS - element.mantissa_bits
    smallest = (1 - element.bias + _BIAS) << _MANTISSA_BITS
    # The last bits of the sum are a code without its exponent field; `offset` prepares for adding that field.
    offset = -(smallest >> shift) & MAGNITUDE_CODE
    unit = np.ldexp(1 + np.ldexp(float(offset), -_MANTISSA_BITS), shift)
    numbers = np.array(
        [
            _word(element.max_value), smallest, _word(unit), shift, FRACTION_BITS - shift,
            _word(2.0 ** (FRACTION_BITS - element.unit_exponent)),
        ],
        np.int32,
    )  # fmt: skip
    numbers.flags.writeable = False
    return numbers


HALF_SHIFT, HALF_UNIT, LAST_NUMBER = range(3)
"""Where `decoding_numbers` has: the shift from a magnitude code to a float16 of the same digits; bits of the float32
by which that float16 is multiplied; the last magnitude code that is no NaN."""


@cache
def decoding_numbers(element: ElementFormat) -> NDArray[np.int32]:
    """Return what decodes an element through float16, int32 [3] as the constants above name them, read-only."""
    half_mantissa_bits, half_bias = 10, 15
    infinity = element.specials is Specials.IEEE
    numbers = np.array(
        [
            half_mantissa_bits - element.mantissa_bits, _word(2.0 ** (half_bias - element.bias)),
            element.max_code + infinity,
        ],
        np.int32,
    )  # fmt: skip
    numbers.flags.writeable = False
    return numbers


@cache
def decoded(element: ElementFormat) -> NDArray[np.float32]:
    """Return the values of all codes as kernels hold them, float32 [2^`held_bits`], read-only; NaN for what is none."""
    sign = 1 << (held_bits(element) - 1)
    values = np.full(2 * sign, np.nan, np.float32)
    values[: element.sign], values[sign : sign + element.sign] = np.split(np.array(element.values), 2)
    values.flags.writeable = False
    return values
