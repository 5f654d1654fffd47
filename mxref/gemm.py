"""Scaled GEMM, C = A B^T, from two MXArrays whose block axis is the contraction axis.

Scale exponents are added before anything is multiplied: dequantizing first overflows float32 at scale
codes 253 and 254, and gives NaN for products that are small.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from mxref.arguments import check_mxarray, check_name
from mxref.arrays import described
from mxref.errors import DtypeError, RecipeError, ShapeError
from mxref.formats import CANONICAL_NAN, E2M1_MAGNITUDES, E8M0, MXFP4
from mxref.layouts.packed import unpack
from mxref.mxarray import MXArray
from mxref.plan import dtype_name
from mxref.recipe import GemmProfile
from mxref.steps.scale import scale_exponent

OUT_DTYPES = ("float32", "bfloat16")

_VALUES = np.array([*E2M1_MAGNITUDES, *(-m for m in E2M1_MAGNITUDES)], np.float32)
_UNPRESCALE = (np.float32(1.0), np.float32(4 / 3), np.float32(16 / 9))
_LOWEST_EXPONENT = 2 * E8M0.min_exponent - 2
"""A block dot is a multiple of 1/4 and its scale at least 2^-254, so every term is a multiple of 2^-256."""

# Mantissa bits and smallest exponent of a unit in the last place.
_OUT_FORMATS = {"float32": (24, -149), "bfloat16": (8, -133)}


def gemm_profile(name: str) -> GemmProfile:
    """Return a profile by name; RecipeError lists the known ones."""
    try:
        return GemmProfile(name)
    except (ValueError, TypeError):
        raise RecipeError(f"GEMM profile {described(name)} is not one of {', '.join(GemmProfile)}") from None


def check_gemm(a: MXArray, b: MXArray, out_dtype: str) -> None:
    """Raise ShapeError or DtypeError unless A [M, K] and B [N, K], block axis stored last, can be multiplied.

    Implements: gemm.operands, gemm.output
    """
    for name, q in (("A", a), ("B", b)):
        check_mxarray("scaled_gemm", q)
        if len(q.shape) != 2:
            raise ShapeError(f"scaled_gemm: {name} must have two axes, got shape {q.shape}")
    if a.shape[a.axis] != b.shape[b.axis] or a.length != b.length:
        raise ShapeError(
            f"scaled_gemm: contraction lengths differ: {a.shape[a.axis]} (axis {a.axis} of {a.shape}) and "
            f"{b.shape[b.axis]} (axis {b.axis} of {b.shape}); quantize both along the contraction axis"
        )
    if a.rotation != b.rotation:
        raise ShapeError(
            f"scaled_gemm: operands carry different Hadamard transforms, {a.rotation} and {b.rotation}; "
            "both need the same size and signs"
        )
    if check_name("out_dtype", out_dtype) not in OUT_DTYPES:
        raise DtypeError(f"scaled_gemm gives {' or '.join(OUT_DTYPES)}, not {out_dtype}")


def check_sum(onto: Any, a: MXArray, b: MXArray) -> None:
    """Raise DtypeError or ShapeError unless checked operands' product can be added to an array in place."""
    if dtype_name(onto) != "float32":
        raise DtypeError(
            f"add_product adds in float32, and the array holds {onto.dtype}: cast it to float32, "
            "or add the result of scaled_gemm to it"
        )
    expected = (*a.rows_shape, *b.rows_shape)
    if tuple(onto.shape) != expected:
        raise ShapeError(
            f"add_product: the array has shape {tuple(onto.shape)}, the product {expected}; give one of that shape"
        )
    flags = getattr(onto, "flags", None)
    if not (flags.c_contiguous and flags.writeable if flags else onto.is_contiguous()):
        raise ShapeError(
            f"add_product writes to an array in C order, and this one of shape {expected} is strided or "
            "read-only; give a contiguous copy, or add the result of scaled_gemm to it"
        )


def scaled_gemm(
    a: MXArray, b: MXArray, *, profile: str = GemmProfile.EXACT, out_dtype: str = "float32"
) -> NDArray[Any]:
    """Return A B^T under the profile `exact` or `ordered`; `bounded` is answered with `ordered`, a member of it.

    Args:
        a: [M, K], quantized along its contraction axis.
        b: [N, K], likewise.
        profile: which rounding of the sum.
        out_dtype: `float32` or `bfloat16`.

    Returns:
        [M, N] of `out_dtype`; NaN (canonical) where a row meets a NaN block.

    Raises:
        ShapeError, DtypeError: operands that do not fit together.

    Implements: gemm.exact, gemm.ordered, gemm.nan, gemm.output, gemm.prescale, conventions.nan
    """
    profile = gemm_profile(profile)
    check_gemm(a, b, out_dtype)
    prescaled = int(a.prescale) + int(b.prescale)
    if profile is GemmProfile.EXACT:
        out = _exact(a, b, prescaled, out_dtype)
    else:
        with np.errstate(over="ignore", under="ignore"):
            out = (_ordered(a, b) * _UNPRESCALE[prescaled]) if prescaled else _ordered(a, b)
            out = out if out_dtype == "float32" else out.astype(ml_dtypes.bfloat16)
    nan_rows = (np.asarray(a.scales) == E8M0.nan_code).any(axis=1)[:, None] | (
        np.asarray(b.scales) == E8M0.nan_code
    ).any(axis=1)
    nan = np.uint32(CANONICAL_NAN) if out_dtype == "float32" else np.uint16(CANONICAL_NAN >> 16)
    out.view(nan.dtype)[nan_rows] = nan
    return out


