"""Reads a kernel that turns its tile around, as the column quantizer does: what each of its stores writes, and where.

`ttir` reads a kernel forward, for one lane. Here a store is read backward: an entry of a tensor is asked for by its
index, and asks for the entries that it is made of. An index is a term, so one entry stands for all along an axis. Where
an operation has to know bits of an index, as a join does, the entries are enumerated by these bits. All lengths are
powers of two; then a reshape or a transposition only moves bits of the index.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise, product

from prove.terms import Term, concat, const, extract, in_order, var, variables, widen, widen_signed
from prove.ttir import (
    BITS,
    POINTWISE,
    SINGLE,
    Kind,
    Line,
    Load,
    UnknownOperation,
    constant_bits,
    kind_of,
    line_of,
    without_locations,
)

_HINT = re.compile(r" \{tt\.contiguity = dense<([^>]*)> : tensor<\d+xi32>\}")
Y_BITS = 16
"""Programs along the second axis of a grid are fewer than 2^16: more are not launched."""
Index = tuple[Term | None, ...]
"""By axis, a term of as many bits as the axis has; None for an axis of one."""


class _Unknown(Exception):
    """Bits of an index have to be known."""

    def __init__(self, term: Term) -> None:
        self.bits: set[tuple[str, int]] = set()
        for part in in_order([term]):
            if part.op == "var":
                whole = term is part or any(part in t.args and t.op != "extract" for t in in_order([term]))
                self.bits |= {(part.value, bit) for bit in range(part.width)} if whole else set()
            elif part.op == "extract":
                self.bits |= {(part.args[0].value, bit) for bit in range(part.value[1], part.value[0] + 1)}


@dataclass(frozen=True)
class Entry:
    """What one store writes for an index whose free bits are the variables `i0`, `i1` and so on, one of each axis."""

    index: Index
    address: Term
    mask: Term
    value: Term


@dataclass
class TurnedKernel:
    """A kernel of which single entries are read."""

    name: str
    widths: list[int] = field(default_factory=list)
    loads: dict[Term, Load] = field(default_factory=dict)
    """By the variable that stands for what is read."""
    stores: list[list[Entry]] = field(default_factory=list)
    side_by_side: list[Term] = field(default_factory=list)
    """What the source promises of addresses, which the compiler relies on: truths."""

    def part(self, stores: slice) -> TurnedKernel:
        """Return the kernel with some of its stores, and the loads of which they are made."""
        found = self.stores[stores]
        read = {v for store in found for entry in store for v in variables(entry.value)}
        loads = {load: access for load, access in self.loads.items() if load in read}
        return replace(self, loads=loads, stores=found)


def read_turned(text: str, given: Mapping[str, Term]) -> TurnedKernel:
    """Return what a kernel writes; `given` are terms that stand for some arguments, by their names `argument0`, .."""
    lines = [line.strip() for line in without_locations(text).splitlines()]
    head = next(line for line in lines if line.startswith("tt.func"))
    found = re.match(r"tt\.func public @(\w+)\((.*)\) attributes", head)
    assert found
    arguments = {f"%{a[1]}": kind_of(a[2]) for a in re.finditer(r"%(\d+): (!tt\.ptr<\w+>|\w+)", found[2])}
    body = lines[lines.index(head) + 1 :]
    reader = _Reader(TurnedKernel(found[1], [kind.bits for kind in arguments.values()]))
    for number, (name, kind) in enumerate(arguments.items()):
        argument = f"argument{number}"
        reader.known[name, ()] = given.get(argument, var(argument, kind.bits))
    for text_of_line in body:
        if text_of_line == "}":
            continue
        hint = _HINT.search(text_of_line)
        line = line_of(_HINT.sub("", text_of_line))
        if hint:
            reader.hints[line.results[0]] = hint[1]
        if line.op not in (
            *_SPECIAL,
            *POINTWISE,
            "tt.store",
            "tt.return",
        ):  # it may do more than give a value
            raise UnknownOperation(text_of_line)
        for place, name in enumerate(line.results):
            reader.lines[name] = line, place
        if line.op == "tt.store":
            reader.kernel.stores.append(list(reader.entries(line)))
    read = {name for name, _ in reader.known}
    for name, (line, _) in reader.lines.items():
        if line.op == "tt.load" and name not in read:
            raise UnknownOperation(f"it is read and not used: {line.text}")
    return reader.kernel


def _simpler(op: str, args: list[Term]) -> Term | None:
    """Return products by powers of two, and sums of numbers that have no bit in common, by their bits."""
    if op == "arith.muli":
        for a, b in (args, args[::-1]):
            if (factor := b.constant) and factor & (factor - 1) == 0:
                return a << factor.bit_length() - 1
    if op == "arith.addi":
        ends = {0}
        for term in args:
            at = 0
            for part in reversed(term.args if term.op == "concat" else (term,)):
                at += part.width
                ends.add(at)
        parts = []
        for low, high in pairwise(sorted(ends)):
            both = [extract(term, high - 1, low) for term in args]
            some = [part for part in both if part.constant != 0]
            if len(some) > 1:
                return None
            parts.append(some[0] if some else both[0])
        return concat(*reversed(parts))
    return None


def _bits(length: int) -> int:
    if length & (length - 1):
        raise UnknownOperation(f"an axis of {length}")
    return length.bit_length() - 1


@dataclass
class _Reader:
    kernel: TurnedKernel
    lines: dict[str, tuple[Line, int]] = field(default_factory=dict)
    """The operation that gives a value, and which of its results the value is."""
    known: dict[tuple[str, Index], Term] = field(default_factory=dict)
    hints: dict[str, str] = field(default_factory=dict)
    """How many neighbours along each axis are side by side, by the pointers' name."""

    def entries(self, store: Line) -> Iterator[Entry]:
        """Yield the entries of a store: one for each value of the bits that have to be known."""
        shape = store.kinds[0].shape
        enumerated: set[tuple[str, int]] = set()
        while True:
            try:
                yield from [self._entry(store, index) for index in _indices(shape, enumerated)]
            except _Unknown as unknown:
                more = set(_original(unknown.bits, shape, enumerated)) - enumerated
                if not more:
                    raise UnknownOperation(store.text) from unknown
                enumerated |= more
                continue
            return

    def _entry(self, store: Line, index: Index) -> Entry:
        address, value, *masks = (self.at(name, index) for name in store.operands)
        return Entry(index, address, masks[0] if masks else const(1, 1), value)

    def at(self, name: str, index: Index) -> Term:
        """Return one entry of a value."""
        found = self.known.get((name, index))
        if found is None:
            line, place = self.lines[name]
            found = self.known[name, index] = self._made(line, place, index)
            if name in self.hints:
                self._promised(name, line, index)
        return found

    def _promised(self, name: str, line: Line, index: Index) -> None:
        """Note what a hint promises: an entry lies as far from the first of its run as its number in it says."""
        counts = [int(n) for n in re.findall(r"\d+", self.hints[name])]
        size = BITS[line.kinds[0].element] // 8
        for axis, count in enumerate(counts):
            bits, at = _bits(count), index[axis] if axis < len(index) else None
            if not bits or at is None:
                continue
            first = concat(extract(at, at.width - 1, bits), const(0, bits))
            start = self._made(line, 0, (*index[:axis], first, *index[axis + 1 :]))
            far = widen(extract(at, bits - 1, 0), 64) * size
            self.kernel.side_by_side.append(self.known[name, index].equal(start + far))

    def _made(self, line: Line, place: int, index: Index) -> Term:
        kind = line.kinds[-1]
        special = _SPECIAL.get(line.op)
        if special is not None:
            return special(self, line, place, index)
        how = POINTWISE.get(line.op)
        if how is None:
            raise UnknownOperation(f"{line.op}: {line.text}")
        if line.op in SINGLE and line.kinds[0].element != "f32":
            raise UnknownOperation(line.text)
        if line.op == "arith.select" and line.kinds[0].shape != kind.shape:
            raise UnknownOperation(line.text)
        if line.op in ("arith.cmpi", "arith.cmpf"):
            kind = Kind(kind.shape, "i1")
        args = [self.at(operand, index) for operand in line.operands]
        made = _simpler(line.op, args) or how(line, args, kind)
        if made.width != kind.bits:
            raise UnknownOperation(f"{line.text}: has {made.width} bits")
        return made

    def constant(self, line: Line, place: int, index: Index) -> Term:
        found = re.search(r"dense<([^>]*)>", line.text) or re.search(r"arith\.constant (\S+)", line.text)
        assert found
        return const(constant_bits(found[1], line), line.kinds[-1].bits)

    def make_range(self, line: Line, place: int, index: Index) -> Term:
        (start,) = map(int, re.findall(r"start = (\d+)", line.text))
        if start:
            raise UnknownOperation(line.text)
        return const(0, 32) if index[0] is None else widen(index[0], 32)

    def program_id(self, line: Line, place: int, index: Index) -> Term:
        (axis,) = re.findall(r"get_program_id ([xyz])", line.text)
        return widen(var(f"program_{axis}", 31 if axis == "x" else Y_BITS), 32)

    def splat(self, line: Line, place: int, index: Index) -> Term:
        return self.at(line.operands[0], ())

    def broadcast(self, line: Line, place: int, index: Index) -> Term:
        before = line.kinds[0].shape
        return self.at(
            line.operands[0], tuple(None if n == 1 else i for n, i in zip(before, index, strict=True))
        )

    def expand_dims(self, line: Line, place: int, index: Index) -> Term:
        (axis,) = map(int, re.findall(r"axis = (\d+)", line.text))
        return self.at(line.operands[0], (*index[:axis], *index[axis + 1 :]))

    def reshape(self, line: Line, place: int, index: Index) -> Term:
        parts = [i for i in index if i is not None]
        out: list[Term | None] = []
        left = sum(part.width for part in parts)
        for length in line.kinds[0].shape:
            bits = _bits(length)
            out.append(extract(concat(*parts), left - 1, left - bits) if bits else None)
            left -= bits
        return self.at(line.operands[0], tuple(out))

    def transpose(self, line: Line, place: int, index: Index) -> Term:
        (order,) = re.findall(r"order = array<i32: ([\d, ]+)>", line.text)
        axes = [int(axis) for axis in order.split(",")]
        return self.at(line.operands[0], tuple(index[axes.index(axis)] for axis in range(len(axes))))

    def split(self, line: Line, place: int, index: Index) -> Term:
        return self.at(line.operands[0], (*index, const(place, 1)))

    def join(self, line: Line, place: int, index: Index) -> Term:
        which = index[-1]
        assert which is not None
        if which.constant is None:
            raise _Unknown(which)
        return self.at(line.operands[which.constant], index[:-1])

    def bitcast(self, line: Line, place: int, index: Index) -> Term:
        return self.at(line.operands[0], index)

    def add_pointer(self, line: Line, place: int, index: Index) -> Term:
        pointer, offset = (self.at(operand, index) for operand in line.operands)
        return pointer + widen_signed(offset, 64) * (BITS[line.kinds[0].element] // 8)

    def load(self, line: Line, place: int, index: Index) -> Term:
        address, *more = (self.at(operand, index) for operand in line.operands)
        out = var(f"load{len(self.kernel.loads)}", BITS[line.kinds[-1].element])
        self.kernel.loads[out] = Load(address, more[0] if more else const(1, 1), out)
        return out


_SPECIAL = {
    "arith.constant": _Reader.constant,
    "tt.make_range": _Reader.make_range,
    "tt.get_program_id": _Reader.program_id,
    "tt.splat": _Reader.splat,
    "tt.broadcast": _Reader.broadcast,
    "tt.expand_dims": _Reader.expand_dims,
    "tt.reshape": _Reader.reshape,
    "tt.trans": _Reader.transpose,
    "tt.split": _Reader.split,
    "tt.join": _Reader.join,
    "tt.bitcast": _Reader.bitcast,
    "tt.addptr": _Reader.add_pointer,
    "tt.load": _Reader.load,
}


def _free(axis: int, bits: int, enumerated: set[tuple[str, int]]) -> list[int]:
    """Return the bits of an axis that are not enumerated, the lowest first."""
    return [bit for bit in range(bits) if (f"i{axis}", bit) not in enumerated]


def _indices(shape: tuple[int, ...], enumerated: set[tuple[str, int]]) -> Iterator[Index]:
    """Yield an index for each value of the enumerated bits."""
    names = sorted(enumerated)
    for values in product((0, 1), repeat=len(names)):
        fixed = dict(zip(names, values, strict=True))
        index: list[Term | None] = []
        for axis, length in enumerate(shape):
            bits = _bits(length)
            free = _free(axis, bits, enumerated)
            variable = var(f"i{axis}", len(free)) if free else None
            parts = []
            for bit in reversed(range(bits)):
                known = fixed.get((f"i{axis}", bit))
                if known is not None or variable is None:
                    parts.append(const(known or 0, 1))
                else:
                    parts.append(extract(variable, free.index(bit), free.index(bit)))
            index.append(concat(*parts) if bits else None)
        yield tuple(index)


def _original(
    bits: set[tuple[str, int]], shape: tuple[int, ...], enumerated: set[tuple[str, int]]
) -> Iterator[tuple[str, int]]:
    """Yield the bits of the axes that free bits of the variables are."""
    for name, bit in bits:
        axis = int(name[1:])
        yield name, _free(axis, _bits(shape[axis]), enumerated)[bit]
