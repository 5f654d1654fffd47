"""Packed storage: element codes in bytes, the first element in the lowest bits, and exchange with ml_dtypes.

Two 4-bit codes go into a byte, element 2i in the low nibble; four 6-bit codes go into three bytes, as one little-endian
word; an 8-bit code is a byte.
Source: OCP MX v1.0 leaves the layout open; low nibble first is what every GEMM backend but ggml's reads.
"""

from __future__ import annotations

import math
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from mxref.errors import DtypeError, ShapeError
from mxref.formats import BlockFormat, ElementFormat


def pack(codes: NDArray[np.uint8], element: ElementFormat) -> NDArray[np.uint8]:
    """Return element codes packed into bytes.

    Args:
        codes: element codes, uint8 [..., K]; K codes must fill whole bytes, so K is even for 4 bits and a multiple
            of 4 for 6 bits.
        element: the format of the codes.

    Returns:
        uint8 [..., K * bits / 8].

    Raises:
        ShapeError: K codes do not fill whole bytes.
        DtypeError: a code does not fit in the element's bits.

    Implements: packing.nibbles, packing.sixes, packing.bytes
    """
    together, size = _group(element)
    if codes.shape[-1] % together:
        raise ShapeError(
            f"cannot pack {codes.shape[-1]} codes of {element.name}: {together} go into {size} bytes, "
            f"so the last axis must be a multiple of {together}"
        )
    largest = (1 << element.bits) - 1
    if codes.size and codes.max() > largest:
        raise DtypeError(
            f"code {codes.max()} does not fit in {element.bits} bits (largest {largest}); "
            "is the array packed already?"
        )
    if together == 1:
        return codes.copy()
    groups = codes.reshape(*codes.shape[:-1], codes.shape[-1] // together, together)
    words: NDArray[Any] = groups[..., 0].astype(_word(size), order="C")
    for i in range(1, together):
        words |= groups[..., i].astype(words.dtype) << element.bits * i
    packed: NDArray[np.uint8] = (
        words if size == 1 else (words[..., None] >> _offsets(size, 8)).astype(np.uint8)
    )
    return packed.reshape(*codes.shape[:-1], codes.shape[-1] // together * size)


def unpack(packed: NDArray[np.uint8], element: ElementFormat) -> NDArray[np.uint8]:
    """Return packed codes one per byte: uint8 [..., K] from uint8 [..., K * bits / 8].

    Implements: packing.nibbles, packing.sixes, packing.bytes
    """
    together, size = _group(element)
    if together == 1:
        return packed.copy()
    groups = packed.reshape(*packed.shape[:-1], packed.shape[-1] // size, size)
    words: NDArray[Any] = groups[..., 0].astype(_word(size), order="C")
    for i in range(1, size):
        words |= groups[..., i].astype(words.dtype) << 8 * i
    shape = (*packed.shape[:-1], packed.shape[-1] // size, together)
    codes = np.empty(shape, np.uint8)
    for i in range(together):
        codes[..., i] = words >> element.bits * i & (1 << element.bits) - 1
    return codes.reshape(*packed.shape[:-1], shape[-2] * together)


def _group(element: ElementFormat) -> tuple[int, int]:
    """Return the smallest number of codes that fill whole bytes, and the number of bytes."""
    common = math.gcd(element.bits, 8)
    return 8 // common, element.bits // common


def _word(size: int) -> type[np.uint8 | np.uint32]:
    """Return an unsigned integer that holds so many bytes."""
    return np.uint8 if size == 1 else np.uint32


def _offsets(count: int, bits: int) -> NDArray[np.uint32]:
    return np.arange(0, count * bits, bits, dtype=np.uint32)


def _dtypes(block_format: BlockFormat) -> tuple[np.dtype[Any], np.dtype[Any]]:
    """Return the types of ml_dtypes for elements and scales; DtypeError if it has none."""
    element, scale = (
        _dtype(part.name, part.dtype, block_format) for part in (block_format.element, block_format.scale)
    )
    return element, scale


def _dtype(name: str, dtype: str | None, block_format: BlockFormat) -> np.dtype[Any]:
    if dtype is None:
        raise DtypeError(
            f"ml_dtypes has no type for {name} of {block_format.title}; exchange the codes themselves"
        )
    return np.dtype(getattr(ml_dtypes, dtype, dtype))  # INT8 is NumPy's own


def to_ml_dtypes(
    codes: NDArray[np.uint8], scales: NDArray[np.uint8], block_format: BlockFormat
) -> tuple[NDArray[Any], NDArray[Any]]:
    """Return packed codes and scale codes as arrays of ml_dtypes, [..., K] and [..., K / k].

    The same bits under other types: ml_dtypes keeps one element per byte.

    Args:
        codes: packed codes, uint8.
        scales: scale codes, uint8.
        block_format: the format of both; MXFP4 gives float4_e2m1fn and float8_e8m0fnu.

    Raises:
        DtypeError: ml_dtypes has no type for the element.

    Implements: packing.exchange
    """
    element, scale = _dtypes(block_format)
    return unpack(codes, block_format.element).view(element), scales.view(scale)


def from_ml_dtypes(
    elements: NDArray[Any], scales: NDArray[Any], block_format: BlockFormat
) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return packed codes and scale codes from ml_dtypes arrays; the inverse of `to_ml_dtypes`.

    Args:
        elements: [..., K], of the type that ml_dtypes has for the element; float4_e2m1fn for MXFP4.
        scales: float8_e8m0fnu [..., K / k].
        block_format: the format of both.

    Raises:
        DtypeError: other types; casting values to E8M0 is no way to make a scale (0 and Inf become NaN).

    Implements: packing.exchange
    """
    element, scale = _dtypes(block_format)
    if elements.dtype != element or scales.dtype != scale:
        raise DtypeError(
            f"expected {element} and {scale}, got {elements.dtype} and {scales.dtype}; "
            "view the codes, do not cast values"
        )
    return pack(elements.view(np.uint8), block_format.element), scales.view(np.uint8)
