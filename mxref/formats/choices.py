"""Choices that a quantization offers beside the format itself."""

from __future__ import annotations

from enum import StrEnum


class BlockShape(StrEnum):
    """What shares one scale: a block of a row, or, where k is 32, a 32x32 tile (its byte stored once per row)."""

    ROW = "1x32"
    TILE = "32x32"


class Nonfinite(StrEnum):
    """What a NaN or Inf does to its block: byte 255 with all codes 0, or an error."""

    NAN_BLOCK = "nan_block"
    RAISE = "raise"
