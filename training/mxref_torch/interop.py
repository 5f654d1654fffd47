"""Exchange of MXArrays with torch's own FP4 and E8M0 types: the same bytes under other type names.

Only views are taken. Torch has no copy kernel for its FP4 type, and casting values to E8M0 makes no
shared scale, so no value is ever converted.

Implements: packing.exchange
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from mxref.errors import DtypeError
from mxref.formats import BlockShape
from mxref.mxarray import MXArray
from mxref.steps.hadamard import Rotation


def to_torch(q: MXArray) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the elements and shared scales of `q` under torch's types, sharing its memory.

    Args:
        q: an MXArray of NumPy arrays or torch tensors, K elements along its block axis.

    Returns:
        float4_e2m1fn_x2 [rows..., K / 2] (element 2i in the low nibble) and float8_e8m0fnu
        [rows..., K / 32], the block axis last.
    """
    codes, scales = (_as_bytes(array) for array in (q.codes, q.scales))
    return codes.view(torch.float4_e2m1fn_x2), scales.view(torch.float8_e8m0fnu)


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
        elements: float4_e2m1fn_x2 [rows..., K / 2].
        scales: float8_e8m0fnu [rows..., K / 32].
        shape: shape of the quantized tensor in its own axis order; default [rows..., K].
        axis: its block axis.
        block: what shares one scale.
        prescale: whether the elements carry the factor 3/4.
        rotation: the Hadamard transform that the elements carry.

    Returns:
        An MXArray of NumPy arrays for CPU tensors, of uint8 tensors for others.

    Raises:
        DtypeError: other types.
        ShapeError: shapes that do not fit together.
    """
    if elements.dtype != torch.float4_e2m1fn_x2 or scales.dtype != torch.float8_e8m0fnu:
        raise DtypeError(
            f"expected float4_e2m1fn_x2 and float8_e8m0fnu, got {elements.dtype} and {scales.dtype}; "
            "view the bytes, do not cast values"
        )
    codes, scale_codes = elements.view(torch.uint8), scales.view(torch.uint8)
    if shape is None:
        shape = (*codes.shape[:-1], 2 * codes.shape[-1])
    placement = tuple(shape), axis, block, prescale, rotation
    if codes.device.type == "cpu":
        return MXArray(codes.numpy(), scale_codes.numpy(), *placement)
    return MXArray(codes, scale_codes, *placement)


def _as_bytes(array: Any) -> torch.Tensor:
    if isinstance(array, torch.Tensor):
        return array
    return torch.from_numpy(np.require(array, requirements=["W"]))
