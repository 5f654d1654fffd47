"""Reads a kernel in Triton's IR and evaluates it for one unit: what it loads, and what it stores where, as terms.

A program works on a tile of units, and the axis of units occurs in its tensors under one length that no other axis has.
That axis is not enumerated: it has one symbolic position, `lane`. An operation that would mix units is refused, so what
is found for one lane holds for each. The other axes are enumerated. So is every operation: an unknown one is an error
that names it.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from prove import ptx
from prove.terms import Term, apply, choose, const, extract, var, widen, widen_signed


class UnknownOperation(Exception):
    """The IR has an operation, or a form of one, for which there is no meaning here."""


_LOCATION = re.compile(r" loc\((?:[^()]|\((?:[^()]|\([^()]*\))*\))*\)")
_NAME = re.compile(r"%[A-Za-z0-9_$.-]+")
BITS = {
    "i1": 1, "i8": 8, "i16": 16, "i32": 32, "i64": 64,
    "f32": 32, "f16": 16, "bf16": 16, "f8E4M3FN": 8, "f8E5M2": 8,
}  # fmt: skip
LANE = "lane"
WITH_MORE = {
    "arith.constant", "arith.cmpi", "arith.cmpf", "tt.make_range", "tt.get_program_id", "tt.expand_dims", "tt.trans",
    "tt.elementwise_inline_asm",
}  # fmt: skip
"""Operations that say more than their operands; a word that another one says may change what it means."""


def without_locations(text: str) -> str:
    """Return IR without its source locations, and with values numbered as they occur: names are those of the source."""
    text = "\n".join(line for line in text.splitlines() if line.strip() and not line.startswith("#loc"))
    text = _LOCATION.sub("", text)
    names: dict[str, str] = {}
    return _NAME.sub(lambda name: names.setdefault(name[0], f"%{len(names)}"), text) + "\n"


def digest_of(text: str) -> str:
    """Return the SHA-256 of IR without locations."""
    return hashlib.sha256(without_locations(text).encode()).hexdigest()


@dataclass(frozen=True)
class Kind:
    """A type: the shape of a tensor, () for a scalar, and what it consists of."""

    shape: tuple[int, ...]
    element: str
    """A key of `BITS`; of a pointer what it points to."""
    pointer: bool = False

    @property
    def bits(self) -> int:
        """Width of an entry."""
        return 64 if self.pointer else BITS[self.element]


def kind_of(text: str) -> Kind:
    """Return the type that a text names."""
    text = text.strip()
    shape: tuple[int, ...] = ()
    if text.startswith("tensor<"):
        *lengths, text = text.removeprefix("tensor<").removesuffix(">").split("x")
        shape = tuple(map(int, lengths))
    found = re.fullmatch(r"!tt\.ptr<(\w+)>|(\w+)", text)
    if not found or (found[1] or found[2]) not in BITS:
        raise UnknownOperation(f"type {text}")
    return Kind(shape, found[1] or found[2], found[1] is not None)


@dataclass(frozen=True)
class Value:
    """Terms of a scalar or a tensor; the axis of units has length 1 in them."""

    terms: np.ndarray[Any, Any]
    kind: Kind


@dataclass(frozen=True)
class Load:
    """One word that a unit reads."""

    address: Term
    mask: Term
    value: Term


@dataclass(frozen=True)
class Store:
    """One word or byte that a unit writes."""

    address: Term
    mask: Term
    value: Term


@dataclass
class Kernel:
    """What a kernel does for one unit, with the program's arguments as variables."""

    name: str
    units: int
    """Of a program."""
    widths: list[int] = field(default_factory=list)
    """Of the arguments, in bits."""
    loads: list[Load] = field(default_factory=list)
    stores: list[Store] = field(default_factory=list)
    float_operations: dict[str, int] = field(default_factory=dict)
    """How often a float operation is done for one unit, by its name."""


