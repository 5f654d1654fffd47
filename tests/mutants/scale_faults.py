"""Faults of shared scales, and of blocks that hold NaN or Inf."""

from __future__ import annotations

import ml_dtypes
import numpy as np

from mutants.mutant import Mutant
from mutants.staged import INF, Staged, staged
from mxref import Rounding, ScaleRule
from mxref.formats import E2M1
from mxref.steps.rounding import round_magnitude
from mxref.steps.scale import magnitude_bits, scale_code


def log2_floor(self, amax, spec):
    a = amax.astype(np.uint32).view(np.float32)
    with np.errstate(divide="ignore"):
        e = np.floor(np.log2(a)).clip(-149, 127)
    bump = scale_code(amax, spec.scale_rule, E2M1).astype(int) - scale_code(amax, ScaleRule.FLOOR, E2M1)
    return (e - 2 + bump).clip(-127, 127).astype(int) + 127


def log2_in_bfloat16(self, amax, spec):
    if self.dtype_now != ml_dtypes.bfloat16:
        return scale_code(amax, spec.scale_rule, E2M1)
    a = amax.astype(np.uint32).view(np.float32).astype(np.float64)
    with np.errstate(divide="ignore"):
        e = np.floor(np.log2(a).astype(ml_dtypes.bfloat16).astype(np.float64)).clip(-149, 127)
    bump = scale_code(amax, spec.scale_rule, E2M1).astype(int) - scale_code(amax, ScaleRule.FLOOR, E2M1)
    return (e - 2 + bump).clip(-127, 127).astype(int) + 127


def turn(rule: ScaleRule, above: int):
    """The scale rule with another mantissa at which it turns."""

    def scale(self, amax, spec):
        if spec.scale_rule is not rule:
            return scale_code(amax, spec.scale_rule, E2M1)
        u = amax.astype(np.int64)
        return np.clip((u >> 23) - 129 + ((u & 0x7FFFFF) > above), -127, 127) + 127

    return scale


def even_to_nan(self, amax, spec):
    scales = scale_code(amax, spec.scale_rule, E2M1).astype(int)
    return np.where((spec.scale_rule is ScaleRule.EVEN) & (amax >= 0x7F600000), 255, scales)


def wrapped(self, amax, spec):
    u = amax.astype(np.int64)
    bump = scale_code(amax, spec.scale_rule, E2M1).astype(int) - scale_code(amax, ScaleRule.FLOOR, E2M1)
    return np.where(amax > 0, (u >> 23) - 2 + bump, 0) & 255


def applied_scale_clamped(self, magnitude, scales):
    return Staged.scaled(self, magnitude, np.maximum(scales, 1))


def flush_inputs(self, x):
    wide = x.astype(np.float32)
    return np.where(np.abs(wide) < 2.0**-126, np.copysign(np.float32(0), wide), wide)


def signed_max(self, bits, v, spec):
    amax = Staged.amax(self, bits, v, spec)
    largest = v.reshape(bits.shape).max(axis=-1)
    negative = (largest <= 0) | np.isnan(largest)
    return (
        np.where(negative, amax, np.maximum(magnitude_bits(largest), 1)) if not spec.block.is_tile else amax
    )


