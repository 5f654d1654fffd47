"""Faults of layouts, many axes and large sizes: backends that are right on small matrices in C order."""

from __future__ import annotations

from dataclasses import replace
from unittest.mock import patch

import numpy as np

from mutants.mutant import Mutant
from mutants.staged import ExactBy, Staged, decoding, staged
from mutants.stored_faults import by_scale
from mxref import GemmProfile
from mxref.block_dots import block_dots
from mxref.quantization import dequantize
from mxref.reference import ReferenceBackend
from mxref.steps.random import elements_per_call, stream_words

_CACHE = 8 << 20
_FACTOR = 1 + 2.0**-22
"""By which the float32 bits of 2^-127 are one too large."""


def subnormals_rounded_twice(name, bits):
    """To the precision of normal numbers first, then to the type."""

    def exact(self, a, b, out_dtype):
        with patch.dict("mxref.gemm._OUT_FORMATS", {name: (bits, -400)}):
            return ReferenceBackend._scaled_gemm(self, a, b, GemmProfile.EXACT, out_dtype)

    return exact


def _other_axes_swapped(values):
    """Values of three axes, the first of which is the block axis, with the others taken in the wrong order."""
    return values.swapaxes(1, 2).reshape(values.shape)


def decodes_axis_0_of_3(q, dtype):
    values = dequantize(q, dtype)
    return _other_axes_swapped(values) if values.ndim == 3 and q.axis == 0 else values


class TransformsAxis0Of3(Staged):
    def _hadamard(self, x, rotation, axis):
        y = super()._hadamard(x, rotation, axis)
        return _other_axes_swapped(y) if y.ndim == 3 and axis == 0 else y


def _as_stored(array):
    """An array as a pointer sees it: in the order of its memory."""
    return array.ravel(order="K").reshape(array.shape)


class GemmByMemory(Staged):
    """Reads one of codes and scales by a pointer, whatever the strides."""

    def __init__(self, part):
        self.part = part

    def _scaled_gemm(self, a, b, profile, out_dtype):
        a, b = (replace(q, **{self.part: _as_stored(getattr(q, self.part))}) for q in (a, b))
        return super()._scaled_gemm(a, b, profile, out_dtype)


def decodes_by_memory(q, dtype):
    return dequantize(replace(q, codes=_as_stored(q.codes)), dtype)


class TransformsByMemory(Staged):
    def _hadamard(self, x, rotation, axis):
        return super()._hadamard(_as_stored(x), rotation, axis)


