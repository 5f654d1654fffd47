"""Faults of MXFP4 kernels that were extended to MXFP8, and of other libraries' conversions to FP8."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from mutants.mutant import Mutant
from mutants.staged import Staged, decoding, staged
from mxref import GemmProfile, Rounding, ScaleRule
from mxref.block_dots import block_dots, values
from mxref.formats import E2M1, E4M3, MXFP8_E4M3, MXFP8_E5M2
from mxref.layouts.packed import pack, unpack
from mxref.quantization import dequantize
from mxref.reference import ReferenceBackend
from mxref.steps.rounding import apply_prescale, round_magnitude
from mxref.steps.scale import bump_above, scale_code

_E4M3, _E5M2 = (MXFP8_E4M3.name,), (MXFP8_E5M2.name,)
_GEMM = ("gemm",)


def one_binade_low(self, amax, spec):
    """The largest exponent of an E4M3 whose highest exponent field holds no numbers."""
    return np.maximum(Staged.scale(self, amax, spec).astype(int) + 1, 1)


def bound_of_mxfp4(rule: ScaleRule):
    """The scale rule with the mantissa at which it turns for E2M1."""

    def scale(self, amax, spec):
        right = Staged.scale(self, amax, spec)
        if spec.scale_rule is not rule:
            return right
        floor = scale_code(amax, ScaleRule.FLOOR, E4M3).astype(int)
        bumped = floor + ((amax & 0x7FFFFF) > bump_above(rule, E2M1))
        return np.where(amax >> 23 > 9, bumped, right)

    return scale


def beyond(code: int):
    """What lies half a step above M or higher becomes a special code."""

    def round_(self, v, spec, random):
        codes, grid = Staged.round(self, v, spec, random), self.element.magnitudes
        return np.where(v >= grid[-1] + (grid[-1] - grid[-2]) / 2, code, codes)

    return round_


def away_from_zero(self, v, spec, random):
    rounding = Rounding.RNA if spec.rounding is Rounding.RNE else spec.rounding
    return round_magnitude(v, rounding, self.element, random, spec.sr_bits)


def subnormals_flushed(self, v, spec, random):
    codes = Staged.round(self, v, spec, random)
    return np.where(codes < 1 << self.element.mantissa_bits, 0, codes)


def bytes_swapped(self, codes):
    pairs = codes.reshape(*codes.shape[:-1], -1, 2)[..., ::-1]
    return pack(np.ascontiguousarray(pairs).reshape(codes.shape), self.element)


class DecodesNanAsNumbers(Staged):
    """Decodes every code by its fields, as if none were special."""

    def _dequantize(self, q, dtype):
        values = dequantize(q, dtype)
        element = q.format.element
        plain = np.where(np.isfinite(element.values), element.values, element.max_value)
        wrong = plain[unpack(q.codes, element)]
        stored = np.repeat(q.scales, q.format.k, axis=-1)
        special = ~np.isfinite(np.array(element.values))[unpack(q.codes, element)] & (stored != 255)
        with np.errstate(over="ignore"):
            numbers = np.ldexp(wrong, stored.astype(int) - 127)
            moved = [np.moveaxis(a[..., : q.shape[q.axis]], -1, q.axis) for a in (special, numbers)]
            return np.where(moved[0], moved[1].astype(values.dtype), values)


class InfAsNan(Staged):
    def _dequantize(self, q, dtype):
        infinite = np.isinf(np.array(q.format.element.values))[unpack(q.codes, q.format.element)]
        infinite = np.moveaxis(infinite[..., : q.shape[q.axis]], -1, q.axis)
        values = dequantize(q, dtype)
        values[infinite] = np.nan
        return values


class DotsInFloat64(Staged):
    """Rounds each dot product to float64 before it is added: E5M2 needs 69 bits."""

    def add_dot(self, acc, dot, a, b):
        with np.errstate(invalid="ignore"):
            return (acc.astype(np.float64) + dot.approximate()).astype(np.float32)


class DotsInFloat32(Staged):
    """Rounds each dot product to float32 before it is added."""

    def add_dot(self, acc, dot, a, b):
        with np.errstate(invalid="ignore"):
            return acc + dot.approximate().astype(np.float32)


class SpecialCodesAreZero(Staged):
    def accumulate(self, a, b):
        acc = np.zeros((len(a.scales), len(b.scales)), np.float32)
        for dot in block_dots(a, b):
            acc = replace(dot, special=None).added_to(acc)
        return acc


class OneFormatForBoth(Staged):
    """Decodes B in A's format."""

    def _scaled_gemm(self, a, b, profile, out_dtype):
        same = a.format.element.bits == b.format.element.bits
        b = replace(b, format=a.format) if same and profile is GemmProfile.ORDERED else b
        return super()._scaled_gemm(a, b, profile, out_dtype)


class AcceptsEveryFormat(Staged):
    capabilities = replace(ReferenceBackend.capabilities, formats=frozenset({MXFP8_E4M3}))

    def plan(self, x, spec, **placement):
        return ReferenceBackend().plan(x, spec, **placement)


def pairs_swapped(self, codes):
    return pack(codes.reshape(*codes.shape[:-1], -1, 2)[..., ::-1].reshape(codes.shape), self.element)


def decodes_no_subnormals(q, dtype):
    element = q.format.element
    codes = unpack(q.codes, element)
    flushed = np.where(codes & (element.sign - 1) < 1 << element.mantissa_bits, codes & element.sign, codes)
    return dequantize(replace(q, codes=pack(flushed.astype(np.uint8), element)), dtype)


