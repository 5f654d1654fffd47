"""Where the kernel of both orientations reads and writes: a program quantizes its tile by rows, then by columns.

The columns are those of `columns`, with other numbers of arguments. A row's units lie side by side, and a program has
some units of each of its rows.
"""

from __future__ import annotations

from functools import cached_property
from typing import Any

import numpy as np

from prove.columns import BAND, UNIT_BITS, Columns
from prove.kernels import Case
from prove.layouts import Access, placed
from prove.questions import NotProved, Step
from prove.terms import Term, concat, const, every, extract, substitute, var, variables, widen
from prove.turned import Y_BITS, Entry, TurnedKernel, read_turned

_ROWS, _COLUMNS, _STRIDE = 5, 6, 7
"""Numbers of the arguments that say how large the matrix is, and how far its rows are apart."""


def read_dual(text: str, case: Case, side: int) -> tuple[TurnedKernel, TurnedKernel]:
    """Return what a kernel writes for rows and for columns, of a matrix whose sides are whole units."""
    whole = case.block.k.bit_length() - 1
    given = {f"argument{_STRIDE}": const(side, 32)}
    for argument in (_ROWS, _COLUMNS):
        units = var(f"argument{argument}", UNIT_BITS)
        given[f"argument{argument}"] = widen(concat(units, const(0, whole)), 32)
    kernel = read_turned(text, given)
    first = next((i for i, store in enumerate(kernel.stores) if store[0].value.width == 8), None)
    if first is None:
        raise NotProved("places: no scale byte is written")
    return kernel.part(slice(None, first + 1)), kernel.part(slice(first + 1, None))


class DualColumns(Columns):
    """The layout of one of the columns that a thread takes."""

    group, key = 18, 20
    codes_at, scales_at = 3, 4

    @property
    def units_term(self) -> Term:
        """How many units a line has, 64 bits."""
        return widen(var(f"argument{_ROWS}", UNIT_BITS), 64)


