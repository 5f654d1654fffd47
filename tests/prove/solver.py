"""Asks the SMT solver whether a goal follows from assumptions, for all values of the variables.

Floats are the solver's own theory: IEEE 754, round to nearest even, subnormals kept. The bits of a float result are a
variable of which only the float is known, so a NaN has any payload.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import bitwuzla
from bitwuzla import Kind

from prove.terms import FLOATS, Term, choose, every, in_order, var, variables

VERSION = f"bitwuzla {bitwuzla.version()}"
ENCODING = 1
"""Counts how this module puts a question to the solver: raised when an operation gets another meaning."""

_BINARY = {
    "add": Kind.BV_ADD, "sub": Kind.BV_SUB, "mul": Kind.BV_MUL, "and": Kind.BV_AND, "or": Kind.BV_OR,
    "xor": Kind.BV_XOR, "shl": Kind.BV_SHL, "lshr": Kind.BV_SHR,
}  # fmt: skip
_TRUTHS = {
    "eq": Kind.EQUAL, "ult": Kind.BV_ULT, "ule": Kind.BV_ULE, "slt": Kind.BV_SLT, "sle": Kind.BV_SLE,
}  # fmt: skip
_EXTREMES = {"umin": Kind.BV_ULT, "umax": Kind.BV_UGT, "smin": Kind.BV_SLT, "smax": Kind.BV_SGT}
_FLOAT = {
    "fadd": Kind.FP_ADD,
    "fadd.rz": Kind.FP_ADD,
    "fsub": Kind.FP_SUB,
    "fmul": Kind.FP_MUL,
    "fdiv": Kind.FP_DIV,
    "fma": Kind.FP_FMA,
}

_SIGN = 0x80000000
_MAGNITUDE = 0x7FFFFFFF
_INFINITY = 0x7F800000


@dataclass(frozen=True)
class Answer:
    """What the solver found."""

    holds: bool | None
    """Whether the goal follows; None if the solver stopped before it knew."""
    seconds: float
    model: dict[str, int]
    """Where it does not follow, values of the variables for which it is false."""


class _Query:
    """Terms as the solver has them."""

    def __init__(self, milliseconds: int) -> None:
        self.terms = bitwuzla.TermManager()
        options = bitwuzla.Options()
        options.set(bitwuzla.Option.PRODUCE_MODELS, True)
        options.set(bitwuzla.Option.NTHREADS, 1)
        if milliseconds:
            options.set(bitwuzla.Option.TIME_LIMIT_PER, milliseconds)
        self.solver = bitwuzla.Bitwuzla(self.terms, options)
        self.nearest = self.terms.mk_rm_value(bitwuzla.RoundingMode.RNE)
        self.to_zero = self.terms.mk_rm_value(bitwuzla.RoundingMode.RTZ)
        self.zero, self.one = (self.terms.mk_bv_value(self.terms.mk_bv_sort(1), bit) for bit in (0, 1))
        self.bits: dict[int, Any] = {}
        """By the terms' identity."""
        self.floats: dict[int, Any] = {}

    def bit(self, truth: Any) -> Any:
        return self.terms.mk_term(Kind.ITE, [truth, self.one, self.zero])

    def truth(self, bit: Any) -> Any:
        return self.terms.mk_term(Kind.EQUAL, [bit, self.one])

    def float(self, term: Term) -> Any:
        found = self.floats.get(id(term))
        if found is None:
            found = self.terms.mk_term(Kind.FP_TO_FP_FROM_BV, [self.bits[id(term)]], list(FLOATS[term.width]))
            self.floats[id(term)] = found
        return found

    def bits_of(self, term: Term, number: Any) -> Any:
        """Return the bits of a float result."""
        self.floats[id(term)] = number
        bits = self.terms.mk_const(self.terms.mk_bv_sort(term.width), f"bits{len(self.floats)}")
        back = self.terms.mk_term(Kind.FP_TO_FP_FROM_BV, [bits], list(FLOATS[term.width]))
        self.solver.assert_formula(self.terms.mk_term(Kind.EQUAL, [back, number]))
        return bits

    def add(self, roots: Sequence[Term]) -> list[Any]:
        for term in in_order(roots):
            if id(term) not in self.bits:
                self.bits[id(term)] = self._made(term)
        return [self.bits[id(root)] for root in roots]

    def _made(self, term: Term) -> Any:
        make = self.terms.mk_term
        args = [self.bits[id(arg)] for arg in term.args]
        if term.op == "const":
            return self.terms.mk_bv_value(self.terms.mk_bv_sort(term.width), term.value)
        if term.op == "var":
            return self.terms.mk_const(self.terms.mk_bv_sort(term.width), term.value)
        if term.op == "concat":
            return make(Kind.BV_CONCAT, args)
        if term.op == "extract":
            return make(Kind.BV_EXTRACT, args, list(term.value))
        if term.op == "sext":
            return make(Kind.BV_SIGN_EXTEND, args, [term.width - term.args[0].width])
        if term.op == "ite":
            return make(Kind.ITE, [self.truth(args[0]), *args[1:]])
        if term.op in _BINARY:
            return make(_BINARY[term.op], args)
        if term.op in _TRUTHS:
            return self.bit(make(_TRUTHS[term.op], args))
        if term.op in _EXTREMES:
            return make(Kind.ITE, [make(_EXTREMES[term.op], args), *args])
        if term.op == "fmaximum":
            nan = var(f"nan{len(self.bits)}", term.width)
            result, is_nan = self.add([_maximum(*term.args, nan), ~(nan & _MAGNITUDE).upto(_INFINITY)])
            self.solver.assert_formula(self.truth(is_nan))
            return result
        if term.op in _FLOAT:
            numbers = [self.float(arg) for arg in term.args]
            mode = self.to_zero if term.op == "fadd.rz" else self.nearest
            return self.bits_of(term, make(_FLOAT[term.op], [mode, *numbers]))
        if term.op == "ftoi":  # of what is no integer of this width, any
            return make(Kind.FP_TO_SBV, [self.to_zero, self.float(term.args[0])], [term.width])
        if term.op == "ftou":
            return make(Kind.FP_TO_UBV, [self.to_zero, self.float(term.args[0])], [term.width])
        if term.op == "itof":
            number = make(Kind.FP_TO_FP_FROM_SBV, [self.nearest, *args], list(FLOATS[term.width]))
            return self.bits_of(term, number)
        if term.op == "half":
            half = make(Kind.FP_TO_FP_FROM_BV, args, [5, 11])
            return self.bits_of(term, make(Kind.FP_TO_FP_FROM_FP, [self.nearest, half], [8, 24]))
        raise ValueError(f"the solver has no operation {term.op}")