def _spans(q):
    """Return how many bits the magnitudes of each block span [rows, blocks]."""
    element, k = q.format.element, q.format.k
    units = np.ldexp(np.abs(np.nan_to_num(values(q), posinf=0)), -element.unit_exponent).astype(np.uint64)
    seen = np.bitwise_or.reduce(units.reshape(*q.scales.shape, k), axis=-1)
    lowest = seen & (~seen + np.uint64(1))
    return np.where(seen, np.frexp((seen // np.maximum(lowest, 1)).astype(np.float64))[1], 0)


class DotsOf49Bits(Staged):
    """Sums the products of two blocks in float64 if they span no more than 49 bits: of 48, every sum is exact."""

    def accumulate(self, a, b):
        k, acc = a.format.k, np.zeros((len(a.scales), len(b.scales)), np.float32)
        spans_a, spans_b = _spans(a), _spans(b)
        for i, dot in enumerate(block_dots(a, b)):
            block = np.s_[:, i * k : (i + 1) * k]
            narrow = replace(dot, parts=(values(a)[block] @ values(b)[block].T,), special=None)
            few = (spans_a[:, i, None] + spans_b[:, i] <= 49) & np.isfinite(narrow.parts[0])
            acc = np.where(few, narrow.added_to(acc), dot.added_to(acc))
        return acc


MXFP8_MUTANTS = (
    Mutant("emax of 7", "scale.rule.floor", "E4M3 taken for a format whose highest exponent field holds no numbers",
           staged(scale=one_binade_low), first=False, formats=_E4M3),
    Mutant("RCEIL by the 6 of E2M1", "scale.rule.rceil", "a bound that was retyped",
           staged(scale=bound_of_mxfp4(ScaleRule.RCEIL)), formats=_E4M3),
    Mutant("EVEN by half a step of E2M1", "scale.rule.even", "torchao's constant for FP4 in another format",
           staged(scale=bound_of_mxfp4(ScaleRule.EVEN)), formats=_E4M3),
    Mutant("saturates to NaN", "rounding.saturate", "ml_dtypes' and PyTorch's float8_e4m3fn above 464",
           staged(round=beyond(0x7F)), formats=_E4M3),
    Mutant("overflows to Inf", "rounding.saturate", "ml_dtypes' and PyTorch's float8_e5m2 above 61,440",
           staged(round=beyond(0x7C)), formats=_E5M2),
    Mutant("half up in E5M2", "rounding.rne", "half a step added to the bits before they are cut",
           staged(round=away_from_zero), formats=_E5M2),
    Mutant("element subnormals flushed", "rounding.rne", "a conversion that has no subnormals",
           staged(round=subnormals_flushed), first=False, formats=_E4M3),
    Mutant("prescale of 3/4", "rounding.prescale", "E2M1's factor in another format",
           staged(prescale=lambda self, v: apply_prescale(v, E2M1)), formats=_E4M3),
    Mutant("bytes swapped", "packing.bytes", "codes written as 16-bit words of the other byte order",
           staged(pack=bytes_swapped), formats=_E4M3),
    Mutant("sixes high bits first", "packing.sixes", "codes of six bits written from the other end",
           staged(pack=pairs_swapped), formats=("mxfp6_e2m3",)),
    Mutant("subnormals of FP6 decoded as zero", "formats.fp6", "a decoder that has no subnormals",
           decoding(decodes_no_subnormals), ("dequantize",), formats=("mxfp6_e3m2",)),
    Mutant("subnormals of E1M2 decoded as zero", "formats.element", "a decoder that has no subnormals",
           decoding(decodes_no_subnormals), ("dequantize",), formats=("mxfp4_e1m2",)),
    Mutant("NaN codes as numbers", "formats.fp8", "a table of E4M3 with one more number",
           DecodesNanAsNumbers, ("dequantize",), formats=_E4M3),
    Mutant("Inf codes as NaN", "formats.fp8", "a decoder that knows one special value",
           InfAsNan, ("dequantize",), formats=_E5M2),
    Mutant("dots rounded to float64", "gemm.block_dot", "products of E5M2 summed in float64",
           DotsInFloat64, _GEMM, formats=_E5M2),
    Mutant("dots of 49 bits in float64", "gemm.block_dot", "the limit of exact dots in float64 is off by one",
           DotsOf49Bits, _GEMM, formats=_E5M2),
    Mutant("dots of 49 bits of two formats in float64", "gemm.block_dot", "the same", DotsOf49Bits, _GEMM,
           formats=(*_E4M3, *_E5M2)),
    Mutant("dots rounded to float32", "gemm.ordered", "acc + fl32(dot), as a tensor core's accumulator might do",
           DotsInFloat32, _GEMM, first=False, formats=_E4M3),
    Mutant("special codes as zero", "gemm.special", "codes masked instead of decoded",
           SpecialCodesAreZero, _GEMM, formats=_E5M2),
    Mutant("4/3 for 8/7", "gemm.prescale", "E2M1's factor undone in another format",
           staged(undo_of=lambda self, a, b: self.undo(int(a.prescale) + int(b.prescale))), _GEMM, formats=_E4M3),
    Mutant("one format for both operands", "gemm.operands", "a product of two formats by a kernel of one",
           OneFormatForBoth, _GEMM, formats=(*_E4M3, *_E5M2)),
    Mutant("undeclared format accepted", "conformance.unsupported", "silent fallback",
           AcceptsEveryFormat, formats=_E4M3),
)  # fmt: skip
