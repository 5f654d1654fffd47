"""Element formats: small floating-point types and one integer, given by their bits.

Source: OCP Microscaling Formats (MX) v1.0, section 5.3; OCP 8-bit Floating Point v1.0 for E4M3 and E5M2. E1M2 is in
no standard: its magnitudes are the uniform grid 0, 0.25, ..., 1.75.

Implements: formats.element, formats.e2m1, formats.fp8, formats.fp6, formats.int8, formats.e1m2
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property


class Negatives(StrEnum):
    """How a code holds a negative number; in both, its highest bit is set."""

    SIGN = "sign"
    """The code of the magnitude with the highest bit set; there is a -0."""
    TWOS_COMPLEMENT = "twos_complement"
    """The code of the magnitude, negated modulo 2^bits. The lowest code has no positive counterpart."""


class Specials(StrEnum):
    """Which codes of an element format are no finite numbers."""

    NONE = "none"
    """Every code is a finite number."""
    NAN = "nan"
    """The code with all bits set, and the same with the sign, are NaN; there is no Inf."""
    IEEE = "ieee"
    """The highest exponent field holds Inf (mantissa 0) and NaN (any other mantissa)."""


@dataclass(frozen=True)
class ElementFormat:
    """A format of one element: sign, exponent field, mantissa field, from the highest bit down.

    Everything else about the format follows from these fields. With no exponent bits all numbers are subnormal: a
    fixed-point format.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    specials: Specials
    dtype: str | None = None
    """Name of the same format in ml_dtypes; None if ml_dtypes has no such type."""
    negatives: Negatives = Negatives.SIGN

    def __hash__(self) -> int:
        return hash(self.name)

    @cached_property
    def bits(self) -> int:
        """The number of bits of a code."""
        return 1 + self.exponent_bits + self.mantissa_bits

    @cached_property
    def sign(self) -> int:
        """The sign bit of a code, as a mask."""
        return 1 << (self.bits - 1)

    @cached_property
    def max_code(self) -> int:
        """Code of the largest finite magnitude."""
        if self.specials is Specials.IEEE:
            return ((1 << self.exponent_bits) - 1 << self.mantissa_bits) - 1
        return self.sign - (2 if self.specials is Specials.NAN else 1)

    @cached_property
    def max_exponent(self) -> int:
        """Exponent of the largest binade, emax: 2^emax <= max_value < 2^(emax + 1)."""
        return math.frexp(self.max_value)[1] - 1

    @cached_property
    def precision(self) -> int:
        """Bits behind the leading one of the largest magnitudes: the mantissa bits of a floating-point format."""
        return self.mantissa_bits if self.exponent_bits else self.max_code.bit_length() - 1

    @cached_property
    def unit_exponent(self) -> int:
        """Exponent of the smallest positive magnitude, of which every finite value is a multiple."""
        return 1 - self.bias - self.mantissa_bits

    @cached_property
    def max_value(self) -> float:
        """Largest finite magnitude; larger inputs saturate to it."""
        return self._magnitude(self.max_code)

    @cached_property
    def prescale(self) -> float:
        """The largest factor at which the scale rule FLOOR cannot saturate: max_value / 2^(emax + 1)."""
        return math.ldexp(self.max_value, -self.max_exponent - 1)

    @cached_property
    def magnitudes(self) -> tuple[float, ...]:
        """Values of the codes 0 to `max_code`, in ascending order."""
        return tuple(self._magnitude(code) for code in range(self.max_code + 1))

    @cached_property
    def values(self) -> tuple[float, ...]:
        """Values of all codes, NaN and Inf included; the upper half holds the negatives, from -0 or the lowest."""
        if self.negatives is Negatives.TWOS_COMPLEMENT:
            lowest = math.ldexp(-self.sign, self.unit_exponent)
            return (*self.magnitudes, lowest, *(-value for value in reversed(self.magnitudes[1:])))
        beyond = range(self.max_code + 1, self.sign)
        infinity = self.max_code + 1 if self.specials is Specials.IEEE else None
        upper = (*self.magnitudes, *(math.inf if code == infinity else math.nan for code in beyond))
        return (*upper, *(-value for value in upper))

    def _magnitude(self, code: int) -> float:
        field, mantissa = code >> self.mantissa_bits, code & ((1 << self.mantissa_bits) - 1)
        hidden = (field > 0) << self.mantissa_bits
        return math.ldexp(mantissa + hidden, max(field, 1) - self.bias - self.mantissa_bits)


E2M1 = ElementFormat("E2M1", 2, 1, bias=1, specials=Specials.NONE, dtype="float4_e2m1fn")
E4M3 = ElementFormat("E4M3", 4, 3, bias=7, specials=Specials.NAN, dtype="float8_e4m3fn")
E5M2 = ElementFormat("E5M2", 5, 2, bias=15, specials=Specials.IEEE, dtype="float8_e5m2")
E2M3 = ElementFormat("E2M3", 2, 3, bias=1, specials=Specials.NONE, dtype="float6_e2m3fn")
E3M2 = ElementFormat("E3M2", 3, 2, bias=3, specials=Specials.NONE, dtype="float6_e3m2fn")
E1M2 = ElementFormat("E1M2", 1, 2, bias=1, specials=Specials.NONE)
INT8 = ElementFormat(
    "INT8", 0, 7, bias=0, specials=Specials.NONE, dtype="int8", negatives=Negatives.TWOS_COMPLEMENT
)