def block_dots(a: MXArray, b: MXArray) -> Iterator[tuple[NDArray[np.float32], NDArray[np.int32]]]:
    """Yield, for blocks in ascending order, their dot products [M, N] and scale exponents [M, N].

    A dot of 32 products is a multiple of 1/4 of at most 1152, so float32 holds it and every partial sum
    exactly, in any order.

    Implements: gemm.block_dot
    """
    pa, pb = _VALUES[unpack(a.codes)], _VALUES[unpack(b.codes)]  # [M, K], [N, K]
    ea, eb = scale_exponent(a.scales), scale_exponent(b.scales)  # [M, K/32], [N, K/32]
    for i in range(ea.shape[1]):
        block = slice(i * MXFP4.k, (i + 1) * MXFP4.k)
        # Adding +0 turns a sum of negative zeros into the +0 of the definition.
        dot = pa[:, block] @ pb[:, block].T + np.float32(0)
        yield dot, ea[:, i, None] + eb[None, :, i]


def _ordered(a: MXArray, b: MXArray) -> NDArray[np.float32]:
    acc = np.zeros((a.scales.shape[0], b.scales.shape[0]), np.float32)
    for dot, exponent in block_dots(a, b):
        # Terms have 13 significant bits and acc 24: one float64 addition loses nothing that float32 would keep.
        acc = (acc.astype(np.float64) + np.ldexp(dot.astype(np.float64), exponent)).astype(np.float32)
    return acc


def _exact(a: MXArray, b: MXArray, prescaled: int, out_dtype: str) -> NDArray[Any]:
    total = np.zeros((a.scales.shape[0], b.scales.shape[0]), object)
    for dot, exponent in block_dots(a, b):
        quarters = (dot * 4).astype(np.int64).astype(object)
        total = total + quarters * (1 << (exponent - 2 * E8M0.min_exponent).astype(object))
    mantissa, lowest = _OUT_FORMATS[out_dtype]
    round_one = np.frompyfunc(lambda n: _round(n * 4**prescaled, 3**prescaled, mantissa, lowest), 1, 1)
    rounded = round_one(total).astype(np.float64) if total.size else total.astype(np.float64)
    with np.errstate(over="ignore"):
        narrow = rounded.astype(np.float32)
    return narrow if out_dtype == "float32" else narrow.astype(ml_dtypes.bfloat16)


def _round(numerator: int, denominator: int, mantissa: int, lowest: int) -> float:
    """Return numerator / denominator * 2^-256 rounded (RNE) to `mantissa` bits and multiples of 2^lowest.

    A float64 holds the result exactly; one beyond the type's range becomes Inf when it is narrowed.
    """
    magnitude = abs(numerator)
    exponent = magnitude.bit_length() - denominator.bit_length() + _LOWEST_EXPONENT
    # Within one of the true binade; the quotient then has mantissa or mantissa + 1 bits or more to round.
    unit = max(exponent - mantissa, lowest)
    while True:
        shift = _LOWEST_EXPONENT - unit
        scaled = magnitude << max(shift, 0)
        divisor = denominator << max(-shift, 0)
        quotient, remainder = divmod(scaled, divisor)
        if quotient < 1 << mantissa:
            break
        unit += 1
    twice = 2 * remainder
    quotient += twice > divisor or (twice == divisor and quotient & 1 == 1)
    value = float(np.ldexp(float(quotient), unit))
    return -value if numerator < 0 else value


def bounded_tolerance(
    a: MXArray, b: MXArray, error_class: str, out_dtype: str = "float32"
) -> NDArray[np.float64]:
    """Return how far a `bounded` result may lie from the real sum, float64 [M, N]; Inf where anything goes.

    Args:
        a: [M, K].
        b: [N, K].
        error_class: `fp32` (eps = K * 2^-24, or (K + 2) * 2^-24 with a prescale) or `fp8-hopper` (eps = 2^-6).
        out_dtype: `bfloat16` adds one rounding to nearest.

    Implements: gemm.bounded, gemm.prescale
    """
    magnitudes = np.abs(_VALUES)
    scale_a, scale_b = (np.repeat(np.ldexp(1.0, scale_exponent(q.scales)), MXFP4.k, axis=1) for q in (a, b))
    total = (magnitudes[unpack(a.codes)] * scale_a) @ (magnitudes[unpack(b.codes)] * scale_b).T
    prescaled = int(a.prescale) + int(b.prescale)
    total *= (4 / 3) ** prescaled
    # Undoing the prescale errs twice more: in the multiply and in its constant.
    eps = (a.length + 2 * (prescaled > 0)) * 2.0**-24 if error_class == "fp32" else 2.0**-6
    bound = eps * total + a.length * 2.0**-149
    if out_dtype == "bfloat16":
        bound = bound + (total + bound) * 2.0**-8 + 2.0**-133
    return np.where(total < 2.0**127, bound, np.inf)
