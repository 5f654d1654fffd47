"""The theorem on a kernel of others: the bytes that it stores are those of a treatment of the specification.

Theorem. For every block of every matrix and for all its contents in a domain: the kernel reads the block's own
elements, and stores the byte and the codes that the clauses give for them, each at its place, and nothing else.

1. *places*: where a unit's elements are read, and its bytes are written.
2. *amax*: what the kernel takes the maximum of are the magnitudes of the 32 elements.
3. *byte*: for every amax in the domain, the byte is the clause's.
4. *codes*: for every amax in the domain, its byte, and elements that are not larger, the code bytes are the clauses'.

A domain is a condition on amax and on each element. `foreign_certificates` tries some, the largest first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import numpy as np

from mxref.formats import BLOCK_FORMATS
from prove import clauses
from prove.algebra import is_place
from prove.clauses import INFINITY, MAGNITUDE
from prove.questions import NotProved, Step
from prove.terms import (
    Term,
    concat,
    const,
    evaluate,
    every,
    extract,
    substitute,
    var,
    variables,
    widen,
    widen_signed,
)
from prove.tiles import TileKernel
from prove.ttir import Load, Store

_Access = TypeVar("_Access", Load, Store)


@dataclass(frozen=True)
class Place:
    """Where an array has what belongs to unit o and place i along the blocks: at pointer + o * outer + i * inner."""

    pointer: str
    outer: Term
    inner: Term


@dataclass(frozen=True)
class Layout:
    """How a kernel's arguments say where things are; all terms have 64 bits."""

    unit: Term
    """The number of the unit, in all programs."""
    first: Term
    """The first place along the blocks of this program."""
    units: Term
    """How many units there are."""
    length: Term
    """How many elements a unit has."""
    step: int
    """How many of them a program has, or a turn of its loop: `first` is a multiple of it."""
    elements: Place
    codes: Place
    scales: Place
    assumptions: tuple[Term, ...] = ()
    """What the host ensures."""
    turns: tuple[Term, Term] | None = None
    """The first turn of a program's loop, and the end of its turns, if it has one."""


@dataclass(frozen=True)
class Domain:
    """A set of finite blocks, by their amax and their elements."""

    told: str
    holds: Callable[[Term], Term] = lambda u: const(1, 1)
    each: Callable[[Term, Term], Term] = lambda y, byte: const(1, 1)
    """What is known of every element besides, as a float32, with the block's byte."""

    def within(self, other: Domain) -> Domain:
        """Return the blocks that are in both sets."""
        return Domain(
            f"{self.told}; {other.told}",
            lambda u: self.holds(u) & other.holds(u),
            lambda y, byte: self.each(y, byte) & other.each(y, byte),
        )


ALL = Domain("every finite block")


