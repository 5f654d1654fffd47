"""The theorem on a row kernel, and its proof in steps that a solver decides one by one.

Theorem. For every unit of every program, for all contents of its block: the kernel reads the words of the unit's own 32
elements, writes the byte and the codes that the clauses give for them, each at its place, and nothing else.

1. *places*: where the words are read and written, for all programs and lanes.
2. *amax*: the kernel's amax is made by maxima alone, whose leaves are the magnitudes of exactly the 32 elements. One
   maximum of two is right for all pairs, so the whole is, by induction over the tree. Where the leaves are a function
   of the magnitudes, it keeps their order, so the whole is that function of amax.
3. *byte*: for all amax, the byte is the clause's.
4. *element*: for all amax and all elements not above it, what the kernel makes of an element before it packs is a
   constant plus the code of the clause. All 32 elements have the same term, up to the name of the element.
5. *words*: for all such codes, all signs and all amax, each word that is written has the bits of the clauses.

Steps 2, 4 and 5 meet at terms that are replaced by variables: what is proved of a term is what the next step assumes of
its variable.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property

import numpy as np

from mxref.formats.elements import Negatives
from prove import clauses
from prove.clauses import INFINITY, MAGNITUDE
from prove.kernels import Case
from prove.layouts import Layout
from prove.questions import NotProved, Step
from prove.terms import (
    Term,
    apply,
    choose,
    concat,
    const,
    evaluate,
    extract,
    in_order,
    substitute,
    var,
    variables,
    widen,
    widen_signed,
)


def _finite(amax: Term) -> Term:
    return (amax & MAGNITUDE).below(INFINITY)


def _one_maximum() -> Step:
    """Return the step that a float32 maximum of magnitudes is that of their bits, and NaN if one is NaN."""
    a, b = var("a", 32), var("b", 32)
    given = (is_maximum(a, a), is_maximum(b, b))
    out = apply("fmaximum", a, b)
    numbers = a.upto(INFINITY) & b.upto(INFINITY)
    is_nan = ~(out & MAGNITUDE).upto(INFINITY)
    right = choose(numbers, out.equal(apply("umax", a, b)), is_nan)
    return Step("amax: one maximum", right, given)


def is_maximum(a: Term, magnitude: Term) -> Term:
    """Return whether bits are those of a given magnitude or of any NaN, which may have a sign."""
    return (a.upto(INFINITY) & a.equal(magnitude)) | ~(a & MAGNITUDE).upto(INFINITY)


class Proof:
    """The steps for one kernel of one case."""

    def __init__(self, case: Case, layout: Layout) -> None:
        self.case = case
        self.element = case.block.element
        self.k = case.block.k
        self.layout = layout
        self.kernel = layout.kernel
        self.inputs = self.layout.inputs
        self.ys = [self._float32(x) for x in self.inputs]
        self.amax = var("amax", 32)
        """What stands for the kernel's amax once it is known to be the largest magnitude."""
        self.is_amax = is_maximum(
            self.amax, self._float32(var("amax_input", 32 if case.dtype == "float32" else 16))
        )
        """What is known of it: it is a magnitude of the input's type, or any NaN."""

    @property
    def stored(self) -> tuple[list[Term], Term]:
        """The words of codes in order, and the byte, as terms of the inputs."""
        return self.layout.stored

    def normed(self, y: Term) -> Term:
        """Return the clause's element or amax from what stands for it here."""
        return y

    def known(self, y: Term) -> tuple[Term, ...]:
        """Return what is known of an element."""
        return ()

    @property
    def elements(self) -> tuple[list[Term], Term]:
        """The same as terms of what is quantized: the inputs, or what a transform makes of them."""
        return self.layout.stored

    def _float32(self, x: Term) -> Term:
        match self.case.dtype:
            case "bfloat16":
                return concat(x, const(0, 16))
            case "float16":
                return Term("half", 32, (x,))
        return x

    @cached_property
    def _support(self) -> dict[Term, int]:
        """Which elements occur in each term, as a set of bits."""
        words, byte = self.elements
        out: dict[Term, int] = {}
        for term in in_order([*words, byte]):
            own = 1 << int(term.value[1:]) if term.op == "var" and term in self.inputs else 0
            for arg in term.args:
                own |= out[arg]
            out[term] = own
        return out

    @cached_property
    def _kernels_amax(self) -> Term:
        """The first term of the byte in which all elements occur."""
        for term in in_order([self.elements[1]]):
            if self._support[term] == (1 << self.k) - 1:
                return term
        raise NotProved("amax: the byte does not depend on all elements")

    def _leaves(self, term: Term) -> Iterator[Term]:
        if term.op in ("fmaximum", "umax"):
            for arg in term.args:
                yield from self._leaves(arg)
        elif (
            term.op == "concat" and term.args[0].op == "umax" and all(a.constant == 0 for a in term.args[1:])
        ):
            for arg in term.args[0].args:  # zeros below keep the order
                yield from self._leaves(concat(arg, *term.args[1:]))
        else:
            yield term

    @cached_property
    def _leaf(self) -> Term:
        """What the maxima are taken of, as a term of `amax` in place of the element: the same for all elements."""
        wrong = NotProved("amax: the leaves of the maxima are not one function of each of the elements")
        elements, found = set(), set()
        for leaf in self._leaves(self._kernels_amax):
            if len(inputs := variables(leaf)) != 1:
                raise wrong
            y = self.ys[self.inputs.index(inputs[0])]
            is_magnitude = leaf is y & MAGNITUDE
            found.add(self.amax & MAGNITUDE if is_magnitude else substitute([leaf], {y: self.amax})[0])
            elements.add(y)
        if len(elements) != self.k or len(found) != 1 or variables(*found) != [self.amax]:
            raise wrong
        return found.pop()

    def _amax(self) -> Iterator[Step]:
        if self._leaf is self.amax & MAGNITUDE:
            yield _one_maximum()
            return
        if "fmaximum" in {term.op for term in in_order([self._kernels_amax])}:
            raise NotProved("amax: a maximum of floats is not of magnitudes")
        # A function that keeps the order of magnitudes gives the same before the maxima as after them.
        a, b = var("a", 32), var("b", 32)
        of_a, of_b = (substitute([self._leaf], {self.amax: x})[0] for x in (a, b))
        sign = extract(a, 31, 31)
        without = substitute([self._leaf], {self.amax: concat(const(0, 1), extract(a, 30, 0))})[0]
        ordered = ~a.upto(b) | ~b.upto(MAGNITUDE) | of_a.upto(of_b)
        yield Step("amax: an order is kept", ordered & (~sign | of_a.equal(without)))

    @cached_property
    def _cut(self) -> tuple[list[Term], Term]:
        """What is stored, as terms of the elements and of amax."""
        words, byte = self.elements
        plain = self._leaf is self.amax & MAGNITUDE
        by = self.amax if plain else substitute([self._leaf], {self.amax: self.amax & MAGNITUDE})[0]
        *words, byte = substitute([*words, byte], {self._kernels_amax: by, **self._random_words})
        return words, byte

    @property
    def _per_call(self) -> int:
        """Elements that a Philox call serves. Clause random.elements."""
        return 8 if self.case.sr_bits <= 16 else 4

    @property
    def _per_unit(self) -> int:
        """Philox calls of a unit."""
        return self.k // self._per_call

    @cached_property
    def _calls(self) -> list[Term]:
        """The numbers of the Philox calls of a unit, in order, as one evaluation shows; `_random` proves it."""
        if self.case.rounding != "sr":
            return []
        products = {
            factor: [t for t in in_order(self.elements[0]) if t.op == "mul" and t.args[1].constant == factor]
            for factor in (clauses.PHILOX[0], clauses.PHILOX[1])
        }
        later = {t for made in products.values() for t in made}
        made = products[clauses.PHILOX[0]]
        first = [t.args[0].args[1] for t in made if later.isdisjoint(in_order(t.args[:1]))]
        whole = [c.args[0] if c.op == "extract" and c.args[0].width == 64 else c for c in first]
        values = {v.value: 0 for v in variables(*whole)}
        places = [int(place) for place in evaluate(whole, values)]
        if sorted(places) != list(range(self._per_unit)):
            raise NotProved(f"random: the calls of a unit are {sorted(places)}")
        return [whole[places.index(call)] for call in range(self._per_unit)]

    @cached_property
    def _random_words(self) -> dict[Term, Term]:
        """Philox's words as the clause makes them, and the variables that stand for them."""
        out = {}
        key = self.layout.key
        low, high, stream_low, stream_high = (var(f"argument{key + i}", 32) for i in range(4))
        for call, number in enumerate(self._calls):
            number = widen(number, 64)
            counter = (extract(number, 31, 0), extract(number, 63, 32), stream_low, stream_high)
            for i, word in enumerate(clauses.philox(counter, (low, high))):
                free = var(f"word{4 * call + i}", 32)
                if i % 2:  # the low half of a product, of which the kernel may extract a part
                    out[word.args[0]] = concat(var(f"high{4 * call + i}", 32), free)
                else:
                    out[word] = free
        return out

    def _random(self) -> Iterator[Step]:
        for call, number in enumerate(self._calls):
            number_of = self.layout.group
            group = var(f"argument{number_of}", self.layout.kernel.widths[number_of])
            expected = widen_signed(group, 64) + self.layout.first_call(self._per_unit) + call
            yield Step(f"random: call {call}", number.equal(extract(expected, number.width - 1, 0)))

    def _byte(self) -> Step:
        u = self.normed(self.amax & MAGNITUDE) & MAGNITUDE
        expected = clauses.scale_byte(u, self.case.rule, self.element, self.case.zero_scale)
        return Step("byte", self._cut[1].equal(expected), (self.is_amax,))

    def _rounded_in(self, words: list[Term]) -> dict[Term, int]:
        """Return the terms of one element each that packing starts from, with the element's number."""
        support: dict[Term, int] = {}
        for term in in_order(words):
            support[term] = 1 << int(term.value[1:]) if term in self.inputs else 0
            for arg in term.args:
                support[term] |= support[arg]
        out: dict[Term, int] = {}
        seen: set[Term] = set()
        stack = list(words)
        while stack:
            term = stack.pop()
            if term in seen or not support[term]:
                continue
            seen.add(term)
            one = support[term] & (support[term] - 1) == 0
            if term.op == "var" or term in self.ys:
                continue
            if one and term.op not in _PACKING:
                out[term] = support[term].bit_length() - 1
            else:
                stack.extend(term.args)
        return out

    @cached_property
    def _rounded(self) -> list[Term]:
        """Of each element, the term before packing."""
        found = self._rounded_in(self._cut[0])
        if sorted(found.values()) != list(range(self.k)):
            raise NotProved(f"element: {len(found)} terms are rounded, of elements {sorted(found.values())}")
        by_element = {j: term for term, j in found.items()}
        return [by_element[j] for j in range(self.k)]

    @property
    def _two(self) -> bool:
        """Whether negative codes are those of two's complement."""
        return self.element.negatives is Negatives.TWOS_COMPLEMENT

    @cached_property
    def _offset(self) -> int:
        """What is added to a code: the term of element 0 for zero."""
        if self.case.rounding != "rne":
            return 0
        values = {"amax": 0x3F800000, self.inputs[0].value: 0}
        return int(evaluate([self._rounded[0]], values)[0])

    @cached_property
    def _fraction(self) -> int:
        """How many bits of the gap follow a code before packing."""
        if self.case.rounding == "rne":
            return 0
        by_sum = any(term.op == "fadd.rz" for term in in_order(self._rounded))
        return 28 if by_sum else 22

    @cached_property
    def _limit(self) -> int:
        """The largest code before packing: one above the format's where packing saturates, as some elements show."""
        numbers = np.arange(1, 31 if self.case.dtype == "float16" else 255)[:, None] << 10 | np.arange(1024)
        inputs = numbers >> 3 if self.case.dtype == "bfloat16" else numbers.ravel()
        if self.case.dtype == "float32":
            inputs = numbers << 13
        values = {self.inputs[0].value: inputs.ravel()}
        (values["amax"],) = evaluate([self.ys[0]], values)
        values |= {f"word{i}": np.uint64(0xFFFFFFFF) for i in range(4 * self._per_unit)}
        (found,) = evaluate([(self._rounded[0] - self._offset) >> self._fraction], values)
        return self.element.max_code + int(found.max() > self.element.max_code)

    def _code_in(self, rounded: Term) -> tuple[Term, Term]:
        """Return whether a rounded term is the offset and a code up to the limit; and the code of the format.

        Codes in two's complement are negated before they are packed, and are the lowest bits of the term.
        """
        if self._two:
            return const(1, 1), extract(rounded, self.element.bits - 1, 0)
        code = (rounded - self._offset) >> self._fraction
        largest = const(self.element.max_code, code.width)
        return code.upto(self._limit), extract(apply("umin", code, largest), self.element.bits - 1, 0)

    def _elements(self) -> Iterator[Step]:
        first, y = self.inputs[0], self.ys[0]
        u = self.normed(self.amax)
        byte = clauses.scale_byte(u, self.case.rule, self.element, self.case.zero_scale)
        free = {first, self.amax, *(var(f"word{i}", 32) for i in range(4))}
        for j, (x, term) in enumerate(zip(self.inputs, self._rounded, strict=True)):
            words = [var(f"word{4 * (j // self._per_call) + i}", 32) for i in range(4)]
            names = {x: first} | {word: var(f"word{i}", 32) for i, word in enumerate(words)}
            (renamed,) = substitute([term], names)
            if not set(variables(renamed)) <= free:
                raise NotProved("element: it depends on more than an element, amax and Philox's words")
            limited, code = self._code_in(renamed)
            element = self.normed(y)
            expected = self._expected(element, byte, j)
            if self._two:
                expected = clauses.signed(expected, element, self.element)
            goal = limited & code.equal(expected)
            not_above = (self.amax.below(INFINITY), (y & MAGNITUDE).upto(self.amax))
            yield Step("element", goal, (self.is_amax, *not_above, *self.known(y)))

    def _expected(self, y: Term, byte: Term, j: int) -> Term:
        """Return the magnitude code of the clauses, for the words of a call under SR."""
        bits = self.case.random_bits
        v = clauses.scaled(y, byte, self.element, bits, self.case.prescale)
        if not bits:
            return clauses.rounded(v, self.element, self.case.rounding)
        r = clauses.random_integer([var(f"word{i}", 32) for i in range(4)], j, bits)
        return clauses.stochastic(v, widen(r, v.width), bits, self.element)

    def _words(self) -> Iterator[Step]:
        expected = []
        limits = []
        variables = {}
        for j, rounded in enumerate(self._rounded):
            free = variables[rounded] = var(f"rounded{j}", rounded.width)
            limited, code = self._code_in(free)
            limits.append(~_finite(self.amax) | limited)
            if not self._two:
                code = clauses.signed(code, self.ys[j], self.element)
            expected.append(choose(_finite(self.amax), code, const(0, self.element.bits)))
        stream = clauses.packed(expected)
        words = substitute(self._cut[0], variables)
        for place, word in enumerate(words):
            goal = word.equal(extract(stream, 32 * place + 31, 32 * place))
            own = sorted({int(v.value[1:]) for v in in_order([goal]) if v in self.inputs})
            parts = [goal, *(limits[j] for j in own)]
            # The elements of every word are numbered from 0, so that equal questions are one.
            names = {self.inputs[j]: self.inputs[i] for i, j in enumerate(own)}
            free = [variables[self._rounded[j]] for j in own]
            names |= {old: var(f"rounded{i}", old.width) for i, old in enumerate(free)}
            goal, *assumptions = substitute(parts, names)
            yield Step("words", goal, (self.is_amax, *assumptions))

    def whole_words(self) -> Iterator[Step]:
        """Yield for each word the question that `element` and `words` split: to find a block where they do not hold."""
        byte = clauses.scale_byte(self.amax & MAGNITUDE, self.case.rule, self.element, self.case.zero_scale)
        stream = clauses.packed(
            [
                clauses.element_code(y, byte, self.element, self.case.rounding, self.case.prescale)
                for y in self.ys
            ]
        )
        not_above = [~_finite(self.amax) | (y & MAGNITUDE).upto(self.amax) for y in self.ys]
        for place, word in enumerate(self._cut[0]):
            goal = word.equal(extract(stream, 32 * place + 31, 32 * place))
            own = [j for j, x in enumerate(self.inputs) if x in variables(goal)]
            yield Step(f"word {place}", goal, (self.is_amax, *(not_above[j] for j in own)))

    def contents(self) -> Iterator[Step]:
        """Yield the questions about what is stored, wherever it lies."""
        yield from self._amax()
        yield self._byte()
        yield from self._random()
        yield from self._elements()
        yield from self._words()

    def steps(self) -> list[Step]:
        """Return the questions, each once; NotProved if the kernel has no form for which there are any."""
        return list(dict.fromkeys([*self.layout.places(), *self.contents()]))


_PACKING = {"and", "or", "xor", "concat", "extract", "shl", "lshr", "sext", "var"}
