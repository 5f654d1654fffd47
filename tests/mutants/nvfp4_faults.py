"""Faults of NVFP4, whose scales have a mantissa and stand under a scale of the tensor, and of MXINT8."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from mutants.mutant import Mutant
from mutants.staged import Staged, decoding, staged
from mxref import GemmProfile
from mxref.formats import MXINT8, NVFP4
from mxref.layouts.packed import unpack
from mxref.quantization import dequantize, plan_tensor_scale
from mxref.steps.quotient import Arithmetic, quotient, scale_code_of_quotient, tensor_scale
from mxref.steps.rounding import nearest_code
from mxref.steps.scale import magnitude_bits, scale_value

_NVFP4, _MXINT8 = (NVFP4.name,), (MXINT8.name,)
_SCALES = np.array(NVFP4.scale.values[: NVFP4.scale.max_code + 1])


def scale_ties_up(self, amax, spec):
    if spec.arithmetic is not Arithmetic.REAL:
        return Staged.scale(self, amax, spec)
    grid = np.array(spec.format.scale.values[: spec.format.scale.max_code + 1])
    real = amax.view(np.float32).astype(np.float64) / (
        spec.format.element.max_value * float(self.tensor.scale)
    )
    return np.searchsorted((grid[1:] + grid[:-1]) / 2, real, side="right").astype(np.uint8)


def twice_rounded(self, magnitude, scales):
    each = np.broadcast_to(scales[..., None], magnitude.shape)
    ordered = self.plan_now.spec.arithmetic is not Arithmetic.REAL
    if ordered or self.tensor.scale < 2.0**-100:  # whose inverse is infinite
        return Staged.scaled(self, magnitude, scales)
    scaled = quotient(magnitude, each, self.plan_now.format, self.tensor, Arithmetic.TORCHAO)
    return np.where(each == 0, 0, scaled)


def sixes_under_zero(self, magnitude, scales):
    scaled = Staged.scaled(self, magnitude, scales)
    if self.plan_now.spec.arithmetic is not Arithmetic.REAL:
        return scaled
    return np.where((scales[..., None] == 0) & (magnitude > 0), self.element.max_value, scaled)


def inverse_rounded_once(self, amax, spec):
    if spec.arithmetic is not Arithmetic.COMPRESSED_TENSORS or not 1e-30 < self.tensor.amax < 1e30:
        return Staged.scale(self, amax, spec)
    a = amax.view(np.float32)
    with np.errstate(over="ignore"):
        rounded = np.float32(2688) / self.tensor.amax * (a / np.float32(6))
    code = nearest_code(rounded.astype(np.float64), _SCALES)
    return np.where(code == 0, 0x20, code).astype(np.uint8)


def halves_to_even(self, amax, spec):
    scales = Staged.scale(self, amax, spec)
    if spec.arithmetic is not Arithmetic.GGML:
        return scales
    nearest = nearest_code((amax.view(np.float32) / np.float32(6)).astype(np.float64), _SCALES)
    return np.where((scales >= 8) & (scales < 0x77), nearest, scales)


def zeros_under_a_scale_of_zero(self, magnitude, scales):
    scaled = Staged.scaled(self, magnitude, scales)
    return np.where(scales[..., None] == 0, 0, scaled)


def four_at_equal_errors(self, magnitude, amax, six, spec):
    chosen = Staged.choose(self, magnitude, amax, six, spec)
    four = scale_code_of_quotient(amax.view(np.float32), spec.format, self.tensor, largest=4.0)
    exact = []
    for scales in (six, four):
        v = quotient(magnitude, np.broadcast_to(scales[..., None], magnitude.shape), spec.format, self.tensor)
        exact.append(np.isin(v, spec.format.element.magnitudes).all(axis=-1))
    return np.where(exact[0] & exact[1] & (spec.block.rows == 1), four, chosen)


def errors_of_saturated_left_out(self, magnitude, amax, six, spec):
    largest = np.float32(spec.format.element.max_value) * scale_value(six, spec.format.scale)
    clipped = np.minimum(magnitude, (largest * float(self.tensor.scale))[..., None]).astype(np.float32)
    return Staged.choose(self, clipped, amax, six, spec)


class LowestMade(Staged):
    """Clips to -128 ... 127."""

    def round(self, v, spec, random):
        self.saturated = v > self.element.max_value
        return super().round(v, spec, random)

    def sign(self, codes, negative):
        signed = super().sign(codes, negative)
        return np.where(negative & self.saturated, np.uint8(0x80), signed)


class NanBlocksLeftOut(Staged):
    """The largest magnitude of a tensor by a maximum that a NaN of the same block hides."""

    def _tensor_scale(self, x, plan, placement):
        if placement.amax is None:
            v = self.rows(self.widen(np.moveaxis(x, plan.axis, -1)), plan)
            amax = magnitude_bits(v).reshape(-1, plan.format.k).max(axis=-1)
            amax = amax[amax < 0x7F800000].max(initial=0).view(np.float32)
            placement = replace(placement, amax=np.array([amax]))
        return plan_tensor_scale(x, plan, placement)


class InverseRounded(Staged):
    """The scale of a tensor as the inverse of a rounded inverse."""

    def _tensor_scale(self, x, plan, placement):
        amax, scale = plan_tensor_scale(x, plan, placement)
        if placement.amax is None:
            return amax, scale
        return amax, np.array([tensor_scale(amax[0], plan.format, Arithmetic.TE).scale])


class TensorScaleLeftOut(Staged):
    """A GEMM that leaves the scale of B's tensor to its caller."""

    changed = True

    def _scaled_gemm(self, a, b, profile, out_dtype):
        if profile is GemmProfile.ORDERED and b.tensor_scale is not None:
            b = replace(b, tensor_scale=np.ones(1, np.float32))
        return super()._scaled_gemm(a, b, profile, out_dtype)


