"""Quantization to a block format and back: signs and Hadamard, shared scale, rounding, packing, in that order.

This order is part of the specification. The arithmetic of each step is in `mxref.steps`, and `plan` decides before the
first step what each one does.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from mxref.arguments import as_spec, check_bool, check_mxarray, check_name, check_placement
from mxref.arrays import as_array
from mxref.dialects import Dialect
from mxref.errors import DtypeError, RecipeError, ShapeError, UnsupportedError
from mxref.formats import CANONICAL_NAN, BlockShape, ElementFormat, Negatives
from mxref.layouts.packed import pack, unpack
from mxref.mxarray import MXArray
from mxref.placement import Placement
from mxref.plan import QuantPlan, check_input, plan_quantize
from mxref.recipe import OperandSpec
from mxref.steps.four_over_six import FourOverSix, choose, lower_largest
from mxref.steps.hadamard import hadamard
from mxref.steps.quotient import (
    NO_TENSOR_SCALE,
    Arithmetic,
    TensorScale,
    quotient,
    scale_code_of_quotient,
    tensor_scale,
)
from mxref.steps.random import random_integers
from mxref.steps.rounding import apply_prescale, round_magnitude
from mxref.steps.scale import (
    INFINITY_BITS,
    magnitude_bits,
    scale_code,
    scale_exponent,
    scale_value,
)


def quantize(
    x: Any,
    spec: OperandSpec | Dialect | str | None = None,
    *,
    axis: int = -1,
    placement: Placement = Placement(),
    pad: bool = False,
) -> MXArray:
    """Return `x` in the block format of a spec, MXFP4 by default.

    Args:
        x: float32, bfloat16 or float16, any shape and strides; a NumPy array or a PyTorch tensor on the CPU.
        spec: the treatment, a dialect, or a dialect's name; default the dialect `ocp`.
        axis: the block axis, whose length is a multiple of k (32) and of the Hadamard size.
        placement: the random stream, needed for SR and random signs, and where `x` lies in the global logical
            tensor that random bits are counted in.
        pad: append +0 along the block axis up to a multiple of lcm(k, Hadamard size).

    Raises:
        DtypeError: another input type.
        ShapeError: lengths, axis or origin that do not fit.
        NonfiniteError: NaN or Inf under `nonfinite = "raise"`.
        RecipeError: a format without blocks, or SR or random signs without the random stream of an operand.
        UnsupportedError: a step in the memory of a device.

    Source: OCP MX v1.0, section 6.3.

    Implements: quantize.order, quantize.strides
    """
    x = as_array(x)
    check_input(x)
    if check_placement("placement", placement).step is not None:
        raise UnsupportedError(
            "mxref.quantize runs on the host and takes no placement.step, which kernels read on their device; give the "
            "number to the stream, as in Stream(seed, step=3)"
        )
    plan = plan_quantize(x.shape, as_spec(spec), axis, placement, check_bool("pad", pad))
    if plan.format.tensor_scale:
        amax, scale = plan_tensor_scale(x, plan, placement)
        plan = replace(plan, tensor_amax=amax, tensor_scale=scale)
    return plan.array(*quantize_planned(x, plan))


def plan_tensor_scale(
    x: NDArray[Any], plan: QuantPlan, placement: Placement
) -> tuple[NDArray[np.float32], NDArray[np.float32]]:
    """Return a tensor's largest finite magnitude and its scale, float32 [1] each.

    The magnitude is the placement's amax, or that of the array itself if it is the whole tensor.

    Raises:
        ShapeError: the array is a part, and the placement has no amax.
        RecipeError: an amax that is no finite magnitude.

    Implements: scale.tensor, scale.tensor.amax, scale.four_over_six
    """
    if placement.amax is not None:
        amax = np.asarray(placement.amax)[0]
        require_magnitude(amax)
    else:
        require_whole(plan)
        bits = magnitude_bits(_transformed(x, plan))
        amax = bits[bits < INFINITY_BITS].max(initial=0).view(np.float32)
    # A block that takes amax / 4 has a scale 1.5 times as large, which S must leave room for.
    top = None if plan.spec.four_over_six is FourOverSix.OFF else 2.0**plan.format.scale.max_exponent
    found = tensor_scale(np.float32(amax), plan.format, plan.spec.arithmetic, top)
    return np.array([found.amax]), np.array([found.scale])


def require_magnitude(amax: Any) -> None:
    """Raise RecipeError unless the amax of a placement is a finite magnitude."""
    if not 0 <= amax < np.inf:
        raise RecipeError(
            f"placement: amax = {amax} is no finite magnitude; give that of the finite elements"
        )


def require_whole(plan: QuantPlan) -> None:
    """Raise ShapeError if a plan is of a part of a tensor, whose own amax is not that of the tensor."""
    if plan.global_shape != plan.shape:
        raise ShapeError(
            f"{plan.format.title} has a scale of the whole tensor, and this is a part of shape {plan.shape} of "
            f"{plan.global_shape}: give placement.amax, the largest finite magnitude of the whole after its transform"
        )


def _transformed(x: NDArray[Any], plan: QuantPlan) -> NDArray[np.float32]:
    """Return the input as float32 with the block axis last, padded, with its signs and transform: [rows..., K].

    Implements: quantize.order, quantize.axis, quantize.padding
    """
    v = np.moveaxis(x, plan.axis, -1).astype(np.float32)  # [rows..., L]
    if plan.length > v.shape[-1]:
        v = np.pad(v, [(0, 0)] * (v.ndim - 1) + [(0, plan.length - v.shape[-1])])
    return hadamard(v, plan.rotation) if plan.rotation else v


def quantize_planned(x: NDArray[Any], plan: QuantPlan) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return packed codes [rows..., K * bits / 8] and scale codes [rows..., K / k] of a planned quantization.

    Implements: quantize.order, scale.zero, scale.nonfinite
    """
    spec, element, k = plan.spec, plan.format.element, plan.format.k
    v = _transformed(x, plan)
    bits = magnitude_bits(v)
    amax = _block_amax(bits, spec.block)  # [rows..., K/k]
    nonfinite = amax >= INFINITY_BITS
    spoiled = np.repeat(nonfinite, k, axis=-1)  # [rows..., K]
    magnitude = np.where(spoiled, np.uint32(0), bits).view(np.float32)
    scales = _scale_codes(np.where(nonfinite, np.uint32(0), amax), magnitude, plan)
    if spec.arithmetic is Arithmetic.REAL:  # an implementation's order of operations decides for itself
        scales[amax == 0] = spec.zero_scale
    scaled = _scaled(magnitude, scales, plan)
    random = None
    if plan.stream is not None:
        integers = random_integers(
            plan.global_rows(), plan.first, plan.length, plan.global_length, plan.stream, spec.sr_bits
        )
        random = integers.reshape(v.shape)
    codes = _with_sign(round_magnitude(scaled, spec.rounding, element, random, spec.sr_bits), v, element)
    codes[spoiled] = 0
    scales[nonfinite] = plan.format.scale.nan_code
    return pack(codes, element), scales


