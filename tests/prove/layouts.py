"""Where a unit's elements are read, and where its codes and its byte are written.

A layout reads a kernel: it names the inputs of a unit, gives what the unit stores as terms of them, and asks whether
all places are right. The rest of a proof does not know where anything lies.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Any, Protocol

import numpy as np

from prove.kernels import Case
from prove.questions import NotProved, Step
from prove.terms import Term, concat, const, evaluate, every, substitute, var, variables, widen
from prove.ttir import LANE, Kernel, Load, Store


@dataclass(frozen=True)
class Access:
    """One word or byte that a unit reads or writes."""

    name: str
    found: Term
    """Its address in the kernel."""
    right: Term
    """The address that the layout gives it."""
    mask: Term
    """Whether the kernel accesses it."""
    exists: Term
    """Whether the unit exists."""


def placed(addresses: list[Term], base: Term, first: Term, size: int) -> list[int]:
    """Return the place within a unit of each of its addresses, as one evaluation shows; NotProved unless all are there.

    Args:
        addresses: of what is accessed in an array.
        base: where the array begins, a variable.
        first: what lies before the unit, in bytes.
        size: bytes of one access.
    """
    values = {v.value: 0 for v in variables(*addresses, first)}
    values |= {LANE: 3, "program_x": 5, base.value: 1 << 20}
    start = (1 << 20) + int(evaluate([first], values)[0])
    places = [(int(at) - start) // size for at in evaluate(addresses, values)]
    if sorted(places) != list(range(len(addresses))):
        raise NotProved(
            f"places: in lane 3 of program 5 the accesses of {base.value} are at places {sorted(places)} of "
            f"0 to {len(addresses) - 1}"
        )
    return places


def told_unit(unit: int, model: dict[str, int]) -> str:
    """Return in words a unit that follows from a lane and a program."""
    return f"unit {unit}, lane {model.get(LANE, 0)} of program {model.get('program_x', 0)}"


class Layout(Protocol):
    """What a proof asks a layout for."""

    group: int
    """Number of the argument that says which random call is the tensor's first."""
    key: int
    """Number of the argument that is the first of four words of seed and stream."""

    @property
    def kernel(self) -> Any:
        """The kernel, with `widths` of its arguments."""

    @property
    def inputs(self) -> list[Term]:
        """A variable for each element of a unit, of the input's width."""

    @property
    def words_out(self) -> int:
        """Words of codes that a unit writes."""

    @property
    def accesses(self) -> list[Access]:
        """All that a unit reads and writes."""

    @property
    def stored(self) -> tuple[list[Term], Term]:
        """The words of codes in order, and the byte, as terms of the inputs."""

    def places(self) -> list[Step]:
        """Return the questions whether everything lies at its place."""

    def first_call(self, per_unit: int) -> Term:
        """Return the number of a unit's first random call, of `per_unit`, less that of the tensor's first."""

    def values(self, units: np.ndarray) -> dict[str, Any]:
        """Return the variables' values for the evaluation of units."""

    def unit_of(self, model: dict[str, int]) -> int:
        """Return the unit of a solver's model."""

    def told(self, model: dict[str, int]) -> str:
        """Return in words the unit of a solver's model."""


