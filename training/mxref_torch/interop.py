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
from mxref.formats import BLOCK_FORMATS, BlockFormat, BlockShape
from mxref.mxarray import MXArray
from mxref.steps.hadamard import Rotation


def _element_type(block_format: BlockFormat) -> torch.dtype | None:
    """Return torch's type of the stored codes of a format; None if it has none."""
    element = block_format.element
    # The name is that of ml_dtypes, but torch keeps two 4-bit codes in an item.
    name = f"{element.dtype}_x2" if element.bits == 4 else str(element.dtype)
    found: torch.dtype | None = getattr(torch, name, None)
    return found


def to_torch(q: MXArray) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the elements and shared scales of `q` under torch's types, sharing its memory.

    Args:
        q: an MXArray of NumPy arrays or torch tensors, K elements along its block axis.

    Returns:
        The elements, and float8_e8m0fnu [rows..., K / k], the block axis last. The elements of MXFP4 are
        float4_e2m1fn_x2 [rows..., K / 2] (element 2i in the low nibble), those of MXFP8 float8_e4m3fn or
        float8_e5m2 [rows..., K].

    Raises:
        DtypeError: torch has no type for the elements.
    """
    element_type = _element_type(q.format)
    if element_type is None:
        raise DtypeError(f"torch has no type for the elements of {q.format.title}; use the codes themselves")
    codes, scales = (_as_bytes(array) for array in (q.codes, q.scales))
    return codes.view(element_type), scales.view(torch.float8_e8m0fnu)


def from_torch(
    elements: torch.Tensor,
    scales: torch.Tensor,
    *,
    shape: tuple[int, ...] | None = None,
    axis: int = -1,
    block: BlockShape = BlockShape.ROW,
    prescale: bool = False,
    rotation: Rotation | None = None,
) -> MXArray:
    """Return the MXArray of torch's types, sharing their memory; the inverse of `to_torch`.

    Args:
        elements: float4_e2m1fn_x2 [rows..., K / 2], or float8_e4m3fn or float8_e5m2 [rows..., K]; the type
            gives the format.
        scales: float8_e8m0fnu [rows..., K / k].
        shape: shape of the quantized tensor in its own axis order; default [rows..., K].
        axis: its block axis.
        block: what shares one scale.
        prescale: whether the elements carry the prescale of their format.
        rotation: the Hadamard transform that the elements carry.

    Returns:
        An MXArray of NumPy arrays for CPU tensors, of uint8 tensors for others.

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
    placement = tuple(shape), axis, block, prescale, rotation, block_format
    if codes.device.type == "cpu":
        return MXArray(codes.numpy(), scale_codes.numpy(), *placement)
    return MXArray(codes, scale_codes, *placement)


def _as_bytes(array: Any) -> torch.Tensor:
    if isinstance(array, torch.Tensor):
        return array
    return torch.from_numpy(np.require(array, requirements=["W"]))
