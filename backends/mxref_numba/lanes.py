"""Vector code in Python notation: `Lanes` is a vector value whose operators emit LLVM instructions.

Integer lanes are unsigned unless a method says otherwise. Nothing is emitted with fast-math flags, so every
float32 operation is rounded once, in the order in which it is written: keep it so, the bits depend on it.

LLVM provides nearly everything for vectors of any length. The instructions that it cannot express are the methods of
`Avx512` and `Avx2`, which a test compares with NumPy. "Quarters" are the 16 bytes within which x86 narrows: a vector of
512 bits has four, one of 256 bits two.
"""

# Emitters work on IR values, which llvmlite does not annotate.
# mypy: allow-untyped-defs, allow-untyped-calls

from __future__ import annotations

from collections.abc import Callable, Sequence
from inspect import Parameter, Signature
from typing import Any, ClassVar

from llvmlite import ir
from numba.core import cgutils, types
from numba.extending import intrinsic

I8, I16, I32, I64 = (ir.IntType(n) for n in (8, 16, 32, 64))
F16, F32, F64 = ir.HalfType(), ir.FloatType(), ir.DoubleType()

MAGNITUDE = 0x7FFFFFFF
"""The bits of a float32 that are not its sign."""

_NAMES = {F16: "f16", F32: "f32", F64: "f64"}


def _operator(integer: str, floating: str = "") -> Callable[[Lanes, Any], Lanes]:
    """Return the operator that emits an instruction, by its name for integers, modulo 2^n, or for floats."""

    def operate(lanes: Lanes, other: Any) -> Lanes:
        name = integer if isinstance(lanes.element, ir.IntType) else floating
        return lanes._of(getattr(lanes.builder, name)(lanes.value, lanes._operand(other)))

    return operate