def _scale_codes(
    amax_bits: NDArray[np.uint32], magnitude: NDArray[np.float32], plan: QuantPlan
) -> NDArray[np.uint8]:
    """Return the scale code of each block from the bits of its finite amax, and from its magnitudes where they choose.

    Implements: scale.four_over_six
    """
    spec, made = plan.spec, plan.format
    if made.scale.powers:
        return scale_code(amax_bits, spec.scale_rule, made.element, made.scale)
    amax, tensor = amax_bits.view(np.float32), _tensor(plan)
    six = scale_code_of_quotient(amax, made, tensor, spec.arithmetic)
    if spec.four_over_six is FourOverSix.OFF:
        return six
    four = scale_code_of_quotient(amax, made, tensor, largest=lower_largest(made))
    return choose(magnitude, six, four, made, tensor, spec.four_over_six, spec.block.rows)


def _tensor(plan: QuantPlan) -> TensorScale:
    """Return the tensor's amax and scale."""
    return (
        NO_TENSOR_SCALE
        if plan.tensor_scale is None
        else TensorScale(plan.tensor_amax[0], plan.tensor_scale[0])
    )


def _scaled(magnitude: NDArray[np.float32], scales: NDArray[np.uint8], plan: QuantPlan) -> NDArray[Any]:
    """Return magnitudes over their scale, [rows..., K].

    Implements: rounding.scaled, rounding.prescale
    """
    scales = np.repeat(scales, plan.format.k, axis=-1)
    if not plan.format.scale.powers:
        return quotient(magnitude, scales, plan.format, _tensor(plan), plan.spec.arithmetic)
    with np.errstate(under="ignore"):
        exponent = scale_exponent(scales, plan.format.scale)
        scaled = np.ldexp(magnitude.astype(np.float64), -exponent).astype(np.float32)
        return apply_prescale(scaled, plan.format.element) if plan.spec.prescale else scaled