def amax_of_64(self, bits, v, spec):
    amax = Staged.amax(self, bits, v, spec)
    pairs = amax[:, : amax.shape[1] // 2 * 2].reshape(len(amax), -1, 2).max(axis=-1)
    return np.concatenate([np.repeat(pairs, 2, axis=1), amax[:, pairs.shape[1] * 2 :]], axis=1)


def tile_as_row(self, bits, v, spec):
    return bits.max(axis=-1)


def tile_nan_per_row(self, amax, bits, spec):
    return bits.max(axis=-1) >= INF


def bias_125(self, amax, spec):
    return np.maximum(scale_code(amax, spec.scale_rule, E2M1).astype(int) - 2, 0)


def prescale_in_the_scale(self, amax, spec):
    return scale_code(amax, ScaleRule.RCEIL if spec.prescale else spec.scale_rule, E2M1)


def nan_to_zero(self, codes, scales, spoiled, v):
    finite = np.where(np.isfinite(v), v, 0)
    amax = magnitude_bits(np.ascontiguousarray(finite, np.float32)).max(axis=-1)
    byte = scale_code(amax, ScaleRule.FLOOR, E2M1)
    again = round_magnitude(self.scaled(np.abs(finite).astype(np.float32), byte), Rounding.RNE, E2M1)
    codes = np.where(spoiled[..., None], again | np.signbit(v).astype(np.uint8) << 3, codes)
    return codes.astype(np.uint8), np.where(spoiled, byte, scales).astype(np.uint8)


def nan_keeps_the_rest(self, codes, scales, spoiled, v):
    kept, _ = nan_to_zero(self, codes, scales, spoiled, v)
    return kept, np.where(spoiled, 255, scales).astype(np.uint8)


def nan_block_zeroed(self, codes, scales, spoiled, v):
    return np.where(spoiled[..., None], 0, codes).astype(np.uint8), np.where(spoiled, 0, scales).astype(
        np.uint8
    )


def inf_only(byte: int, code: int):
    """Blocks with Inf and no NaN get a finite scale and the given code for Inf."""

    def nan(self, codes, scales, spoiled, v):
        codes, scales = Staged.nan(self, codes, scales, spoiled, v)
        infinite = spoiled & ~np.isnan(v).any(axis=-1)
        return (
            np.where(infinite[..., None], np.where(np.isinf(v), code, 0), codes).astype(np.uint8),
            np.where(infinite, byte, scales).astype(np.uint8),
        )

    return nan


SCALE_MUTANTS = (
    Mutant("log2 in float32", "scale.rule.floor", "microxcaling, ggml: up to 44 floats below each power of two",
           staged(scale=log2_floor)),
    Mutant("log2 in bfloat16", "conventions.inputs", "microxcaling and Quark on bfloat16: 6,850 of 32,639 values",
           staged(scale=log2_in_bfloat16)),
    Mutant("EVEN at 1.5", "scale.rule.even", "rounding up on the mantissa bit above the right one",
           staged(scale=turn(ScaleRule.EVEN, 0x3FFFFF))),
    Mutant("EVEN past its turn", "scale.rule.even", "compressed-tensors and vLLM in the input type",
           staged(scale=turn(ScaleRule.EVEN, 0x600000))),
    Mutant("EVEN to NaN", "scale.rule.even", "torchao main from 1.75 * 2^127 on", staged(scale=even_to_nan)),
    Mutant("RCEIL bumps at 1.5", "scale.rule.rceil", "reciprocal of 6 rounded up (flashinfer's approximate one)",
           staged(scale=turn(ScaleRule.RCEIL, 0x3FFFFF))),
    Mutant("RCEIL one too late", "scale.rule.rceil", "the same reciprocal rounded down",
           staged(scale=turn(ScaleRule.RCEIL, 0x400001))),
    Mutant("CEIL bumps powers of two", "scale.rule.ceil", "TransformerEngine, ceil(log2(x)) + 1 idiom",
           staged(scale=turn(ScaleRule.CEIL, -1))),
    Mutant("FLOOR by rounding", "scale.rule.floor", "exponent of amax rounded to nearest",
           staged(scale=turn(ScaleRule.FLOOR, 0x400000))),
    Mutant("threshold without its bound", "scale.rule.threshold", ">= taken as >",
           staged(scale=turn(ScaleRule(">=1.75"), 0x600000))),
    Mutant("bias 125", "scale.rule.floor", "compressed-tensors until PR 538",
           staged(scale=bias_125), first=False),
    Mutant("negative exponents wrap", "scale.clamp", "ggml and aiter's Triton kernel: uint8 of a negative float",
           staged(scale=wrapped)),
    Mutant("applied scale clamped", "rounding.scaled", "torchao 0.18: byte 0 stored, 2^-126 applied",
           staged(scaled=applied_scale_clamped)),
    Mutant("subnormals flushed", "scale.clamp", "FTZ under torch.compile, CUDA fast math",
           staged(widen=flush_inputs), first=False),
    Mutant("signed maximum", "scale.amax", "max instead of absolute max", staged(amax=signed_max)),
    Mutant("blocks of 64", "scale.block.row", "group size of another format", staged(amax=amax_of_64)),
    Mutant("tile amax by row", "scale.block.tile", "1x32 kernels reused for weights", staged(amax=tile_as_row)),
    Mutant("tile NaN by row", "scale.block.tile", "NaN policy applied before the tile's reduction",
           staged(spoiled=tile_nan_per_row)),
    Mutant("zero byte 127", "scale.zero", "flashinfer's reference stores 127 where its kernel stores 0",
           staged(zero=lambda self, spec: 127)),
    Mutant("zero byte swapped", "scale.zero", "the policies of two dialects exchanged",
           staged(zero=lambda self, spec: 127 - spec.zero_scale)),
    Mutant("NaN to zero", "scale.nonfinite", "ggml, gguf-py", staged(nan=nan_to_zero)),
    Mutant("NaN keeps the rest", "scale.nonfinite", "torchao: byte 255, codes kept", staged(nan=nan_keeps_the_rest)),
    Mutant("NaN block zeroed", "scale.nonfinite", "triton_kernels ROUND_UP: the pattern wraps to scale 0",
           staged(nan=nan_block_zeroed)),
    Mutant("Inf to a negative code", "scale.nonfinite", "triton_kernels ROUND_UP: code f",
           staged(nan=inf_only(255, 15))),
    Mutant("Inf to 6", "scale.nonfinite", "torchao 0.18, gfloat: byte 254, code 7", staged(nan=inf_only(254, 7))),
    Mutant("prescale in the scale", "scale.rule.floor", "FP-Quant: the factor goes into the scale",
           staged(scale=prescale_in_the_scale), first=False),
)  # fmt: skip