class TileProof:
    """The steps for one kernel."""

    def __init__(
        self, kernel: TileKernel, layout: Layout, made: str, rule: str, dtype: str, domain: Domain = ALL
    ) -> None:
        self.kernel, self.layout, self.rule, self.dtype, self.domain = kernel, layout, rule, dtype, domain
        self.block = BLOCK_FORMATS[made]
        self.element, self.k = self.block.element, self.block.k
        self.width = 32 if dtype == "float32" else 16
        self.amax = var("amax", 32)

    def float32(self, x: Term) -> Term:
        """Return an element as a float32."""
        match self.dtype:
            case "bfloat16":
                return concat(x, const(0, 16))
            case "float16":
                return Term("half", 32, (x,))
        return x

    def finite(self, x: Term) -> Term:
        """Return whether an element is finite."""
        return (self.float32(x) & MAGNITUDE).below(INFINITY)

    # Places

    @cached_property
    def _stores(self) -> tuple[list[Store], list[Store]]:
        """The stores of codes and those of scales."""
        pointers = [{v.value for v in variables(store.address)} for store in self.kernel.stores]
        found = [
            [s for s, names in zip(self.kernel.stores, pointers, strict=True) if place.pointer in names]
            for place in (self.layout.codes, self.layout.scales)
        ]
        if sum(map(len, found)) != len(self.kernel.stores):
            raise NotProved("places: something else is written than codes and scales")
        return found[0], found[1]

    def _in_order(self, accesses: list[_Access], place: Place, size: int, per: int) -> list[_Access]:
        """Return accesses of a unit in their order along the blocks, as one evaluation shows; `places` proves it."""
        roots = [access.address for access in accesses]
        roots += [place.outer, place.inner, self.layout.unit, self.layout.first]
        values = {v.value: 5 for v in variables(*roots)} | {place.pointer: 0}
        *found, outer, inner, unit, first = (int(np.asarray(x).ravel()[0]) for x in evaluate(roots, values))
        numbers = [(at // size - unit * outer) // inner - first // per for at in found]
        if sorted(numbers) != list(range(len(numbers))):
            raise NotProved(f"places: numbers {sorted(numbers)[:4]} to {max(numbers)} of {place.pointer}")
        return [accesses[numbers.index(i)] for i in range(len(numbers))]

    @cached_property
    def _loaded(self) -> list[Load]:
        """The loads of a unit, in order."""
        found = self._in_order(self.kernel.loads, self.layout.elements, self.width // 8, 1)
        if len(found) != self.layout.step:
            raise NotProved(f"places: {len(found)} elements of a unit are read, of {self.layout.step}")
        return found

    @cached_property
    def _written(self) -> tuple[list[Store], list[Store]]:
        """The stores of codes and of scales of a unit, in order."""
        codes, scales = self._stores
        lay, many = self.layout, len(self._loaded)
        if not codes or not scales:
            raise NotProved("places: codes or scales are not written")
        return (
            self._in_order(codes, lay.codes, 1, many // len(codes)),
            self._in_order(scales, lay.scales, 1, many // len(scales)),
        )

    def places(self) -> Iterator[Step]:
        """Yield the steps on what is read and written where."""
        lay = self.layout
        if (lay.turns is None) != (self.kernel.turns is None):
            raise NotProved("places: a loop")
        if lay.turns is not None and self.kernel.turns is not None:
            right = [widen_signed(t, 64).equal(w) for t, w in zip(self.kernel.turns, lay.turns, strict=True)]
            started = lay.turns[0] * len(self._loaded)
            yield Step("places of turns", every(right), (started.below(lay.length), *lay.assumptions))
        codes, scales = self._written
        groups: list[tuple[str, Sequence[Load | Store], Place, int]] = [
            ("elements", self._loaded, lay.elements, self.width // 8),
            ("codes", codes, lay.codes, 1),
            ("scales", scales, lay.scales, 1),
        ]
        for name, accesses, place, size in groups:
            per = len(self._loaded) // len(accesses)
            for number, access in enumerate(accesses):
                first = lay.first + number * per
                exists = lay.unit.below(lay.units) & first.below(lay.length)
                offset = (
                    lay.unit * place.outer + _divided(lay.first, per) * place.inner + place.inner * number
                )
                pointer, small = var(place.pointer, 64), name == "scales"
                yield Step(f"places of {name}", access.mask.equal(exists), lay.assumptions)
                if not is_place(access.address, pointer, offset, size, small=small):
                    right = access.address.equal(pointer + offset * size)
                    given = (*lay.assumptions, *([offset.below(1 << 31)] if small else []))
                    yield Step(f"places of {name}", ~exists | right, given)

    # Contents

    @cached_property
    def _blocks(self) -> list[tuple[Term, list[Term]]]:
        """The byte and the code bytes of each block of a unit, as terms of reductions and x0 to x31."""
        inputs = [var(f"x{j % self.k}", self.width) for j in range(len(self._loaded))]
        by = {load.value: x for load, x in zip(self._loaded, inputs, strict=True)}
        codes, scales = self._written
        per = len(codes) // len(scales)
        own: dict[int, dict[Term, Term]] = {}
        for number, load in enumerate(self._loaded):
            block = own.setdefault(number // self.k, {})
            block[load.value] = by[load.value]
            if load.mask.constant is None:  # the block is there; whether others are is not known
                block[load.mask] = const(1, 1)
        out = []
        for number, scale in enumerate(scales):
            roots = [scale.value, *(s.value for s in codes[number * per : (number + 1) * per])]
            loads = {v for root in self._expanded(roots) for v in variables(root) if v in by}
            if not loads <= set(own[number]):
                raise NotProved("codes: a block depends on elements of another")
            byte, *data = substitute(roots, own[number])
            out.append((byte, data))
        return out

    def _expanded(self, roots: Sequence[Term]) -> list[Term]:
        """Return terms, and what the reductions in them are made of."""
        out, seen = list(roots), set()
        for root in out:
            for v in variables(root):
                if v in self.kernel.reductions and v not in seen:
                    seen.add(v)
                    out.extend(self.kernel.reductions[v].operands)
        return out

    def _operands(self, number: int, result: Term) -> list[Term]:
        """Return what a reduction of a block is made of, as terms of x0 to x31."""
        loads = self._loaded[number * self.k : (number + 1) * self.k]
        by = {load.value: var(f"x{j}", self.width) for j, load in enumerate(loads)}
        by |= {load.mask: const(1, 1) for load in loads if load.mask.constant is None}
        return substitute(self.kernel.reductions[result].operands, by)

    def _reduced(self, number: int) -> tuple[Term, list[Term]]:
        """Return the reduction of a block that is its amax, and the others."""
        byte, data = self._blocks[number]
        found = [v for v in variables(byte, *data) if v in self.kernel.reductions]
        largest = [v for v in found if self.kernel.reductions[v].op == "arith.maxnumf"]
        if len(largest) != 1:
            raise NotProved(f"amax: {len(largest)} maxima of floats")
        return largest[0], [v for v in found if v is not largest[0]]

    def _amax(self, number: int) -> Iterator[Step]:
        largest, others = self._reduced(number)
        x = var("x", self.width)
        for result in (largest, *others):
            operands = self._operands(number, result)
            used = [variables(operand) for operand in operands]
            if any(len(v) != 1 for v in used) or {v[0].value for v in used} != {
                f"x{j}" for j in range(self.k)
            }:
                raise NotProved("amax: it is not made of each of the block's elements")
            for operand, (own,) in zip(operands, used, strict=True):
                (renamed,) = substitute([operand], {own: x})
                right = self.float32(x) & MAGNITUDE if result is largest else const(0, renamed.width)
                yield Step("amax", renamed.equal(right), (self.finite(x),))

    @property
    def _is_amax(self) -> tuple[Term, ...]:
        """What is known of amax: it is the magnitude of an element, in the domain."""
        x = var("amax_input", self.width)
        magnitude = self.float32(x) & MAGNITUDE
        return self.finite(x), self.amax.equal(magnitude), self.domain.holds(self.amax)

    def _cut(self, number: int) -> tuple[Term, list[Term]]:
        """Return a block's byte as a term of amax, and its code bytes as terms of that byte and the elements."""
        byte, data = self._blocks[number]
        largest, others = self._reduced(number)
        by = {largest: self.amax} | {v: const(0, v.width) for v in others}
        byte, *data = substitute([byte, *data], by)
        return byte, substitute(data, {byte: var("byte", 8)})

    def _right_byte(self) -> Term:
        return clauses.scale_byte(self.amax, self.rule, self.element)

    def _contents(self, number: int) -> Iterator[Step]:
        byte, data = self._cut(number)
        yield Step("byte", byte.equal(self._right_byte()), self._is_amax)
        stored, per = var("byte", 8), self.k // len(data)
        for place, term in enumerate(data):
            own = [var(f"x{place * per + i}", self.width) for i in range(per)]
            names = {old: var(f"x{i}", self.width) for i, old in enumerate(own)}
            others = set(variables(term)) - {*own, stored, self.amax}
            if any(v in self.kernel.reductions or v.value.startswith("x") for v in others):
                raise NotProved(
                    f"codes: byte {place} of a block depends on {sorted(v.value for v in others)}"
                )
            names |= {v: var(f"any{i}", v.width) for i, v in enumerate(sorted(others, key=lambda v: v.value))}
            (term,) = substitute([term], names)
            ys = [self.float32(names[x]) for x in own]
            expected = clauses.packed([clauses.element_code(y, stored, self.element) for y in ys])
            bounds = [(y & MAGNITUDE).upto(self.amax) & self.domain.each(y, stored) for y in ys]
            given = (*self._is_amax, stored.equal(self._right_byte()), *bounds)
            yield Step("codes", term.equal(expected), given)

    def questions(self) -> Iterator[Step]:
        """Yield the questions, those on contents before those on places; some occur more than once."""
        for number in range(len(self._blocks)):
            yield from self._amax(number)
            yield from self._contents(number)
        yield from self.places()

    def steps(self) -> list[Step]:
        """Return the questions, each once."""
        return list(dict.fromkeys(self.questions()))

    # Evaluation

    def stored_by_kernel(self, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the code bytes [n, bytes] and scale bytes [n] that the kernel's terms give for blocks of bits."""
        byte, data = self._blocks[0]
        values = {f"x{j}": blocks[:, j] for j in range(self.k)}
        for result in (v for v in variables(byte, *data) if v in self.kernel.reductions):
            operands = evaluate(self._operands(0, result), values)
            stacked = np.stack([np.broadcast_to(o, (len(blocks),)) for o in operands], 1)
            if self.kernel.reductions[result].op == "arith.maxnumf":
                numbers = stacked.astype(np.uint32).view(np.float32)
                with np.errstate(invalid="ignore"):
                    values[result.value] = np.fmax.reduce(numbers, axis=1).view(np.uint32)
            else:
                values[result.value] = stacked.astype(np.uint32).view(np.int32).max(1).view(np.uint32)
        values = {v.value: 0 for v in variables(byte, *data)} | values  # what has no meaning, as 0
        scales, *codes = evaluate([byte, *data], values)
        return np.stack(codes, 1).astype(np.uint8), np.broadcast_to(scales, (len(blocks),)).astype(np.uint8)

    def stored_by_clauses(self, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the same as the clauses give it."""
        ys = [self.float32(var(f"x{j}", self.width)) for j in range(self.k)]
        u = clauses.largest([y & MAGNITUDE for y in ys])
        values = {f"x{j}": blocks[:, j] for j in range(self.k)}
        (scales,) = evaluate([clauses.scale_byte(u, self.rule, self.element)], values)
        stored, y = var("byte", 8), var("y", 32)
        code = clauses.element_code(y, stored, self.element)
        numbers = np.stack(evaluate(ys, values), 1)
        (codes,) = evaluate([code], {"y": numbers.ravel(), "byte": np.repeat(scales, self.k)})
        codes = codes.reshape(len(blocks), self.k).astype(np.uint8)
        if self.element.bits == 4:
            codes = codes[:, ::2] | codes[:, 1::2] << 4
        return codes, scales.astype(np.uint8)

    def differing(self, blocks: np.ndarray) -> np.ndarray:
        """Return which blocks the kernel and the clauses store otherwise."""
        (codes, scales), (right_codes, right_scales) = (
            self.stored_by_kernel(blocks),
            self.stored_by_clauses(blocks),
        )
        return (codes != right_codes).any(1) | (scales != right_scales)


def _divided(place: Term, per: int) -> Term:
    """Return a place along the blocks in units of so many elements."""
    return place if per == 1 else widen(extract(place, 63, per.bit_length() - 1), 64)
