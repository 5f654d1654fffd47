"""Reads a kernel of others, which works on a tile of rows and columns, for one symbolic row (or column) of the tile.

`ttir` reads our own row kernel, in which one axis is that of units. Here an axis may hold the units and blocks within
them, as after a reshape of [rows, 128] to [rows * 4, 32]: it is kept as the 4. An operation that would combine units
with anything else is refused. What a reduction gives is a variable, and its operands are kept beside it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from prove.operations import MEANINGS, ON_FLOAT32, SAYING_MORE, signed_whole
from prove.terms import Term, apply, concat, const, var, widen, widen_signed
from prove.ttir import (
    BITS,
    LANE,
    Kind,
    Line,
    Load,
    Store,
    UnknownOperation,
    kind_of,
    line_of,
    without_locations,
)

_SHIFTS = {"arith.shrui": "lshr", "arith.shli": "shl"}
_REDUCED = {"arith.maxnumf", "arith.maxsi"}
_TAKEN = re.compile(r"(x|any|load|reduction|nan)\d+|amax|amax_input|x|y|byte|turn|program_[xyz]|" + LANE)
"""Names of variables of the reader and of `foreign`: an argument of such a name would be taken for it."""


@dataclass(frozen=True)
class Tile:
    """Terms of a value. An axis of length 1 is the same for all its places, or, if it is `units`, one for each unit."""

    terms: np.ndarray
    kind: Kind
    units: int | None = None
    """The axis in which the units are, in the slowest place."""


@dataclass(frozen=True)
class Reduction:
    """One result of a reduction: a variable, and what it is made of."""

    result: Term
    op: str
    operands: tuple[Term, ...]


@dataclass
class TileKernel:
    """What a kernel does for one unit, with its arguments as terms."""

    name: str
    arguments: dict[str, Kind] = field(default_factory=dict)
    loads: list[Load] = field(default_factory=list)
    stores: list[Store] = field(default_factory=list)
    reductions: dict[Term, Reduction] = field(default_factory=dict)
    turns: tuple[Term, Term] | None = None
    """The first turn of a loop, and the end of its turns."""
    operations: set[str] = field(default_factory=set)
    """Names of the operations that occur."""


def folded(text: str) -> list[str]:
    """Return the lines of IR without locations, each reduction as one line: its region is one operation of its two."""
    lines = [line.strip().replace(" cacheModifier = cg", "") for line in text.splitlines()]
    out = []
    while lines:
        line = lines.pop(0)
        found = re.match(r'(%\w+) = "tt\.reduce"\((%\w+)\) <\{axis = (\d+) : i32\}> \(\{$', line)
        if not found:
            out.append(line)
            continue
        head, done, given, end = (lines.pop(0) for _ in range(4))
        pair = re.findall(r"(%\w+): \w+", head)
        made = re.match(r"(%\w+) = (\S+) (%\w+), (%\w+) : \w+$", done)
        back = re.match(r"tt\.reduce\.return (%\w+) : \w+$", given)
        types = re.match(r"\}\) : \((.*)\) -> (.*)$", end)
        if not (made and back and types and [made[3], made[4]] == pair and back[1] == made[1]):
            raise UnknownOperation(f"reduction: {done}")
        if made[2] not in _REDUCED:
            raise UnknownOperation(f"reduction by {made[2]}")
        out.append(
            f"{found[1]} = tt.reduce {found[2]} {{axis = {found[3]}, by = {made[2]}}} : {types[1]} -> {types[2]}"
        )
    return out


def read_tile(
    text: str,
    units: int,
    among: Sequence[int] = (),
    given: Mapping[str, Term] | None = None,
    wraps: bool = False,
) -> TileKernel:
    """Return what a kernel does for one unit.

    Args:
        text: Triton's IR.
        units: length of the range that numbers the units of a program.
        among: lengths of ranges that number what is in all units, those of a unit one after the other.
        wraps: whether the machine shifts by the low bits of the amount alone, as AMD's do; NVIDIA's shift all bits out.
        given: terms that stand for some arguments, by the argument's name in the source, and for `program_x` and so on.
    """
    head = next(line.strip() for line in text.splitlines() if "tt.func" in line)
    names = re.findall(r"%(\w+): ", head)
    taken = [name for name in names if _TAKEN.fullmatch(name)]
    if taken:
        raise UnknownOperation(f"arguments have names of variables of the proof: {', '.join(taken)}")
    lines = folded(without_locations(text))
    start = next(i for i, line in enumerate(lines) if line.startswith("tt.func"))
    found = re.match(r"tt\.func public @(\w+)\((.*)\) attributes", lines[start])
    if not found:
        raise UnknownOperation(lines[start])
    reader = _Reader(TileKernel(found[1]), units, tuple(among), dict(given or {}), wraps)
    arguments = re.findall(r"(%\d+): (!tt\.ptr<\w+>|\w+)", found[2])
    for name, (number, kind) in zip(names, arguments, strict=True):
        reader.argument(name, number, kind_of(kind))
    for line in lines[start + 1 :]:
        if line.startswith("scf.for"):
            reader.loop(line)
        elif not line.startswith("}") and line != "tt.return":
            reader.do(line_of(line, SAYING_MORE))
    return reader.kernel


@dataclass
class _Reader:
    kernel: TileKernel
    units: int
    among: tuple[int, ...]
    given: dict[str, Term]
    wraps: bool
    values: dict[str, Tile] = field(default_factory=dict)

    def argument(self, name: str, number: str, kind: Kind) -> None:
        self.kernel.arguments[name] = kind
        self.values[number] = _uniform(self.given.get(name, var(name, kind.bits)), kind)

    def loop(self, line: str) -> None:
        """Begin a loop that hands nothing from one turn to the next: its body is read for one turn, `turn`."""
        found = re.match(r"scf\.for (%\w+) = (%\w+) to (%\w+) step (%\w+) +: i32 \{$", line)
        if not found or self.kernel.turns is not None or self.values[found[4]].terms[()].constant != 1:
            raise UnknownOperation(line)
        turn = self.given.get("turn", widen(var("turn", 31), 32))
        self.kernel.turns = (self.values[found[2]].terms[()], self.values[found[3]].terms[()])
        self.values[found[1]] = _uniform(turn, kind_of("i32"))

    def do(self, line: Line) -> None:
        self.kernel.operations.add(line.op)
        inputs = [self.values[name] for name in line.operands]
        if line.op == "tt.store":
            self.store(inputs, line)
            return
        kind = line.kinds[-1]
        if line.op == "tt.split":
            self.split(line, inputs[0], kind)
            return
        if line.op in _SHAPES:
            out = _SHAPES[line.op](self, line, inputs, kind)
        else:
            out = self.pointwise(line, inputs, kind)
        self.check(line, out)
        (name,) = line.results
        self.values[name] = out

    def check(self, line: Line, out: Tile) -> None:
        """Refuse a value whose shape or width is not that of its type."""
        for axis, (length, whole) in enumerate(zip(out.terms.shape, out.kind.shape, strict=True)):
            if length not in (1, whole // self.units if axis == out.units else whole):
                raise UnknownOperation(f"{line.text}: has {out.terms.shape}")
        if out.terms.flat[0].width != out.kind.bits:
            raise UnknownOperation(f"{line.text}: has {out.terms.flat[0].width} bits")

    def together(self, line: Line, tiles: Sequence[Tile]) -> tuple[list[np.ndarray], int | None]:
        """Return the terms of some values in one shape, and their axis of units."""
        axes = {tile.units for tile in tiles if tile.units is not None}
        if len(axes) > 1:
            raise UnknownOperation(f"units lie in two axes: {line.text}")
        units = axes.pop() if axes else None
        if units is not None and any(t.units is None and t.terms.shape[units] > 1 for t in tiles):
            raise UnknownOperation(f"units are combined with another axis: {line.text}")
        shape = np.broadcast_shapes(*(tile.terms.shape for tile in tiles))
        return [np.broadcast_to(tile.terms, shape) for tile in tiles], units

    def pointwise(self, line: Line, inputs: list[Tile], kind: Kind) -> Tile:
        if line.op in ("arith.cmpi", "arith.cmpf"):
            kind = Kind(kind.shape, "i1")
        if line.op == "arith.select" and line.kinds[0].shape != kind.shape:
            raise UnknownOperation(line.text)
        how = MEANINGS.get(line.op)
        if line.op == "arith.fptoui" and self.wraps:  # AMD's are made of the signed conversion
            how = signed_whole
        if line.op in _SHIFTS and any(t.constant is None for t in inputs[1].terms.flat):
            how = self.shifted
            self.kernel.operations.add("shift by a variable")
        if how is None:
            raise UnknownOperation(f"{line.op}: {line.text}")
        if line.op in ON_FLOAT32 and line.kinds[0].element != "f32":
            raise UnknownOperation(line.text)
        terms, units = self.together(line, inputs)
        out = np.empty(terms[0].shape, dtype=object)
        for at in np.ndindex(out.shape):
            out[at] = how(line, [each[at] for each in terms], kind)
        return Tile(out, kind, units)

    def shifted(self, line: Line, args: Sequence[Term], kind: Kind) -> Term:
        if kind.bits != 32:  # what is assumed of the machines is about 32 bits
            raise UnknownOperation(f"not a shift by a constant: {line.text}")
        by = args[1] & (kind.bits - 1) if self.wraps else args[1]
        return apply(_SHIFTS[line.op], args[0], by)

    def whole(self, line: Line, tile: Tile) -> np.ndarray:
        """Return the terms of every place of a unit."""
        if tile.units is None and any(
            n == 1 < whole for n, whole in zip(tile.terms.shape, tile.kind.shape, strict=True)
        ):
            raise UnknownOperation(f"which axis has the units is not known: {line.text}")
        shape = [n // self.units if i == tile.units else n for i, n in enumerate(tile.kind.shape)]
        return np.broadcast_to(tile.terms, shape)

    def load(self, line: Line, inputs: list[Tile], kind: Kind) -> Tile:
        terms, units = self.together(line, inputs)
        kind = Kind(kind.shape, kind.element)
        out = np.empty(terms[0].shape, dtype=object)
        for at in np.ndindex(out.shape):
            out[at] = var(f"load{len(self.kernel.loads)}", BITS[kind.element])
            mask = terms[1][at] if len(terms) > 1 else const(1, 1)
            self.kernel.loads.append(Load(terms[0][at], mask, out[at]))
        return Tile(out, kind, units)

    def store(self, inputs: list[Tile], line: Line) -> None:
        terms, _ = self.together(line, inputs)
        for at in np.ndindex(terms[0].shape):
            mask = terms[2][at] if len(terms) > 2 else const(1, 1)
            self.kernel.stores.append(Store(terms[0][at], mask, terms[1][at]))

    def reduce(self, line: Line, inputs: list[Tile], kind: Kind) -> Tile:
        (axis,) = map(int, re.findall(r"axis = (\d+)", line.text))
        (op,) = re.findall(r"by = ([\w.]+)", line.text)
        tile = inputs[0]
        if axis == tile.units or (tile.units is not None and axis < tile.units):
            raise UnknownOperation(f"units are reduced: {line.text}")
        terms = np.moveaxis(self.whole(line, tile), axis, -1)
        out = np.empty(terms.shape[:-1], dtype=object)
        for at in np.ndindex(out.shape):
            result = var(f"reduction{len(self.kernel.reductions)}", kind.bits)
            self.kernel.reductions[result] = Reduction(result, op, tuple(terms[at]))
            out[at] = result
        return Tile(out, kind, tile.units)

    # Operations that change shapes

    def constant(self, line: Line, inputs: list[Tile], kind: Kind) -> Tile:
        found = re.search(r"dense<([^>]*)>", line.text) or re.search(r"arith\.constant (\S+)", line.text)
        assert found
        text = found[1]
        if text in ("true", "false"):
            bits = int(text == "true")
        elif text.startswith("0x"):
            bits = int(text, 16)
        elif kind.element == "f32":
            bits = int(np.float32(text).view(np.uint32))
        elif kind.element.startswith("i"):
            bits = int(text)
        else:
            raise UnknownOperation(line.text)
        return _uniform(const(bits, kind.bits), kind)

    def make_range(self, line: Line, inputs: list[Tile], kind: Kind) -> Tile:
        length = kind.shape[0]
        if "start = 0 :" not in line.text:
            raise UnknownOperation(line.text)
        if length == self.units or length in self.among:
            lane, each = var(LANE, self.units.bit_length() - 1), length // self.units
            places = [widen(concat(lane, const(i, each.bit_length() - 1)), 32) for i in range(each)]
            return Tile(np.array(places, dtype=object), kind, 0)
        return Tile(np.array([const(i, 32) for i in range(length)], dtype=object), kind)

    def program_id(self, line: Line, inputs: list[Tile], kind: Kind) -> Tile:
        (axis,) = re.findall(r"get_program_id ([xyz])", line.text)
        name = f"program_{axis}"
        return _uniform(self.given.get(name, widen(var(name, 31), 32)), kind)

    def splat(self, line: Line, inputs: list[Tile], kind: Kind) -> Tile:
        return _uniform(inputs[0].terms[()], kind)

    def broadcast(self, line: Line, inputs: list[Tile], kind: Kind) -> Tile:
        tile = inputs[0]
        if tile.units is not None and tile.kind.shape[tile.units] != kind.shape[tile.units]:
            raise UnknownOperation(line.text)
        return Tile(tile.terms, kind, tile.units)

    def expand_dims(self, line: Line, inputs: list[Tile], kind: Kind) -> Tile:
        (axis,) = map(int, re.findall(r"axis = (\d+)", line.text))
        units = inputs[0].units
        moved = units + (axis <= units) if units is not None else None
        return Tile(np.expand_dims(inputs[0].terms, axis), kind, moved)

    def reshape(self, line: Line, inputs: list[Tile], kind: Kind) -> Tile:
        tile = inputs[0]
        if tile.terms.size == 1 and tile.units is None:
            return _uniform(tile.terms.flat[0], kind)
        terms = self.whole(line, tile)
        if tile.units is None:
            return Tile(terms.reshape(kind.shape), kind)
        # Units stay the slowest of an axis that begins where theirs began.
        before = int(np.prod(tile.kind.shape[: tile.units]))
        starts = [int(np.prod(kind.shape[:i])) for i in range(len(kind.shape))]
        fitting = [i for i, n in enumerate(kind.shape) if starts[i] == before and n % self.units == 0]
        if len(fitting) != 1:
            raise UnknownOperation(f"units are mixed: {line.text}")
        lengths = [n // self.units if i == fitting[0] else n for i, n in enumerate(kind.shape)]
        return Tile(terms.reshape(lengths), kind, fitting[0])

    def transpose(self, line: Line, inputs: list[Tile], kind: Kind) -> Tile:
        (text,) = re.findall(r"order = array<i32: ([\d, ]+)>", line.text)
        order = [int(axis) for axis in text.split(",")]
        units = inputs[0].units
        moved = order.index(units) if units is not None else None
        return Tile(inputs[0].terms.transpose(order), kind, moved)

    def split(self, line: Line, tile: Tile, kind: Kind) -> None:
        if tile.units == len(tile.kind.shape) - 1 or tile.terms.shape[-1] != 2:
            raise UnknownOperation(line.text)
        for i, name in enumerate(line.results):
            self.values[name] = Tile(tile.terms[..., i], kind, tile.units)

    def retyped(self, line: Line, inputs: list[Tile], kind: Kind) -> Tile:
        return Tile(inputs[0].terms, kind, inputs[0].units)

    def add_pointer(self, line: Line, inputs: list[Tile], kind: Kind) -> Tile:
        (places, offsets), units = self.together(line, inputs)
        kind = line.kinds[0]
        out = np.empty(places.shape, dtype=object)
        for at in np.ndindex(out.shape):
            out[at] = places[at] + widen_signed(offsets[at], 64) * (BITS[kind.element] // 8)
        return Tile(out, kind, units)


def _uniform(term: Term, kind: Kind) -> Tile:
    out = np.empty((1,) * len(kind.shape), dtype=object)
    out[...] = term
    return Tile(out, kind)


_SHAPES: dict[str, Callable[[_Reader, Line, list[Tile], Kind], Tile]] = {
    "arith.constant": _Reader.constant,
    "tt.make_range": _Reader.make_range,
    "tt.get_program_id": _Reader.program_id,
    "tt.splat": _Reader.splat,
    "tt.broadcast": _Reader.broadcast,
    "tt.expand_dims": _Reader.expand_dims,
    "tt.reshape": _Reader.reshape,
    "tt.trans": _Reader.transpose,
    "tt.bitcast": _Reader.retyped,
    "tt.addptr": _Reader.add_pointer,
    "tt.load": _Reader.load,
    "tt.reduce": _Reader.reduce,
}
