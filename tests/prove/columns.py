"""Where the column quantizer reads and writes: lines lie side by side, and the output is transposed.

A program has a tile of lines and of some units of each. `turned` reads what it stores for one line and one unit of the
tile, as symbols. Where a thread takes two lines, of 16-bit elements that are one word, there is a layout for each.

The proved variant is the one for a large contiguous matrix: lines are one element apart, the step between elements of a
line is a constant, and the host has seen that no offset within a tile leaves 32 bits.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np

from prove.kernels import Case
from prove.layouts import Access, placed
from prove.questions import NotProved, Step
from prove.terms import Term, concat, const, every, extract, substitute, var, variables, widen, widen_signed
from prove.turned import Y_BITS, Entry, TurnedKernel, read_turned

BAND = 32
"""Tiles that programs go across before they go down: `tile_index`."""
UNIT_BITS = 18
"""Bits of the number of units of a line: of at most 256 lines at once, no offset reaches 2^31."""
_STEP, _UNITS = 6, 4
"""Numbers of the arguments that say how far elements of a line are apart, and how many units a line has."""


def read_columns(text: str, case: Case, side: int) -> TurnedKernel:
    """Return what a column kernel writes, of a matrix whose rows have `side` elements."""
    step = side // together_of(case)
    units = widen(var(f"argument{_UNITS}", UNIT_BITS), 32)
    return read_turned(text, {f"argument{_STEP}": const(step, 32), f"argument{_UNITS}": units})


def together_of(case: Case) -> int:
    """Return how many lines a thread takes."""
    return 1 if case.dtype == "float32" or case.random_bits else 2


class Columns:
    """The layout of one of the lines that a thread takes."""

    group, key = 9, 11
    """Numbers of the arguments that say which random calls a tensor has, and of the first word of the stream."""
    codes_at, scales_at = 1, 2
    """Numbers of the arguments that are what is written."""

    def __init__(self, case: Case, kernel: TurnedKernel, which: int, side: int) -> None:
        self.case = case
        self.kernel = kernel
        self.k = case.block.k
        self.side = side
        self.which = which
        self.together = together_of(case)
        width = 32 if case.dtype == "float32" else 16
        self.inputs = [var(f"x{j}", width) for j in range(self.k)]
        last = kernel.stores[-1]
        if any(entry.value.width != 8 for entry in last):
            raise NotProved("places: the last that is written are not scale bytes")
        self.lines, self.units = (1 << (i.width if i is not None else 0) for i in last[0].index)

    def values(self, units: np.ndarray) -> dict[str, Any]:
        """Return the variables' values for the evaluation of units: all lie in one here."""
        return {"program_x": 0, "program_y": 0, "i0": 0, "i1": 0}

    def unit_of(self, model: dict[str, int]) -> int:
        """Return the unit of a solver's model: none is set apart here."""
        return 0

    def told(self, model: dict[str, int]) -> str:
        """Return in words the unit of a solver's model."""
        x, y, line, unit = (model.get(name, 0) for name in ("program_x", "program_y", "i0", "i1"))
        return f"unit {unit} of lines {line * self.together} on, in the tile of program ({x}, {y})"

    def first_call(self, per_unit: int) -> Term:
        """Return the number of a unit's first random call, less that of the tensor's first."""
        line, unit = self._tile
        within, own, _ = self._own(self._byte, 1)
        row = line + widen(within, 64)
        groups = widen_signed(var(f"argument{self.group + 1}", 32), 64)
        return row * groups + (unit + widen(own, 64)) * per_unit

    @property
    def words_out(self) -> int:
        """Words of codes that a unit writes."""
        return self.k * self.case.block.element.bits // 32

    @property
    def units_term(self) -> Term:
        """How many units a line has, 64 bits."""
        return widen(var(f"argument{_UNITS}", UNIT_BITS), 64)

    @cached_property
    def _tile(self) -> tuple[Term, Term]:
        """The first line and the first unit of a program's tile, 64 bits."""
        x, y = var("program_x", 31), var("program_y", Y_BITS)
        band = BAND.bit_length() - 1
        across = widen(concat(y, extract(x, band - 1, 0)), 64)
        down = widen(extract(x, 30, band), 64)
        return across << self.lines.bit_length() - 1, down << self.units.bit_length() - 1

    def _own(self, entry: Entry, out: int) -> tuple[Term, Term, int]:
        """Return the line and the unit of an entry within the tile, and which of the `out` of a unit it is."""
        line, place = entry.index
        assert line is not None
        assert place is not None
        bits = out.bit_length() - 1
        number = extract(place, bits - 1, 0).constant if bits else 0
        if number is None or (self.together > 1 and extract(line, 0, 0).constant is None):
            raise NotProved("places: a word is not told from its neighbours")
        return line, extract(place, place.width - 1, bits), number

    def _belongs(self, entry: Entry) -> bool:
        line = entry.index[0]
        return self.together == 1 or (line is not None and extract(line, 0, 0).constant == self.which)

    @cached_property
    def _codes(self) -> list[tuple[int, Entry, int]]:
        """The words of codes: which of the unit each is, its entry, and how many its store writes of a unit."""
        out: list[tuple[int, Entry, int]] = []
        first = 0
        for store in self.kernel.stores[:-1]:
            place = store[0].index[1]
            count = (1 << place.width) // self.units if place is not None else 0
            if any(entry.value.width != 32 for entry in store):
                raise NotProved("places: something else is written than words and a byte")
            own = filter(self._belongs, store)
            out += [(first + self._own(entry, count)[2], entry, count) for entry in own]
            first += count
        if sorted(number for number, _, _ in out) != list(range(self.words_out)):
            raise NotProved(f"places: words {sorted(number for number, _, _ in out)} are written")
        return sorted(out, key=lambda found: found[0])

    @cached_property
    def _byte(self) -> Entry:
        found = [*filter(self._belongs, self.kernel.stores[-1])]
        if len(found) != 1:
            raise NotProved(f"places: {len(found)} scale bytes are written")
        return found[0]

    @cached_property
    def _size(self) -> int:
        """Bytes that a thread reads at once: an element of each of its lines."""
        return self.together * self.inputs[0].width // 8

    @cached_property
    def _first(self) -> Term:
        """Where the first elements of a unit lie, in bytes after the input's beginning."""
        line, unit = self._tile
        within, own, _ = self._own(self._byte, 1)
        threads = self.together.bit_length() - 1
        place = widen(extract(within, within.width - 1, threads), 64) * self._size + self._line_bytes(line)
        return place + (unit + widen(own, 64)) * (self.k * self._row)

    def _line_bytes(self, line: Term) -> Term:
        return line * (self.inputs[0].width // 8)

    @cached_property
    def _row(self) -> int:
        """Bytes between elements of a line."""
        return self.side * self.inputs[0].width // 8

    @cached_property
    def _loads(self) -> dict[Term, int]:
        """Which element of the unit is read, by what stands for it."""
        found = list(self.kernel.loads.values())
        if len(found) != self.k or any(load.value.width != 8 * self._size for load in found):
            raise NotProved("places: what is read are not the elements of a unit")
        base = var("argument0", 64)
        places = placed([load.address for load in found], base, self._first, self._row)
        return {load.value: place for load, place in zip(found, places, strict=True)}

    @cached_property
    def accesses(self) -> list[Access]:
        """All that is read and written for one unit of a line."""
        yes = const(1, 1)
        out = []
        for load, place in self._loads.items():
            right = var("argument0", 64) + self._first + place * self._row
            access = self.kernel.loads[load]
            out.append(Access(f"element {place}", access.address, right, access.mask, yes))
        line, unit = self._tile
        units = self.units_term

        def place(entry: Entry, of: int, argument: int, size: int, number: int, count: int) -> Term:
            """Return an address: `of` words or bytes for each unit, of which this is `number`."""
            within, own, _ = self._own(entry, count)
            tile = (line * units + unit) * of
            rest = widen(within, 64) * (units * of) + widen(own, 64) * of + number
            return var(f"argument{argument}", 64) + tile * size + rest * size

        for number, entry, count in self._codes:
            right = place(entry, self.words_out, self.codes_at, 4, number, count)
            out.append(Access(f"word {number} of the codes", entry.address, right, entry.mask, yes))
        right = place(self._byte, 1, self.scales_at, 1, 0, 1)
        out.append(Access("scale byte", self._byte.address, right, self._byte.mask, yes))
        return out

    def places(self) -> list[Step]:
        """Return the questions whether everything lies at its place."""
        out = [
            Step("places", access.found.equal(access.right) & access.mask.equal(access.exists))
            for access in self.accesses
        ]
        if promised := list(dict.fromkeys(self.kernel.side_by_side)):
            out.append(Step("places", every(promised)))
        return out

    @cached_property
    def stored(self) -> tuple[list[Term], Term]:
        """The words of codes in order, and the byte, as terms of the inputs."""
        by: dict[Term, Term] = {}
        for load, j in self._loads.items():
            parts = [self.inputs[j]]
            if self.together == 2:
                other = var(f"other{j}", 16)
                parts = [other, self.inputs[j]] if self.which == 0 else [self.inputs[j], other]
            by[load] = concat(*parts)
        *words, byte = substitute([*(entry.value for _, entry, _ in self._codes), self._byte.value], by)
        used = {v for v in variables(*words, byte) if v.value.startswith("other")}
        if used:
            raise NotProved("places: what is written for a line depends on another")
        return words, byte