class Lanes:
    """A vector of LLVM values under construction."""

    def __init__(self, builder: ir.IRBuilder, value: Any) -> None:
        self.builder, self.value = builder, value

    @property
    def element(self) -> Any:
        """Type of one lane."""
        return self.value.type.element

    @property
    def count(self) -> int:
        """Number of lanes."""
        return int(self.value.type.count)

    def _of(self, value: Any) -> Lanes:
        return Lanes(self.builder, value)

    def _operand(self, other: Any) -> Any:
        if isinstance(other, Lanes):
            return other.value
        return ir.Constant(self.value.type, [other] * self.count)

    __add__ = _operator("add", "fadd")
    __sub__ = _operator("sub", "fsub")
    __mul__ = _operator("mul", "fmul")
    __truediv__ = _operator("udiv", "fdiv")
    __and__, __or__, __xor__ = _operator("and_"), _operator("or_"), _operator("xor")
    __lshift__, __rshift__ = _operator("shl"), _operator("lshr")  # filled with zeros

    def compare(self, relation: str, other: Any) -> Lanes:
        """Return one bit per lane: whether an unsigned integer relation holds."""
        return self._of(self.builder.icmp_unsigned(relation, self.value, self._operand(other)))

    def ordered(self, relation: str, other: Any) -> Lanes:
        """Return one bit per lane: whether a relation of floats holds; none holds of NaN."""
        return self._of(self.builder.fcmp_ordered(relation, self.value, self._operand(other)))

    def choose(self, yes: Any, no: Lanes) -> Lanes:
        """Return `yes` where these bits are set, and `no` elsewhere."""
        return self._of(self.builder.select(self.value, no._operand(yes), no.value))

    def call(self, name: str, *others: Any) -> Lanes:
        """Return the result of an LLVM intrinsic whose lanes all have one type, such as `umin`."""
        lane = _NAMES.get(self.element) or f"i{self.element.width}"
        vector = self.value.type
        function = cgutils.get_or_insert_function(
            self.builder.module,
            ir.FunctionType(vector, [vector] * (1 + len(others))),
            f"llvm.{name}.v{self.count}{lane}",
        )
        return self._of(self.builder.call(function, [self.value, *map(self._operand, others)]))

    def cast(self, element: Any) -> Lanes:
        """Return the same bits as lanes of another type."""
        bits = self.count * _width(self.element)
        return self._of(self.builder.bitcast(self.value, ir.VectorType(element, bits // _width(element))))

    def convert(self, operation: str, element: Any) -> Lanes:
        """Return the lanes converted one by one, as in `zext`."""
        return self._of(getattr(self.builder, operation)(self.value, ir.VectorType(element, self.count)))

    def pick(self, lanes: Sequence[int], other: Lanes | None = None) -> Lanes:
        """Return the lanes with the given indices; indices from `count` on mean lanes of `other`."""
        second = other.value if other else ir.Constant(self.value.type, ir.Undefined)
        index = ir.Constant(ir.VectorType(I32, len(lanes)), list(lanes))
        return self._of(self.builder.shuffle_vector(self.value, second, index))

    def like(self, values: Sequence[float]) -> Lanes:
        """Return constant float32 lanes, in the same builder."""
        return self._of(ir.Constant(ir.VectorType(F32, len(values)), list(values)))

    def at_most(self, limit: float | Lanes) -> Lanes:
        """Return float32 magnitudes, at most `limit`."""
        return self._instructions.at_most(self, self._of(self._operand(limit)))

    def narrowed(self, other: Lanes, element: Any) -> Lanes:
        """Return lanes of half the width, alternately from 16 bytes of these and of `other`; each must fit unsigned."""
        return self._instructions.narrowed(self, other, element)

    def pairs_summed(self, weights: tuple[int, int]) -> Lanes:
        """Return, of each pair of bytes, the sum of both times their weights: int16."""
        return self._instructions.pairs_summed(self, weights)

    def raised(self) -> Lanes:
        """Return eight float64, not negative, as the nearest float32 that are not below."""
        return self._instructions.raised(self)

    def at(self, index: Lanes) -> Lanes:
        """Return, for each int32 modulo the number of lanes, one of these float32 lanes."""
        return self._instructions.permuted(self, index)

    def descended(self, x: Lanes, start: Lanes) -> Lanes:
        """Return twice these, plus 1 where `x` is below `start`: all int32, the latter two not negative."""
        return self._instructions.descended(self, x, start)

    def look_up(self, table: Sequence[float]) -> Lanes:
        """Return, for each int32 modulo 16, one of sixteen float32, of which the last eight are minus the first."""
        return self._instructions.look_up(tuple(table), self)

    @property
    def _instructions(self) -> Instructions:
        found: Instructions = self.builder.module.mxref_target.instructions
        return found

    def store(self, address: Any, *, streaming: bool = False) -> None:
        """Store all lanes at an address, int64; `streaming` past the caches, to a multiple of the vector's bytes."""
        pointer = self.builder.inttoptr(address, self.value.type.as_pointer())
        size = self.count * _width(self.element) // 8
        instruction = self.builder.store(self.value, pointer, align=size if streaming else 1)
        if streaming:
            one = self.builder.module.add_metadata([ir.Constant(I32, 1)])
            instruction.set_metadata("nontemporal", one)


def named(name: str, result: Any, lanes: Lanes, *values: Any) -> Lanes:
    """Return the result of an LLVM function for lanes and further IR values; `result` is its type."""
    operands = [lanes.value, *values]
    function = cgutils.get_or_insert_function(
        lanes.builder.module, ir.FunctionType(result, [value.type for value in operands]), f"llvm.{name}"
    )
    return Lanes(lanes.builder, lanes.builder.call(function, operands))


class Instructions:
    """The instructions in which targets differ, besides the number of lanes."""

    _narrowing: ClassVar[dict[Any, str]]
    _pairs: ClassVar[str]
    _permute: ClassVar[str]

    def at_most(self, v: Lanes, limit: Lanes) -> Lanes:
        """Return float32 magnitudes, at most `limit`; for NaN, any number."""
        raise NotImplementedError

    def look_up(self, table: tuple[float, ...], codes: Lanes) -> Lanes:
        """Return, for each int32 modulo 16, one of sixteen float32, of which the last eight are minus the first."""
        raise NotImplementedError

    def raised(self, v: Lanes) -> Lanes:
        """Return eight float64, not negative, as the nearest float32 that are not below."""
        raise NotImplementedError

    def descended(self, node: Lanes, x: Lanes, start: Lanes) -> Lanes:
        """Return twice `node`, plus 1 where `x` is below `start`: all int32, the latter two not negative."""
        raise NotImplementedError

    def permuted(self, values: Lanes, index: Lanes) -> Lanes:
        """Return, for each int32 modulo the number of lanes, one of float32 lanes."""
        return named(self._permute, values.value.type, values, index.value)

    def narrowed(self, a: Lanes, b: Lanes, element: Any) -> Lanes:
        """Return lanes of half the width, alternately from a quarter of `a` and of `b`; values must fit unsigned."""
        return named(self._narrowing[element], ir.VectorType(element, 2 * a.count), a, b.value)

    def pairs_summed(self, v: Lanes, weights: tuple[int, int]) -> Lanes:
        """Return, of each pair of bytes, the sum of both times their weights: int16."""
        pairs = ir.Constant(v.value.type, list(weights) * (v.count // 2))
        return named(self._pairs, ir.VectorType(I16, v.count // 2), v, pairs)


class Avx512(Instructions):
    """AVX-512: F, BW, DQ, VL and VBMI."""

    _narrowing: ClassVar = {I16: "x86.avx512.packusdw.512", I8: "x86.avx512.packuswb.512"}
    _pairs = "x86.avx512.pmaddubs.w.512"
    _permute = "x86.avx512.permvar.sf.512"

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
        return self.permuted(codes.like(table), codes)

    def raised(self, v: Lanes) -> Lanes:
        """Convert with the rounding in the instruction."""
        made, upward, all_lanes = ir.VectorType(F32, v.count), 0b1010, 0xFF
        return named(
            "x86.avx512.mask.cvtpd2ps.512", made, v, ir.Constant(made, ir.Undefined),
            ir.Constant(I8, all_lanes), ir.Constant(I32, upward),
        )  # fmt: skip

    def descended(self, node: Lanes, x: Lanes, start: Lanes) -> Lanes:
        """Shift the sign of the difference in: comparisons and what they mask would all need one port of the CPU."""
        return node.call("fshl", x - start, 1)


class Avx2(Instructions):
    """AVX2, FMA and F16C: the level x86-64-v3."""

    _narrowing: ClassVar = {I16: "x86.avx2.packusdw", I8: "x86.avx2.packuswb"}
    _pairs = "x86.avx2.pmadd.ub.sw"
    _permute = "x86.avx2.permps"

    def at_most(self, v: Lanes, limit: Lanes) -> Lanes:
        """Return the smaller of limit and magnitude; the instruction gives its second operand for NaN."""
        magnitude = (v.cast(I32) & MAGNITUDE).cast(v.element)
        smaller = magnitude.builder.fcmp_ordered("<", magnitude.value, limit.value)
        return Lanes(v.builder, smaller).choose(magnitude, limit)

    def raised(self, v: Lanes) -> Lanes:
        """Convert to the nearest, and take the next one where that is below."""
        near = v.convert("fptrunc", F32)
        below = near.convert("fpext", F64).ordered("<", v).convert("zext", I32)
        return (near.cast(I32) + below).cast(F32)

    def descended(self, node: Lanes, x: Lanes, start: Lanes) -> Lanes:
        """Compare as float32, which gives -1 where it holds; AVX2 compares no unsigned integers."""
        return node + node - x.cast(F32).ordered("<", start.cast(F32)).convert("sext", I32)

    def look_up(self, table: tuple[float, ...], codes: Lanes) -> Lanes:
        """Look codes 0 to 7 up in one vector, and take bit 3 of the code as the sign."""
        magnitude = self.permuted(codes.like(table[:8]), codes)
        return (magnitude.cast(I32) | ((codes << 28) & ~MAGNITUDE)).cast(magnitude.element)


def _width(element: Any) -> int:
    return element.width if isinstance(element, ir.IntType) else {F16: 16, F32: 32, F64: 64}[element]


def load(builder: ir.IRBuilder, element: Any, count: int, address: Any, offset: int = 0) -> Lanes:
    """Return lanes from an address, int64, plus a constant number of bytes."""
    place = builder.add(address, ir.Constant(I64, offset))
    pointer = builder.inttoptr(place, ir.VectorType(element, count).as_pointer())
    return Lanes(builder, builder.load(pointer, align=1))


def splat(builder: ir.IRBuilder, scalar: Any, count: int) -> Lanes:
    """Return a run-time value in every lane."""
    vector = ir.VectorType(scalar.type, count)
    first = builder.insert_element(ir.Constant(vector, ir.Undefined), scalar, ir.Constant(I32, 0))
    return Lanes(builder, first).pick([0] * count)


def broadcast(builder: ir.IRBuilder, element: Any, count: int, address: Any, offset: int = 0) -> Lanes:
    """Return one value from an address, int64, plus a constant number of bytes, in every lane."""
    return load(builder, element, 1, address, offset).pick([0] * count)


def constant(builder: ir.IRBuilder, element: Any, values: Sequence[Any]) -> Lanes:
    """Return given lanes."""
    return Lanes(builder, ir.Constant(ir.VectorType(element, len(values)), list(values)))


def prefetch(builder: ir.IRBuilder, address: Any) -> None:
    """Ask for the cache line of an address, int64, which need not be readable."""
    pointer = builder.inttoptr(address, I8.as_pointer())
    function = cgutils.get_or_insert_function(
        builder.module, ir.FunctionType(ir.VoidType(), [pointer.type, I32, I32, I32]), "llvm.prefetch.p0"
    )
    read, keep, data = (ir.Constant(I32, n) for n in (0, 3, 1))
    builder.call(function, [pointer, read, keep, data])


def vector_code(*parameters: types.Type) -> Callable[[Callable[..., None]], Any]:
    """Make a function that kernels call from an emitter, which gets the builder and the arguments as IR values."""

    def wrap(emit: Callable[..., None]) -> Any:
        def generate(context, builder, _, arguments):
            emit(builder, *arguments)
            return context.get_dummy_value()

        def function(typingctx, *arguments):
            return types.void(*parameters), generate

        # Numba wants to see one parameter after the other.
        names = ["typingctx", *(f"a{i}" for i in range(len(parameters)))]
        function.__signature__ = Signature(  # type: ignore[attr-defined]
            [Parameter(name, Parameter.POSITIONAL_OR_KEYWORD) for name in names]
        )
        return intrinsic(function)

    return wrap