@dataclass(frozen=True)
class Line:
    """One operation as it is written."""

    results: list[str]
    op: str
    operands: list[str]
    kinds: list[Kind]
    text: str


def line_of(text: str, more: Collection[str] = WITH_MORE) -> Line:
    """Return an operation's parts; one that is not in `more` says nothing beside its operands."""
    results, _, rest = text.rpartition(" = ") if re.match(r"%[^\"{]* = ", text) else ("", "", text)
    if results:
        results, rest = text.split(" = ", 1)
    found = re.match(r"([a-z_]+\.[a-z_0-9]+)(.*)", rest)
    if not found:
        raise UnknownOperation(text)
    op, rest = found[1], found[2]
    body, _, types = rest.rpartition(" : ")
    if op == "tt.return":
        body, types = "", ""
    kinds = [] if not types else [kind_of(t) for t in re.split(r", (?![^<]*>)| -> | to ", types)]
    if op not in more and re.sub(r"%[A-Za-z0-9_]+|[ ,]", "", body):
        raise UnknownOperation(text)
    return Line(
        [name.strip() for name in results.split(",")] if results else [],
        op,
        re.findall(r"%[A-Za-z0-9_]+", re.sub(r"\{.*\}|\"[^\"]*\"", "", body)),
        kinds,
        text,
    )


def read(text: str) -> Kernel:
    """Return what a kernel does for one unit."""
    lines = [line.strip() for line in without_locations(text).splitlines()]
    head = next(line for line in lines if line.startswith("tt.func"))
    found = re.match(r"tt\.func public @(\w+)\((.*)\) attributes", head)
    assert found
    body = [line_of(line) for line in lines[lines.index(head) + 1 :] if line != "}"]
    ranges = [
        int(m[1])
        for line in body
        if line.op == "tt.make_range" and (m := re.search(r"end = (\d+)", line.text))
    ]
    units = max(ranges)
    others = {n for line in body for kind in line.kinds for n in kind.shape if n != units}
    if units <= max(others, default=1):
        raise UnknownOperation(f"the axis of units is not the longest: {units} of {sorted(others)}")
    program = _Program(Kernel(found[1], units))
    for argument in re.finditer(r"%(\d+): (!tt\.ptr<\w+>|\w+)", found[2]):
        program.argument(f"%{argument[1]}", kind_of(argument[2]))
    for line in body:
        program.do(line)
    return program.kernel


