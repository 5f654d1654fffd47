"""Packed storage: two codes per byte, element 2i in the low nibble, and exchange with ml_dtypes.

Source: OCP MX v1.0 leaves the layout open; low nibble first is what every GEMM backend but ggml's reads.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from mxref.errors import DtypeError, ShapeError


def pack(codes: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return element codes packed two per byte.

    Args:
        codes: element codes 0 to 15, uint8 [..., K], K even.

    Returns:
        uint8 [..., K / 2].

    Raises:
        ShapeError: K is odd.
        DtypeError: a code is above 15.

    Implements: packing.nibbles
    """
    if codes.shape[-1] % 2:
        raise ShapeError(
            f"cannot pack {codes.shape[-1]} codes: two go into a byte, so the last axis must be even"
        )
    if codes.size and codes.max() > 15:
        raise DtypeError(
            f"code {codes.max()} does not fit in 4 bits (largest 15); is the array packed already?"
        )
    return codes[..., 0::2] | codes[..., 1::2] << np.uint8(4)


def unpack(packed: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """Return packed codes one per byte: uint8 [..., K] from uint8 [..., K / 2].

    Implements: packing.nibbles
    """
    pairs = np.stack([packed & np.uint8(15), packed >> np.uint8(4)], axis=-1)
    return pairs.reshape(*packed.shape[:-1], 2 * packed.shape[-1])


def to_ml_dtypes(codes: NDArray[np.uint8], scales: NDArray[np.uint8]) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return packed codes and scale codes as float4_e2m1fn [..., K] and float8_e8m0fnu [..., K / 32].

    The same bits under other types: ml_dtypes keeps one element per byte.

    Implements: packing.exchange
    """
    return unpack(codes).view(ml_dtypes.float4_e2m1fn), scales.view(ml_dtypes.float8_e8m0fnu)


def from_ml_dtypes(
    elements: NDArray[Any], scales: NDArray[Any]
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return packed codes and scale codes from ml_dtypes arrays; the inverse of `to_ml_dtypes`.

    Args:
        elements: float4_e2m1fn [..., K], K even.
        scales: float8_e8m0fnu [..., K / 32].

    Raises:
        DtypeError: other types; casting values to E8M0 is no way to make a scale (0 and Inf become NaN).

    Implements: packing.exchange
    """
    if elements.dtype != ml_dtypes.float4_e2m1fn or scales.dtype != ml_dtypes.float8_e8m0fnu:
        raise DtypeError(
            f"expected float4_e2m1fn and float8_e8m0fnu, got {elements.dtype} and {scales.dtype}; "
            "view the codes, do not cast values"
        )
    return pack(elements.view(np.uint8)), scales.view(np.uint8)
