"""Scale formats: what a block's shared scale can be.

Source: OCP Microscaling Formats (MX) v1.0, section 5.4.

Implements: formats.e8m0
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class ScaleFormat:
    """A power-of-two scale format without sign or mantissa: byte b holds 2^(b - bias)."""

    name: str
    bias: int
    min_exponent: int
    max_exponent: int
    nan_code: int
    dtype: str
    """Name of the same format in ml_dtypes."""


E8M0 = ScaleFormat(
    "E8M0", bias=127, min_exponent=-127, max_exponent=127, nan_code=255, dtype="float8_e8m0fnu"
)