@dataclass
class _Program:
    kernel: Kernel
    values: dict[str, Value] = field(default_factory=dict)

    def argument(self, name: str, kind: Kind) -> None:
        self.kernel.widths.append(kind.bits)
        self.values[name] = self._filled(var(f"argument{len(self.values)}", kind.bits), kind)

    def _filled(self, term: Term, kind: Kind) -> Value:
        out = np.empty(self._lengths(kind), dtype=object)
        out[...] = term
        return Value(out, kind)

    def _lengths(self, kind: Kind) -> tuple[int, ...]:
        if kind.shape.count(self.kernel.units) > 1:
            raise UnknownOperation(f"two axes of {self.kernel.units}")
        return tuple(1 if n == self.kernel.units else n for n in kind.shape)

    def do(self, line: Line) -> None:
        """Do one operation."""
        if line.op == "tt.return":
            return
        inputs = [self.values[name] for name in line.operands]
        if line.op == "tt.store":
            self._store(inputs)
            return
        kind = line.kinds[-1]
        if line.op in _SHAPES:
            outs = _SHAPES[line.op](self, line, inputs, kind)
        elif line.op == "tt.load":
            outs = [self._load(inputs, kind)]
        else:
            outs = [self._pointwise(line, inputs, kind)]
        for name, out in zip(line.results, outs, strict=True):
            if out.terms.shape != self._lengths(out.kind) or out.terms.flat[0].width != out.kind.bits:
                raise UnknownOperation(
                    f"{line.text}: has {out.terms.shape} of {out.terms.flat[0].width} bits"
                )
            self.values[name] = out

    def _pointwise(self, line: Line, inputs: list[Value], kind: Kind) -> Value:
        if line.op == "arith.select" and line.kinds[0].shape != kind.shape:
            raise UnknownOperation(line.text)
        if line.op in ("arith.cmpi", "arith.cmpf"):
            kind = Kind(kind.shape, "i1")
        if line.op in SINGLE and line.kinds[0].element != "f32":
            raise UnknownOperation(line.text)
        how = POINTWISE.get(line.op)
        if how is None:
            raise UnknownOperation(f"{line.op}: {line.text}")
        if any(value.terms.shape != inputs[0].terms.shape for value in inputs):
            raise UnknownOperation(f"shapes of {line.text}")
        if line.op in _COUNTED:
            counts = self.kernel.float_operations
            counts[line.op] = counts.get(line.op, 0) + inputs[0].terms.size
        out = np.empty(inputs[0].terms.shape, dtype=object)
        for at in np.ndindex(out.shape):
            out[at] = how(line, [value.terms[at] for value in inputs], kind)
        return Value(out, kind)

    def _load(self, inputs: list[Value], kind: Kind) -> Value:
        places, *masks = inputs
        # What a masked load gives elsewhere is of no effect: `theorems` finds the same mask at every store.
        out = np.empty(places.terms.shape, dtype=object)
        for at in np.ndindex(out.shape):
            out[at] = var(f"load{len(self.kernel.loads)}", BITS[kind.element])
            mask = masks[0].terms[at] if masks else const(1, 1)
            self.kernel.loads.append(Load(places.terms[at], mask, out[at]))
        return Value(out, Kind(kind.shape, kind.element))

    def _store(self, inputs: list[Value]) -> None:
        places, values, *masks = inputs
        for at in np.ndindex(places.terms.shape):
            mask = masks[0].terms[at] if masks else const(1, 1)
            self.kernel.stores.append(Store(places.terms[at], mask, values.terms[at]))

    # Operations that change shapes

    def constant(self, line: Line, inputs: list[Value], kind: Kind) -> list[Value]:
        found = re.search(r"dense<([^>]*)>", line.text) or re.search(r"arith\.constant (\S+)", line.text)
        assert found
        bits = constant_bits(found[1], line)
        return [self._filled(const(bits, kind.bits), kind)]

    def make_range(self, line: Line, inputs: list[Value], kind: Kind) -> list[Value]:
        (start,) = map(int, re.findall(r"start = (\d+)", line.text))
        length = kind.shape[0]
        if length != self.kernel.units:
            out = np.array([const(start + i, 32) for i in range(length)], dtype=object)
            return [Value(out, kind)]
        if start or length & (length - 1):
            raise UnknownOperation(line.text)
        return [self._filled(widen(var(LANE, length.bit_length() - 1), 32), kind)]

    def program_id(self, line: Line, inputs: list[Value], kind: Kind) -> list[Value]:
        (axis,) = re.findall(r"get_program_id ([xyz])", line.text)
        return [self._filled(widen(var(f"program_{axis}", 31), 32), kind)]

    def splat(self, line: Line, inputs: list[Value], kind: Kind) -> list[Value]:
        return [self._filled(inputs[0].terms[()], kind)]

    def broadcast(self, line: Line, inputs: list[Value], kind: Kind) -> list[Value]:
        return [Value(np.broadcast_to(inputs[0].terms, self._lengths(kind)), kind)]

    def expand_dims(self, line: Line, inputs: list[Value], kind: Kind) -> list[Value]:
        (axis,) = map(int, re.findall(r"axis = (\d+)", line.text))
        return [Value(np.expand_dims(inputs[0].terms, axis), kind)]

    def reshape(self, line: Line, inputs: list[Value], kind: Kind) -> list[Value]:
        shapes = [value.shape for value in (inputs[0].kind, kind)]
        units = self.kernel.units
        before = {int(np.prod(shape[: shape.index(units)])) if units in shape else None for shape in shapes}
        if len(before) > 1:
            raise UnknownOperation(f"units are mixed: {line.text}")
        return [Value(inputs[0].terms.reshape(self._lengths(kind)), kind)]

    def transpose(self, line: Line, inputs: list[Value], kind: Kind) -> list[Value]:
        (order,) = re.findall(r"order = array<i32: ([\d, ]+)>", line.text)
        return [Value(inputs[0].terms.transpose([int(axis) for axis in order.split(",")]), kind)]

    def split(self, line: Line, inputs: list[Value], kind: Kind) -> list[Value]:
        return [Value(inputs[0].terms[..., i], kind) for i in range(2)]

    def join(self, line: Line, inputs: list[Value], kind: Kind) -> list[Value]:
        return [Value(np.stack([value.terms for value in inputs], axis=-1), kind)]

    def bitcast(self, line: Line, inputs: list[Value], kind: Kind) -> list[Value]:
        return [Value(inputs[0].terms, kind)]

    def add_pointer(self, line: Line, inputs: list[Value], kind: Kind) -> list[Value]:
        places, offsets = (value.terms for value in inputs)
        kind = line.kinds[0]
        size = BITS[kind.element] // 8
        out = np.empty(places.shape, dtype=object)
        for at in np.ndindex(out.shape):
            out[at] = places[at] + widen_signed(offsets[at], 64) * size
        return [Value(out, kind)]


