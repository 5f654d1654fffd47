"""Faults of the protocol: types, strides, axes, packing, and what is declared."""

from __future__ import annotations

from dataclasses import replace

import ml_dtypes
import numpy as np

from mutants.mutant import Mutant
from mutants.staged import Staged, staged, with_capabilities
from mxref import ScaleRule
from mxref.formats import E2M1
from mxref.layouts.packed import pack
from mxref.quantization import dequantize
from mxref.reference import ReferenceBackend


class IgnoresStrides(Staged):
    def _quantize(self, x, plan):
        if not x.flags.c_contiguous and x.base is not None and x.base.size >= x.size:
            x = np.lib.stride_tricks.as_strided(
                np.ascontiguousarray(x.base).reshape(-1), x.shape, _contiguous(x)
            )
        return super()._quantize(x, plan)


def _contiguous(x):
    return tuple(int(np.prod(x.shape[i + 1 :])) * x.itemsize for i in range(x.ndim))


class WritesToItsInput(Staged):
    def _quantize(self, x, plan):
        out = super()._quantize(x, plan)
        if x.flags.writeable:
            x[np.isnan(x)] = 0
        return out


class LetsNanPass(Staged):
    def quantize(self, x, spec, **arguments):
        return super().quantize(x, replace(spec, nonfinite="nan_block"), **arguments)


class PadsWhatItIsGiven(Staged):
    def quantize(self, x, spec, **arguments):
        return super().quantize(x, spec, **{**arguments, "pad": True})


class AxisByShape(Staged):
    """Guesses that the block axis is the longer one."""

    def _quantize(self, x, plan):
        if x.ndim == 2 and plan.axis == 0 and x.shape[0] == x.shape[1]:
            x = x.T
        elif x.ndim == 3 and plan.axis == 0:
            codes, scales = super()._quantize(x, plan)
            return codes.swapaxes(0, 1).reshape(codes.shape), scales
        return super()._quantize(x, plan)


class TakesFloat64(Staged):
    def quantize(self, x, spec, **arguments):
        return super().quantize(x.astype(np.float32) if x.dtype == np.float64 else x, spec, **arguments)


def truncate_bfloat16(self, x):
    """A reinterpretation that drops a bfloat16's low bits on their way."""
    wide = x.astype(np.float32)
    return (
        (wide.view(np.uint32) & np.uint32(0xFFFE0000)).view(np.float32)
        if x.dtype == ml_dtypes.bfloat16
        else wide
    )


def flush_float16(self, x):
    wide = x.astype(np.float32)
    return (
        np.where(np.abs(wide) < 2.0**-14, np.copysign(np.float32(0), wide), wide)
        if x.dtype == np.float16
        else wide
    )


def split_nibbles(codes):
    blocks = codes.reshape(*codes.shape[:-1], -1, 2, 16)
    return (blocks[..., 0, :] | blocks[..., 1, :] << 4).reshape(*codes.shape[:-1], codes.shape[-1] // 2)


def block_order(self, codes, scales, spoiled, v):
    codes, scales = Staged.nan(self, codes, scales, spoiled, v)
    return codes, scales[:, ::-1]


def high_nibble_first(self, codes):
    return pack(
        codes.reshape(*codes.shape[:-1], codes.shape[-1] // 2, 2)[..., ::-1].reshape(codes.shape), E2M1
    )


class Accepts(Staged):
    """Does what it does not declare."""

    capabilities = with_capabilities(scale_rules=frozenset({ScaleRule.FLOOR}), prescale=False)

    def plan(self, x, spec, **placement):
        return ReferenceBackend().plan(x, spec, **placement)


class DecodesAll(Staged):
    capabilities = with_capabilities(dequantize_dtypes=frozenset({"float32"}))

    def dequantize(self, q, dtype="float32"):
        return dequantize(q, dtype)


class RefusesWhatItDeclares(Staged):
    def plan(self, x, spec, **placement):
        if spec.hadamard > 128:
            ReferenceBackend.capabilities.require("mutant", "scale_rules", "H256")
        return super().plan(x, spec, **placement)


class BrokenArrays(Staged):
    def from_numpy(self, array):
        return array.astype(np.float32) if array.dtype == ml_dtypes.bfloat16 else array


class NonsenseCapabilities(Staged):
    capabilities = with_capabilities(hadamard_sizes=frozenset({16, 48}))


LAYOUT_MUTANTS = (
    Mutant("nonfinite = raise ignored", "scale.nonfinite", "a fast path that skips the check", LetsNanPass),
    Mutant("float16 subnormals flushed", "conventions.inputs", "float16 arithmetic under FTZ",
           staged(widen=flush_float16)),
    Mutant("bfloat16 truncated", "conventions.inputs", "the Triton interpreter's casts",
           staged(widen=truncate_bfloat16)),
    Mutant("float64 taken", "conventions.inputs", "silent narrowing in most Python references", TakesFloat64),
    Mutant("input overwritten", "conformance.protocol", "nan_to_num in place", WritesToItsInput),
    Mutant("split nibbles", "packing.nibbles", "ggml: element j low, j + 16 high",
           staged(pack=lambda self, codes: split_nibbles(codes))),
    Mutant("high nibble first", "packing.nibbles", "big-endian packing",
           staged(pack=high_nibble_first)),
    Mutant("scales reversed", "packing.scales", "reorder metadata misread", staged(nan=block_order)),
    Mutant("strides ignored", "quantize.strides", "a pointer taken from a view", IgnoresStrides),
    Mutant("axis guessed", "quantize.axis", "TransformerEngine: guessed from a transpose flag",
           AxisByShape, first=False),
    Mutant("pads unasked", "quantize.length", "silent padding", PadsWhatItIsGiven),
    Mutant("undeclared rule accepted", "conformance.unsupported", "silent fallback", Accepts),
    Mutant("undeclared type decoded", "conformance.unsupported", "silent fallback", DecodesAll, ("dequantize",)),
    Mutant("declared size refused", "conformance.capabilities", "a promise that is not kept", RefusesWhatItDeclares),
    Mutant("sizes that do not exist", "conformance.capabilities", "H48", NonsenseCapabilities),
    Mutant("from_numpy widens", "conformance.arrays", "bfloat16 through float32", BrokenArrays),
)  # fmt: skip
