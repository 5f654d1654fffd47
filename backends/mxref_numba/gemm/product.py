"""Scaled GEMM from packed operands: which kernels answer which profile and formats, and what they all share.

Where an operand is not MXFP4, `wide` multiplies, on any CPU. All else here is for MXFP4.
`ordered` has one result and two sets of kernels, `tile` and `portable`. A result of `ordered` is also valid for
`bounded`, so `bounded` takes the fastest kernel: `ordered` of `tile` or `wide`, or float32 values and BLAS.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from mxref.errors import UnsupportedError
from mxref.formats import CANONICAL_NAN, E8M0, MXFP4
from mxref.gemm import prescale_product
from mxref.mxarray import MXArray, PreparedArray
from mxref.recipe import GemmProfile
from mxref_numba import memory
from mxref_numba.gemm import portable, tile, wide
from mxref_numba.path import KernelPath
from mxref_numba.scalar.dequantize import dequantize
from mxref_numba.vector.target import TARGETS

MAX_BOUNDED_SCALE = 252
"""Largest scale code at which every element fits float32: 6 * 2^125."""


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
    out = memory.empty((m, n), np.float32 if out_dtype == "float32" else ml_dtypes.bfloat16)
    if not (out.size and a.length):
        out[...] = 0
        return out
    factor = np.float32(1 / prescale_product(a, b))
    if not (a.format is MXFP4 and b.format is MXFP4):
        wide.multiply(a, _wide_operand(b), b.format, factor, out)
        _mark_nan(out, _nan_rows(a), _nan_rows(b))
        return out
    layout = b.layout if isinstance(b, PreparedArray) else prepare(b, profile, path)
    if (target := TARGETS.get(path)) is not None:
        left, right = tile.packed(target, a, is_right=False), layout[0]
        tile.multiply_packed(target, left, right, a.scales.shape[1], factor, out)
        nan_a, nan_b = (
            tile.nan_rows(target, left, m, is_right=False),
            tile.nan_rows(target, right, n, is_right=True),
        )
        _mark_nan(out, nan_a, nan_b)
        return out
    if profile is GemmProfile.ORDERED:
        portable.multiply_turned(a, portable.Turned(*layout), factor, out)
    else:
        _multiply_values(_values(a), layout[0], factor, out)
    _mark_nan(out, _nan_rows(a), _nan_rows(b))
    return out


def _wide_operand(b: MXArray) -> wide.DecodedOperand:
    # The layout of an MXFP4 operand serves only a product with MXFP4.
    if isinstance(b, PreparedArray) and b.format is not MXFP4:
        return wide.DecodedOperand(*b.layout)
    return wide.decoded_operand(b, turn=True)


def prepare(q: MXArray, profile: GemmProfile, path: KernelPath) -> tuple[NDArray[Any], ...]:
    """Return the layout of a right operand that `scaled_gemm` would otherwise make itself; () for an empty matrix."""
    if not q.codes.size:
        return ()
    if q.format is not MXFP4:
        return tuple(wide.decoded_operand(q, turn=True))
    if (target := TARGETS.get(path)) is not None:
        return (tile.packed(target, q, is_right=True),)
    return tuple(portable.turned(q)) if profile is GemmProfile.ORDERED else (_values(q),)


def _nan_rows(q: MXArray) -> NDArray[np.bool_]:
    spoiled: NDArray[np.bool_] = (np.asarray(q.scales) == E8M0.nan_code).any(axis=1)
    return spoiled


def _mark_nan(out: NDArray[Any], rows: NDArray[np.bool_], columns: NDArray[np.bool_]) -> None:
    bits = out.view(f"u{out.itemsize}")
    nan = CANONICAL_NAN >> (32 - 8 * out.itemsize)
    if rows.any():
        bits[rows] = nan
    if columns.any():
        bits[:, columns] = nan


def _check_bounded(name: str, q: MXArray) -> None:
    scales = np.asarray(q.scales)
    top = int(scales.max(initial=0, where=scales != E8M0.nan_code))
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