_SHAPES: dict[str, Callable[[_Program, Line, list[Value], Kind], list[Value]]] = {
    "arith.constant": _Program.constant,
    "tt.make_range": _Program.make_range,
    "tt.get_program_id": _Program.program_id,
    "tt.splat": _Program.splat,
    "tt.broadcast": _Program.broadcast,
    "tt.expand_dims": _Program.expand_dims,
    "tt.reshape": _Program.reshape,
    "tt.trans": _Program.transpose,
    "tt.split": _Program.split,
    "tt.join": _Program.join,
    "tt.bitcast": _Program.bitcast,
    "tt.addptr": _Program.add_pointer,
}

_COMPARED: dict[str, Callable[[Term, Term], Term]] = {
    "eq": lambda a, b: a.equal(b),
    "ne": lambda a, b: ~a.equal(b),
    "ult": lambda a, b: a.below(b),
    "ule": lambda a, b: a.upto(b),
    "ugt": lambda a, b: b.below(a),
    "uge": lambda a, b: b.upto(a),
    "slt": lambda a, b: a.signed_below(b),
    "sle": lambda a, b: ~b.signed_below(a),
    "sgt": lambda a, b: b.signed_below(a),
    "sge": lambda a, b: ~a.signed_below(b),
}


def _compare(line: Line, args: Sequence[Term], kind: Kind) -> Term:
    (predicate,) = re.findall(r"arith\.cmpi (\w+)", line.text)
    return _COMPARED[predicate](*args)


def constant_bits(text: str, line: Line) -> int:
    """Return the bits of a constant as it is written."""
    kind = line.kinds[-1]
    if text in ("true", "false"):
        return int(text == "true")
    if text.startswith("0x"):
        return int(text, 16)
    if kind.element in ("f32", "f16", "bf16"):
        if kind.element != "f32":
            raise UnknownOperation(line.text)
        return int(np.float32(text).view(np.uint32))
    return int(text)


def _is_nan(line: Line, args: Sequence[Term], kind: Kind) -> Term:
    """Return whether a float32 is not equal to itself; other comparisons of floats are refused."""
    if " une, " not in line.text or args[0] is not args[1] or line.kinds[0].element != "f32":
        raise UnknownOperation(line.text)
    return const(0x7F800000, 32).below(args[0] & 0x7FFFFFFF)


