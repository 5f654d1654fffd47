"""Exchange of MXArrays with torch's own types of elements and scales: the same bytes under other type names.

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


def _types(block_format: BlockFormat) -> tuple[torch.dtype, torch.dtype] | None:
    """Return torch's types of the stored codes and of the scales of a format; None if it has not both."""
    element = block_format.element
    # The names are those of ml_dtypes, but torch keeps two 4-bit codes in an item.
    name = f"{element.dtype}_x2" if element.bits == 4 else str(element.dtype)
    found = [getattr(torch, each, None) for each in (name, str(block_format.scale.dtype))]
    return (found[0], found[1]) if found[0] and found[1] and element.dtype else None


def to_torch(q: MXArray) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the elements and shared scales of `q`, of NumPy arrays or torch tensors, under torch's types.

    Memory is shared. The block axis, of K elements, is last. Elements of MXFP4 and NVFP4 are float4_e2m1fn_x2
    [rows..., K / 2] (element 2i in the low nibble), those of MXFP8 float8_e4m3fn or float8_e5m2 [rows..., K]. Scales
    are float8_e8m0fnu [rows..., K / k], those of NVFP4 float8_e4m3fn; its scale of the tensor stays `q.tensor_scale`.

    Raises:
        DtypeError: torch has no type for the elements.
    """
    types = _types(q.format)
    if types is None:
        raise DtypeError(f"torch has no type for the elements of {q.format.title}; use the codes themselves")
    codes, scales = (
        each if isinstance(each, torch.Tensor) else torch.from_numpy(np.require(each, requirements=["W"]))
        for each in (q.codes, q.scales)
    )
    return codes.view(types[0]), scales.view(types[1])


def from_torch(
    elements: torch.Tensor, scales: torch.Tensor, *, shape: tuple[int, ...] | None = None, **fields: Any
) -> MXArray:
    """Return the MXArray of what `to_torch` returns, sharing memory: NumPy arrays for CPU tensors, uint8 for others.

    The types of elements and scales give the format. `shape` is that of the quantized tensor in its own axis order, by
    default [rows..., K]; `fields` are other fields of the MXArray: axis (default -1), block, prescale, rotation, and
    tensor_scale for NVFP4.

    Raises:
        DtypeError: other types.
        ShapeError: shapes that do not fit together.
    """
    typed = ((_types(block_format), block_format) for block_format in BLOCK_FORMATS.values())
    formats = {types: block_format for types, block_format in typed if types}
    if (elements.dtype, scales.dtype) not in formats:
        pairs = "; ".join(f"{element} and {scale}" for element, scale in formats)
        raise DtypeError(
            f"expected {pairs}; got {elements.dtype} and {scales.dtype}; view the bytes, do not cast values"
        )
    block_format = formats[elements.dtype, scales.dtype]
    codes, scale_codes = elements.view(torch.uint8), scales.view(torch.uint8)
    if shape is None:
        shape = (*codes.shape[:-1], codes.shape[-1] * 8 // block_format.element.bits)
    given: dict[str, Any] = {"shape": tuple(shape), "axis": -1, "format": block_format} | fields
    if codes.device.type == "cpu":
        return MXArray(codes.numpy(), scale_codes.numpy(), **given)
    return MXArray(codes, scale_codes, **given)