def no_carry_within_a_row(self, plan):
    """Random integers whose call takes its upper word from the row's first element."""
    bits = plan.spec.sr_bits
    per_call = elements_per_call(bits)
    rows = plan.global_rows()[:, None] * (plan.global_length // per_call)
    group = rows + (plan.first + np.arange(0, plan.length, per_call)) // per_call
    words = stream_words(group & 0xFFFFFFFF | group[:, :1] >> 32 << 32, plan.stream)
    if per_call == 4:
        return words.reshape(plan.rows, -1) >> np.uint32(32 - bits)
    halves = np.stack([words & np.uint32(0xFFFF), words >> np.uint32(16)], axis=-1)
    return halves.reshape(plan.rows, -1) >> np.uint32(16 - bits)


class RowsIn16Bits(Staged):
    """A grid of 65,535 programs, whose rows start again."""

    def _quantize(self, x, plan):
        codes, scales = super()._quantize(x, plan)
        most = 65535
        if plan.rows > most:
            codes.reshape(plan.rows, -1)[most:] = codes.reshape(plan.rows, -1)[: plan.rows - most]
        return codes, scales


class GemmOf512(Staged):
    """A grid of 512 rows or columns."""

    def __init__(self, axis):
        self.axis = axis

    def _scaled_gemm(self, a, b, profile, out_dtype):
        out = super()._scaled_gemm(a, b, profile, out_dtype)
        return np.take(out, np.arange(out.shape[self.axis]) % 512, axis=self.axis)


def _streamed(values):
    """Results beyond the caches, written in whole cache lines, of which the last is left out."""
    if values.nbytes >= _CACHE:
        values = np.ascontiguousarray(values)
        values.reshape(-1)[-64 // values.itemsize :] = 0
    return values


def decodes_streaming(q, dtype):
    return _streamed(dequantize(q, dtype))


class TransformsStreaming(Staged):
    def _hadamard(self, x, rotation, axis):
        return _streamed(super()._hadamard(x, rotation, axis))


class GemmStreaming(Staged):
    def _scaled_gemm(self, a, b, profile, out_dtype):
        return _streamed(super()._scaled_gemm(a, b, profile, out_dtype))


def least_scale_off_by_one(self, magnitude, scales):
    scaled = Staged.scaled(self, magnitude, scales)
    return np.where(scales[..., None] == 0, scaled * np.float32(_FACTOR), scaled).astype(np.float32)


def least_scale_of_a_off_by_one(self, a, b):
    acc = np.zeros((len(a.scales), len(b.scales)), np.float32)
    for i, dot in enumerate(block_dots(a, b)):
        term = dot.approximate()
        acc = self.add(acc, np.where(a.scales[:, i, None] == 0, term * _FACTOR, term))
    return acc


SIZE_MUTANTS = (
    Mutant("exact's subnormals of float32 rounded twice", "gemm.exact", "to 24 bits, then to what a subnormal holds",
           lambda: ExactBy(subnormals_rounded_twice("float32", 24)), ("gemm",)),
    Mutant("exact's subnormals of bfloat16 rounded twice", "gemm.exact", "to 8 bits, then to what a subnormal holds",
           lambda: ExactBy(subnormals_rounded_twice("bfloat16", 8)), ("gemm",)),
    Mutant("three axes decoded along the first", "quantize.axis", "the other axes in the wrong order",
           decoding(decodes_axis_0_of_3), ("dequantize",)),
    Mutant("three axes transformed along the first", "hadamard.size", "the other axes in the wrong order",
           TransformsAxis0Of3, ("hadamard",)),
    Mutant("codes by a pointer", "gemm.operands", "strides that are not looked at",
           lambda: GemmByMemory("codes"), ("gemm",)),
    Mutant("scales by a pointer", "gemm.operands", "strides that are not looked at",
           lambda: GemmByMemory("scales"), ("gemm",)),
    Mutant("codes decoded by a pointer", "quantize.strides", "strides that are not looked at",
           decoding(decodes_by_memory), ("dequantize",)),
    Mutant("transform by a pointer", "quantize.strides", "strides that are not looked at",
           TransformsByMemory, ("hadamard",)),
    Mutant("no carry within a row", "random.counter", "the counter's upper word computed once for a row",
           staged(integers=no_carry_within_a_row)),
    Mutant("65,535 rows", "quantize.strides", "the limit of a grid's second dimension", RowsIn16Bits, level="full"),
    Mutant("512 rows of A", "gemm.operands", "a grid for what fits a benchmark",
           lambda: GemmOf512(0), ("gemm",), level="full"),
    Mutant("512 rows of B", "gemm.operands", "a grid for what fits a benchmark",
           lambda: GemmOf512(1), ("gemm",), level="full"),
    Mutant("streamed values", "quantize.strides", "the last line of a result that is written past the caches",
           decoding(decodes_streaming), ("dequantize",), level="full"),
    Mutant("streamed transforms", "quantize.strides", "the last line of a result that is written past the caches",
           TransformsStreaming, ("hadamard",), level="full"),
    Mutant("streamed products", "gemm.operands", "the last line of a result that is written past the caches",
           GemmStreaming, ("gemm",), level="full"),
    Mutant("2^-127 off by one", "rounding.rne", "a constant of a compiled kernel: 0x00400001",
           staged(scaled=least_scale_off_by_one)),
    Mutant("2^-127 decoded off by one", "formats.e8m0", "a constant of a compiled kernel: 0x00400001",
           decoding(by_scale(lambda s, f: np.where(s == 0, f * _FACTOR, f))), ("dequantize",)),
    Mutant("2^-127 multiplied off by one", "gemm.block_dot", "a constant of a compiled kernel: 0x00400001",
           staged(accumulate=least_scale_of_a_off_by_one), ("gemm",)),
)  # fmt: skip
