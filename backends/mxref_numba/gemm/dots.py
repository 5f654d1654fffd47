"""Exact dots of sixteen or more bytes in integers: what the instruction sets offer, and all that the GEMM asks of them.

A vector has a word of four bytes for each column. `add` adds the four products of each word of A (the same for all
columns) with those of B. E2M1 values are held as 2P, at most 12, so that a block dot is at most 32 * 144 = 4608,
and 9216 with the offset below; both fit int16.

Some instructions take A's bytes unsigned. There A is held as 2P + 12 (0 to 24), and a dot starts from -12 times the
sum of B's block.
"""

# Emitters work on IR values, which llvmlite does not annotate.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

from llvmlite import ir
from numba.core import cgutils

from mxref_numba.vector.lanes import I8, I16, I32, Lanes, constant


def named(name: str, result: Any, builder: ir.IRBuilder, *operands: Any) -> Any:
    """Return what an LLVM function of values of several types, or of the name's own, gives."""
    kinds = [operand.type for operand in operands]
    function = cgutils.get_or_insert_function(builder.module, ir.FunctionType(result, kinds), name)
    return builder.call(function, operands)


def _in_order(lanes: Lanes) -> Lanes:
    """Return the same lanes, made to be computed after those for which this was emitted before.

    LLVM would compute one dot after the other, with all words of A and B of a block in registers or on the stack.
    """
    kind = lanes.value.type
    operands = [lanes.value]
    return Lanes(
        lanes.builder,
        lanes.builder.asm(ir.FunctionType(kind, [kind]), "", "=x,0", operands, side_effect=True),
    )


class Dots(ABC):
    """How an instruction set adds up products of bytes."""

    offset = 12
    """What is added to A's bytes so that they are not negative; 0 where they may be."""

    @abstractmethod
    def add(self, partial: Any, starts: Lanes, left: Lanes, right: Lanes) -> Any:
        """Return partial dots plus four products each.

        Args:
            partial: what this gave for the words before, or None.
            starts: int32, where the dots start.
            left: words of A.
            right: words of B.
        """

    @abstractmethod
    def total(self, partial: Any, starts: Lanes) -> Lanes:
        """Return the dots, int32, of what `add` gave for all words of a block."""


class Vnni(Dots):
    """VPDPBUSD adds four products of an unsigned and a signed byte to each int32."""

    def add(self, partial, starts, left, right):
        sums = partial or starts
        values = sums.value, left.value, right.value
        name = f"llvm.x86.avx512.vpdpbusd.{32 * sums.count}"
        return Lanes(sums.builder, named(name, values[0].type, sums.builder, *values))

    def total(self, partial, starts):
        return partial


class BytePairs(Dots):
    """VPMADDUBSW adds two products of an unsigned and a signed byte to an int16; VPMADDWD makes int32 of pairs."""

    def add(self, partial, starts, left, right):
        builder, bytes_each = right.builder, (left.cast(I8).value, right.cast(I8).value)
        kind = ir.VectorType(I16, 2 * right.count)
        products = Lanes(builder, named("llvm.x86.avx2.pmadd.ub.sw", kind, builder, *bytes_each))
        return _in_order(partial + products if partial else products)

    def total(self, partial, starts):
        builder, ones = partial.builder, constant(partial.builder, I16, [1] * partial.count)
        sums = named("llvm.x86.avx2.pmadd.wd", starts.value.type, builder, partial.value, ones.value)
        return Lanes(builder, sums) + starts


class SignedDot(Dots):
    """SDOT adds four products of signed bytes to each int32."""

    offset = 0

    def add(self, partial, starts, left, right):
        builder, sums = right.builder, partial or starts
        values = sums.value, left.cast(I8).value, right.cast(I8).value
        return Lanes(builder, named("llvm.aarch64.neon.sdot.v4i32.v16i8", sums.value.type, builder, *values))

    def total(self, partial, starts):
        return partial


class SignedProducts(Dots):
    """SMLAL adds products of signed bytes to int16; two words of a vector in one half, two in the other."""

    offset = 0

    def add(self, partial, starts, left, right):
        factors = [words.cast(I8) for words in (left, right)]
        halves = [[f.pick(half).convert("sext", I16) for f in factors] for half in (range(8), range(8, 16))]
        products = [a * b for a, b in halves]
        return [p + q for p, q in zip(partial, products, strict=True)] if partial else products

    def total(self, partial, starts):
        builder = starts.builder
        pairs = [
            named("llvm.aarch64.neon.saddlp.v4i32.v8i16", starts.value.type, builder, p.value) for p in partial
        ]
        return Lanes(builder, named("llvm.aarch64.neon.addp.v4i32", starts.value.type, builder, *pairs))


def looked_up(table: Lanes, index: Lanes) -> Lanes:
    """Return bytes of a table of sixteen, repeated as often as fits the vector, for indices below 16."""
    count, arm = index.count, "aarch64" in index.builder.module.triple
    names = {16: "ssse3.pshuf.b.128", 32: "avx2.pshuf.b", 64: "avx512.pshuf.b.512"}
    name = "llvm.aarch64.neon.tbl1.v16i8" if arm else f"llvm.x86.{names[count]}"
    return Lanes(index.builder, named(name, index.value.type, index.builder, table.value, index.value))


__all__ = ["BytePairs", "Dots", "SignedDot", "SignedProducts", "Vnni", "looked_up", "named", "I32"]
