"""Scaled GEMM, C = A B^T, from two MXArrays whose block axis is the contraction axis.

The two may differ in format, not in block length.

Scale exponents are added before anything is multiplied: dequantizing first overflows float32 at scale
codes 253 and 254 of E8M0, and gives NaN for products that are small. Scales of tensors come last.
"""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from mxref.arguments import check_mxarray, check_name
from mxref.arrays import described
from mxref.block_dots import block_dots, exact_blocks, lowest_exponent, rounded_to_odd, to_int, values
from mxref.errors import DtypeError, RecipeError, ShapeError, UnsupportedError
from mxref.formats import CANONICAL_NAN
from mxref.mxarray import MXArray
from mxref.plan import dtype_name
from mxref.recipe import GemmProfile
from mxref.steps.scale import scale_value

OUT_DTYPES = ("float32", "bfloat16")

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
        if len(q.shape) != 2:
            raise ShapeError(f"scaled_gemm: {name} must have two axes, got shape {q.shape}")
    if a.shape[a.axis] != b.shape[b.axis] or a.length != b.length:
        raise ShapeError(
            f"scaled_gemm: contraction lengths differ: {a.shape[a.axis]} (axis {a.axis} of {a.shape}) and "
            f"{b.shape[b.axis]} (axis {b.axis} of {b.shape}); quantize both along the contraction axis"
        )
    if a.format.k != b.format.k:
        raise ShapeError(
            f"scaled_gemm: block lengths differ: {a.format.k} in {a.format.title} and {b.format.k} in "
            f"{b.format.title}; both operands need the same length"
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
        [M, N] of `out_dtype`; NaN (canonical) where a row meets a NaN block. A NaN or Inf code gives what IEEE
        arithmetic gives on the decoded values.

    Raises:
        ShapeError, DtypeError: operands that do not fit together.
        UnsupportedError: a format whose block dots no float64 holds, as E5M2 under scales with a mantissa.

    Implements: gemm.exact, gemm.ordered, gemm.nan, gemm.output, gemm.prescale, gemm.tensor_scale, conventions.nan
    """
    profile = gemm_profile(profile)
    a, b = check_mxarray("scaled_gemm", a), check_mxarray("scaled_gemm", b)
    check_gemm(a, b, out_dtype)
    for q in (a, b):
        if not exact_blocks(q.format):
            raise UnsupportedError(
                f"scaled_gemm: no float64 holds a block's dot product of {q.format.element.name} under "
                f"{q.format.scale.name} scales ({q.format.title}); use a narrower element, or E8M0 scales"
            )
    prescale = prescale_product(a, b)
    with np.errstate(over="ignore", under="ignore", invalid="ignore"):
        if profile is GemmProfile.EXACT:
            out = _exact(a, b, prescale, out_dtype)
        else:
            out = _ordered(a, b)
            out = out if prescale == 1 else out * np.float32(1 / prescale)
            for scale in _tensor_scales(a, b):
                out = out * scale
            out = out if out_dtype == "float32" else out.astype(ml_dtypes.bfloat16)
    nan_rows = _nan_rows(a)[:, None] | _nan_rows(b) | np.isnan(out)
    nan = np.uint32(CANONICAL_NAN) if out_dtype == "float32" else np.uint16(CANONICAL_NAN >> 16)
    out.view(nan.dtype)[nan_rows] = nan
    return out


def _nan_rows(q: MXArray) -> NDArray[np.bool_]:
    spoiled: NDArray[np.bool_] = (np.asarray(q.scales) == q.format.scale.nan_code).any(axis=1)
    return spoiled


def prescale_product(a: MXArray, b: MXArray) -> Fraction:
    """Return the product of the factors that the operands' elements carry.

    Implements: gemm.prescale
    """
    factors = [Fraction(q.format.element.prescale) for q in (a, b) if q.prescale]
    return math.prod(factors, start=Fraction(1))


def _tensor_scales(a: MXArray, b: MXArray) -> list[np.float32]:
    """Return the operands' scales of tensors, that of A first.

    Implements: gemm.tensor_scale
    """
    return [np.asarray(q.tensor_scale)[0] for q in (a, b) if q.tensor_scale is not None]


def _ordered(a: MXArray, b: MXArray) -> NDArray[np.float32]:
    acc = np.zeros((a.scales.shape[0], b.scales.shape[0]), np.float32)
    for dot in block_dots(a, b):
        acc = dot.added_to(acc)
    return acc


def _exact(a: MXArray, b: MXArray, prescale: Fraction, out_dtype: str) -> NDArray[Any]:
    total = np.zeros((a.scales.shape[0], b.scales.shape[0]), object)
    special = np.zeros(total.shape)
    lowest = lowest_exponent(a, b)
    for dot in block_dots(a, b):
        total = total + dot.integers(lowest)
        special = special if dot.special is None else special + dot.special
    factor = 1 / prescale * math.prod(map(Fraction, map(float, _tensor_scales(a, b))), start=Fraction(1))
    # A scale of a tensor is an integer times a power of two, and only the integers are kept in what is divided.
    power = factor.denominator & -factor.denominator
    rounded = _rounded(
        total * factor.numerator,
        factor.denominator // power,
        lowest - power.bit_length() + 1,
        *_OUT_FORMATS[out_dtype],
    )
    narrow = np.where(special == 0, rounded, special).astype(np.float32)
    return narrow if out_dtype == "float32" else narrow.astype(ml_dtypes.bfloat16)


def _rounded(
    numerators: NDArray[Any], denominator: int, exponent: int, mantissa: int, lowest: int
) -> NDArray[np.float64]:
    """Return numerators / denominator * 2^exponent rounded (RNE) to `mantissa` bits and multiples of 2^lowest.

    A float64 holds the results exactly; one beyond the type's range becomes Inf when it is narrowed.

    Args:
        numerators: Python's integers, any shape.
        denominator: positive, below 2^64.
        exponent: of the power of two that the quotients are multiplied by.
        mantissa: bits of the type, few enough that a quotient rounded to odd in float64 rounds as the real one.
        lowest: exponent of the smallest step.
    """
    odd = _quotients(numerators, denominator, exponent)
    unit = np.maximum(np.frexp(odd)[1] - mantissa, lowest)
    rounded: NDArray[np.float64] = np.ldexp(np.rint(np.ldexp(odd, -unit)), unit)
    return rounded


def _quotients(numerators: NDArray[Any], denominator: int, exponent: int) -> NDArray[np.float64]:
    """Return integers * 2^exponent / denominator, rounded to odd where a float64 cannot hold it."""
    shift = 0 if denominator == 1 else 128  # every nearest float64 is then an integer
    shifted = numerators << shift
    nearest = np.asarray(shifted / denominator, np.float64)
    error = np.sign(shifted - to_int(nearest) * denominator)
    return np.ldexp(rounded_to_odd(nearest, error.astype(np.float64)), exponent - shift)


def bounded_tolerance(
    a: MXArray, b: MXArray, error_class: str, out_dtype: str = "float32"
) -> NDArray[np.float64]:
    """Return how far a `bounded` result may lie from the real sum, float64 [M, N]; Inf where anything goes.

    Only products of finite elements count: a product with NaN or Inf decides the result by itself.

    Args:
        a: [M, K].
        b: [N, K].
        error_class: `fp32` (eps = K * 2^-24, or (K + 2) * 2^-24 with a prescale) or `fp8-hopper` (eps = 2^-6).
        out_dtype: `bfloat16` adds one rounding to nearest.

    Implements: gemm.bounded, gemm.prescale
    """
    decoded = [np.abs(values(q)) for q in (a, b)]
    scales = [np.nan_to_num(scale_value(q.scales, q.format.scale), nan=0.0) for q in (a, b)]
    scales = [np.repeat(scale, q.format.k, axis=1) for scale, q in zip(scales, (a, b), strict=True)]
    finite = [np.where(np.isfinite(v), v, 0.0) * scale for v, scale in zip(decoded, scales, strict=True)]
    total = finite[0] @ finite[1].T
    prescale = prescale_product(a, b)
    total /= float(prescale)
    scaled = len(_tensor_scales(a, b))
    t_a, t_b = (1.0 if q.tensor_scale is None else float(np.asarray(q.tensor_scale)[0]) for q in (a, b))
    # What a scale of a tensor multiplies may have overflowed or underflowed before.
    largest, least = total * max(1.0, t_a, t_a * t_b), a.length * 2.0**-149 * max(1.0, t_a, t_b, t_a * t_b)
    least += 2.0**-148 * max(1.0, t_b) if scaled else 0.0
    total *= t_a * t_b
    # Undoing the prescale errs twice more, in the multiply and in its constant, and each scale of a tensor once.
    eps = (a.length + 2 * (prescale != 1) + scaled) * 2.0**-24 if error_class == "fp32" else 2.0**-6
    bound = eps * total + least
    if out_dtype == "bfloat16":
        bound = bound + (total + bound) * 2.0**-8 + 2.0**-133
    return np.where(largest < 2.0**127, bound, np.inf)
