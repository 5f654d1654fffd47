"""The instructions in which targets differ, besides the number of lanes; LLVM provides everything else.

"Quarters" are the 16 bytes within which x86 narrows: a vector of 512 bits has four, one of 256 bits two.
"""

# Emitters work on IR values, which llvmlite does not annotate.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from typing import Any, ClassVar

import numpy as np
from llvmlite import ir
from numba.core import cgutils

from mxref_numba.vector.lanes import F32, I8, I16, I32, Instructions, Lanes

_MAGNITUDE = 0x7FFFFFFF


def named(name: str, result: Any, lanes: Lanes, *values: Any) -> Lanes:
    """Return the result of an LLVM function for lanes and further IR values; `result` is its type."""
    operands = [lanes.value, *values]
    function = cgutils.get_or_insert_function(
        lanes.builder.module, ir.FunctionType(result, [value.type for value in operands]), f"llvm.{name}"
    )
    return Lanes(lanes.builder, lanes.builder.call(function, operands))


class _X86(Instructions):
    """Instructions that both widths have under different names."""

    _narrowing: ClassVar[dict[Any, str]]
    _pairs: ClassVar[str]

    def narrowed(self, a: Lanes, b: Lanes, element: Any) -> Lanes:
        """Return both saturated."""
        return named(self._narrowing[element], ir.VectorType(element, 2 * a.count), a, b.value)

    def pairs_summed(self, v: Lanes, weights: tuple[int, int]) -> Lanes:
        """Return the sums of products."""
        pairs = ir.Constant(v.value.type, list(weights) * (v.count // 2))
        return named(self._pairs, ir.VectorType(I16, v.count // 2), v, pairs)


class Avx512(_X86):
    """AVX-512: F, BW, DQ, VL and VBMI."""

    _narrowing: ClassVar = {I16: "x86.avx512.packusdw.512", I8: "x86.avx512.packuswb.512"}
    _pairs = "x86.avx512.pmaddubs.w.512"

    def at_most(self, v: Lanes, limit: Lanes) -> Lanes:
        """Return the smaller magnitude, in one instruction."""
        lanes = v.value.type
        smaller_magnitude_without_sign, all_lanes, as_rounded = 0b1010, 0xFFFF, 4
        return named(
            "x86.avx512.mask.range.ps.512", lanes, v, limit.value,
            ir.Constant(I32, smaller_magnitude_without_sign), ir.Constant(lanes, ir.Undefined),
            ir.Constant(I16, all_lanes), ir.Constant(I32, as_rounded),
        )  # fmt: skip

    def look_up(self, table: tuple[float, ...], codes: Lanes) -> Lanes:
        """Look codes up in one vector that holds the whole table."""
        values = codes.like(table)
        return named("x86.avx512.permvar.sf.512", values.value.type, values, codes.value)


class Avx2(_X86):
    """AVX2, FMA and F16C: the level x86-64-v3."""

    _narrowing: ClassVar = {I16: "x86.avx2.packusdw", I8: "x86.avx2.packuswb"}
    _pairs = "x86.avx2.pmadd.ub.sw"

    def at_most(self, v: Lanes, limit: Lanes) -> Lanes:
        """Return the smaller of limit and magnitude; the instruction gives its second operand for NaN."""
        magnitude = (v.cast(I32) & _MAGNITUDE).cast(v.element)
        smaller = magnitude.builder.fcmp_ordered("<", magnitude.value, limit.value)
        return Lanes(v.builder, smaller).choose(magnitude, limit)

    def look_up(self, table: tuple[float, ...], codes: Lanes) -> Lanes:
        """Look codes 0 to 7 up in one vector, and take bit 3 of the code as the sign."""
        values = codes.like(table[:8])
        magnitude = named("x86.avx2.permps", values.value.type, values, codes.value)
        return (magnitude.cast(I32) | ((codes << 28) & ~_MAGNITUDE)).cast(magnitude.element)


class Neon(Instructions):
    """AArch64 Advanced SIMD: a vector is one quarter, and narrowing takes every second lane."""

    def at_most(self, v: Lanes, limit: Lanes) -> Lanes:
        """Return the smaller of limit and magnitude; of a NaN and a number the instruction gives the number."""
        return (v.cast(I32) & _MAGNITUDE).cast(v.element).call("minnum", limit)

    def narrowed(self, a: Lanes, b: Lanes, element: Any) -> Lanes:
        """Return the lower halves of both."""
        lower = range(0, 4 * a.count, 2)
        return a.cast(element).pick(lower, b.cast(element))

    def pairs_summed(self, v: Lanes, weights: tuple[int, int]) -> Lanes:
        """Return the sums of products."""
        even, odd = weights
        pairs = v.cast(I16)
        return (pairs & 0xFF) * even + (pairs >> 8) * odd

    def look_up(self, table: tuple[float, ...], codes: Lanes) -> Lanes:
        """Look the upper two bytes of values 0 to 7 up one by one, and take bit 3 of the code as the sign."""
        words = np.array(table[:8], np.float32).view(np.uint32)
        halves = (words >> 16).astype(np.uint16).view(np.uint8)
        assert (words & 0xFFFF == 0).all(), "the values have to fit bfloat16"
        # Bytes 2 and 3 of a lane choose bytes 2m and 2m + 1; an index beyond the table gives zero.
        index = ((codes & 7) * 0x02020000 + 0x0100FFFF).cast(I8)
        of_bytes = ir.Constant(index.value.type, halves.tolist())
        magnitude = named(
            "aarch64.neon.tbl1.v16i8", of_bytes.type, Lanes(codes.builder, of_bytes), index.value
        )
        return (magnitude.cast(I32) | ((codes << 28) & ~_MAGNITUDE)).cast(F32)