def _assembly(line: Line, args: Sequence[Term], kind: Kind) -> Term:
    (text,) = re.findall(r'elementwise_inline_asm "([^"]*)"', line.text)
    constraints = re.search(r'constraints = "([^"]*)", packed_element = 1 : i32, pure = true', line.text)
    meaning = ptx.MEANING.get(text)
    if (
        meaning is None
        or constraints is None
        or constraints[1] not in (f"={out}" + f",{r}" * len(args) for out, r in ("rr", "ff", "hr"))
    ):
        raise UnknownOperation(f"inline assembly: {line.text}")
    return meaning(*args)


def _signed_division(op: str, a: Term, b: Term) -> Term:
    """Return a quotient or a remainder by a power of two, of `a` that is not negative."""
    divisor = b.constant
    if a.op == "mul" and (factor := a.args[1].constant) and factor & (factor - 1) == 0:
        a = a.args[0] << factor.bit_length() - 1
    from_zero = (
        a.args[0].constant == 0 if a.op == "concat" else not (a.constant or 1 << a.width - 1) >> a.width - 1
    )
    if not (divisor and divisor & (divisor - 1) == 0 and from_zero):
        raise UnknownOperation(f"{op} is not of a number from 0 on by a power of two")
    return a >> divisor.bit_length() - 1 if op == "sdiv" else a & (divisor - 1)


def _shifted(op: str) -> Callable[[Line, Sequence[Term], Kind], Term]:
    """Return a shift: by the width or more it has no value, and machines do not agree."""

    def done(line: Line, args: Sequence[Term], kind: Kind) -> Term:
        by = args[1].constant
        if by is None or by >= kind.bits:
            raise UnknownOperation(f"not a shift by a constant below {kind.bits}: {line.text}")
        return apply(op, *args)

    return done


def _applied(op: str) -> Callable[[Line, Sequence[Term], Kind], Term]:
    return lambda line, args, kind: apply(op, *args)


_COUNTED = {"arith.addf", "arith.subf", "arith.mulf", "math.fma"}
SINGLE = _COUNTED | {"arith.maximumf", "arith.fptosi"}
"""Operations whose meaning here is that on float32."""
POINTWISE: dict[str, Callable[[Line, Sequence[Term], Kind], Term]] = {
    **{f"arith.{name}": _applied(op) for name, op in {
        "addi": "add", "subi": "sub", "muli": "mul", "andi": "and", "ori": "or", "xori": "xor",
        "minui": "umin", "maxui": "umax", "minsi": "smin", "maxsi": "smax",
        "addf": "fadd", "subf": "fsub", "mulf": "fmul", "maximumf": "fmaximum",
    }.items()},
    "arith.shli": _shifted("shl"),
    "arith.shrui": _shifted("lshr"),
    "math.fma": _applied("fma"),
    "math.absf": lambda line, args, kind: args[0] & ((1 << (kind.bits - 1)) - 1),
    "arith.cmpi": _compare,
    "arith.cmpf": _is_nan,
    "arith.select": lambda line, args, kind: choose(*args),
    "arith.extsi": lambda line, args, kind: widen_signed(args[0], kind.bits),
    "arith.extui": lambda line, args, kind: widen(args[0], kind.bits),
    "arith.trunci": lambda line, args, kind: extract(args[0], kind.bits - 1, 0),
    "arith.divsi": lambda line, args, kind: _signed_division("sdiv", *args),
    "arith.remsi": lambda line, args, kind: _signed_division("srem", *args),
    "arith.fptosi": lambda line, args, kind: Term("ftoi", kind.bits, (args[0],)),
    "arith.extf": lambda line, args, kind: _half(line, args[0]),
    "tt.elementwise_inline_asm": _assembly,
}  # fmt: skip


def _half(line: Line, a: Term) -> Term:
    if [kind.element for kind in line.kinds] != ["f16", "f32"]:
        raise UnknownOperation(line.text)
    return Term("half", 32, (a,))