class Rows:
    """The layout of a matrix whose rows are contiguous, read as one row: units follow each other."""

    group, key = 8, 10
    """Numbers of the arguments that say which random calls a tensor has, and of the first word of the stream."""

    def __init__(self, case: Case, kernel: Kernel) -> None:
        self.case = case
        self.kernel: Any = kernel
        self.k = case.block.k
        self.inputs = [var(f"x{j}", 32 if case.dtype == "float32" else 16) for j in range(self.k)]

    def first_call(self, per_unit: int) -> Term:
        """Return the number of a unit's first random call, less that of the tensor's first."""
        return self.unit * per_unit

    def values(self, units: np.ndarray) -> dict[str, Any]:
        """Return the variables' values for the evaluation of units."""
        program, lane = np.divmod(units, self.kernel.units)
        return {"program_x": program, LANE: lane}

    def unit_of(self, model: dict[str, int]) -> int:
        """Return the unit of a solver's model."""
        return model.get("program_x", 0) * self.kernel.units + model.get(LANE, 0)

    def told(self, model: dict[str, int]) -> str:
        """Return in words the unit of a solver's model."""
        return told_unit(self.unit_of(model), model)

    @cached_property
    def unit(self) -> Term:
        """The number of the unit: programs of `units` each, in order."""
        lane = var(LANE, self.kernel.units.bit_length() - 1)
        return widen(var("program_x", 31), 64) * self.kernel.units + widen(lane, 64)

    def _by_place(
        self, accesses: list[Load] | list[Store], argument: int, count: int, size: int
    ) -> list[int]:
        """Return the place within the unit of each access, as one evaluation shows; `places` proves it."""
        if len(accesses) != count:
            raise NotProved(f"places: {len(accesses)} accesses of argument {argument}, and not {count}")
        base = var(f"argument{argument}", 64)
        return placed([access.address for access in accesses], base, self.unit * (count * size), size)

    @property
    def words_in(self) -> int:
        """Words that a unit reads."""
        return self.k // 2 if self.inputs[0].width == 16 else self.k

    @property
    def words_out(self) -> int:
        """Words of codes that a unit writes."""
        return self.k * self.case.block.element.bits // 32

    @cached_property
    def _stores(self) -> tuple[list[Store], list[Store]]:
        stores = self.kernel.stores
        codes, scales = ([s for s in stores if s.value.width == width] for width in (32, 8))
        if len(codes) + len(scales) != len(stores):
            raise NotProved("places: something else is written than words and a byte")
        return codes, scales

    @cached_property
    def _load_places(self) -> list[int]:
        if any(load.value.width != 32 for load in self.kernel.loads):
            raise NotProved("places: something else is read than words")
        return self._by_place(self.kernel.loads, 0, self.words_in, 4)

    @cached_property
    def _store_places(self) -> list[int]:
        return self._by_place(self._stores[0], 1, self.words_out, 4)

    @cached_property
    def accesses(self) -> list[Access]:
        """All that a unit reads and writes."""
        codes, scales = self._stores
        self._by_place(scales, 2, 1, 1)
        groups = (
            ("input", self.kernel.loads, 0, self._load_places, self.words_in, 4),
            ("codes", codes, 1, self._store_places, self.words_out, 4),
            ("scale byte", scales, 2, [0], 1, 1),
        )
        masked = any(access.mask.constant != 1 for access in (*self.kernel.loads, *self.kernel.stores))
        exists = self.unit.below(widen(var("argument4", 32), 64)) if masked else const(1, 1)
        out = []
        for name, found, argument, places, count, size in groups:
            base = var(f"argument{argument}", 64)
            for access, place in zip(found, places, strict=True):
                told = name if count == 1 else f"word {place} of the {name}"
                right = base + (self.unit * count + place) * size
                out.append(Access(told, access.address, right, access.mask, exists))
        return out

    def places(self) -> list[Step]:
        """Return the question whether everything lies at its place."""
        truths = [access.found.equal(access.right) for access in self.accesses]
        masks = list(dict.fromkeys((access.mask, access.exists) for access in self.accesses))
        assumptions: tuple[Term, ...] = ()
        if masks != [(const(1, 1), const(1, 1))]:
            truths += [mask.equal(exists) for mask, exists in masks]
            rows = var("argument3", 32)
            assumptions = (const(0, 32).signed_below(rows), ~var("argument4", 32).signed_below(0))
        return [Step("places", every(truths), assumptions)]

    @cached_property
    def stored(self) -> tuple[list[Term], Term]:
        """The words of codes in order, and the byte, as terms of the inputs."""
        by: dict[Term, Term] = {}
        for load, place in zip(self.kernel.loads, self._load_places, strict=True):
            if self.inputs[0].width == 16:
                by[load.value] = concat(self.inputs[2 * place + 1], self.inputs[2 * place])
            else:
                by[load.value] = self.inputs[place]
        codes, scales = self._stores
        *words, byte = substitute([store.value for store in (*codes, *scales)], by)
        ordered = [words[self._store_places.index(place)] for place in range(self.words_out)]
        return ordered, byte