def _with_sign(codes: NDArray[np.uint8], v: NDArray[np.float32], element: ElementFormat) -> NDArray[np.uint8]:
    """Return magnitude codes with the signs of `v`; in two's complement there is no -0.

    Implements: rounding.sign
    """
    if element.negatives is Negatives.TWOS_COMPLEMENT:
        return np.where(np.signbit(v), -codes, codes)
    return codes | np.where(np.signbit(v), np.uint8(element.sign), np.uint8(0))


def _block_amax(bits: NDArray[np.uint32], block: BlockShape) -> NDArray[np.uint32]:
    """Return the largest magnitude bits per block, repeated over the rows of a tile: uint32 [..., K / k].

    Bits order as magnitudes do, and put every NaN above Inf, so an integer maximum misses neither.

    Implements: scale.amax, scale.block.row, scale.block.tile
    """
    k, rows = block.columns, block.rows
    amax: NDArray[np.uint32] = bits.reshape(*bits.shape[:-1], bits.shape[-1] // k, k).max(axis=-1)
    if block.is_tile:
        tiles = amax.reshape(*amax.shape[:-2], amax.shape[-2] // rows, rows, amax.shape[-1]).max(axis=-2)
        amax = np.repeat(tiles, rows, axis=-2)
    return amax


def dequantize(q: MXArray, dtype: str = "float32") -> NDArray[Any]:
    """Return the values of an MXArray, in the axis order and shape of what was quantized.

    A Hadamard transform and a prescale are not undone: the values are those that a GEMM multiplies.

    Args:
        q: the array.
        dtype: `float64` (exact), `float32` or `bfloat16` (exact but for overflow to Inf and underflow below the
            type's smallest step; for MXFP4 only |P| >= 4 at scale code 253 and |P| >= 2 at 254). Under a tensor's
            scale float32 is the real product rounded once, and bfloat16 that float32 rounded again. NaN blocks
            and NaN codes give the canonical NaN.

    Raises:
        DtypeError: another type; float16 cannot hold the range.

    Implements: dequantize.value, dequantize.overflow, dequantize.nan, formats.mxfp4, conventions.nan
    """
    q = check_mxarray("dequantize", q)
    if check_name("dtype", dtype) not in ("float64", "float32", "bfloat16"):
        raise DtypeError(f"dequantize gives float64, float32 or bfloat16, not {dtype}")
    scale = np.repeat(scale_value(q.scales, q.format.scale), q.format.k, axis=-1)
    if q.tensor_scale is not None:
        scale = scale * float(q.tensor_scale[0])
    elements = np.array(q.format.element.values)[unpack(q.codes, q.format.element)]  # [rows..., K]
    with np.errstate(invalid="ignore"):  # a scale may be 0, and an infinity stays one
        values = np.where(np.isinf(elements) & ~np.isnan(scale), elements, elements * scale)
    values = np.moveaxis(values[..., : q.shape[q.axis]], -1, q.axis)
    if dtype == "float64":
        return values
    with np.errstate(over="ignore", invalid="ignore"):
        narrow = values.astype(np.float32)
    narrow.view(np.uint32)[np.isnan(narrow)] = CANONICAL_NAN
    return narrow if dtype == "float32" else narrow.astype(ml_dtypes.bfloat16)
