"""The number formats, as frozen data: elements, scales, and the block formats made of both.

What follows from a format's bits is a property of it. Nothing here computes on arrays, and nothing
outside this package knows a format's numbers by heart.
"""

from mxref.formats.blocks import (
    BF16,
    BLOCK_FORMATS,
    CANONICAL_NAN,
    FORMATS,
    FP8,
    INPUT_DTYPES,
    MXFP4,
    MXFP4_E1M2,
    MXFP6_E2M3,
    MXFP6_E3M2,
    MXFP8_E4M3,
    MXFP8_E5M2,
    BlockFormat,
    BlockShape,
    Nonfinite,
    OperandFormat,
    TensorFormat,
)
from mxref.formats.elements import E1M2, E2M1, E2M3, E3M2, E4M3, E5M2, ElementFormat, Specials
from mxref.formats.scales import E8M0, ScaleFormat

__all__ = [
    "BF16",
    "BLOCK_FORMATS",
    "CANONICAL_NAN",
    "E1M2",
    "E2M1",
    "E2M3",
    "E3M2",
    "E4M3",
    "E5M2",
    "E8M0",
    "FORMATS",
    "FP8",
    "INPUT_DTYPES",
    "MXFP4",
    "MXFP4_E1M2",
    "MXFP6_E2M3",
    "MXFP6_E3M2",
    "MXFP8_E4M3",
    "MXFP8_E5M2",
    "BlockFormat",
    "BlockShape",
    "ElementFormat",
    "Nonfinite",
    "OperandFormat",
    "ScaleFormat",
    "Specials",
    "TensorFormat",
]
