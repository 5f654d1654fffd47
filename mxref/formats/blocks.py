"""The formats in which a GEMM reads an operand, by name: block formats, and those without blocks.

Beside them stand the choices that a quantization offers, and what holds for every format: the input types and the NaN.

Source: OCP Microscaling Formats (MX) v1.0, section 5.2; arXiv 2509.25149 for NVFP4.

Implements: formats.mxfp4, formats.mxfp8, formats.mxfp6, formats.mxint8, formats.mxfp4_e1m2, formats.nvfp4
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from enum import StrEnum
from functools import cached_property
from typing import Any, ClassVar

from mxref.errors import RecipeError
from mxref.formats.elements import E1M2, E2M1, E2M3, E3M2, E4M3, E5M2, INT8, ElementFormat
from mxref.formats.scales import E8M0, UE4M3, ScaleFormat

CANONICAL_NAN = 0x7FC00000
"""The float32 bits of every NaN that mxref produces."""

INPUT_DTYPES = ("float32", "bfloat16", "float16")
"""Input types: each is taken as the exact float32 value that it holds."""


class BlockShape(str):
    """The elements that share one scale, as text: rows by columns, as `1x32`; the byte of a tile is stored in each row.

    The columns are the block length k. RecipeError unless both are powers of two.
    """

    __slots__ = ()

    ROW: ClassVar[BlockShape]
    """A block of 32, `1x32`."""
    TILE: ClassVar[BlockShape]
    """A tile of 32 by 32, `32x32`."""

    def __new__(cls, text: Any) -> BlockShape:
        """Return the shape of a text."""
        if isinstance(text, BlockShape):
            return text
        if not isinstance(text, str):
            raise RecipeError(
                f"a block shape is text, as in '1x32', and this is of type {type(text).__name__}"
            )
        found = re.fullmatch(r"([1-9][0-9]{0,5})x([1-9][0-9]{0,5})", text)
        if not found or any(int(number) & int(number) - 1 for number in found.groups()):
            raise RecipeError(
                f"{text[:20]!r} is no block shape: write two powers of two, as in '1x32' or '16x16'"
            )
        return super().__new__(cls, text)

    @property
    def rows(self) -> int:
        """Rows that share a scale."""
        return int(self.partition("x")[0])

    @property
    def columns(self) -> int:
        """Elements of each row that share a scale, the block length."""
        return int(self.partition("x")[2])

    @property
    def is_tile(self) -> bool:
        """Whether several rows share a scale."""
        return not self.startswith("1x")


BlockShape.ROW = BlockShape("1x32")
BlockShape.TILE = BlockShape("32x32")


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
    """A block of `k` elements under one shared scale.

    RecipeError unless k is a power of two, 4 at least, and codes of the element can be packed.
    """

    element: ElementFormat
    scale: ScaleFormat
    k: int
    tensor_scale: bool = False
    """Whether a float32 scale of the whole tensor stands above the scales of blocks."""

    __hash__ = OperandFormat.__hash__

    def __post_init__(self) -> None:
        if self.k < 4 or self.k & self.k - 1:
            raise RecipeError(
                f"block format {self.name!r}: k = {self.k} is no power of two of at least 4; 16 and 32 are in use"
            )
        if self.element.bits not in (4, 6, 8):
            raise RecipeError(
                f"block format {self.name!r}: no packing exists for the {self.element.bits} bits of "
                f"{self.element.name}; take an element of 4, 6 or 8 bits, the sign included"
            )
        if self.tensor_scale and self.scale.powers:
            raise RecipeError(
                f"block format {self.name!r}: a tensor's scale above {self.scale.name} says nothing that the blocks' "
                "scales could not; leave tensor_scale out"
            )

    @property
    def kind(self) -> str:
        """`block`, for every block format."""
        return "block"

    def code_bytes(self, length: int) -> int:
        """Return the bytes in which the codes of `length` elements are stored."""
        return length * self.element.bits // 8

    @cached_property
    def row(self) -> BlockShape:
        """The shape of one block."""
        return BlockShape(f"1x{self.k}")

    @cached_property
    def tile(self) -> BlockShape:
        """The shape of a square tile."""
        return BlockShape(f"{self.k}x{self.k}")


BF16 = TensorFormat("bf16")
FP8 = TensorFormat("fp8")
MXFP4 = BlockFormat("mxfp4", E2M1, E8M0, k=32)
MXFP8_E4M3 = BlockFormat("mxfp8_e4m3", E4M3, E8M0, k=32)
MXFP8_E5M2 = BlockFormat("mxfp8_e5m2", E5M2, E8M0, k=32)

MXFP6_E2M3 = BlockFormat("mxfp6_e2m3", E2M3, E8M0, k=32)
MXFP6_E3M2 = BlockFormat("mxfp6_e3m2", E3M2, E8M0, k=32)
MXINT8 = BlockFormat("mxint8", INT8, E8M0, k=32)
MXFP4_E1M2 = BlockFormat("mxfp4_e1m2", E1M2, E8M0, k=32)
NVFP4 = BlockFormat("nvfp4", E2M1, UE4M3, k=16, tensor_scale=True)

BLOCK_FORMATS: dict[str, BlockFormat] = {
    f.name: f for f in (MXFP4, MXFP8_E4M3, MXFP8_E5M2, MXFP6_E2M3, MXFP6_E3M2, MXINT8, MXFP4_E1M2, NVFP4)
}
"""The block formats, by name."""

FORMATS: dict[str, OperandFormat] = {BF16.name: BF16, FP8.name: FP8, **BLOCK_FORMATS}
"""Every format that an operand can have, by name."""


def _registered(name: str) -> OperandFormat:
    return FORMATS[name]