class DualRows:
    """The layout of the units of rows."""

    group, key = 10, 12

    def __init__(self, case: Case, kernel: TurnedKernel, columns: Columns) -> None:
        self.case = case
        self.kernel = kernel
        self.k = case.block.k
        self.side = columns.side
        self.inputs = [var(f"x{j}", 16) for j in range(self.k)]
        self.rows, self.units = columns.units * self.k, columns.lines // self.k
        """Rows of a tile, and units of each."""

    @property
    def words_out(self) -> int:
        """Words of codes that a unit writes."""
        return self.k * self.case.block.element.bits // 32

    def values(self, units: np.ndarray) -> dict[str, Any]:
        """Return the variables' values for the evaluation of units: all lie in one here."""
        return {"program_x": 0, "program_y": 0, "i0": 0, "i1": 0}

    def unit_of(self, model: dict[str, int]) -> int:
        """Return the unit of a solver's model: none is set apart here."""
        return 0

    def told(self, model: dict[str, int]) -> str:
        """Return in words the unit of a solver's model."""
        lane = model.get("i1", model.get("i0", 0))
        return (
            f"unit {lane} of the tile of program ({model.get('program_x', 0)}, {model.get('program_y', 0)})"
        )

    def first_call(self, per_unit: int) -> Term:
        """Refuse: SR takes two kernels."""
        raise NotProved("random: both orientations at once draw no random bits")

    @cached_property
    def _tile(self) -> tuple[Term, Term]:
        """The first row and the first unit of a program's tile, 64 bits."""
        x, y = var("program_x", 31), var("program_y", Y_BITS)
        band = BAND.bit_length() - 1
        across = widen(concat(y, extract(x, band - 1, 0)), 64)
        down = widen(extract(x, 30, band), 64)
        return down << self.rows.bit_length() - 1, across << self.units.bit_length() - 1

    def _own(self, entry: Entry) -> tuple[Term, Term]:
        """Return the row and the unit of an entry within the tile."""
        lanes = [
            i for i in entry.index if i is not None and i.width == (self.rows * self.units).bit_length() - 1
        ]
        if len(lanes) != 1:
            raise NotProved("places: the unit of an entry is not told")
        bits = self.units.bit_length() - 1
        row = extract(lanes[0], lanes[0].width - 1, bits)
        return row, extract(lanes[0], bits - 1, 0) if bits else const(0, 1)

    def _first(self, entry: Entry) -> Term:
        """Where a unit's elements lie, in bytes after the input's beginning."""
        row, unit = self._tile
        own_row, own_unit = self._own(entry)
        at = (row + widen(own_row, 64)) * (2 * self.side)
        return at + (unit + widen(own_unit, 64)) * (2 * self.k)

    def _loads(self, entry: Entry) -> dict[Term, int]:
        """Return which word of the unit is read, by what stands for it in an entry."""
        found = [v for v in variables(entry.value) if v in self.kernel.loads]
        if len(found) != self.k // 2 or any(v.width != 32 for v in found):
            raise NotProved("places: what is read are not the elements of a unit")
        addresses = [self.kernel.loads[v].address for v in found]
        return dict(zip(found, placed(addresses, var("argument0", 64), self._first(entry), 4), strict=True))

    @cached_property
    def _entries(self) -> list[tuple[int, Entry]]:
        """The words of codes and, last, the byte; the number of each word in its unit."""
        out, first = [], 0
        for store in self.kernel.stores[:-1]:
            found = []
            for entry in store:
                parts = [i for i in entry.index if i is not None]
                numbers = [part.constant for part in parts if part.constant is not None]
                number = 0
                for part in parts:
                    if part.constant is not None:
                        number = number << part.width | part.constant
                if entry.value.width != 32 or len(numbers) != len(parts) - 1:
                    raise NotProved("places: something else is written than words and a byte")
                found.append((first + number, entry))
            out += found
            first += len(found)
        if sorted(number for number, _ in out) != list(range(self.words_out)):
            raise NotProved("places: not every word is written once")
        if len(self.kernel.stores[-1]) != 1 or self.kernel.stores[-1][0].value.width != 8:
            raise NotProved("places: not one scale byte is written")
        return [*sorted(out, key=lambda found: found[0]), (0, self.kernel.stores[-1][0])]

    @cached_property
    def accesses(self) -> list[Access]:
        """All that is read and written for one unit."""
        row, unit = self._tile
        units = widen(var(f"argument{_COLUMNS}", UNIT_BITS), 64)
        yes = const(1, 1)
        out = []
        for number, entry in self._entries:
            for load, place in self._loads(entry).items():
                access = self.kernel.loads[load]
                right = var("argument0", 64) + self._first(entry) + 4 * place
                out.append(Access(f"word {place} of the input", access.address, right, access.mask, yes))
            is_byte = entry.value.width == 8
            of, size, argument = (1, 1, 2) if is_byte else (self.words_out, 4, 1)
            own_row, own_unit = self._own(entry)
            rest = (widen(own_row, 64) * units + widen(own_unit, 64)) * of + number
            right = var(f"argument{argument}", 64) + (row * units + unit) * of * size + rest * size
            name = "scale byte" if is_byte else f"word {number} of the codes"
            out.append(Access(name, entry.address, right, entry.mask, yes))
        return out

    def places(self) -> list[Step]:
        """Return the questions whether everything lies at its place."""
        asked = [a.found.equal(a.right) & a.mask.equal(a.exists) for a in self.accesses]
        out = [Step("places", truth) for truth in asked]
        if promised := list(dict.fromkeys(self.kernel.side_by_side)):
            out.append(Step("places", every(promised)))
        return out

    @cached_property
    def stored(self) -> tuple[list[Term], Term]:
        """The words of codes in order, and the byte, as terms of the inputs."""
        out = []
        for _, entry in self._entries:
            by = {
                load: concat(self.inputs[2 * place + 1], self.inputs[2 * place])
                for load, place in self._loads(entry).items()
            }
            out += substitute([entry.value], by)
        *words, byte = out
        return words, byte