def _maximum(a: Term, b: Term, nan: Term) -> Term:
    """Return IEEE 754-2019's maximum of two float32, as bits: `nan` if either is one; -0 is below +0."""
    negative = [x.signed_below(0) for x in (a, b)]
    # Bits as integers whose order is that of the numbers.
    place = [choose(sign, ~x, x | _SIGN) for sign, x in zip(negative, (a, b), strict=True)]
    numbers = [(x & _MAGNITUDE).upto(_INFINITY) for x in (a, b)]
    return choose(every(numbers), choose(place[0].below(place[1]), b, a), nan)


def ask(goal: Term, assumptions: Sequence[Term] = (), seconds: float = 0.0) -> Answer:
    """Return whether a goal follows from assumptions; `seconds` limits the search, 0 for no limit."""
    start = time.perf_counter()
    query = _Query(int(seconds * 1000))
    truths = [*assumptions, ~goal]
    made = query.add(truths)
    for bit in made:
        query.solver.assert_formula(query.truth(bit))
    result = query.solver.check_sat()
    spent = time.perf_counter() - start
    if result == bitwuzla.Result.UNSAT:
        return Answer(True, spent, {})
    if result != bitwuzla.Result.SAT:
        return Answer(None, spent, {})
    model = {
        term.value: int(query.solver.get_value(query.bits[id(term)]).value(10)) for term in variables(*truths)
    }
    return Answer(False, spent, model)