def no_subnormal_scales(q, dtype):
    scales = np.where(q.scales < 8, 0, q.scales).astype(np.uint8)
    return dequantize(replace(q, scales=scales), dtype)


def sign_and_magnitude(q, dtype):
    codes = unpack(q.codes, q.format.element)
    return dequantize(
        replace(q, codes=np.where(codes & 0x80, -(codes & 0x7F), codes).astype(np.uint8)), dtype
    )


NVFP4_MUTANTS = (
    Mutant("scale ties up", "scale.rule.nearest", "half a step added to the scale's bits before they are cut",
           staged(scale=scale_ties_up), first=False, formats=_NVFP4),
    Mutant("quotient rounded twice", "rounding.quotient", "torchao: x * ((1 / t) / s) in float32",
           staged(scaled=twice_rounded), formats=_NVFP4),
    Mutant("codes of 6 under a scale of 0", "scale.underflow", "Transformer Engine",
           staged(scaled=sixes_under_zero), formats=_NVFP4),
    Mutant("tensor's scale by its inverse", "scale.tensor", "Transformer Engine", InverseRounded, formats=_NVFP4),
    Mutant("NaN blocks outside of the tensor", "scale.tensor.amax", "a maximum of the blocks' maxima",
           NanBlocksLeftOut, formats=_NVFP4),
    Mutant("subnormal scales decoded as zero", "formats.scale", "a decoder that has no subnormals",
           decoding(no_subnormal_scales), ("dequantize",), formats=_NVFP4),
    Mutant("tensor's scale left out of the GEMM", "gemm.tensor_scale", "a kernel of the blocks alone",
           TensorScaleLeftOut, ("gemm",), formats=_NVFP4),
    Mutant("an inverse rounded once", "scale.arithmetic", "2688 / amax in one division for compressed-tensors",
           staged(scale=inverse_rounded_once), formats=_NVFP4),
    Mutant("ggml's scales to even", "scale.arithmetic", "the cast of the hardware in place of ggml's own",
           staged(scale=halves_to_even), formats=_NVFP4),
    Mutant("an order's zero scale without its sixes", "scale.arithmetic", "the specification's rule under every order",
           staged(scaled=zeros_under_a_scale_of_zero), formats=_NVFP4),
    Mutant("four at equal errors", "scale.four_over_six", "a comparison by <= in place of <",
           staged(choose=four_at_equal_errors), formats=_NVFP4),
    Mutant("errors of saturated elements left out", "scale.four_over_six", "magnitudes clipped first",
           staged(choose=errors_of_saturated_left_out), formats=_NVFP4),
    Mutant("-128 made", "rounding.saturate", "a clip to all of INT8", LowestMade, formats=_MXINT8),
    Mutant("INT8 as sign and magnitude", "formats.int8", "a decoder of floating-point elements",
           decoding(sign_and_magnitude), ("dequantize",), formats=_MXINT8),
)  # fmt: skip
