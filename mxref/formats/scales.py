"""Scale formats: what a block's shared scale can be, given by its bits.

Source: OCP Microscaling Formats (MX) v1.0, section 5.4, for E8M0; OCP 8-bit Floating Point v1.0 for E4M3. UE5M3 is in
no standard: vendors' scaled matrix instructions take it.

Implements: formats.scale, formats.e8m0
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cached_property


@dataclass(frozen=True)
class ScaleFormat:
    """A format of positive numbers in a byte: exponent field, then mantissa field, from the highest bit down.

    Everything else about the format follows from these fields. Its largest code is its only NaN.
    """

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    subnormals: bool
    """Whether exponent field 0 holds subnormal numbers, and so a zero."""
    dtype: str | None = None
    """Name of the same format in ml_dtypes; None if ml_dtypes has no such type."""

    def __hash__(self) -> int:
        return hash(self.name)

    @cached_property
    def nan_code(self) -> int:
        """The code of NaN."""
        return (1 << self.exponent_bits + self.mantissa_bits) - 1

    @cached_property
    def max_code(self) -> int:
        """Code of the largest number."""
        return self.nan_code - 1

    @cached_property
    def one_code(self) -> int:
        """Code of the number 1."""
        return self.bias << self.mantissa_bits

    @cached_property
    def powers(self) -> bool:
        """Whether every number is a power of two."""
        return not self.mantissa_bits and not self.subnormals

    @cached_property
    def unit_exponent(self) -> int:
        """Exponent of the power of two of which every number is a multiple."""
        return (1 if self.subnormals else 0) - self.bias - self.mantissa_bits

    @cached_property
    def min_exponent(self) -> int:
        """Exponent of the smallest positive number, which is a power of two."""
        return self.unit_exponent if self.subnormals else -self.bias

    @cached_property
    def max_exponent(self) -> int:
        """Exponent of the largest power of two."""
        return (self.max_code >> self.mantissa_bits) - self.bias

    @cached_property
    def max_value(self) -> float:
        """The largest number; larger quotients saturate to it."""
        return self.values[self.max_code]

    @cached_property
    def values(self) -> tuple[float, ...]:
        """Values of the codes 0 to 255; those above `max_code` are NaN."""
        return tuple(self._value(code) if code <= self.max_code else math.nan for code in range(256))

    def _value(self, code: int) -> float:
        field, mantissa = code >> self.mantissa_bits, code & ((1 << self.mantissa_bits) - 1)
        hidden = 1 << self.mantissa_bits
        if self.subnormals and field == 0:
            field, hidden = 1, 0
        return math.ldexp(mantissa + hidden, field - self.bias - self.mantissa_bits)


E8M0 = ScaleFormat("E8M0", 8, 0, bias=127, subnormals=False, dtype="float8_e8m0fnu")
UE4M3 = ScaleFormat("UE4M3", 4, 3, bias=7, subnormals=True, dtype="float8_e4m3fn")
UE5M3 = ScaleFormat("UE5M3", 5, 3, bias=15, subnormals=True)
