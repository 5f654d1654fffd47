"""Quantization to a block format and back: signs and Hadamard, shared scale, rounding, packing, in that order.

This order is part of the specification. The arithmetic of each step is in `mxref.steps`, and `plan` decides before the
first step what each one does.
"""

from __future__ import annotations

from typing import Any

import ml_dtypes
import numpy as np
from numpy.typing import NDArray

from mxref.arguments import as_spec, check_bool, check_mxarray, check_name, check_placement
from mxref.arrays import as_array
from mxref.dialects import Dialect
from mxref.errors import DtypeError, UnsupportedError
from mxref.formats import CANONICAL_NAN, BlockShape
from mxref.layouts.packed import pack, unpack
from mxref.mxarray import MXArray
from mxref.placement import Placement
from mxref.plan import QuantPlan, check_input, plan_quantize
from mxref.recipe import OperandSpec
from mxref.steps.hadamard import hadamard
from mxref.steps.random import random_integers
from mxref.steps.rounding import apply_prescale, round_magnitude
from mxref.steps.scale import INFINITY_BITS, magnitude_bits, scale_code, scale_exponent, scale_value


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
    return plan.array(*quantize_planned(x, plan))


def quantize_planned(x: NDArray[Any], plan: QuantPlan) -> tuple[NDArray[np.uint8], NDArray[np.uint8]]:
    """Return packed codes [rows..., K * bits / 8] and scale codes [rows..., K / k] of a planned quantization.

    Implements: quantize.order, quantize.axis, quantize.padding, scale.zero, scale.nonfinite, rounding.scaled,
    rounding.sign
    """
    spec, element, k = plan.spec, plan.format.element, plan.format.k
    v = np.moveaxis(x, plan.axis, -1).astype(np.float32)  # [rows..., L]
    if plan.length > v.shape[-1]:
        v = np.pad(v, [(0, 0)] * (v.ndim - 1) + [(0, plan.length - v.shape[-1])])  # [rows..., K]
    if plan.rotation:
        v = hadamard(v, plan.rotation)
    bits = magnitude_bits(v)
    amax = _block_amax(bits, spec.block, k)  # [rows..., K/k]
    nonfinite = amax >= INFINITY_BITS
    scales = scale_code(np.where(nonfinite, np.uint32(0), amax), spec.scale_rule, element)
    scales[amax == 0] = spec.zero_scale

    exponent = np.repeat(scale_exponent(scales), k, axis=-1)  # [rows..., K]
    spoiled = np.repeat(nonfinite, k, axis=-1)
    magnitude = np.where(spoiled, np.uint32(0), bits).view(np.float32)
    with np.errstate(under="ignore"):
        scaled = np.ldexp(magnitude.astype(np.float64), -exponent).astype(np.float32)
        if spec.prescale:
            scaled = apply_prescale(scaled, element)
    random = None
    if plan.stream is not None:
        integers = random_integers(
            plan.global_rows(), plan.first, plan.length, plan.global_length, plan.stream, spec.sr_bits
        )
        random = integers.reshape(v.shape)
    codes = round_magnitude(scaled, spec.rounding, element, random, spec.sr_bits)
    codes |= np.where(np.signbit(v), np.uint8(element.sign), np.uint8(0))
    codes[spoiled] = 0
    scales[nonfinite] = plan.format.scale.nan_code
    return pack(codes, element), scales


def _block_amax(bits: NDArray[np.uint32], block: BlockShape, k: int) -> NDArray[np.uint32]:
    """Return the largest magnitude bits per block, repeated over the rows of a tile: uint32 [..., K / k].

    Bits order as magnitudes do, and put every NaN above Inf, so an integer maximum misses neither.

    Implements: scale.amax, scale.block.row, scale.block.tile
    """
    amax: NDArray[np.uint32] = bits.reshape(*bits.shape[:-1], bits.shape[-1] // k, k).max(axis=-1)
    if block is BlockShape.TILE:
        tiles = amax.reshape(*amax.shape[:-2], amax.shape[-2] // k, k, amax.shape[-1]).max(axis=-2)
        amax = np.repeat(tiles, k, axis=-2)
    return amax


def dequantize(q: MXArray, dtype: str = "float32") -> NDArray[Any]:
    """Return the values of an MXArray, in the axis order and shape of what was quantized.

    A Hadamard transform and a prescale are not undone: the values are those that a GEMM multiplies.

    Args:
        q: the array.
        dtype: `float64` (exact), `float32` or `bfloat16` (exact but for overflow to Inf and underflow below the
            type's smallest step; for MXFP4 only |P| >= 4 at scale code 253 and |P| >= 2 at 254). NaN blocks and
            NaN codes give the canonical NaN.

    Raises:
        DtypeError: another type; float16 cannot hold the range.

    Implements: dequantize.value, dequantize.overflow, dequantize.nan, formats.mxfp4, conventions.nan
    """
    q = check_mxarray("dequantize", q)
    if check_name("dtype", dtype) not in ("float64", "float32", "bfloat16"):
        raise DtypeError(f"dequantize gives float64, float32 or bfloat16, not {dtype}")
    scale = np.repeat(scale_value(q.scales), q.format.k, axis=-1)
    values = np.array(q.format.element.values)[unpack(q.codes, q.format.element)] * scale  # [rows..., K]
    values = np.moveaxis(values[..., : q.shape[q.axis]], -1, q.axis)
    if dtype == "float64":
        return values
    with np.errstate(over="ignore", invalid="ignore"):
        narrow = values.astype(np.float32)
    narrow.view(np.uint32)[np.isnan(narrow)] = CANONICAL_NAN
    return narrow if dtype == "float32" else narrow.astype(ml_dtypes.bfloat16)
