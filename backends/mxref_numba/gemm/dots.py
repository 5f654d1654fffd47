"""Exact block dots in integers: what instruction sets offer for them.

A vector has a word of four bytes for each column of C. A step adds the four products of a word of A, the same for
all columns, with each column's word of B. E2M1 values are held as 2P, from -12 to 12, so a block dot is an integer of
at most 32 * 144 = 4608.

x86 multiplies unsigned bytes by signed ones. There A is held as 2P + 12 (0 to 24), and a dot starts from -12 times
the sum of B's block. Partial sums are then at most 32 * 24 * 12 = 9216, which int16 holds too.
"""

# Emitters work on IR values, which llvmlite does not annotate.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from llvmlite import ir

from mxref_numba.vector.instructions import named
from mxref_numba.vector.lanes import I8, I16, Lanes, constant


class Dots(ABC):
    """How an instruction set adds up products of bytes."""

    offset = 12
    """What is added to A's bytes to make them unsigned; 0 where they are signed."""

    @abstractmethod
    def entries(self, table: list[int], index: Lanes) -> Lanes:
        """Return bytes of a table of sixteen, for indices below 16."""

    @abstractmethod
    def add(self, partial: Any, starts: Lanes, left: Lanes, right: Lanes) -> Any:
        """Return partial dots plus the products of one step.

        Args:
            partial: the result of the step before, or None in the first.
            starts: int32, where the dots start.
            left: one word of A in all lanes.
            right: words of B.
        """

    @abstractmethod
    def total(self, partial: Any, starts: Lanes) -> Lanes:
        """Return the dots, int32, from the result of the last step."""


class _X86(Dots):
    def entries(self, table, index):
        name = {16: "ssse3.pshuf.b.128", 32: "avx2.pshuf.b", 64: "avx512.pshuf.b.512"}[index.count]
        entries = constant(index.builder, I8, table * (index.count // 16))
        return named(f"x86.{name}", index.value.type, entries, index.value)


class Vnni(_X86):
    """VPDPBUSD adds the four products of a word to an int32."""

    def add(self, partial, starts, left, right):
        """Return int32."""
        sums = partial or starts
        return named(f"x86.avx512.vpdpbusd.{32 * sums.count}", sums.value.type, sums, left.value, right.value)

    def total(self, partial, starts):
        """Return what is there."""
        return partial


class BytePairs(_X86):
    """VPMADDUBSW adds two products to an int16; VPMADDWD makes int32 of pairs of these."""

    def add(self, partial, starts, left, right):
        """Return int16, two for each column."""
        kind = ir.VectorType(I16, 2 * right.count)
        products = named("x86.avx2.pmadd.ub.sw", kind, left.cast(I8), right.cast(I8).value)
        return _in_order(partial + products if partial else products)

    def total(self, partial, starts):
        """Return the sums of pairs, and the starts."""
        ones = constant(partial.builder, I16, [1] * partial.count)
        return named("x86.avx2.pmadd.wd", starts.value.type, partial, ones.value) + starts


def _in_order(lanes: Lanes) -> Lanes:
    """Return the lanes, computed after all others for which this was emitted before.

    LLVM would compute one dot after the other, and keep all words of a block on the stack for that.
    """
    kind = lanes.value.type
    nothing = ir.FunctionType(kind, [kind])
    in_a_register = lanes.builder.asm(nothing, "", "=x,0", [lanes.value], side_effect=True)
    return Lanes(lanes.builder, in_a_register)


class _Arm(Dots):
    offset = 0

    def entries(self, table, index):
        entries = constant(index.builder, I8, table)
        return named("aarch64.neon.tbl1.v16i8", index.value.type, entries, index.value)


class SignedDots(_Arm):
    """SDOT, of Armv8.2 and later, adds the four products of a word to an int32."""

    def add(self, partial, starts, left, right):
        """Return int32."""
        sums, (a, b) = partial or starts, (words.cast(I8).value for words in (left, right))
        return named("aarch64.neon.sdot.v4i32.v16i8", sums.value.type, sums, a, b)

    def total(self, partial, starts):
        """Return what is there."""
        return partial


class SignedProducts(_Arm):
    """SMLAL adds products to int16, of two columns at a time; SADDLP and ADDP make int32 of four of these."""

    def add(self, partial, starts, left, right):
        """Return int16, four for each of the first two columns and of the last two."""
        a, b = (words.cast(I8) for words in (left, right))
        first = a.pick(range(8)).convert("sext", I16)  # the word is the same in the other half
        products = [first * b.pick(half).convert("sext", I16) for half in (range(8), range(8, 16))]
        return [p + q for p, q in zip(partial, products, strict=True)] if partial else products

    def total(self, partial, starts):
        """Return the sums of fours."""
        kind = starts.value.type
        low, high = (named("aarch64.neon.saddlp.v4i32.v8i16", kind, half) for half in partial)
        return named("aarch64.neon.addp.v4i32", kind, low, high.value)
