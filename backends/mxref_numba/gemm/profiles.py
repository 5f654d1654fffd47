"""Scaled GEMM from packed operands: which kernels answer which profile and formats, and what they all share.

There are three ways to multiply. `packed_tiles` is for MXFP4 on vectors, `plain_tiles` for any formats on any CPU; both
give the result of `ordered`, which is also valid for `bounded`. `bounded` of MXFP4 without vectors takes what is faster
there: float32 values and BLAS.
"""

from __future__ import annotations

from typing import Any, Literal

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from mxref.errors import UnsupportedError
from mxref.formats import CANONICAL_NAN, MXFP4, BlockFormat
from mxref.gemm import prescale_product
from mxref.mxarray import MXArray, PreparedArray
from mxref.recipe import GemmProfile
from mxref_numba import buffers
from mxref_numba.gemm import packed_tiles, plain_tiles
from mxref_numba.gemm.plain_operands import DecodedOperand, decoded_operand
from mxref_numba.path import KernelPath
from mxref_numba.scalar.decoder import dequantize
from mxref_numba.vector.target import TARGETS

MAX_BOUNDED_SCALE = 252
"""Largest scale code at which every element fits float32: 6 * 2^125."""

_Way = Literal["packed", "values", "plain"]


def _way(a: BlockFormat, b: BlockFormat, profile: GemmProfile, path: KernelPath) -> _Way:
    if not (a is MXFP4 and b is MXFP4):
        return "plain"
    if path in TARGETS:
        return "packed"
    return "plain" if profile is GemmProfile.ORDERED else "values"


def scaled_gemm(
    a: MXArray,
    b: MXArray,
    profile: GemmProfile,
    out_dtype: str,
    path: KernelPath,
) -> NDArray[Any]:
    """Return A B^T of checked operands.

    Args:
        a: [M, K].
        b: [N, K]; a PreparedArray has the layout that `prepare` made for this profile and path.
        profile: `ordered` or `bounded`.
        out_dtype: `float32` or `bfloat16`.
        path: which kernels run.

    Returns:
        [M, N] of `out_dtype`.

    Raises:
        UnsupportedError: `bounded` with a scale code of 253 or 254.
    """
    if profile is GemmProfile.BOUNDED:
        _check_bounded("A", a)
        _check_bounded("B", b)
    m, n = a.scales.shape[0], b.scales.shape[0]
    out = buffers.empty((m, n), np.float32 if out_dtype == "float32" else ml_dtypes.bfloat16)
    if not (out.size and a.length):
        out[...] = 0
        return out
    factor = np.float32(1 / prescale_product(a, b))
    way = _way(a.format, b.format, profile, path)
    # A layout was made for a product with an operand of the same format.
    made = isinstance(b, PreparedArray) and _way(b.format, b.format, profile, path) == way
    layout = b.layout if made else _layout(b, way, path)  # type: ignore[attr-defined]
    if way == "packed":
        target, right = TARGETS[path], layout[0]
        left = packed_tiles.packed(target, a, is_right=False)
        packed_tiles.multiply_packed(target, left, right, a.scales.shape[1], factor, out)
        spoiled_a = packed_tiles.spoiled(target, left, m, is_right=False)
        spoiled_b = packed_tiles.spoiled(target, right, n, is_right=True)
    else:
        if way == "values":
            _multiply_values(_values(a), layout[0], factor, out)
        else:
            plain_tiles.multiply(a, b, DecodedOperand(*layout), factor, out)
        spoiled_a, spoiled_b = (np.asarray(q.scales) == q.format.scale.nan_code for q in (a, b))
    bits, nan = out.view(f"u{out.itemsize}"), CANONICAL_NAN >> (32 - 8 * out.itemsize)
    if spoiled_a.any():
        bits[spoiled_a.any(axis=1)] = nan
    if spoiled_b.any():
        bits[:, spoiled_b.any(axis=1)] = nan
    return out


def prepare(q: MXArray, profile: GemmProfile, path: KernelPath) -> tuple[NDArray[Any], ...]:
    """Return the layout of a right operand that `scaled_gemm` would otherwise make itself; () for an empty matrix."""
    return _layout(q, _way(q.format, q.format, profile, path), path) if q.codes.size else ()


def _layout(q: MXArray, way: _Way, path: KernelPath) -> tuple[NDArray[Any], ...]:
    if way == "packed":
        return (packed_tiles.packed(TARGETS[path], q, is_right=True),)
    return (_values(q),) if way == "values" else tuple(decoded_operand(q, turn=True))


def _check_bounded(name: str, q: MXArray) -> None:
    scales = np.asarray(q.scales)
    top = int(scales.max(initial=0, where=scales != q.format.scale.nan_code))
    if top > MAX_BOUNDED_SCALE:
        raise UnsupportedError(
            f"backend 'numba' declares bounded_max_scale = {MAX_BOUNDED_SCALE}, but {name} has a scale code {top}; "
            "use the profile 'ordered'"
        )


def _values(q: MXArray) -> NDArray[np.float32]:
    rows = MXArray(q.codes, q.scales, (q.scales.shape[0], q.length), 1)
    return dequantize(rows, "float32")


def _multiply_values(
    a: NDArray[np.float32], b: NDArray[np.float32], factor: np.float32, out: NDArray[Any]
) -> None:
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        wide = out if out.dtype == np.float32 else np.empty(out.shape, np.float32)
        np.matmul(a, b.T, out=wide)
        if factor != 1:
            wide *= factor
        if out.dtype != np.float32:
            out[...] = wide
