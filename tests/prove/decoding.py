"""The theorem on a kernel that dequantizes, and its proof.

Theorem. For every word or quad of codes, for all that is in it, all scale bytes and, where there is one, all scales of
the tensor: the kernel reads the codes and the byte of their block, writes the values that the clauses give, each at its
place, and nothing else. A quad is four codes, a word eight of four bits.

The steps are *places*, and *value* for each word that is written.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from mxref import quantize
from mxref.formats import E2M1
from mxref.recipe import OperandSpec
from prove import clauses
from prove.kernels import Decoding
from prove.layouts import Access, placed, told_unit
from prove.questions import NotProved, Step
from prove.terms import Term, const, every, extract, substitute, var, variables, widen
from prove.ttir import LANE, Kernel, Load, Store


class DecodingProof:
    """The steps for one kernel of one case."""

    def __init__(self, case: Decoding, kernel: Kernel) -> None:
        self.case = case
        self.kernel = kernel
        self.block = case.block
        self.element = self.block.element
        whole = self.element is E2M1 and self.block.scale.powers
        self.together = 8 if whole else 4
        """Codes of a unit."""
        self.codes = [var(f"code{i}", self.element.bits) for i in range(self.together)]
        self.byte = var("byte", 8)
        self.tensor = var("tensor", 32) if self.block.tensor_scale else None
        # In order: codes, scale bytes, the scale of the tensor, values, a flag beside a quad, and how many there are.
        self.places = {"codes": 0, "scale byte": 1, "values": 2 + (self.tensor is not None)}
        self.count = len(kernel.widths) - 1
        self.layout = self  # it says itself where everything lies

    @property
    def _unit(self) -> Term:
        lane = var(LANE, self.kernel.units.bit_length() - 1)
        return widen(var("program_x", 31), 64) * self.kernel.units + widen(lane, 64)

    def told(self, model: dict[str, int]) -> str:
        """Return in words the unit of a solver's model."""
        unit = model.get("program_x", 0) * self.kernel.units + model.get(LANE, 0)
        return told_unit(unit, model)

    def _of(self, accesses: list[Load] | list[Store], argument: int) -> list[Load] | list[Store]:
        """Return the accesses of an array, as their addresses say."""
        base = var(f"argument{argument}", 64)
        return [a for a in accesses if base in variables(a.address)]  # type: ignore[return-value]

    @cached_property
    def _groups(self) -> dict[str, tuple[list[Load] | list[Store], list[int], int]]:
        """Of codes, byte and values: the accesses, the place of each within the unit, and the bytes of one."""
        loads, stores = self.kernel.loads, self.kernel.stores
        codes, scales = (self._of(loads, self.places[name]) for name in ("codes", "scale byte"))
        rest = [load for load in loads if load not in codes and load not in scales]
        right = [var("argument2", 64)] if self.tensor is not None else []
        if [load.address for load in rest] != right or any(load.mask.constant != 1 for load in rest):
            raise NotProved("places: something else is read than codes, bytes and the scale of the tensor")
        size = self.element.bits * self.together // 8
        wide = codes[0].value.width // 8
        count = self.together * self.case.value_bits // 32
        if size != wide * len(codes) or len(stores) != count or any(s.value.width != 32 for s in stores):
            raise NotProved("places: not every code is read, or not every value is written")
        per_block = self.block.k // self.together
        block = self._unit >> per_block.bit_length() - 1
        return {
            "codes": (codes, self._placed(codes, "codes", self._unit * size, wide), wide),
            "scale byte": (scales, self._placed(scales, "scale byte", block, 1), 1),
            "values": (stores, self._placed(stores, "values", self._unit * 4 * count, 4), 4),
        }

    def _placed(self, found: list[Load] | list[Store], name: str, first: Term, size: int) -> list[int]:
        base = var(f"argument{self.places[name]}", 64)
        return placed([access.address for access in found], base, first, size)

    @cached_property
    def accesses(self) -> list[Access]:
        """All that a unit reads and writes, but for the scale of the tensor."""
        exists = self._unit.below(widen(var(f"argument{self.count}", 32), 64))
        out = []
        for name, (found, places, size) in self._groups.items():
            base = var(f"argument{self.places[name]}", 64)
            if name == "scale byte":
                first = self._unit >> (self.block.k // self.together).bit_length() - 1
            else:
                first = self._unit * (size * len(found))
            for access, place in zip(found, places, strict=True):
                right = base + first + place * size
                told = f"part {place} of the {name}"
                out.append(Access(told, access.address, right, access.mask, exists))
        return out

    def _places(self) -> Step:
        truths = [access.found.equal(access.right) for access in self.accesses]
        masks = dict.fromkeys((access.mask, access.exists) for access in self.accesses)
        truths += [mask.equal(exists) for mask, exists in masks]
        return Step("places", every(truths), (~var(f"argument{self.count}", 32).signed_below(0),))

    @cached_property
    def stored(self) -> list[Term]:
        """The words of values in order, as terms of codes, byte and the scale of the tensor."""
        codes, places, size = self._groups["codes"]
        packed = clauses.packed(self.codes)
        by: dict[Term, Term] = {}
        for load in self.kernel.loads:
            if load in codes:
                at = 8 * size * places[codes.index(load)]
                by[load.value] = extract(packed, at + 8 * size - 1, at)
            else:
                by[load.value] = self.byte if load.value.width == 8 else self.tensor or self.byte
        stores, places, _ = self._groups["values"]
        found = substitute([store.value for store in stores], by)
        return [found[places.index(place)] for place in range(len(stores))]

    @cached_property
    def values(self) -> list[Term]:
        """The values of the codes in order: two of bfloat16 to a word."""
        bits = self.case.value_bits
        return [extract(word, at + bits - 1, at) for word in self.stored for at in range(0, word.width, bits)]

    @cached_property
    def expected(self) -> list[Term]:
        """The same as the clauses have them."""
        values = [clauses.value_of(code, self.byte, self.block, self.tensor) for code in self.codes]
        if self.case.value_bits == 16:
            return [clauses.to_bfloat16(value) for value in values]
        return values

    def _values(self) -> Iterator[Step]:
        given: tuple[Term, ...] = ()
        if self.tensor is not None:  # clause scale.tensor: positive and finite
            given = (const(0, 32).below(self.tensor), self.tensor.below(clauses.INFINITY))
        for found, right in zip(self.values, self.expected, strict=True):
            own = [x for x in self.codes if x in variables(found, right)]
            names = {old: self.codes[i] for i, old in enumerate(own)}
            found, right = substitute([found, right], names)
            yield Step("value", found.equal(right), given)

    def steps(self) -> list[Step]:
        """Return the questions, each once; NotProved if the kernel has no form for which there are any."""
        return list(dict.fromkeys([self._places(), *self._values()]))

    def example(self, model: dict[str, int]) -> CodeExample:
        """Return what a solver's model shows."""
        return CodeExample(self.case, model.get("code0", 0), model.get("byte", 0), model.get("tensor"))


@dataclass(frozen=True)
class CodeExample:
    """A code under a scale byte for which a kernel's value and the specification's differ."""

    case: Decoding
    code: int
    byte: int
    tensor: int | None = None
    """Bits of the scale of the tensor."""

    @property
    def place(self) -> str:
        """The counterexample in words."""
        told = f"code 0x{self.code:02x} under byte 0x{self.byte:02x}"
        told += "" if self.tensor is None else f" and the tensor's scale 0x{self.tensor:08x}"
        return f", {told}" if self.command else f"{told}, which no block has, so that no command shows it"

    @property
    def command(self) -> str | None:
        """The command that explains a block with this code and this byte, where FLOOR gives both to one."""
        block = self.case.block
        if not block.scale.powers:
            return None
        if self.byte == 255:
            return f"mxref explain --format {self.case.format} nan"
        code, byte = const(self.code, block.element.bits), const(self.byte, 8)
        value = clauses.decoded(code, byte, block.element).constant
        with np.errstate(all="ignore"):
            top = np.ldexp(np.float32(1), self.byte - 127 + block.element.max_exponent)
        x = np.zeros(block.k, np.float32)
        x[0], x[1] = np.uint32(value).view(np.float32), top
        quantized = quantize(x, OperandSpec(block))
        mask = (1 << block.element.bits) - 1
        found = [int(np.asarray(part).ravel()[0]) for part in (quantized.codes, quantized.scales)]
        if [found[0] & mask, found[1]] != [self.code, self.byte]:
            return None
        return f"mxref explain --format {self.case.format} {float(x[0])!r} {float(top)!r}"
