"""Faults of dequantization and of the scaled GEMM."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import ml_dtypes
import numpy as np

from mutants.mutant import Mutant
from mutants.staged import VALUES, ExactBy, Staged, decoding, staged
from mxref import GemmProfile
from mxref.block_dots import block_dots
from mxref.formats import E2M1
from mxref.layouts.packed import pack, unpack
from mxref.quantization import dequantize
from mxref.reference import ReferenceBackend


def by_scale(change: Callable[[Any, Any], Any]):
    """Values as elements times factors, the factors changed."""

    def decode(q, dtype):
        factors = np.ldexp(1.0, q.scales.astype(int) - 127)
        factors = np.repeat(change(q.scales, np.where(q.scales == 255, np.nan, factors)), 32, axis=-1)
        values = VALUES[unpack(q.codes, E2M1)].astype(np.float64) * factors
        values = np.moveaxis(values[..., : q.shape[q.axis]], -1, q.axis)
        kind = {"float64": np.float64, "float32": np.float32, "bfloat16": ml_dtypes.bfloat16}[dtype]
        return values.astype(np.float32).astype(kind) if dtype == "bfloat16" else values.astype(kind)

    return decode


def clamped_to_largest(q, dtype):
    values = dequantize(q, dtype)
    wide = values.astype(np.float64)
    return np.where(np.isinf(wide), np.copysign(float(ml_dtypes.finfo(values.dtype).max), wide), wide).astype(
        values.dtype
    )


def unsplit(q, dtype):
    nibbles = unpack(q.codes, E2M1).reshape(*q.codes.shape[:-1], -1, 16, 2)
    codes = np.concatenate([nibbles[..., 0], nibbles[..., 1]], axis=-1).reshape(*q.codes.shape[:-1], -1)
    return dequantize(replace(q, codes=pack(codes, E2M1)), dtype)


def undoes_prescale(q, dtype):
    values = dequantize(q, dtype)
    return (values.astype(np.float64) * (4 / 3)).astype(values.dtype) if q.prescale else values


def dequantized(self, a, b):
    wide = [dequantize(replace(q, shape=(len(q.scales), q.length), axis=1), "float32") for q in (a, b)]
    return wide[0] @ wide[1].T


def descending(self, a, b):
    acc = np.zeros((len(a.scales), len(b.scales)), np.float32)
    for dot in reversed(list(block_dots(a, b))):
        acc = self.add(acc, dot.approximate())
    return acc


def float64_accumulation(self, a, b):
    acc = np.zeros((len(a.scales), len(b.scales)))
    for dot in block_dots(a, b):
        acc = acc + dot.approximate()
    return acc.astype(np.float32)


def term_in_float32(self, acc, term):
    return acc + term.astype(np.float32)


def float32_terms_flushed(self, acc, term):
    narrow = Staged.add(self, acc, term)
    return np.where(np.abs(narrow) < 2.0**-126, np.copysign(np.float32(0), narrow), narrow)


def undo_before(self, a, b):
    factor = (np.float32(1), np.float32(4 / 3), np.float32(16 / 9))[int(a.prescale) + int(b.prescale)]
    acc = np.zeros((len(a.scales), len(b.scales)), np.float32)
    for dot in block_dots(a, b):
        acc = self.add(acc, dot.approximate() * float(factor))
    return acc


def inf_minus_inf(self, acc, term):
    terms = term.astype(np.float32)
    return np.where(
        np.isinf(acc) & np.isinf(terms) & (np.sign(acc) != np.sign(terms)), np.nan, self_add(acc, term)
    )


def self_add(acc, term):
    return (acc.astype(np.float64) + term).astype(np.float32)


def truncated(self, acc, out_dtype):
    if out_dtype == "float32":
        return acc
    return (acc.view(np.uint32) >> 16).astype(np.uint16).view(ml_dtypes.bfloat16)


def no_nan_rows(self, a, b):
    return np.zeros((len(a.scales), len(b.scales)), np.bool_)


def nan_only_if_nonzero(self, a, b):
    live = [(q.scales == 255) & (q.codes.reshape(*q.scales.shape, 16) & 0x77).any(axis=-1) for q in (a, b)]
    return live[0].any(axis=1)[:, None] | live[1].any(axis=1)


def rounded_twice(self, a, b, out_dtype):
    wide = ReferenceBackend._scaled_gemm(self, a, b, GemmProfile.EXACT, "float32")
    return wide if out_dtype == "float32" else wide.astype(ml_dtypes.bfloat16)


def exact_plus_zero(self, a, b, out_dtype):
    return ReferenceBackend._scaled_gemm(self, a, b, GemmProfile.EXACT, out_dtype) + np.float32(0).astype(
        "float32" if out_dtype == "float32" else ml_dtypes.bfloat16
    )


def exact_by_ordered(self, a, b, out_dtype):
    return ReferenceBackend._scaled_gemm(self, a, b, GemmProfile.ORDERED, out_dtype)


class Loose(Staged):
    """`bounded` from operands rounded to three mantissa bits: beyond the error class that it declares."""

    def _scaled_gemm(self, a, b, profile, out_dtype):
        out = super()._scaled_gemm(a, b, profile, out_dtype)
        if profile is GemmProfile.BOUNDED:
            with np.errstate(all="ignore"):
                out = (out.astype(np.float64) * (1 + 2.0**-7)).astype(out.dtype)
        return out


class BoundedWithoutNaN(Staged):
    """NaN rows of `bounded` as zeros: a fast GEMM whose scales are exponents alone, beside a right slow one."""

    def _scaled_gemm(self, a, b, profile, out_dtype):
        out = super()._scaled_gemm(a, b, profile, out_dtype)
        return np.where(np.isnan(out), out.dtype.type(0), out) if profile is GemmProfile.BOUNDED else out


class GemmIgnoresAxis(Staged):
    def _scaled_gemm(self, a, b, profile, out_dtype):
        out = super()._scaled_gemm(a, b, profile, out_dtype)
        return out[::-1] if a.axis == 0 and b.axis == 1 else out


STORED_MUTANTS = (
    Mutant("byte 0 is zero", "formats.e8m0", "Quark, triton_kernels before 11624, vLLM's helper: scale << 23",
           decoding(by_scale(lambda s, f: np.where(s == 0, 0, f))), ("dequantize",)),
    Mutant("byte 254 is Inf", "formats.e8m0", "an exponent field of 255",
           decoding(by_scale(lambda s, f: np.where(s == 254, np.inf, f))), ("dequantize",)),
    Mutant("byte 255 is Inf", "dequantize.nan", "HF transformers, ggml, compressed-tensors",
           decoding(by_scale(lambda s, f: np.where(s == 255, np.inf, f))), ("dequantize",)),
    Mutant("bias 125 decoded", "formats.e8m0", "compressed-tensors until PR 538",
           decoding(by_scale(lambda s, f: f * 4)), ("dequantize",), False),
    Mutant("overflow clamped", "dequantize.overflow", "triton_kernels clamps to the largest float",
           decoding(clamped_to_largest), ("dequantize",)),
    Mutant("split nibbles decoded", "packing.nibbles", "imp 567: ggml's order, fluent garbage",
           decoding(unsplit), ("dequantize",)),
    Mutant("prescale undone", "dequantize.value", "4/3 folded into the values",
           decoding(undoes_prescale), ("dequantize",)),
    Mutant("dequantize, then multiply", "gemm.block_dot", "the Triton interpreter: NaN where the answer is 29",
           staged(accumulate=dequantized), ("gemm",), False),
    Mutant("blocks descending", "gemm.ordered", "a loop from the far end", staged(accumulate=descending), ("gemm",)),
    Mutant("float64 accumulation", "gemm.ordered", "accumulation in a wider type",
           staged(accumulate=float64_accumulation), ("gemm",)),
    Mutant("terms in float32", "gemm.ordered", "acc + fl32(term): Inf - Inf",
           staged(add=term_in_float32), ("gemm",), False),
    Mutant("accumulator flushed", "gemm.ordered", "FTZ in the accumulator",
           staged(add=float32_terms_flushed), ("gemm",), False),
    Mutant("Inf becomes NaN", "gemm.ordered", "Inf - Inf in the accumulator", staged(add=inf_minus_inf), ("gemm",)),
    Mutant("NaN rows dropped", "gemm.nan", "scale bytes not tested for 255", staged(nan_rows=no_nan_rows), ("gemm",)),
    Mutant("NaN times zero", "gemm.nan", "zero blocks skipped before the NaN is seen",
           staged(nan_rows=nan_only_if_nonzero), ("gemm",)),
    Mutant("bfloat16 output truncated", "gemm.output", "the Triton interpreter's stores",
           staged(narrow=truncated), ("gemm",)),
    Mutant("prescale not undone", "gemm.prescale", "a factor that is nowhere",
           staged(undo=lambda self, p: np.float32(1)), ("gemm",)),
    Mutant("prescale undone twice", "gemm.prescale", "fl32(4/3) times itself",
           staged(undo=lambda self, p: np.float32(4 / 3) ** p), ("gemm",)),
    Mutant("prescale undone before", "gemm.prescale", "each term times 4/3",
           staged(accumulate=undo_before, undo=lambda self, p: np.float32(1)), ("gemm",)),
    Mutant("exact rounded twice", "gemm.exact", "through float32 to bfloat16",
           lambda: ExactBy(rounded_twice), ("gemm",)),
    Mutant("exact underflow to +0", "gemm.exact", "the sign lost in a final addition",
           lambda: ExactBy(exact_plus_zero), ("gemm",)),
    Mutant("exact is ordered", "gemm.exact", "a capability that is declared and wrong",
           lambda: ExactBy(exact_by_ordered), ("gemm",), False),
    Mutant("bounded too loose", "gemm.bounded", "an error class that was not measured", Loose, ("gemm",), False),
    Mutant("bounded without NaN", "gemm.nan", "byte 255 as 2^128, in a GEMM that has no bits to be held to",
           BoundedWithoutNaN, ("gemm",)),
    Mutant("transposed operand", "gemm.operands", "rows taken in storage order of another axis",
           GemmIgnoresAxis, ("gemm",)),
)  # fmt: skip
