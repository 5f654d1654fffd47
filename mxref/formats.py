"""The number formats, as frozen data: E2M1, E8M0, MXFP4, and the two FP8 types of the baseline.

Nothing here computes. Source: OCP Microscaling Formats (MX) v1.0, sections 5.2, 5.3 and 5.4;
OCP 8-bit Floating Point v1.0 for E4M3 and E5M2.

Implements: formats.e2m1, formats.e8m0, formats.mxfp4, formats.fp8
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


@dataclass(frozen=True)
class ElementFormat:
    """A small floating-point format of one element."""

    name: str
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max_value: float
    """Largest finite magnitude; larger ones saturate to it."""
    dtype: str
    """Name of the same format in ml_dtypes."""


@dataclass(frozen=True)
class ScaleFormat:
    """A power-of-two scale format without sign or mantissa: byte b holds 2^(b - bias)."""

    name: str
    bias: int
    min_exponent: int
    max_exponent: int
    nan_code: int


@dataclass(frozen=True)
class BlockFormat:
    """A block of `k` elements under one shared scale."""

    name: str
    element: ElementFormat
    scale: ScaleFormat
    k: int


E2M1 = ElementFormat("E2M1", 2, 1, bias=1, max_value=6.0, dtype="float4_e2m1fn")
E4M3 = ElementFormat("E4M3", 4, 3, bias=7, max_value=448.0, dtype="float8_e4m3fn")
E5M2 = ElementFormat("E5M2", 5, 2, bias=15, max_value=57344.0, dtype="float8_e5m2")
E8M0 = ScaleFormat("E8M0", bias=127, min_exponent=-127, max_exponent=127, nan_code=255)
MXFP4 = BlockFormat("MXFP4", E2M1, E8M0, k=32)

E2M1_MAGNITUDES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""Value of codes 0 to 7; bit 3 of a code is the sign, so codes 8 to 15 are their negatives."""

E2M1_SIGN = 8
"""The sign bit of an element code."""

CANONICAL_NAN = 0x7FC00000
"""The float32 bits of every NaN that mxref produces."""

INPUT_DTYPES = ("float32", "bfloat16", "float16")
"""Input types: each is taken as the exact float32 value that it holds."""


class BlockShape(StrEnum):
    """What shares one scale: 32 elements of a row, or a 32x32 tile (its byte stored once per row)."""

    ROW = "1x32"
    TILE = "32x32"


class Nonfinite(StrEnum):
    """What a NaN or Inf does to its block: byte 255 with all codes 0, or an error."""

    NAN_BLOCK = "nan_block"
    RAISE = "raise"


class OperandFormat(StrEnum):
    """The format in which a GEMM reads an operand."""

    BF16 = "bf16"
    FP8 = "fp8"
    MXFP4 = "mxfp4"
