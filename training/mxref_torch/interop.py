"""Exchange of MXArrays with torch's own types of elements and of E8M0: the same bytes under other type names.

Only views are taken. Torch has no copy kernel for its FP4 type, and casting values to E8M0 makes no
shared scale, so no value is ever converted.

Implements: packing.exchange
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from mxref.errors import DtypeError
from mxref.formats import BLOCK_FORMATS, BlockFormat
from mxref.mxarray import MXArray


def _element_type(block_format: BlockFormat) -> torch.dtype | None:
    """Return torch's type of the stored codes of a format; None if it has none."""
    element = block_format.element
    # The name is that of ml_dtypes, but torch keeps two 4-bit codes in an item.
    name = f"{element.dtype}_x2" if element.bits == 4 else str(element.dtype)
    found: torch.dtype | None = getattr(torch, name, None)
    return found


def to_torch(q: MXArray) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the elements and shared scales of `q`, of NumPy arrays or torch tensors, under torch's types.

    Memory is shared. The block axis, of K elements, is last. Elements of MXFP4 are float4_e2m1fn_x2 [rows..., K / 2]
    (element 2i in the low nibble), those of MXFP8 float8_e4m3fn or float8_e5m2 [rows..., K], and scales float8_e8m0fnu
    [rows..., K / k].

    Raises:
        DtypeError: torch has no type for the elements.
    """
    element_type = _element_type(q.format)
    if element_type is None:
        raise DtypeError(f"torch has no type for the elements of {q.format.title}; use the codes themselves")
    codes, scales = (
        each if isinstance(each, torch.Tensor) else torch.from_numpy(np.require(each, requirements=["W"]))
        for each in (q.codes, q.scales)
    )
    return codes.view(element_type), scales.view(torch.float8_e8m0fnu)


def from_torch(
    elements: torch.Tensor, scales: torch.Tensor, *, shape: tuple[int, ...] | None = None, **fields: Any
) -> MXArray:
    """Return the MXArray of what `to_torch` returns, sharing memory: NumPy arrays for CPU tensors, uint8 for others.

    The type of the elements gives the format. `shape` is that of the quantized tensor in its own axis order, by default
    [rows..., K]; `fields` are other fields of the MXArray: axis (default -1), block, prescale and rotation.

    Raises:
        DtypeError: other types.
        ShapeError: shapes that do not fit together.
    """
    typed = ((_element_type(block_format), block_format) for block_format in BLOCK_FORMATS.values())
    formats = {element_type: block_format for element_type, block_format in typed if element_type}
    if elements.dtype not in formats or scales.dtype != torch.float8_e8m0fnu:
        raise DtypeError(
            f"expected {', '.join(map(str, formats))} and torch.float8_e8m0fnu, got {elements.dtype} and "
            f"{scales.dtype}; view the bytes, do not cast values"
        )
    block_format = formats[elements.dtype]
    codes, scale_codes = elements.view(torch.uint8), scales.view(torch.uint8)
    if shape is None:
        shape = (*codes.shape[:-1], codes.shape[-1] * 8 // block_format.element.bits)
    given: dict[str, Any] = {"shape": tuple(shape), "axis": -1, "format": block_format} | fields
    if codes.device.type == "cpu":
        return MXArray(codes.numpy(), scale_codes.numpy(), **given)
    return MXArray(codes, scale_codes, **given)
