"""The formats in which a GEMM reads an operand, by name: block formats, and those without blocks.

Beside them stand the choices that a quantization offers, and what holds for every format: the input types and the NaN.

Source: OCP Microscaling Formats (MX) v1.0, section 5.2.

Implements: formats.mxfp4, formats.mxfp8, formats.mxfp6, formats.mxfp4_e1m2
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from mxref.errors import RecipeError
from mxref.formats.elements import E1M2, E2M1, E2M3, E3M2, E4M3, E5M2, ElementFormat
from mxref.formats.scales import E8M0, ScaleFormat

CANONICAL_NAN = 0x7FC00000
"""The float32 bits of every NaN that mxref produces."""

INPUT_DTYPES = ("float32", "bfloat16", "float16")
"""Input types: each is taken as the exact float32 value that it holds."""


class BlockShape(StrEnum):
    """What shares one scale: a block of a row, or, where k is 32, a 32x32 tile (its byte stored once per row)."""

    ROW = "1x32"
    TILE = "32x32"


class Nonfinite(StrEnum):
    """What a NaN or Inf does to its block: byte 255 with all codes 0, or an error."""

    NAN_BLOCK = "nan_block"
    RAISE = "raise"


@dataclass(frozen=True, repr=False)
class OperandFormat:
    """The format in which a GEMM reads an operand; `str` gives its name."""

    name: str

    @property
    def kind(self) -> str:
        """How operands of this format are handled; both operands of a GEMM share it."""
        return self.name

    @property
    def title(self) -> str:
        """The name as texts write it, as in `MXFP8 E4M3`."""
        return self.name.upper().replace("_", " ")

    def __str__(self) -> str:
        return self.name

    def __repr__(self) -> str:
        return f"<{type(self).__name__} {self.name}>"

    def __hash__(self) -> int:
        return hash(self.name)

    def __reduce__(self) -> str | tuple[Any, ...]:
        # A copy of a registered format, by pickle or deepcopy, is the format itself.
        return (_registered, (self.name,)) if FORMATS.get(self.name) is self else super().__reduce__()

    @staticmethod
    def by_name() -> dict[str, OperandFormat]:
        """Return the formats that a recipe can name."""
        return FORMATS


@dataclass(frozen=True, repr=False)
class TensorFormat(OperandFormat):
    """A format without blocks: BF16, or FP8 with one scale for a tensor."""

    __hash__ = OperandFormat.__hash__


@dataclass(frozen=True, repr=False)
class BlockFormat(OperandFormat):
    """A block of `k` elements under one shared scale; RecipeError for a scale format other than E8M0."""

    element: ElementFormat
    scale: ScaleFormat
    k: int

    __hash__ = OperandFormat.__hash__

    def __post_init__(self) -> None:
        # Scale rules, kernels and stored bytes are those of E8M0.
        if self.scale != E8M0:
            raise RecipeError(
                f"block format {self.name!r}: the scale format {self.scale.name} is not supported; use E8M0, as in "
                f"BlockFormat({self.name!r}, {self.element.name}, E8M0, k={self.k})"
            )

    @property
    def kind(self) -> str:
        """`block`, for every block format."""
        return "block"

    def code_bytes(self, length: int) -> int:
        """Return the bytes in which the codes of `length` elements are stored."""
        return length * self.element.bits // 8


BF16 = TensorFormat("bf16")
FP8 = TensorFormat("fp8")
MXFP4 = BlockFormat("mxfp4", E2M1, E8M0, k=32)
MXFP8_E4M3 = BlockFormat("mxfp8_e4m3", E4M3, E8M0, k=32)
MXFP8_E5M2 = BlockFormat("mxfp8_e5m2", E5M2, E8M0, k=32)

MXFP6_E2M3 = BlockFormat("mxfp6_e2m3", E2M3, E8M0, k=32)
MXFP6_E3M2 = BlockFormat("mxfp6_e3m2", E3M2, E8M0, k=32)
MXFP4_E1M2 = BlockFormat("mxfp4_e1m2", E1M2, E8M0, k=32)

BLOCK_FORMATS: dict[str, BlockFormat] = {
    f.name: f for f in (MXFP4, MXFP8_E4M3, MXFP8_E5M2, MXFP6_E2M3, MXFP6_E3M2, MXFP4_E1M2)
}
"""The block formats, by name."""

FORMATS: dict[str, OperandFormat] = {BF16.name: BF16, FP8.name: FP8, **BLOCK_FORMATS}
"""Every format that an operand can have, by name."""


def _registered(name: str) -> OperandFormat:
    return FORMATS[name]
