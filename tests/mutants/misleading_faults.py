"""Faults that show in many clauses: the clause that decides must be named first."""

from __future__ import annotations

from unittest.mock import patch

import ml_dtypes
import numpy as np

from mutants.mutant import Mutant
from mutants.staged import ExactBy, Staged, decoding, rotating, staged
from mxref import GemmProfile
from mxref.quantization import dequantize
from mxref.reference import ReferenceBackend
from mxref.steps.random import random_integers


def divided_by_the_root(x, rotation):
    """The sums over fl32(sqrt(n)), where the specification multiplies by fl32(1 / sqrt(n))."""
    n = rotation.n
    with np.errstate(all="ignore"):
        y, h = x.reshape(-1, n) * rotation.vector(), 1
        while h < n:
            pairs = y.reshape(-1, n // (2 * h), 2, h)
            y = np.stack([pairs[:, :, 0] + pairs[:, :, 1], pairs[:, :, 0] - pairs[:, :, 1]], axis=2)
            h *= 2
        return y.reshape(x.shape) / np.sqrt(np.float32(n))


def placed(rows, first, length):
    """Random integers of a part, whose place in the whole is changed."""

    def integers(self, plan):
        place = (rows(plan), first(plan), plan.length, length(plan))
        return random_integers(*place, plan.stream, plan.spec.sr_bits)

    return staged(integers=integers)


def _rows_of_the_part(plan):
    return np.arange(plan.rows, dtype=np.int64)


def decodes_without_minus_zero(q, dtype):
    values = dequantize(q, dtype)
    return np.where(values == 0, np.zeros_like(values), values)


@np.vectorize(otypes=[np.float64])
def _ties_away(numerator, denominator, exponent, mantissa, lowest):
    """As `mxref.gemm._rounded`, a tie rounded away from zero: half a unit more, and then toward zero."""
    magnitude = abs(numerator)
    binade = magnitude.bit_length() - denominator.bit_length() + exponent
    unit = max(binade - mantissa - 1, lowest)
    while True:
        top, bottom = magnitude << max(exponent - unit, 0), denominator << max(unit - exponent, 0)
        count = (2 * top + bottom) // (2 * bottom)
        if count <= 1 << mantissa:
            break
        unit += 1
    value = float(np.ldexp(float(count), unit))
    return -value if numerator < 0 else value


def exact_with_ties_away(self, a, b, out_dtype):
    with patch("mxref.gemm._rounded", _ties_away):
        return ReferenceBackend._scaled_gemm(self, a, b, GemmProfile.EXACT, out_dtype)


def exact_without_minus_zero_in_bfloat16(self, a, b, out_dtype):
    out = ReferenceBackend._scaled_gemm(self, a, b, GemmProfile.EXACT, out_dtype)
    return out if out_dtype == "float32" else out + np.zeros((), ml_dtypes.bfloat16)


class RowsPermuted(Staged):
    """Stores the rows of three axes with the other two axes exchanged."""

    def _quantize(self, x, plan):
        codes, scales = super()._quantize(x, plan)
        if x.ndim != 3:
            return codes, scales
        return tuple(part.swapaxes(0, 1).reshape(part.shape) for part in (codes, scales))


class TilesByRow(Staged):
    """Takes 32 rows of one place in the first axis for a tile, where the axis before the block axis has fewer."""

    def amax(self, bits, v, spec):
        amax = super().amax(bits, v, spec)
        return np.roll(amax, 1, axis=1) if spec.block.is_tile and self.plan_now.axis == 0 else amax


BLAME_MUTANTS = (
    Mutant("divided by sqrt(n)", "hadamard.factor", "a division where the specification multiplies",
           rotating(divided_by_the_root), ("hadamard", "quantize")),
    Mutant("a part's offset ignored", "random.index", "columns counted from the part's own first",
           placed(lambda plan: plan.global_rows(), lambda plan: 0, lambda plan: plan.global_length)),
    Mutant("a part's place ignored", "random.index", "rows and columns counted from the part's own first",
           placed(_rows_of_the_part, lambda plan: 0, lambda plan: plan.global_length)),
    Mutant("a part's local length", "random.index", "rows as long as the part's",
           placed(lambda plan: plan.global_rows(), lambda plan: plan.first, lambda plan: plan.length)),
    Mutant("-0 decoded as +0", "formats.e2m1", "a table of sixteen values with one zero",
           decoding(decodes_without_minus_zero), ("dequantize",)),
    Mutant("exact with ties away", "gemm.exact", "half a unit added before the low bits are cut",
           lambda: ExactBy(exact_with_ties_away), ("gemm",)),
    Mutant("exact bfloat16 without -0", "gemm.exact", "the sign lost in a final addition",
           lambda: ExactBy(exact_without_minus_zero_in_bfloat16), ("gemm",)),
    Mutant("rows permuted", "quantize.axis", "the other axes in the wrong order", RowsPermuted),
    Mutant("tiles along axis 0", "scale.block.tile", "tiles of the transposed matrix", TilesByRow),
)  # fmt: skip
